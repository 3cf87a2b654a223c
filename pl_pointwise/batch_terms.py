"""The terms of the constraints whose ψ acts on one statistic of the batch, in a training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .batch_statistic import (
    BatchStatistic,
    Reduce,
    Slope,
    batch_statistic,
    linearised,
    slope_of,
    stepped_threshold,
)
from .formulations import BatchFormulation, Constraint
from .multipliers import Multipliers
from .step import Measured, Terms, weights

Part = tuple[Tensor, Tensor]
"""Violations and their mask, (b, sides·K) both."""


class BatchTerms:
    """All such constraints of a module, with their multipliers and learned thresholds.

    Args:
        formulations: in force, by constraint.
        constraints: of the module.
        multipliers: of the module; read.
        thresholds: of the module; :meth:`visit` steps them.
        dual_first: whether the step of the weights uses λ after this step's dual update.
    """

    def __init__(
        self,
        formulations: Mapping[str, BatchFormulation],
        constraints: Mapping[str, Constraint],
        multipliers: Multipliers,
        thresholds: dict[str, Tensor],
        dual_first: bool,
    ) -> None:
        self.formulations = formulations
        self.sides = {name: constraints[name].sides for name in formulations}
        self.multipliers, self.thresholds = multipliers, thresholds
        self.dual_first = dual_first

    @property
    def linear(self) -> bool:
        """Whether every slope is its multiplier, whatever the batch."""
        return not self.dual_first and all(f.linear for f in self.formulations.values())

    def multiplier(self, name: str) -> Tensor:
        """λ of each side, (sides,)."""
        return self.multipliers.scalar(name, self.sides[name])

    def threshold(self, name: str) -> Tensor:
        """t of each side, (sides,); 0 where the formulation learns none."""
        sides = self.sides[name]
        return self.thresholds.get(name, torch.zeros(sides)).reshape(sides)

    def slopes_without_data(self) -> dict[str, Slope]:
        """∂ψ/∂mean where :attr:`linear`."""
        return {n: Slope(self.threshold(n), self.multiplier(n)) for n in self.formulations}

    def slopes(
        self,
        terms: Sequence[Terms],
        counts: Mapping[str, Tensor],
        device: torch.device,
        reduce: Reduce | None = None,
    ) -> dict[str, Slope]:
        """∂ψ/∂mean by constraint, at the violations of all micro-batches.

        reduce: where the other ranks hold samples of the step too.
        """
        found = {}
        for name, formulation in self.formulations.items():
            shared = counts[name], device, reduce
            followed = [(part.followed[name].detach(), part.masks[name]) for part in terms]
            statistic = self._statistic(name, followed, *shared)
            multiplier = self.multiplier(name).to(statistic.mean, non_blocking=True)
            if self.dual_first:
                parts = [(part.judged[name], part.masks[name]) for part in terms]
                judged = self._statistic(name, parts, *shared)
                multiplier = formulation.ascend(judged.value, multiplier)
            found[name] = slope_of(statistic, multiplier)
        return found

    def loss(
        self, terms: Terms, slopes: Mapping[str, Slope], counts: Mapping[str, Tensor]
    ) -> Tensor:
        """A micro-batch's share of terms whose gradients are those of ψ(statistic, λ)."""
        total = torch.zeros((), dtype=terms.objective.dtype, device=terms.objective.device)
        for name, formulation in self.formulations.items():
            violation, mask = terms.followed[name], terms.masks[name]
            psi = linearised(formulation, violation, mask, slopes[name])
            normalised = weights(mask, self.sides[name], violation.dtype) / counts[name]
            total = total + (torch.where(mask, psi, 0) * normalised).sum()
        return total

    def visit(self, name: str, measured: Measured) -> tuple[list[Tensor], float]:
        """The statistic of a step (sides,), on the CPU, and ψ of it; steps the threshold.

        That of the judged violations, then, where it is another, that of those that the weights
        followed; ψ is of the latter.
        """
        formulation, count = self.formulations[name], measured.counts[name]
        parts = [(measured.followed[name], measured.masks[name])]
        value = self._statistic(name, parts, count, torch.device("cpu")).value
        values = [value]
        if measured.strict:
            judged = [(measured.judged[name], measured.masks[name])]
            values.insert(0, self._statistic(name, judged, count, torch.device("cpu")).value)
        psi = float(formulation.lagrangian(value, self.multiplier(name)).sum())
        if formulation.learns_threshold:
            stepped = stepped_threshold(
                formulation, parts, self.sides[name], count, self.threshold(name)
            )
            self.thresholds[name] = stepped if len(stepped) > 1 else stepped[0]
        return values, psi

    def _statistic(
        self,
        name: str,
        parts: Sequence[Part],
        count: Tensor | int,
        device: torch.device,
        reduce: Reduce | None = None,
    ) -> BatchStatistic:
        formulation, threshold = self.formulations[name], self.threshold(name)
        sides = self.sides[name]
        return batch_statistic(formulation, parts, sides, count, threshold, device, reduce)
