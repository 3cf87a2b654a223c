"""What ψ acts on where it is one statistic of the batch, with one λ for all samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..formulations import BatchFormulation
from .scopes import Scope
from .terms import DualStep, Measured, Terms, carries, over_ranks, weights, widest

Part = tuple[Tensor, Tensor]
"""Violations and mask of some samples, (b, sides·K) both."""
Reduce = Callable[[Tensor, Literal["sum", "max"]], Tensor]
"""Takes a value over the ranks."""


@dataclass
class Slope:
    """∂ψ/∂(mean of inner), with the anchor at which it was taken, (sides,) both."""

    anchor: Tensor
    slope: Tensor


class PerBatch(Scope):
    """ψ of one statistic g of the batch, and one multiplier per side.

    g = a + outer(mean of inner(v − a)), with inner and outer of the formulation, and a its anchor.
    Its derivative in each violation is outer′(mean)·inner′(v − a), so that a backward pass through
    slope · inner(v − a), with the slope ∂ψ/∂mean known before a step's first one, gives the
    gradient of ψ(g, λ).
    """

    dimensions = 0
    formulation: BatchFormulation

    @property
    def table(self) -> Tensor:
        """λ itself, () or (2,)."""
        return self.multipliers.table(self.name, (2,) if self.sides > 1 else ())

    @property
    def multiplier(self) -> Tensor:
        """λ of each side, (sides,), a copy."""
        return self.table.reshape(self.sides).clone()

    @property
    def threshold(self) -> Tensor:
        """t of each side, (sides,); 0 where the formulation learns none."""
        threshold = self.context.thresholds.get(self.name, torch.zeros(self.sides))
        return threshold.reshape(self.sides)

    @property
    def knows_slope(self) -> bool:
        """Whether ∂ψ/∂mean is λ, whatever the batch."""
        return self.formulation.linear and not self.context.dual_first

    def rows(self, index: Tensor, violation: Tensor) -> Tensor | None:
        return None

    def slope(self, terms: Sequence[Terms], count: Tensor) -> Slope:
        """∂ψ/∂mean of all micro-batches of all ranks; ``count`` samples over them."""
        threshold, multiplier = self.threshold, self.multiplier
        # Then no pass over the batch is needed before the one that is differentiated.
        if self.knows_slope:
            return Slope(threshold, multiplier)
        name = self.name
        followed = [(of.followed[name].detach(), of.masks[name]) for of in terms]
        anchor, mean = self._statistic(followed, count, threshold, over_ranks)
        multiplier = multiplier.to(mean, non_blocking=True)
        if self.context.dual_first:
            strict = [(of.judged[name].detach(), of.masks[name]) for of in terms]
            judged = self._value(*self._statistic(strict, count, threshold, over_ranks))
            multiplier = self.formulation.ascend(judged, multiplier)
        with torch.enable_grad():
            mean.requires_grad_()
            psi = self.formulation.lagrangian(self._value(anchor, mean), multiplier)
            (slope,) = torch.autograd.grad(psi.sum(), mean)
        return Slope(anchor, slope)

    def loss(self, terms: Terms, multiplier: Tensor | None, count: Tensor) -> Tensor:
        """Of the one micro-batch of a step, whose statistic it is."""
        return self.loss_at(self.slope([terms], count), terms, count)

    def loss_at(self, slope: Slope, terms: Terms, count: Tensor) -> Tensor:
        """A micro-batch's share of a term whose gradient is that of ψ(g, λ)."""
        violation, mask = terms.followed[self.name], terms.masks[self.name]
        factor = _by_column(slope.slope, violation)
        psi = factor * self.formulation.inner(_anchored(violation, mask, slope.anchor))
        return self._mean(psi, terms, count)

    def visit(self, measured: Measured) -> list[Tensor] | None:
        """The statistic that λ follows (sides,), on the CPU.

        Adds ψ of that of the weights to the Lagrangian, and takes the step of the threshold,
        t − threshold_step · ∂g/∂t.
        """
        name, formulation = self.name, self.formulation
        mask, count = measured.masks[name], torch.tensor(measured.counts[name])
        # It applies to no sample of this step, so there is no statistic.
        if not mask.all() and not mask.any():
            return None
        threshold = self.threshold.double().requires_grad_(formulation.learns_threshold)
        followed = [(measured.followed[name], mask)]
        value = self._value(*self._statistic(followed, count, threshold, _of_all_ranks))
        judged = value.detach()
        if measured.strict:
            strict = [(measured.judged[name], mask)]
            judged = self._value(
                *self._statistic(strict, count, self.threshold, _of_all_ranks)
            )
        psi = formulation.lagrangian(value.detach(), self.multiplier)
        measured.lagrangian += float(psi.sum())
        if formulation.learns_threshold:
            (slope,) = torch.autograd.grad(value.sum(), threshold)
            stepped = (threshold - formulation.threshold_step * slope).detach().float()
            # A table of one side has no dimension, as λ has none.
            stepped = stepped if len(stepped) > 1 else stepped[0]
            self.context.thresholds[name] = stepped
        return [judged]

    def step(self, visits: Sequence[list[Tensor]]) -> DualStep | None:
        value = torch.stack([judged for (judged,) in visits]).mean(0)
        multiplier = self.multiplier.to(value)
        stepped = self.formulation.ascend(value, multiplier)
        self.table.copy_(stepped.reshape(self.table.shape))
        return DualStep(
            index=None,
            judged=value[None],
            mask=torch.ones_like(value, dtype=torch.bool)[None],
            before=multiplier[None],
            after=stepped[None],
        )

    def _value(self, anchor: Tensor, mean: Tensor) -> Tensor:
        """g."""
        return anchor + self.formulation.outer(mean)

    def _statistic(
        self, parts: Sequence[Part], count: Tensor, threshold: Tensor, reduce: Reduce
    ) -> tuple[Tensor, Tensor]:
        """The anchor and the mean of inner(v − a) of all ranks, in the widest dtype.

        Differentiable in ``threshold``; samples that were left out of ``count`` have v = 0.
        """
        sides, formulation = self.sides, self.formulation
        present = torch.zeros((), dtype=widest(count.device), device=count.device)
        for _, mask in parts:
            present = present + carries(mask).sum()
        # Samples that a repair left out still count, with v = 0.
        left_out = 1 - reduce(present, "sum") / count
        anchor = threshold.to(left_out, non_blocking=True)
        # The exponentials of a tilted mean are taken below it, where none overflows.
        if formulation.anchor == "largest":
            anchor = reduce(self._largest(parts, left_out), "max")
            anchor = torch.where(left_out > 0, anchor.clamp(min=0), anchor)
        mean = torch.zeros_like(anchor)
        for violation, mask in parts:
            terms = formulation.inner(_anchored(violation.to(anchor), mask, anchor))
            normalised = weights(mask, sides, terms.dtype) / count
            mean = mean + (terms * normalised).unflatten(1, (sides, -1)).sum((0, 2))
        mean = reduce(mean, "sum")
        missing = left_out * formulation.inner(-anchor)
        return anchor, mean + torch.where(left_out > 0, missing, 0)

    def _largest(self, parts: Sequence[Part], like: Tensor) -> Tensor:
        """The largest violation of each side, (sides,); −∞ without any."""
        largest = like.new_full((self.sides,), -math.inf)
        for violation, mask in parts:
            if not len(violation):  # amax() of nothing is an error.
                continue
            alone = violation.masked_fill(~mask, -math.inf)
            of_sides = alone.unflatten(1, (self.sides, -1)).transpose(0, 1).flatten(1)
            largest = torch.maximum(largest, of_sides.amax(1).to(largest))
        return largest


def _of_all_ranks(value: Tensor, operation: Literal["sum", "max"]) -> Tensor:
    """As it is: what a step measured is of all ranks already."""
    return value


def _by_column(of_sides: Tensor, violation: Tensor) -> Tensor:
    """A number of each side for every column, (sides·K,), as the violations (b, sides·K)."""
    columns = violation.shape[1] // len(of_sides)
    return of_sides.to(violation, non_blocking=True).repeat_interleave(columns)


def _anchored(violation: Tensor, mask: Tensor, anchor: Tensor) -> Tensor:
    """v − a, zero where the mask is False."""
    return torch.where(mask, violation - _by_column(anchor, violation), 0)
