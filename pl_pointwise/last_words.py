"""How the constraints ended, in a line each, by what the steps measured anyway."""

from __future__ import annotations

import torch
from torch import Tensor

from .certificates import worst_per_sample
from .duals import Duals
from .step import OBJECTIVE, Measured
from .task import Task, warn

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
        self._worst = {name: [torch.zeros(0)] for name in self.task.constraints}

    def add(self, measured: Measured) -> None:
        """Adds a step, before the weights move."""
        for name, violation in measured.judged.items():
            constraint = self.task.constraints[name]
            violation, mask = constraint.outside(violation, measured.masks[name])
            worst = worst_per_sample(constraint.reported(violation), mask)
            self._worst[name].append(worst)
            self._ever |= {name} if (worst > 0).any() else set()
        objective = measured.objective[measured.masks[OBJECTIVE]]
        judged = any(measured.masks[name].any() for name in measured.judged)
        if self.task.global_step or self._ever or not (judged and len(objective)):
            return
        if objective.abs().max() <= 1e-6:  # Rounding makes it of 0.
            warn(
                self.task,
                "The first batch has nothing to learn: no constraint is violated and the objective "
                "is 0. Where that holds for all data, as when the model is its own reference, "
                "training can only lead away from there.",
            )

    def say(self, duals: Duals) -> None:
        """Logs what calls for an answer, and keeps the other lines."""
        for name, found in self._worst.items():
            worst = torch.cat(found)
            line, answer = self._count(name, worst, duals), self._answer(name, worst, duals)
            if answer:
                warn(self.task, f"{name}: {line}: {answer}")
            else:
                self.lines.append(f"{name}: {line}.")

    def _count(self, name: str, worst: Tensor, duals: Duals) -> str:
        if not len(worst):
            return "applied to no sample in the last epoch"
        text = f"{int((worst > 0).sum()):,} of {len(worst):,} violated in the last epoch"
        if self.task.constraints[name].equals is not None:
            mean, largest = f"{worst.mean():.3g}", f"{worst.max():.3g}"
            text = f"off by {mean} on average, {largest} at most, in the last epoch"
        table, formulation = duals.multipliers.get(name), self.task.formulations.get(name)
        if table is None or formulation is None or formulation.scope != "sample":
            return text
        return f"{text}, λ {'≠' if formulation.signed else '>'} 0 on {int(table.any(1).sum()):,}"

    def _answer(self, name: str, worst: Tensor, duals: Duals) -> str:
        """What to do, or "" where nothing is to be done or said."""
        if not len(worst):
            return "membership() leaves all of them out, or there are none."
        formulation, table = duals.in_force.get(name), duals.multipliers.get(name)
        if formulation is None or self.task.constraints[name].equals is not None:
            return ""
        largest = 0.0 if table is None or not table.numel() else float(table.abs().max())
        if name not in self._ever:
            # Of all formulations only the linear penalty acts below the bound.
            below = formulation.lagrangian(torch.tensor([-2.0, -1.0]), torch.zeros(2))
            idle = not largest and below[0] == below[1]
            return "it never acted, so this run is one with formulation: null." if idle else ""
        if (worst > 0).all():
            return (
                "its bound is out of reach, the epochs were too few, or it is the wrong way round "
                "(at_most for at_least). See docs/settings.md."
            )
        times = largest / (duals.units.unit(name) or torch.inf)
        if times > LARGE and (worst > 0).float().mean() > STAYS:
            return (
                f"λ has grown to {times:,.0f} times its unit and the weights do not follow. "
                "Raise training.primal_steps, or the bound is out of reach."
            )
        return ""
