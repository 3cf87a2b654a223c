"""The multipliers and the rule that moves them: in a step, at a run's start, in a checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ..constraint import Constraint
from ..errors import DataError, TrainingError
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
from .gradient_units import GradientUnits
from .terms import DualStep, Measured, Terms, carries, is_index, last_visits, shape_of, weights

log = logging.getLogger(__name__)
CPU = torch.device("cpu")


class Duals:
    """λ of every constraint, of ``samples`` samples (0: a stream), and when and how it moves.

    Attributes:
        units: Λ and r of the formulations that find their own α.
        in_force: the formulations with α a number, of the last step.
        dual_first: whether the step of the weights uses λ after this step's dual update.
        groups: (N,), the group of each sample where λ is a group's; None where it is a sample's.
        scopes: by constraint what ψ acts on; on_batch: those of a batch's statistic.
    """

    warn: Callable[[str], None] = staticmethod(log.warning)

    def __init__(
        self,
        constraints: Mapping[str, Constraint],
        formulations: Mapping[str, Formulation],
        samples: int = 0,
        primal_steps: int = 1,
        order: str = "simultaneous",
        groups: Tensor | None = None,
    ) -> None:
        self.constraints = constraints
        self.configure(formulations, primal_steps, order, groups)
        self.multipliers = Multipliers(self.owners_of(samples))
        self.thresholds: dict[str, Tensor] = {}
        self.units = GradientUnits()
        self.in_force: dict[str, Formulation] = {}
        self.fingerprint: str | None = None
        self._window: list[dict[str, list[Tensor]]] = []
        """The updated samples of the steps since the last dual step."""

    def configure(
        self,
        formulations: Mapping[str, Formulation],
        primal_steps: int,
        order: str,
        groups: Tensor | None,
    ) -> None:
        """How λ moves from now on, and whose it is."""
        self.formulations, self.groups = formulations, groups
        self.primal_steps, self.dual_first = primal_steps, order == "dual_first"
        self.scopes = {name: scope_of(name, self) for name in formulations}
        self.on_batch = {n: s for n, s in self.scopes.items() if isinstance(s, PerBatch)}

    def owners_of(self, samples: int) -> int:
        """How many rows λ has: one a sample, or one a group."""
        return samples if self.groups is None else int(self.groups.max()) + 1

    # In a step ----------------------------------------------------------------------------------

    def put_in_force(self, steps_an_epoch: float = math.inf) -> None:
        """The formulations of this step; steps from one visit of a sample to the next."""
        between = max(steps_an_epoch, self.primal_steps)
        self.in_force = self.units.in_force(self.formulations, self.constraints, between)
        for name, scope in self.scopes.items():
            scope.formulation = self.in_force[name]

    def step(self, measured: Measured, steps_an_epoch: float) -> dict[str, DualStep]:
        """λ ← (λ + η ∂ψ/∂λ)₊ for the samples seen since the last dual step, and no others.

        Each with its last violation; a statistic with its mean. Nothing while a window is open:
        what it needs of the step of the weights, which ``measured`` tells, is kept by constraint.
        """
        visits = {
            name: visit
            for name, scope in self.scopes.items()
            if (visit := scope.visit(measured)) is not None
        }
        self._window.append(visits)
        self.units.add(measured, self.formulations, self.in_force, steps_an_epoch)
        if len(self._window) < self.primal_steps:
            return {}
        window, self._window = self._window, []
        by_name = {n: [visits[n] for visits in window if n in visits] for n in self.scopes}
        steps = {name: self.scopes[name].step(visits) for name, visits in by_name.items() if visits}
        return {name: step for name, step in steps.items() if step is not None}

    @property
    def knows_slopes(self) -> bool:
        """Whether every ∂ψ/∂mean is λ, whatever the batch: those of PointwiseLoss.share."""
        linear = (scope.formulation.linear for scope in self.on_batch.values())
        return not self.on_batch or (not self.dual_first and all(linear))

    def slopes(
        self,
        terms: Sequence[Terms],
        counts: Mapping[str, Tensor],
        device: torch.device,
        reduce: Reduce | None = None,
    ) -> dict[str, Slope]:
        """∂ψ/∂mean by constraint of all micro-batches; ``reduce`` where others hold samples."""
        return {
            name: scope.slope(terms, counts[name], device, reduce)
            for name, scope in self.on_batch.items()
        }

    # At the start of a fit ----------------------------------------------------------------------

    def start(self, samples: int, fingerprint: str | None, resumed: bool, first: bool) -> None:
        """Keeps the multipliers if they belong to this training set, or starts them again.

        samples, fingerprint: of the training set; 0 and None of a stream. resumed: whether they are
        a checkpoint's. first: whether steps are counted from 0 by a fit that is not resumed.
        """
        if not resumed and fingerprint != self.fingerprint:
            if self.fingerprint is not None and samples:
                self.warn("Another training set than before: the multipliers start at 0 again.")
            self.multipliers = self.multipliers.for_samples(self.owners_of(samples))
            self.thresholds, self.units, self._window = {}, GradientUnits(), []
        self.fingerprint = fingerprint
        self.fit_tables()
        if first:  # What was measured stays until it is measured again.
            self.units.load_state_dict({**self.units.state_dict(), "next": 0})

    def fit_tables(self) -> None:
        """Fits multipliers and thresholds to the formulations of now, or refuses them.

        Kept under another formulation of the same scope; dropped, with a warning, without one.
        """
        multipliers = self.multipliers
        for name in set(multipliers).intersection(multipliers.pending()):
            self.warn(f'Multipliers of "{name}" are the checkpoint\'s, not those that were set.')
            del multipliers.pending()[name]
        for name in [*multipliers, *multipliers.pending()]:
            formulation = self.formulations.get(name)
            dimensions = None if formulation is None else self.scopes[name].dimensions
            if formulation is None or dimensions is None:
                what = "no such constraint" if formulation is None else repr(formulation)
                self.warn(f'Multipliers of "{name}" are dropped: this module has {what}.')
                multipliers.reset(name)
                continue
            table = multipliers.get(name)
            if table is None:
                table = multipliers.pending()[name]
            elif (table.dim() == 2) != (dimensions == 2):
                scope = "sample" if table.dim() == 2 else "constraint"
                raise TrainingError(
                    f'Constraint "{name}": its multipliers are one per {scope}, and those of '
                    f"{formulation} are not. Start them again from 0: {_remedy(name)}."
                )
            if not formulation.signed and (table < 0).any():
                raise TrainingError(
                    f'Constraint "{name}" has multipliers below 0, which only an equality has. '
                    f"Set others, or start them from 0: {_remedy(name)}."
                )
        # What was reset takes no step from values of before, nor from a threshold of before.
        self._window = [
            {name: visit for name, visit in visits.items() if name in multipliers}
            for visits in self._window
        ]
        self.thresholds = {
            name: threshold
            for name, threshold in self.thresholds.items()
            if name in multipliers and self.formulations[name].learns_threshold
        }

    # In a checkpoint ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "samples": self.multipliers.samples,
            "multipliers": self.multipliers.state_dict(),
            "thresholds": dict(self.thresholds),
            "gradient_units": self.units.state_dict(),
            "fingerprint": self.fingerprint,
            "window": self._window,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.multipliers = self.multipliers.for_samples(int(state["samples"]))
        self.multipliers.load_state_dict(state["multipliers"])
        self.thresholds = {
            name: value.to("cpu", torch.float32, copy=True)
            for name, value in state["thresholds"].items()
        }
        self.units.load_state_dict(state["gradient_units"])
        self._window = [dict(visits) for visits in state["window"]]
        self.fingerprint = state["fingerprint"]


def _remedy(name: str) -> str:
    return (
        f"call module.multipliers.reset({name!r}) before fit; of a checkpoint, after "
        "load_from_checkpoint, and fit without ckpt_path"
    )


# What ψ acts on: a sample's violation, a group's, a statistic of the batch -----------------------


class Weight:
    """ψ of each sample's violation, without a multiplier."""

    dimensions: int | None = None
    """Of the table of multipliers: 2 of (N, sides·K), 0 where (sides,) stands for the batch."""

    def __init__(self, name: str, state: Duals) -> None:
        self.name, self.state = name, state
        self.sides = state.constraints[name].sides
        self.formulation: Any = state.formulations[name]  # That in force, from the first step on.

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
        psi = psi if terms.whole else torch.where(mask, psi, 0)
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
        rows = multipliers.rows(self.name, index, violation.shape[1])
        rows = rows.pin_memory() if violation.is_cuda else rows
        return rows.to(violation.device, violation.dtype, non_blocking=True)

    def visit(self, measured: Measured) -> list[Tensor] | None:
        """Of samples it applies to the index (n,), and violation, mask and λ (n, sides·K)."""
        name, mask = self.name, measured.masks[self.name]
        rows = None if measured.whole or mask.all() else carries(mask)
        if not self.state.multipliers.samples or (rows is not None and not rows.any()):
            return None
        visit = [measured.index, measured.judged[name], mask, measured.multipliers[name]]
        return visit if rows is None else [part[rows] for part in visit]

    def step(self, visits: Sequence[list[Tensor]]) -> DualStep:
        parts = visits[0]
        if len(visits) > 1:
            parts = list(map(torch.cat, zip(*visits, strict=True)))
        index, judged, mask, multiplier = self.distinct(parts)
        ascended = self.formulation.ascend(judged, multiplier)
        stepped = torch.where(mask, ascended, multiplier)
        self.state.multipliers.write(self.name, index, stepped)
        return DualStep(index, judged, mask, multiplier, stepped)

    def distinct(self, parts: list[Tensor]) -> list[Tensor]:
        """The last visit of each sample."""
        if len(set(parts[0].tolist())) == len(parts[0]):
            return parts
        last = last_visits(parts[0])
        return [part[last] for part in parts]


class PerGroup(PerSample):
    """ψ of each sample's violation and its group's multipliers, which follow the group's mean."""

    def rows(self, index: Tensor, violation: Tensor) -> Tensor:
        return super().rows(self.owners(index), violation)

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
        index, judged, mask, multiplier = parts
        owners = self.owners(index)
        groups, row = torch.unique(owners, return_inverse=True)
        sums = torch.zeros(len(groups), judged.shape[1], dtype=judged.dtype)
        number = sums.index_add(0, row, mask.to(judged.dtype))
        mean = sums.index_add(0, row, torch.where(mask, judged, 0)) / number.clamp(min=1)
        return [groups, mean, number > 0, multiplier[last_visits(owners)]]


class PerBatch(Weight):
    """ψ of a statistic of the batch (batch_statistic.py) and one multiplier per side."""

    dimensions = 0
    formulation: BatchFormulation

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
        if self.state.knows_slopes:
            return Slope(self.threshold, self.multiplier)
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
        """The statistic that λ follows (sides,), on the CPU.

        Adds ψ of that of the weights to the Lagrangian, and steps the threshold.
        """
        name, count, formulation = self.name, measured.counts[self.name], self.formulation
        mask = measured.masks[name]
        if not mask.all() and not mask.any():
            return None
        parts = [(measured.followed[name], mask)]
        value = self._statistic(parts, count, CPU).value
        judged = value
        if measured.strict:
            judged = self._statistic([(measured.judged[name], mask)], count, CPU).value
        measured.lagrangian += float(formulation.lagrangian(value, self.multiplier).sum())
        if formulation.learns_threshold:
            stepped = stepped_threshold(formulation, parts, self.sides, count, self.threshold)
            self.state.thresholds[name] = stepped if len(stepped) > 1 else stepped[0]
        return [judged]

    def step(self, visits: Sequence[list[Tensor]]) -> DualStep:
        value = torch.stack([judged for (judged,) in visits]).mean(0)
        multiplier = self.multiplier.to(value)
        stepped = self.formulation.ascend(value, multiplier)
        self.state.multipliers.write_scalar(self.name, stepped)
        mask = torch.ones_like(value, dtype=torch.bool)
        parts = (value, mask, multiplier, stepped)
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


def group_numbers(groups: Any, samples: int, whose: str = "groups") -> Tensor:
    """The group of each of N samples, (N,) int64; refuses what is no number from 0 for each."""
    found = None
    with suppress(ValueError, TypeError):  # Of texts.
        found = torch.as_tensor(groups).cpu()
    if found is None or not is_index(found) or len(found) != samples or (found < 0).any():
        raise DataError(
            f"{whose}: a whole number from 0 for each of the {samples:,} samples, got "
            f"{shape_of(groups)}; np.unique(groups, return_inverse=True)[1] numbers them."
        )
    return found.long()


def scope_of(name: str, state: Duals) -> Weight:
    """What the formulation of a constraint acts on."""
    per_sample = PerSample if state.groups is None else PerGroup
    kinds = {"sample": per_sample, "batch": PerBatch, "none": Weight}
    return kinds[state.formulations[name].scope](name, state)
