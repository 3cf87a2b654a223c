"""What a training step logs: ``running/…``, of the batch, taken while the weights move; and what
the progress bar shows, of the epoch so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from .metrics import share_violated
from .optimizers import monitor_of
from .step import OBJECTIVE, Measured
from .task import Task


def log_step(
    task: Task, measured: Measured, so_far: EpochSoFar, left_out: int, skipped_steps: int
) -> None:
    """Logs the statistics of a step.

    For loggers and callbacks at the trainer's ``log_every_n_steps`` and at the end of an epoch; for
    the progress bar, where there is one, at every step.
    """
    trainer = task.trainer
    if getattr(trainer.progress_bar_callback, "is_enabled", False):
        if so_far.epoch != task.current_epoch or trainer.fit_loop.epoch_loop.batch_idx == 0:
            so_far.start(task.current_epoch)
        objective = measured.objective[measured.masks[OBJECTIVE]]
        violations = [*reported_violations(task, measured).values()]
        so_far.add(objective, torch.cat(violations) if violations else torch.empty(0))
        task.log_dict(so_far.values(), prog_bar=True, logger=False)
    schedulers = [monitor_of(config.scheduler) for config in trainer.lr_scheduler_configs]
    if (
        trainer.is_last_batch
        or trainer._logger_connector.should_update_logs
        or any(monitored.startswith("running/") for monitored in schedulers)
    ):
        statistics = running_statistics(task, measured)
        statistics |= {"left_out": float(left_out), "skipped_steps": float(skipped_steps)}
        task.log_dict({f"running/{key}": value for key, value in statistics.items()})


class EpochSoFar:
    """What the progress bar shows: of all visits of the epoch, or since a resume in its middle."""

    def __init__(self) -> None:
        self.start(None)

    def start(self, epoch: int | None) -> None:
        """Forgets what there was."""
        self.epoch = epoch
        self._objective, self._objectives = 0.0, 0
        self._violated, self._violations = 0, 0

    def add(self, objective: Tensor, violations: Tensor) -> None:
        """Adds a step's objective (m,) and violations (n,), of the samples that carry them."""
        self._objective += float(objective.double().sum())
        self._objectives += len(objective)
        self._violated += int((violations > 0).sum())
        self._violations += len(violations)

    def values(self) -> dict[str, float]:
        """Mean objective and share violated; none of what nobody carried."""
        found = {}
        if self._objectives:
            found["objective"] = self._objective / self._objectives
        if self._violations:
            found["violated"] = self._violated / self._violations
        return found


def log_of_all_ranks(
    module: LightningModule, values: Mapping[str, Tensor | float], **options: Any
) -> None:
    """Logs values of an epoch that every rank has alike.

    As their largest over the ranks, which is what each has; else Lightning asks for
    ``sync_dist=True`` for each of them, whose mean may round.
    """
    ranks = module.trainer.world_size > 1
    module.log_dict(values, sync_dist=ranks, reduce_fx="max" if ranks else "mean", **options)


def running_statistics(task: Task, measured: Measured) -> dict[str, Tensor | float]:
    """Of a step's samples: Lagrangian, objective, mean violation and share violated."""
    mask = measured.masks[OBJECTIVE]
    shown: dict[str, Tensor | float] = {
        "lagrangian": measured.lagrangian,
        "gradient_norm": measured.gradient_norm,
    }
    if mask.any():
        shown["objective"] = measured.objective[mask].mean()
    for name, values in reported_violations(task, measured).items():
        if len(values):
            shown |= {f"{name}/mean": values.mean(), f"{name}/violated": share_violated(values)}
    return shown


def reported_violations(task: Task, measured: Measured) -> dict[str, Tensor]:
    """(m,) by constraint, the violations of a step: of an equality |ℓ − c|."""
    return {
        name: task.constraints[name].reported(violation[measured.masks[name]])
        for name, violation in measured.judged.items()
    }
