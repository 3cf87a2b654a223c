"""How the constraints ended, in a line each, by what the steps measured anyway."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .duals import Duals
from .formulations import Formulation
from .step import OBJECTIVE, Measured
from .task import Task, warn

NOTHING = 1e-6
"""A value of the objective that rounding makes of 0."""
LARGE, STAYS = 100.0, 0.05
"""λ in its unit, and the share of samples violated, beyond which λ grows and does not help."""


@dataclass
class _Seen:
    """Of one constraint, in one epoch, over all ranks."""

    samples: int = 0
    violated: int = 0  # With a value above 0.
    total: float = 0.0  # Of each sample's largest violation.
    largest: float = -math.inf


class LastWords:
    """Counts violated samples, epoch by epoch, and says at the end of a fit what they mean."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.start_fit()

    def start_fit(self) -> None:
        self.lines: list[str] = []  # Those that are no warning, for the command line.
        self._ever: set[str] = set()  # Constraints violated so far in this fit.
        self.start_epoch()

    def start_epoch(self) -> None:
        self._epoch = {name: _Seen() for name in self.task.constraints}

    def add(self, measured: Measured) -> None:
        """Adds a step, before the weights move."""
        if self.task.global_step == 0:
            self._warn_of_nothing_to_do(measured)
        for name, violation in measured.judged.items():
            constraint, seen = self.task.constraints[name], self._epoch[name]
            violation, mask = constraint.outside(violation, measured.masks[name])
            values = constraint.reported(violation).masked_fill(~mask, -math.inf).amax(1)
            values = values[mask.any(1)]
            if len(values):
                seen.samples += len(values)
                seen.violated += int((values > 0).sum())
                seen.total += float(values.double().sum())
                seen.largest = max(seen.largest, float(values.max()))
                self._ever |= {name} if seen.violated else set()

    def _warn_of_nothing_to_do(self, measured: Measured) -> None:
        objective = measured.objective[measured.masks[OBJECTIVE]]
        values = [
            self.task.constraints[name].reported(violation)[measured.masks[name]]
            for name, violation in measured.judged.items()
        ]
        none = any(map(len, values)) and not any(bool((v > 0).any()) for v in values)
        if none and len(objective) and bool((objective.abs() <= NOTHING).all()):
            warn(
                self.task,
                "The first batch has nothing to learn: no constraint is violated and the objective "
                "is 0. Where that holds for all data, as when the model is its own reference, "
                "training can only lead away from there.",
            )

    def say(self, duals: Duals) -> None:
        """Logs what calls for an answer, and keeps the other lines."""
        for name, seen in self._epoch.items():
            verdict = self._verdict(name, seen, duals)
            line = f"{name}: {self._count(name, seen, duals)}"
            if verdict:
                warn(self.task, f"{line}: {verdict}")
            else:
                self.lines.append(f"{line}.")

    def _count(self, name: str, seen: _Seen, duals: Duals) -> str:
        if not seen.samples:
            return "applied to no sample in the last epoch"
        text = f"{seen.violated:,} of {seen.samples:,} violated in the last epoch"
        if self.task.constraints[name].equals is not None:
            mean = seen.total / seen.samples
            text = f"off by {mean:.3g} on average, {seen.largest:.3g} at most, in the last epoch"
        table, formulation = duals.multipliers.get(name), self.task.formulations.get(name)
        if table is None or formulation is None:
            return text
        if table.dim() < 2:
            sides = ", ".join(f"{value:.3g}" for value in table.reshape(-1).tolist())
            return f"{text}, λ of its {type(formulation).__name__} {sides}"
        return f"{text}, λ {'≠' if formulation.signed else '>'} 0 on {int(table.any(1).sum()):,}"

    def _verdict(self, name: str, seen: _Seen, duals: Duals) -> str:
        """What to do, or "" where nothing is to be done or said."""
        formulation, table = self.task.formulations.get(name), duals.multipliers.get(name)
        if not seen.samples:
            return "membership() leaves all of them out, or there are none."
        if formulation is None:
            return ""
        if name not in self._ever and acts_on_violations_only(duals.in_force[name]):
            if table is None or not table.any():
                return "it never acted, so this run is one with formulation: null."
            return ""
        if self.task.constraints[name].equals is not None:
            return ""
        if seen.violated == seen.samples:
            return (
                "its bound is out of reach, the epochs were too few, or it is the wrong way round "
                "(at_most for at_least). See docs/settings.md."
            )
        unit = duals.units.unit(name)
        if unit and table is not None and seen.violated > STAYS * seen.samples:
            times = float(table.abs().max()) / unit
            if times > LARGE:
                return (
                    f"λ has grown to {times:,.0f} times its unit and the weights do not follow. "
                    "Raise training.primal_steps, or the bound is out of reach."
                )
        return ""


def acts_on_violations_only(formulation: Formulation) -> bool:
    """Whether ψ(v, 0) is the same for all v ≤ 0, as of all but the linear penalty."""
    psi = formulation.lagrangian(torch.tensor([-2.0, -1.0]), torch.zeros(2))
    return bool(psi[0] == psi[1])
