"""How the constraints ended, in a line each, by what the steps measured anyway."""

from __future__ import annotations

import torch
from torch import Tensor

from ..certificates import worst_per_sample
from ..lagrangian.duals import Duals
from ..lagrangian.terms import OBJECTIVE, Measured
from ..task import Task, warn


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
            if self.task.constraints[name].equals is not None:
                violation = violation.abs()
            if measured.whole:
                worst = violation.amax(1)
            else:
                worst = worst_per_sample(violation, measured.masks[name])
            self._worst[name].append(worst)
            if name not in self._ever and (worst > 0).any():
                self._ever.add(name)
        if self._ever or self.task.global_step:
            return
        objective = measured.objective[measured.masks[OBJECTIVE]]
        judged = any(measured.masks[name].any() for name in measured.judged)
        if judged and len(objective) and objective.abs().max() <= 1e-6:  # Rounding makes it of 0.
            warn(
                self.task,
                "The first batch has nothing to learn: no constraint is violated and the objective "
                "is 0. Where that holds for all data, as when the model is its own reference, "
                "training can only lead away from there.",
            )

    def say(self, duals: Duals) -> None:
        """Logs what calls for an answer, and keeps the other lines."""
        for name, found in self._worst.items():
            text, answer = self._ending(name, torch.cat(found), duals)
            if answer:
                warn(self.task, f"{name}: {text}: {answer}")
            else:
                self.lines.append(f"{name}: {text}.")

    def _ending(self, name: str, worst: Tensor, duals: Duals) -> tuple[str, str]:
        """How a constraint ended, and what to do, or "" where nothing is to be done."""
        if not len(worst):
            # Of several constraints some may have no sample, as roles of no record.
            alone = not any(len(values) for of in self._worst.values() for values in of)
            answer = "membership() leaves all of them out, or there are none." * alone
            return "applied to no sample in the last epoch", answer
        equality = self.task.constraints[name].equals is not None
        text = f"{int((worst > 0).sum()):,} of {len(worst):,} violated in the last epoch"
        if equality:
            mean, most = f"{worst.mean():.3g}", f"{worst.max():.3g}"
            text = f"off by {mean} on average, {most} at most, in the last epoch"
        formulation, table = duals.in_force.get(name), duals.multipliers.get(name)
        if formulation is None:
            return text, ""
        if formulation.scope == "sample" and table is not None and table.numel():
            text += f", λ {'≠' if equality else '>'} 0 on {int(table.any(1).sum()):,}"
        # Of all formulations only the linear penalty acts below the bound.
        below = formulation.lagrangian(torch.tensor([-2.0, -1.0]), torch.zeros(2))
        if equality:
            return text, ""
        if name not in self._ever and below[0] == below[1] and (table is None or not table.any()):
            return text, "it never acted, so this run is one with formulation: null."
        if (worst > 0).all():
            return text, (
                "its bound is out of reach, the epochs were too few, or it is the wrong way round "
                "(at_most for at_least). See docs/settings.md."
            )
        return text, ""
