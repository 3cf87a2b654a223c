"""Faults that no setting tells, found by what the steps of a fit measure anyway."""

from __future__ import annotations

from torch.utils.data import RandomSampler, SequentialSampler

from ..data import PointwiseSampler
from ..errors import TrainingError
from ..lagrangian.terms import OBJECTIVE, Measured
from ..task import Task, warn
from .training_set import SHARED_ROWS, has_multipliers_per_sample, sampler_of


class Watch:
    """Finds faults that no setting tells, by what the steps measure anyway.

    Attributes:
        is_over: whether the steps that are left of this epoch can show none.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.start_fit()

    def start_fit(self) -> None:
        self.is_over = False
        # Of each sample whether this epoch has had it; empty in one that was resumed in its midst.
        self._visited = bytearray()
        # Whether an epoch of this fit has had every sample, each under a number of its own.
        self._proven = False

    def start_epoch(self) -> None:
        self.is_over = False
        self._proven = self._proven or (len(self._visited) > 0 and all(self._visited))
        self._visited = bytearray(0 if self._proven else self._samples_to_watch())

    def _samples_to_watch(self) -> int:
        """N, where each sample has its λ and an epoch has it once; else 0."""
        loader = self.task.trainer.train_dataloader
        sampler = sampler_of(loader)
        # Samplers that hand out each position once an epoch; of a subclass that is not known.
        once = type(sampler) in (PointwiseSampler, SequentialSampler)
        if type(sampler) is RandomSampler:
            once = not sampler.replacement and sampler.num_samples <= len(
                sampler.data_source
            )
        watched = once and has_multipliers_per_sample(self.task)
        return len(loader.dataset) if watched else 0

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
        if not self.task.global_step:
            self._warn_of_an_optimum(measured)
        self.is_over = not self._visited

    def _warn_of_an_optimum(self, measured: Measured) -> None:
        """Of a first batch whose objective is 0 and in which nothing is violated."""
        judged = violated = False
        for name, violation in measured.judged.items():
            applied = violation[measured.masks[name]]
            judged |= len(applied) > 0
            violated |= bool((self.task.constraints[name].reported(applied) > 0).any())
        objective = measured.objective[measured.masks[OBJECTIVE]]
        if violated or not judged or not len(objective):
            return
        if objective.abs().max() <= 1e-6:  # Rounding makes it of 0.
            warn(
                self.task,
                "The first batch has nothing to learn: no constraint is violated and the objective "
                "is 0. Where that holds for all data, as when the model is its own reference, "
                "training can only lead away from there.",
            )
