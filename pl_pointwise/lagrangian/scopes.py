"""What the ψ of a constraint acts on: a sample's violation, a group's, a batch's statistic.

Each class says for its scope what the loss is, what a step leaves for the dual step, and how that
moves λ. Duals has one of them for every constraint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from ..constraint import Constraint
from ..errors import TrainingError
from ..formulations import BatchFormulation, Formulation
from ..multipliers import Multipliers
from .batch_statistic import (
    BatchStatistic,
    Reduce,
    Slope,
    batch_statistic,
    linearised,
    slope_of,
    stepped_threshold,
)
from .terms import DualStep, Measured, Terms, carries, last_visits, weights

CPU = torch.device("cpu")


class State(Protocol):
    """What a scope reads and moves; it belongs to Duals, whose attributes these are."""

    constraints: Mapping[str, Constraint]
    formulations: Mapping[str, Formulation]
    in_force: dict[str, Formulation]
    multipliers: Multipliers
    thresholds: dict[str, Tensor]
    groups: Tensor | None
    dual_first: bool


class Weight:
    """ψ of each sample's violation, without a multiplier."""

    dimensions: int | None = None
    """Of the table of multipliers: 2 of (N, sides·K), 0 where (sides,) stands for the batch."""

    def __init__(self, name: str, state: State) -> None:
        self.name, self.state = name, state
        self.sides = state.constraints[name].sides

    @property
    def formulation(self) -> Formulation:
        """The one in force in this step."""
        return self.state.in_force[self.name]

    def rows(self, index: Tensor, violation: Tensor) -> Tensor | None:
        """λ_t of the samples index (b,), as their violations; None where they have none."""
        return None

    def loss(self, terms: Terms, multiplier: Tensor | None, count: Tensor) -> Tensor:
        """A micro-batch's share of mean ψ(v, λ), a scalar; ``count`` samples over all ranks."""
        violation = terms.followed[self.name]
        multiplier = torch.zeros_like(violation) if multiplier is None else multiplier
        if self.state.dual_first:
            multiplier = self.formulation.ascend(terms.judged[self.name], multiplier)
        return self._mean(self.formulation.lagrangian(violation, multiplier), terms, count)

    def visit(self, measured: Measured) -> list[Tensor] | None:
        """What the dual step needs of a step; None where it has nothing to do."""
        return None

    def step(self, visits: Sequence[list[Tensor]]) -> DualStep | None:
        """Moves λ by what the steps of a window left; None where they left nothing."""
        return None

    def _mean(self, psi: Tensor, terms: Terms, count: Tensor) -> Tensor:
        mask = terms.masks[self.name]
        psi = torch.where(mask, psi, 0)
        if mask.shape[1] == self.sides:
            return psi.sum() / count
        return (psi * (weights(mask, self.sides, psi.dtype) / count)).sum()


class PerSample(Weight):
    """ψ of each sample's violation and its own multipliers."""

    dimensions = 2

    def rows(self, index: Tensor, violation: Tensor) -> Tensor:
        """λ_t on the violations' device by one asynchronous copy; 0 of a stream."""
        multipliers = self.state.multipliers
        if not multipliers.samples:
            return torch.zeros_like(violation)
        rows = multipliers.rows(self.name, self.owners(index), violation.shape[1])
        rows = rows.pin_memory() if violation.is_cuda else rows
        return rows.to(violation.device, violation.dtype, non_blocking=True)

    def visit(self, measured: Measured) -> list[Tensor] | None:
        """Index (n,), violation, mask and λ (n, sides·K); last what the weights follow, if other.

        Of the samples that the constraint applies to.
        """
        name, mask = self.name, measured.masks[self.name]
        rows = None if mask.all() else carries(mask)
        if not self.state.multipliers.samples or (rows is not None and not rows.any()):
            return None
        visit = [measured.index, measured.judged[name], mask, measured.multipliers[name]]
        visit += [measured.followed[name]] if measured.strict else []
        return visit if rows is None else [part[rows] for part in visit]

    def step(self, visits: Sequence[list[Tensor]]) -> DualStep:
        parts = visits[0]
        if len(visits) > 1:
            parts = list(map(torch.cat, zip(*visits, strict=True)))
        index, judged, mask, multiplier, *followed = self.distinct(parts)
        ascended = self.formulation.ascend(judged, multiplier)
        stepped = torch.where(mask, ascended, multiplier)
        self.state.multipliers.write(self.name, index, stepped)
        return DualStep(index, judged, mask, multiplier, stepped, *(followed or [judged]))

    def owners(self, index: Tensor) -> Tensor:
        """Whose multipliers are those of the samples index (b,): their own."""
        return index

    def distinct(self, parts: list[Tensor]) -> list[Tensor]:
        """The last visit of each sample."""
        if len(set(parts[0].tolist())) == len(parts[0]):
            return parts
        last = last_visits(parts[0])
        return [part[last] for part in parts]


class PerGroup(PerSample):
    """ψ of each sample's violation and its group's multipliers, which follow the group's mean."""

    def owners(self, index: Tensor) -> Tensor:
        """The groups of the samples index (b,)."""
        groups = self.state.groups
        assert groups is not None
        if len(index) and int(index.max()) >= len(groups):
            raise TrainingError(
                f"Sample index {int(index.max())} is outside the {len(groups):,} of groups."
            )
        return torch.where(index < 0, index, groups[index.clamp(min=0)])

    def distinct(self, parts: list[Tensor]) -> list[Tensor]:
        """A row for each group: the mean of its samples' violations, and λ, alike within it."""
        index, judged, mask, multiplier, *followed = parts
        owners = self.owners(index)
        groups, row = torch.unique(owners, return_inverse=True)
        sums = torch.zeros(len(groups), judged.shape[1], dtype=judged.dtype)
        number = sums.index_add(0, row, mask.to(judged.dtype))
        means = [
            sums.index_add(0, row, torch.where(mask, table, 0)) / number.clamp(min=1)
            for table in (judged, *followed)
        ]
        return [groups, means[0], number > 0, multiplier[last_visits(owners)], *means[1:]]


class PerBatch(Weight):
    """ψ of a statistic of the batch (batch_statistic.py) and one multiplier per side."""

    dimensions = 0

    @property
    def formulation(self) -> BatchFormulation:
        return cast("BatchFormulation", super().formulation)

    @property
    def multiplier(self) -> Tensor:
        """λ of each side, (sides,)."""
        return self.state.multipliers.scalar(self.name, self.sides)

    @property
    def threshold(self) -> Tensor:
        """t of each side, (sides,); 0 where the formulation learns none."""
        threshold = self.state.thresholds.get(self.name, torch.zeros(self.sides))
        return threshold.reshape(self.sides)

    def slope(
        self, terms: Sequence[Terms], count: Tensor, device: torch.device, reduce: Reduce | None
    ) -> Slope:
        """∂ψ/∂mean of all micro-batches."""
        name, shared = self.name, (count, device, reduce)
        followed = [(part.followed[name].detach(), part.masks[name]) for part in terms]
        statistic = self._statistic(followed, *shared)
        multiplier = self.multiplier.to(statistic.mean, non_blocking=True)
        if self.state.dual_first:
            judged = [(part.judged[name], part.masks[name]) for part in terms]
            value = self._statistic(judged, *shared).value
            multiplier = self.formulation.ascend(value, multiplier)
        return slope_of(statistic, multiplier)

    def loss_of(self, terms: Terms, slope: Slope, count: Tensor) -> Tensor:
        """A micro-batch's share of a term whose gradient is that of ψ(statistic, λ)."""
        violation, mask = terms.followed[self.name], terms.masks[self.name]
        return self._mean(linearised(self.formulation, violation, mask, slope), terms, count)

    def visit(self, measured: Measured) -> list[Tensor] | None:
        """The statistic that λ follows (sides,), then that of the weights if another, on the CPU.

        Adds ψ of the latter to the Lagrangian, and steps the threshold.
        """
        name, count, formulation = self.name, measured.counts[self.name], self.formulation
        mask = measured.masks[name]
        if not mask.all() and not mask.any():
            return None
        parts = [(measured.followed[name], mask)]
        value = self._statistic(parts, count, CPU).value
        values = [value]
        if measured.strict:
            judged = [(measured.judged[name], mask)]
            values.insert(0, self._statistic(judged, count, CPU).value)
        measured.lagrangian += float(formulation.lagrangian(value, self.multiplier).sum())
        if formulation.learns_threshold:
            stepped = stepped_threshold(formulation, parts, self.sides, count, self.threshold)
            self.state.thresholds[name] = stepped if len(stepped) > 1 else stepped[0]
        return values

    def step(self, visits: Sequence[list[Tensor]]) -> DualStep:
        value, *followed = (torch.stack(values).mean(0) for values in zip(*visits, strict=True))
        multiplier = self.multiplier.to(value)
        stepped = self.formulation.ascend(value, multiplier)
        self.state.multipliers.write_scalar(self.name, stepped)
        mask = torch.ones_like(value, dtype=torch.bool)
        parts = [value, mask, multiplier, stepped, *(followed or [value])]
        return DualStep(None, *(part[None] for part in parts))

    def _statistic(
        self,
        parts: Sequence[tuple[Tensor, Tensor]],
        count: Tensor | int,
        device: torch.device,
        reduce: Reduce | None = None,
    ) -> BatchStatistic:
        formulation, threshold = self.formulation, self.threshold
        return batch_statistic(formulation, parts, self.sides, count, threshold, device, reduce)


def scope_of(name: str, state: State) -> Weight:
    """What the formulation of a constraint acts on."""
    per_sample = PerSample if state.groups is None else PerGroup
    kinds = {"sample": per_sample, "batch": PerBatch, "none": Weight}
    return kinds[state.formulations[name].scope](name, state)
