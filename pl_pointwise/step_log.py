"""What a training step logs: ``running/…``, of the batch, taken while the weights move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from .metrics import cvar, share_violated, violation_statistics
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
        on_bar = {"objective": measured.objective[measured.masks[OBJECTIVE]].mean()}
        violations = pooled_violations(module, measured)
        on_bar |= {"cvar95": cvar(violations), "violated": share_violated(violations)}
        shown = {key: value for key, value in on_bar.items() if not value.isnan()}
        module.log_dict(shown, prog_bar=True, logger=False)
    if logs_this_step(module):
        statistics = running_statistics(module, measured)
        statistics |= {
            "left_out": float(module.left_out),
            "skipped_steps": float(module.skipped_steps),
        }
        module.log_dict({f"running/{key}": value for key, value in statistics.items()})


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
        for name, violation in measured.violations.items()
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
