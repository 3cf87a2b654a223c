"""What Average, Tilted and CVaR act on: one statistic of the batch, and its slope.

The statistic of a constraint in one step is g = a + outer(mean of inner(v − a)), with inner and
outer of the formulation, and a its anchor. Its derivative in each violation is
outer′(mean)·inner′(v − a), so that a backward pass through slope · inner(v − a), with the slope
∂ψ/∂mean known before a step's first one, gives the gradient of ψ(g, λ).

All shapes (sides,) unless said otherwise. ``reduce`` sums or maximises over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..formulations import BatchFormulation
from .terms import carries, weights, widest

Reduce = Callable[[Tensor, Literal["sum", "max"]], Tensor]


@dataclass
class Slope:
    """∂ψ/∂(mean of inner), with the anchor at which it was taken."""

    anchor: Tensor
    slope: Tensor


@dataclass
class BatchStatistic:
    """The statistic of a batch, in the widest dtype."""

    formulation: BatchFormulation
    anchor: Tensor
    mean: Tensor  # of inner(v − anchor)

    @property
    def value(self) -> Tensor:
        """g."""
        return self.anchor + self.formulation.outer(self.mean)


def batch_statistic(
    formulation: BatchFormulation,
    parts: Sequence[tuple[Tensor, Tensor]],
    sides: int,
    count: Tensor | int,
    threshold: Tensor,
    device: torch.device,
    reduce: Reduce | None = None,
) -> BatchStatistic:
    """The statistic of a step, differentiable in ``threshold``; what was left out counts as v = 0.

    parts: violations and their mask, (b, sides·K) both, of every micro-batch.
    count: samples that the constraint applies to, over all ranks, those left out included.
    """
    reduce = reduce or (lambda value, operation: value)
    present = torch.zeros((), dtype=widest(device), device=device)
    for _, mask in parts:
        present = present + carries(mask).sum()
    left_out = 1 - reduce(present, "sum") / count
    anchor = threshold.to(left_out, non_blocking=True)
    if formulation.anchor == "largest":
        anchor = left_out.new_full((sides,), -math.inf)
        for violation, mask in parts:
            if not len(violation):
                continue
            alone = violation.masked_fill(~mask, -math.inf).unflatten(1, (sides, -1))
            anchor = torch.maximum(anchor, alone.transpose(0, 1).flatten(1).amax(1).to(anchor))
        anchor = reduce(anchor, "max")
        anchor = torch.where(left_out > 0, anchor.clamp(min=0), anchor)
    mean = torch.zeros_like(anchor)
    for violation, mask in parts:
        terms = formulation.inner(_anchored(violation.to(anchor), mask, anchor))
        normalised = weights(mask, sides, terms.dtype) / count
        mean = mean + (terms * normalised).unflatten(1, (sides, -1)).sum((0, 2))
    mean = reduce(mean, "sum")
    missing = left_out * formulation.inner(-anchor)
    return BatchStatistic(formulation, anchor, mean + torch.where(left_out > 0, missing, 0))


def slope_of(statistic: BatchStatistic, multiplier: Tensor) -> Slope:
    """∂ψ/∂mean at λ."""
    formulation = statistic.formulation
    multiplier = multiplier.to(statistic.mean, non_blocking=True)
    with torch.enable_grad():
        mean = statistic.mean.detach().requires_grad_()
        value = statistic.anchor + formulation.outer(mean)
        (slope,) = torch.autograd.grad(formulation.lagrangian(value, multiplier).sum(), mean)
    return Slope(statistic.anchor, slope)


def linearised(
    formulation: BatchFormulation, violation: Tensor, mask: Tensor, slope: Slope
) -> Tensor:
    """slope · inner(v − a), (b, sides·K), whose derivative in v is that of the batch's ψ."""
    per_side = violation.shape[1] // len(slope.slope)
    factor = slope.slope.to(violation, non_blocking=True).repeat_interleave(per_side)
    return factor * formulation.inner(_anchored(violation, mask, slope.anchor))


def stepped_threshold(
    formulation: BatchFormulation,
    parts: Sequence[tuple[Tensor, Tensor]],
    sides: int,
    count: int,
    threshold: Tensor,
) -> Tensor:
    """t − threshold_step · ∂g/∂t, float32, of the violations of all ranks on the CPU."""
    threshold = threshold.to(torch.float64).requires_grad_()
    statistic = batch_statistic(formulation, parts, sides, count, threshold, torch.device("cpu"))
    (slope,) = torch.autograd.grad(statistic.value.sum(), threshold)
    return (threshold - formulation.threshold_step * slope).detach().float()


def _anchored(violation: Tensor, mask: Tensor, anchor: Tensor) -> Tensor:
    """v − a of each side's a, in the dtype of v, (b, sides·K); zero where the mask is False."""
    columns = anchor.to(violation, non_blocking=True).repeat_interleave(
        violation.shape[1] // len(anchor)
    )
    return torch.where(mask, violation - columns, 0)
