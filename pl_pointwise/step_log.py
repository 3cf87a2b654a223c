"""What a training step logs: ``running/…``, of the batch, taken while the weights move; and what
the progress bar shows, of the epoch so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from .metrics import violation_statistics
from .optimizers import monitor_of
from .step import OBJECTIVE, Measured

if TYPE_CHECKING:
    from .module import PointwiseModule


def log_step(module: PointwiseModule, measured: Measured) -> None:
    """Logs the statistics of a step.

    For loggers and callbacks at the trainer's ``log_every_n_steps`` and at the end of an epoch; for
    the progress bar, where there is one, at every step.
    """
    if shows_progress_bar(module.trainer):
        so_far = module._epoch_so_far
        if (
            so_far.epoch != module.current_epoch
            or module.trainer.fit_loop.epoch_loop.batch_idx == 0
        ):
            so_far.start(module.current_epoch)
        objective = measured.objective[measured.masks[OBJECTIVE]]
        so_far.add(objective, pooled_violations(module, measured))
        module.log_dict(so_far.values(), prog_bar=True, logger=False)
    if logs_this_step(module):
        statistics = running_statistics(module, measured)
        statistics |= {
            "left_out": float(module.left_out),
            "skipped_steps": float(module.skipped_steps),
        }
        module.log_dict({f"running/{key}": value for key, value in statistics.items()})


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


def running_statistics(module: PointwiseModule, measured: Measured) -> dict[str, Tensor | float]:
    """Of a step's samples: Lagrangian, objective, and the statistics of each constraint."""
    mask = measured.masks[OBJECTIVE]
    shown: dict[str, Tensor | float] = {
        "lagrangian": measured.lagrangian,
        "gradient_norm": measured.gradient_norm,
    }
    if mask.any():
        shown["objective"] = measured.objective[mask].mean()
    for name, values in reported_violations(module, measured).items():
        if len(values):
            statistics = violation_statistics(values)
            shown |= {f"{name}/{key}": value for key, value in statistics.items()}
    return shown


def reported_violations(module: PointwiseModule, measured: Measured) -> dict[str, Tensor]:
    """(m,) by constraint, the violations of a step: of an equality |ℓ − c|."""
    return {
        name: module.constraints[name].reported(violation[measured.masks[name]])
        for name, violation in measured.judged.items()
    }


def pooled_violations(module: PointwiseModule, measured: Measured) -> Tensor:
    """(m,), all violations of a step, of every constraint."""
    values = list(reported_violations(module, measured).values())
    return torch.cat(values) if values else torch.empty(0)


def logs_this_step(module: PointwiseModule) -> bool:
    """Whether a logger takes what this step logs, or callbacks or schedulers may read it."""
    trainer = module.trainer
    if trainer.is_last_batch or trainer._logger_connector.should_update_logs:
        return True
    return any(monitor_of(c.scheduler).startswith("running/") for c in trainer.lr_scheduler_configs)


def shows_progress_bar(trainer: Trainer) -> bool:
    return bool(getattr(trainer.progress_bar_callback, "is_enabled", False))
