"""Nine quantiles of a network, which may not cross at any sample."""

from __future__ import annotations

import torch
from torch import Tensor

from pl_pointwise import Constraint

from .task import Parameters, Task, Terms, layers, network

SAMPLES, NEW = 200, 2000
LEVELS = torch.linspace(0.1, 0.9, 9)


def quantiles() -> Task:
    """Two inputs; the noise is skewed, and where it is small the quantiles are close."""
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(SAMPLES + NEW, 2, generator=generator) - 1
    spread = 0.02 + 0.3 * (1 + x[:, 1]).square() / 4
    noise = torch.randn(len(x), generator=generator).exp() - 1.5
    y = torch.sin(3 * x[:, 0]) * x[:, 1] + spread * noise

    def terms(parameters: Parameters, index: Tensor) -> Terms:
        found = network(parameters, x[index])
        off = y[index][..., None] - found
        pinball = torch.maximum(LEVELS * off, (LEVELS - 1) * off).mean(2)
        return pinball, {"crossing": found[..., :-1] - found[..., 1:]}

    return Task(
        SAMPLES,
        lambda generator: layers(generator, 2, 32, 32, len(LEVELS)),
        terms,
        {"crossing": Constraint(at_most=0.0)},
        {"crossing": 1e-3},
        unseen=range(SAMPLES, len(x)),
    )
