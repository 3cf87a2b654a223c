"""A network that may not fall in any of its four inputs, at each sample; the data are noisy."""

from __future__ import annotations

import torch
from torch import Tensor

from pl_pointwise import Constraint

from .task import Parameters, Task, Terms, layers, network, slope

SAMPLES, NEW = 150, 2000


def monotone() -> Task:
    """Unseen rows are without noise: their objective is the error to the truth."""
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(SAMPLES + NEW, 4, generator=generator) - 1
    truth = (
        torch.relu(x[:, 0])
        + torch.tanh(3 * x[:, 1])
        + 0.2 * (x[:, 2] + 1) * (x[:, 3] + 1)
    )
    y = truth.clone()
    y[:SAMPLES] += 0.4 * torch.randn(SAMPLES, generator=generator)

    def terms(parameters: Parameters, index: Tensor) -> Terms:
        with torch.enable_grad():
            at = x[index].clone().requires_grad_()
            found = network(parameters, at)[..., 0]
            rises = slope(found, at)
        return (found - y[index]).square(), {"slope": rises}

    return Task(
        SAMPLES,
        lambda generator: layers(generator, 4, 32, 32, 1),
        terms,
        {"slope": Constraint(at_least=0.0)},
        {"slope": 0.01},
        unseen=range(SAMPLES, len(x)),
    )
