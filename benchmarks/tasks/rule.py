"""The package's own rule: a PointwiseLoss of every member, on its row of the batched terms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pl_pointwise import PointwiseLoss
from pl_pointwise.errors import TrainingError
from pl_pointwise.formulations import Formulation

from .task import Task, Terms


class Rules:
    """M members, each with multipliers and units of its own.

    Args:
        task: its constraints, membership and groups.
        members: a formulation of each.
        steps: of the whole run.
    """

    def __init__(self, task: Task, members: Sequence[Formulation], steps: int) -> None:
        self.task = task
        groups = None if task.groups is None else task.groups[: task.samples]
        self.losses: list[PointwiseLoss | None] = [
            PointwiseLoss(
                task.constraints,
                formulation,
                samples=task.samples,
                groups=groups if formulation.scope == "sample" else None,
                total_steps=steps,
            )
            for formulation in members
        ]

    def loss(self, terms: Terms, index: Tensor) -> Tensor:
        """(M,): of each member; 0 of one that has diverged. index (M, B)."""
        objective, values = terms
        found = []
        for member, constrained in enumerate(self.losses):
            own = {name: value[member] for name, value in values.items()}
            found.append(
                self._of(member, constrained, objective[member], own, index[member])
            )
        return torch.stack(found)

    def _of(
        self,
        member: int,
        constrained: PointwiseLoss | None,
        objective: Tensor,
        values: dict[str, Tensor],
        index: Tensor,
    ) -> Tensor:
        if constrained is None:
            return objective.new_zeros(())
        masks = {name: table[index] for name, table in self.task.membership.items()}
        try:
            return constrained(objective, values, index, masks=masks)
        except TrainingError as error:
            if "nothing has moved" not in str(error):
                raise
            self.losses[member] = None  # Not finite: what it has by now is judged.
            return objective.new_zeros(())

    def step(self) -> None:
        """λ of the last loss's samples, after the step of the weights."""
        for constrained in self.losses:
            if constrained is not None:
                constrained.step()
