"""How the constraints ended, in a line each, by what the steps measured anyway."""

from __future__ import annotations

import torch
from torch import Tensor

from .duals import Duals
from .formulations import Formulation
from .step import OBJECTIVE, Measured
from .task import Task, warn

NOTHING = 1e-6
"""A value of the objective that rounding makes of 0."""
LARGE, STAYS = 100.0, 0.05
"""λ in its unit, and the share of samples violated, beyond which λ grows and does not help."""


class LastWords:
    """Keeps each sample's largest violation in an epoch, and says at the end what they mean."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.start_fit()

    def start_fit(self) -> None:
        self.lines: list[str] = []  # Those that are no warning, for the command line.
        self._ever: set[str] = set()  # Constraints that this fit has violated.
        self.start_epoch()

    def start_epoch(self) -> None:
        self._epoch: dict[str, list[Tensor]] = {name: [] for name in self.task.constraints}

    def add(self, measured: Measured) -> None:
        """Adds a step, before the weights move."""
        for name, violation in measured.judged.items():
            constraint = self.task.constraints[name]
            violation, mask = constraint.outside(violation, measured.masks[name])
            worst = constraint.reported(violation).masked_fill(~mask, -torch.inf).amax(1)
            self._epoch[name].append(worst[mask.any(1)])
            self._ever |= {name} if (worst > 0).any() else set()
        objective = measured.objective[measured.masks[OBJECTIVE]]
        judged = any(map(len, (each for found in self._epoch.values() for each in found)))
        if self.task.global_step or self._ever or not (judged and len(objective)):
            return
        if objective.abs().max() <= NOTHING:
            warn(
                self.task,
                "The first batch has nothing to learn: no constraint is violated and the objective "
                "is 0. Where that holds for all data, as when the model is its own reference, "
                "training can only lead away from there.",
            )

    def say(self, duals: Duals) -> None:
        """Logs what calls for an answer, and keeps the other lines."""
        for name, found in self._epoch.items():
            worst, table = (
                torch.cat(found) if found else torch.zeros(0),
                duals.multipliers.get(name),
            )
            verdict = self._verdict(name, worst, table, duals)
            line = f"{name}: {self._count(name, worst, table)}"
            if verdict:
                warn(self.task, f"{line}: {verdict}")
            else:
                self.lines.append(f"{line}.")

    def _count(self, name: str, worst: Tensor, table: Tensor | None) -> str:
        if not len(worst):
            return "applied to no sample in the last epoch"
        text = f"{int((worst > 0).sum()):,} of {len(worst):,} violated in the last epoch"
        if self.task.constraints[name].equals is not None:
            mean, largest = f"{worst.mean():.3g}", f"{worst.max():.3g}"
            text = f"off by {mean} on average, {largest} at most, in the last epoch"
        if table is None or not (formulation := self.task.formulations.get(name)):
            return text
        if table.dim() < 2:
            sides = ", ".join(f"{value:.3g}" for value in table.reshape(-1).tolist())
            return f"{text}, λ of its {type(formulation).__name__} {sides}"
        return f"{text}, λ {'≠' if formulation.signed else '>'} 0 on {int(table.any(1).sum()):,}"

    def _verdict(self, name: str, worst: Tensor, table: Tensor | None, duals: Duals) -> str:
        """What to do, or "" where nothing is to be done or said."""
        if not len(worst):
            return "membership() leaves all of them out, or there are none."
        if name not in self.task.formulations:
            return ""
        largest = 0.0 if table is None or not table.numel() else float(table.abs().max())
        if name not in self._ever:
            idle = not largest and acts_on_violations_only(duals.in_force[name])
            return "it never acted, so this run is one with formulation: null." if idle else ""
        violated = float((worst > 0).float().mean())
        if self.task.constraints[name].equals is not None:
            return ""
        if violated == 1:
            return (
                "its bound is out of reach, the epochs were too few, or it is the wrong way round "
                "(at_most for at_least). See docs/settings.md."
            )
        times = largest / (duals.units.unit(name) or torch.inf)
        if times > LARGE and violated > STAYS:
            return (
                f"λ has grown to {times:,.0f} times its unit and the weights do not follow. "
                "Raise training.primal_steps, or the bound is out of reach."
            )
        return ""


def acts_on_violations_only(formulation: Formulation) -> bool:
    """Whether ψ(v, 0) is the same for all v ≤ 0, as of all but the linear penalty."""
    psi = formulation.lagrangian(torch.tensor([-2.0, -1.0]), torch.zeros(2))
    return bool(psi[0] == psi[1])
