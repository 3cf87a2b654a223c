"""One network, four outputs: the error of three is bounded in units of 1, 100 and 0.01."""

from __future__ import annotations

import torch
from torch import Tensor

from pl_pointwise import Constraint

from .task import Parameters, Task, Terms, layers, network

SAMPLES, NEW = 200, 1000
UNITS = {"first": 1.0, "second": 100.0, "third": 0.01}
BOUND = 0.05  # In each unit.


def multitask() -> Task:
    """The fourth output is learned; the others stay within a squared error of each sample."""
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(SAMPLES + NEW, 4, generator=generator) - 1
    turned = x @ torch.randn(4, 12, generator=generator)
    shape = torch.sin(turned[:, :4]) + 0.4 * turned[:, 4:8] * torch.tanh(turned[:, 8:])
    target = shape + 0.05 * torch.randn(shape.shape, generator=generator)

    def terms(parameters: Parameters, index: Tensor) -> Terms:
        error = (network(parameters, x[index]) - target[index]).square()
        of = zip(UNITS.items(), error[..., 1:].unbind(2), strict=True)
        return error[..., 0], {name: unit * each for (name, unit), each in of}

    return Task(
        SAMPLES,
        lambda generator: layers(generator, 4, 24, 24, 4),
        terms,
        {name: Constraint(at_most=BOUND * unit) for name, unit in UNITS.items()},
        dict.fromkeys(UNITS, 0.005),
        scale=dict(UNITS),
        unseen=range(SAMPLES, SAMPLES + NEW),
        grid=({name: 1 / unit for name, unit in UNITS.items()},),
        lengths=(1, 10, 100, 1000),
    )
