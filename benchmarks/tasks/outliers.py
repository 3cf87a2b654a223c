"""A line through a tube about each sample, one in ten of which is wrong: no weights satisfy all."""

from __future__ import annotations

import torch
from torch import Tensor

from pl_pointwise import Constraint

from .task import Parameters, Task, Terms, affine, zeros

INPUTS, SAMPLES, NEW, WIDTH = 10, 200, 2000, 0.25


def outliers() -> Task:
    """|wx − y| ≤ .25, small weights; the noise is ±.2, a tenth of the labels is moved by 1 to 3.

    Only right labels are judged; the objective shown is the distance to the true weights.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES + NEW, INPUTS, generator=generator)
    true = 0.5 * torch.randn(INPUTS, generator=generator)
    y = x @ true + 0.2 * (2 * torch.rand(len(x), generator=generator) - 1)
    wrong = torch.arange(len(x)) < SAMPLES // 10
    y[wrong] += 1 + 2 * torch.rand(int(wrong.sum()), generator=generator)

    def terms(parameters: Parameters, index: Tensor) -> Terms:
        weight = parameters["weight"]
        found = affine(weight[..., None], parameters["bias"], x[index])[..., 0]
        size = weight.square().sum(1, keepdim=True).expand_as(found)
        return size, {"off": (found - y[index]).abs()}

    def error(parameters: Parameters) -> Tensor:
        return (parameters["weight"] - true).norm(dim=1)

    return Task(
        SAMPLES,
        zeros(weight=(INPUTS,), bias=(1,)),
        terms,
        {"off": Constraint(at_most=WIDTH)},
        {"off": 0.01},
        counted=~wrong,
        unseen=range(SAMPLES, len(x)),
        error=error,
        rate=0.03,
    )
