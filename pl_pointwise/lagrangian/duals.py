"""The multipliers and the rule that moves them: in a step, at a run's start, in a checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

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
from .gradient_units import GradientUnits
from .terms import DualStep, Measured, Terms, carries, last_visits, weights

log = logging.getLogger(__name__)

CPU = torch.device("cpu")


class Duals:
    """λ of every constraint, of ``samples`` samples (0: a stream), and when and how it moves.

    Attributes:
        multipliers: λ by constraint, float32 in training-set order.
        thresholds: t by constraint of a CVaR, () or (2,).
        units: Λ and r of the formulations that find their own α.
        in_force: the formulations with α a number, of the last step.
        dual_first: whether the step of the weights uses λ after this step's dual update.
        groups: (N,), the group of each sample where λ is a group's; None where it is a sample's.
        fingerprint: of the training set that the multipliers belong to.
        warn: how it warns.
    """

    warn: Callable[[str], None] = staticmethod(log.warning)

    def __init__(
        self,
        constraints: Mapping[str, Constraint],
        formulations: Mapping[str, Formulation],
        samples: int = 0,
        primal_steps: int = 1,
        order: str = "simultaneous",
    ) -> None:
        self.constraints = constraints
        self.configure(formulations, primal_steps, order)
        self.multipliers = Multipliers(samples)
        self.groups: Tensor | None = None
        self.thresholds: dict[str, Tensor] = {}
        self.units = GradientUnits()
        self.in_force: dict[str, Formulation] = {}
        self.fingerprint: str | None = None
        self._window: list[dict[str, list[Tensor]]] = []
        """The updated samples of the steps since the last dual step."""

    def configure(
        self, formulations: Mapping[str, Formulation], primal_steps: int, order: str
    ) -> None:
        """How λ moves from now on."""
        self.formulations = formulations
        self.primal_steps, self.dual_first = primal_steps, order == "dual_first"

    # In a step ----------------------------------------------------------------------------------

    def put_in_force(self, steps_an_epoch: float = math.inf) -> None:
        """The formulations of this step: those with numbers of their own, and α by what is known.

        steps_an_epoch: steps from one visit of a sample to the next.
        """
        between = max(steps_an_epoch, self.primal_steps)
        self.in_force = self.units.in_force(self.formulations, self.constraints, between)

    def rows(self, index: Tensor, terms: Terms) -> dict[str, Tensor]:
        """λ_t of the samples, by constraint, on the violations' device by one asynchronous copy."""
        found = {}
        for name, formulation in self.formulations.items():
            if formulation.scope == "sample":
                violation = terms.followed[name]
                if not self.multipliers.samples:  # A stream.
                    found[name] = torch.zeros_like(violation)
                    continue
                rows = self.multipliers.rows(name, self._owners(index), violation.shape[1])
                rows = rows.pin_memory() if violation.is_cuda else rows
                found[name] = rows.to(violation.device, violation.dtype, non_blocking=True)
        return found

    def note(self, measured: Measured, steps_an_epoch: float) -> None:
        """Keeps what the dual step needs of a step, by constraint, until it is due.

        Per sample: index (n,), violation, mask and λ, (n, sides·K). Else the statistic (sides,).
        If the weights follow another violation, or statistic, than the multipliers, it comes last.
        """
        visits: dict[str, list[Tensor]] = {}
        for name, formulation in self.in_force.items():
            mask = measured.masks[name]
            rows = None if mask.all() else carries(mask)
            if rows is not None and not rows.any():
                continue
            if formulation.scope == "sample" and self.multipliers.samples:
                visit = [measured.index, measured.judged[name], mask, measured.multipliers[name]]
                visit += [measured.followed[name]] if measured.strict else []
                visits[name] = visit if rows is None else [part[rows] for part in visit]
            elif formulation.scope == "batch":
                visits[name] = self._visit_of_batch(name, measured)
        self._window.append(visits)
        self.units.add(measured, self.formulations, self.in_force, steps_an_epoch)

    def step(self) -> dict[str, DualStep]:
        """λ ← (λ + η ∂ψ/∂λ)₊ for the samples seen since the last dual step, and no others.

        Each with its last violation; a statistic with its mean. Nothing while a window is open.
        """
        steps = dict[str, DualStep]()
        if len(self._window) < self.primal_steps:
            return steps
        window, self._window = self._window, []
        for name, formulation in self.in_force.items():
            visits = [visits[name] for visits in window if name in visits]
            if not visits:
                continue
            if formulation.scope == "batch":
                value, *followed = (
                    torch.stack(of_steps).mean(0) for of_steps in zip(*visits, strict=True)
                )
                multiplier = self.multipliers.scalar(name, len(value)).to(value)
                stepped = formulation.ascend(value, multiplier)
                self.multipliers.write_scalar(name, stepped)
                mask = torch.ones_like(value, dtype=torch.bool)
                parts = [value, mask, multiplier, stepped, *(followed or [value])]
                steps[name] = DualStep(None, *(part[None] for part in parts))
                continue
            parts = visits[0]
            if len(visits) > 1:
                parts = list(map(torch.cat, zip(*visits, strict=True)))
            if self.groups is not None:
                parts = means_of_groups(self._owners(parts[0]), *parts[1:])
            elif len(set(parts[0].tolist())) < len(parts[0]):
                last = last_visits(parts[0])
                parts = [part[last] for part in parts]
            index, judged, mask, multiplier, *followed = parts
            stepped = torch.where(mask, formulation.ascend(judged, multiplier), multiplier)
            self.multipliers.write(name, index, stepped)
            steps[name] = DualStep(
                index, judged, mask, multiplier, stepped, *(followed or [judged])
            )
        return steps

    def _owners(self, index: Tensor) -> Tensor:
        """Whose multipliers are those of the samples ``index`` (B,): theirs, or their groups'."""
        if self.groups is None:
            return index
        if len(index) and int(index.max()) >= len(self.groups):
            raise TrainingError(
                f"Sample index {int(index.max())} is outside the {len(self.groups):,} of groups."
            )
        return torch.where(index < 0, index, self.groups[index.clamp(min=0)])

    # Constraints on a statistic of the batch (batch_statistic.py) --------------------------------

    @property
    def on_batch(self) -> dict[str, BatchFormulation]:
        """The formulations in force that act on one."""
        return {
            name: cast("BatchFormulation", formulation)
            for name, formulation in self.in_force.items()
            if formulation.scope == "batch"
        }

    def known_slopes(self) -> dict[str, Slope] | None:
        """∂ψ/∂mean where it is λ, whatever the batch; None where it has to be measured."""
        if self.dual_first or not all(f.linear for f in self.on_batch.values()):
            return None
        return {name: Slope(self._threshold(name), self._scalar(name)) for name in self.on_batch}

    def slopes(
        self,
        terms: Sequence[Terms],
        counts: Mapping[str, Tensor],
        device: torch.device,
        reduce: Reduce | None = None,
    ) -> dict[str, Slope]:
        """∂ψ/∂mean by constraint of all micro-batches; ``reduce`` where others hold samples."""
        found = {}
        for name, formulation in self.on_batch.items():
            shared = counts[name], device, reduce
            followed = [(part.followed[name].detach(), part.masks[name]) for part in terms]
            statistic = self._statistic(name, followed, *shared)
            multiplier = self._scalar(name).to(statistic.mean, non_blocking=True)
            if self.dual_first:
                parts = [(part.judged[name], part.masks[name]) for part in terms]
                judged = self._statistic(name, parts, *shared)
                multiplier = formulation.ascend(judged.value, multiplier)
            found[name] = slope_of(statistic, multiplier)
        return found

    def batch_loss(
        self, terms: Terms, slopes: Mapping[str, Slope], counts: Mapping[str, Tensor]
    ) -> Tensor:
        """A micro-batch's share of terms whose gradients are those of ψ(statistic, λ)."""
        total = torch.zeros((), dtype=terms.objective.dtype, device=terms.objective.device)
        for name, formulation in self.on_batch.items():
            violation, mask = terms.followed[name], terms.masks[name]
            psi = linearised(formulation, violation, mask, slopes[name])
            normalised = weights(mask, self._sides(name), violation.dtype) / counts[name]
            total = total + (torch.where(mask, psi, 0) * normalised).sum()
        return total

    def _visit_of_batch(self, name: str, measured: Measured) -> list[Tensor]:
        """The statistic that λ follows (sides,), then that of the weights if another, on the CPU.

        Adds ψ of the latter to the Lagrangian, and steps the threshold.
        """
        formulation, count = self.on_batch[name], measured.counts[name]
        parts = [(measured.followed[name], measured.masks[name])]
        value = self._statistic(name, parts, count, CPU).value
        values = [value]
        if measured.strict:
            judged = [(measured.judged[name], measured.masks[name])]
            values.insert(0, self._statistic(name, judged, count, CPU).value)
        measured.lagrangian += float(formulation.lagrangian(value, self._scalar(name)).sum())
        if formulation.learns_threshold:
            sides, threshold = self._sides(name), self._threshold(name)
            stepped = stepped_threshold(formulation, parts, sides, count, threshold)
            self.thresholds[name] = stepped if len(stepped) > 1 else stepped[0]
        return values

    def _statistic(
        self,
        name: str,
        parts: Sequence[tuple[Tensor, Tensor]],
        count: Tensor | int,
        device: torch.device,
        reduce: Reduce | None = None,
    ) -> BatchStatistic:
        formulation, threshold = self.on_batch[name], self._threshold(name)
        sides = self._sides(name)
        return batch_statistic(formulation, parts, sides, count, threshold, device, reduce)

    def _sides(self, name: str) -> int:
        return self.constraints[name].sides

    def _scalar(self, name: str) -> Tensor:
        """λ of each side, (sides,)."""
        return self.multipliers.scalar(name, self._sides(name))

    def _threshold(self, name: str) -> Tensor:
        """t of each side, (sides,); 0 where the formulation learns none."""
        sides = self._sides(name)
        return self.thresholds.get(name, torch.zeros(sides)).reshape(sides)

    # At the start of a fit ----------------------------------------------------------------------

    def start(self, samples: int, fingerprint: str | None, resumed: bool, first: bool) -> None:
        """Keeps the multipliers if they belong to this training set, or starts them again.

        samples, fingerprint: of the training set; 0 and None of a stream.
        resumed: whether they are a checkpoint's. first: whether steps are counted from 0 by a
            fit that is not resumed.
        """
        if not resumed and fingerprint != self.fingerprint:
            if self.fingerprint is not None and samples:
                self.warn("Another training set than before: the multipliers start at 0 again.")
            self.multipliers = self.multipliers.for_samples(samples)
            self.thresholds, self.units, self._window = {}, GradientUnits(), []
        self.fingerprint = fingerprint
        self._fit_tables()
        if first:  # What was measured stays until it is measured again.
            self.units.load_state_dict({**self.units.state_dict(), "next": 0})

    def _fit_tables(self) -> None:
        """Fits multipliers and thresholds to the formulations of now, or refuses them.

        Kept under another formulation of the same scope; dropped, with a warning, without one.
        """
        multipliers = self.multipliers
        for name in set(multipliers).intersection(multipliers.pending()):
            self.warn(f'Multipliers of "{name}" are the checkpoint\'s, not those that were set.')
            del multipliers.pending()[name]
        for name in [*multipliers, *multipliers.pending()]:
            formulation = self.formulations.get(name)
            if formulation is None or formulation.scope == "none":
                what = "no such constraint" if formulation is None else repr(formulation)
                self.warn(f'Multipliers of "{name}" are dropped: this module has {what}.')
                multipliers.reset(name)
                continue
            table = multipliers.get(name)
            if table is None:
                table = multipliers.pending()[name]
            elif (table.dim() == 2) != (formulation.scope == "sample"):
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


def means_of_groups(
    groups: Tensor, judged: Tensor, mask: Tensor, multiplier: Tensor, *followed: Tensor
) -> list[Tensor]:
    """A row for each group (G,): the mean of its samples' violations, and its λ.

    groups: (n,), of each sample. The others (n, sides·K); λ is alike within a group.
    """
    distinct, row = torch.unique(groups, return_inverse=True)
    sums = torch.zeros(len(distinct), judged.shape[1], dtype=judged.dtype)
    number = sums.index_add(0, row, mask.to(judged.dtype))
    means = [
        sums.index_add(0, row, torch.where(mask, table, 0)) / number.clamp(min=1)
        for table in (judged, *followed)
    ]
    first = last_visits(groups)
    return [distinct, means[0], number > 0, multiplier[first], *means[1:]]


def _remedy(name: str) -> str:
    return (
        f"call module.multipliers.reset({name!r}) before fit; of a checkpoint, after "
        "load_from_checkpoint, and fit without ckpt_path"
    )
