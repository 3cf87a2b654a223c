"""A classifier of 60 points in the plane, nowhere steeper than 4 at any of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from pl_pointwise import Constraint

from .task import Parameters, Task, Terms, layers, network, slope

SAMPLES, NEW, STEEPEST = 60, 2000, 4.0


def lipschitz() -> Task:
    """Two spirals, some points of which are on the other's side."""
    generator = torch.Generator().manual_seed(0)
    count = SAMPLES + NEW
    turn = torch.rand(count, generator=generator) * 1.2 * math.pi + 0.6
    sign = torch.where(torch.arange(count) % 2 == 0, 1.0, -1.0)
    noise = 0.12 * torch.randn(count, 2, generator=generator)
    x = (
        0.25 * sign[:, None] * turn[:, None] * torch.stack([turn.cos(), turn.sin()], 1)
        + noise
    )

    def terms(parameters: Parameters, index: Tensor) -> Terms:
        with torch.enable_grad():
            at = x[index].clone().requires_grad_()
            score = network(parameters, at)[..., 0]
            steep = (slope(score, at).square().sum(2) + 1e-12).sqrt()
        return softplus(-sign[index] * score), {"steep": steep}

    return Task(
        SAMPLES,
        lambda generator: layers(generator, 2, 32, 32, 1),
        terms,
        {"steep": Constraint(at_most=STEEPEST)},
        {"steep": 0.02},
        unseen=range(SAMPLES, count),
    )
