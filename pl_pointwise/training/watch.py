"""What the steps of a fit show: faults that no setting tells, and how each constraint ended."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import RandomSampler, SequentialSampler

from ..certificates import worst_per_sample
from ..data import PointwiseSampler
from ..errors import TrainingError
from ..lagrangian.duals import Duals
from ..lagrangian.terms import OBJECTIVE, Measured, Terms
from ..task import Task, warn
from .checks import SHARED_ROWS, has_multipliers_per_sample, sampler_of


class Watch:
    """Watches the steps of a fit, by what they measure anyway."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.start_fit()

    def start_fit(self) -> None:
        self.lines: list[str] = []  # Those that are no warning, for the command line.
        trained = {name for name, f in self.task.formulations.items() if f.needs_gradient}
        self.unproven = {OBJECTIVE, *trained}  # Terms of which no sample has been seen yet.
        self._ever: set[str] = set()  # Constraints that this fit has violated.
        # Of each sample whether this epoch has had it; empty in one that was resumed in its midst.
        self._visited = bytearray()
        self._worst = {name: [torch.zeros(0)] for name in self.task.constraints}

    def start_epoch(self) -> None:
        loader = self.task.trainer.train_dataloader
        sampler = sampler_of(loader)
        once = type(sampler) in (PointwiseSampler, SequentialSampler)
        if type(sampler) is RandomSampler:
            once = not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
        watched = once and has_multipliers_per_sample(self.task)
        self._visited = bytearray(len(loader.dataset) if watched else 0)
        self._worst = {name: [torch.zeros(0)] for name in self.task.constraints}

    def require_gradients(self, terms: Terms) -> None:
        """Refuses values without a gradient, in the first batch that a term applies to."""
        if not torch.is_grad_enabled():
            return
        values = {OBJECTIVE: terms.objective, **terms.followed}
        for name in sorted(name for name in self.unproven if bool(terms.masks[name].any())):
            self.unproven.discard(name)
            is_objective = name == OBJECTIVE
            if values[name].dim() == 2 and 2 < len(values[name]) == values[name].shape[1]:
                warn(
                    self.task,
                    f'Constraint "{name}" has as many values a sample as the batch has samples: '
                    "if that is not meant, (B, 1) was put against (B,) and broadcast.",
                )
            none = is_objective and bool(self.task.formulations) and not terms.objective.any()
            if values[name].requires_grad or none:  # Constraints alone are trained.
                continue
            term = "The objective" if is_objective else f'Constraint "{name}"'
            method = "objective()" if is_objective else "constraint_values()"
            raise TrainingError(
                f"{term}: its values have no gradient. In {method} and forward(), look for "
                "torch.no_grad(), .detach(), an argmax, a comparison, or a frozen part. What is "
                "only to be measured belongs in evaluation_metrics()."
            )

    def add(self, measured: Measured) -> None:
        """Adds a step, before the weights move; refuses a sample that the epoch has had."""
        for number in measured.index.tolist():
            if not 0 <= number < len(self._visited):
                continue  # Padding; of one that is too large the multipliers say so.
            if self._visited[number]:
                raise TrainingError(
                    f"Sample index {number} came twice in epoch {self.task.current_epoch}, and the "
                    f"sampler hands out each position once. {SHARED_ROWS}"
                )
            self._visited[number] = True
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
