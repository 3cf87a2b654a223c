"""What a task is: its constraints, the terms of each sample, metrics. No step, no multiplier."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.data_connector import _process_dataloader
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch import Tensor
from torchmetrics import Metric

from .constraint import Constraint
from .errors import TrainingError
from .formulations import Formulation
from .optimizers import Training
from .report.closing_table import Closing
from .report.history import History

log = logging.getLogger(__name__)

Batch = dict[str, Any]
"""What the collate functions of the shipped tasks return: tensors and lists by name."""
Metrics = dict[str, Metric]
"""By the name in the log keys, without the data set's."""


@dataclass
class Notes:
    """What others know of a model: for its card, and for what may be written about it."""

    confidential: bool = False  # whether a task writes no files about this evaluation
    certificate: str | None = None  # what ``compare --require`` certified
    checkpoint: str = ""  # that the weights are of; "" for those of the last step
    # a task's, for its checkpoints; plain
    kept: dict[str, Any] = field(default_factory=dict)
    # what only the user knows: model_card.py
    facts: dict[str, Any] = field(default_factory=dict)


class Task(LightningModule):
    """The methods that a task writes, and what it declares.

    Users derive from :class:`~pl_pointwise.module.PointwiseModule`.
    """

    constraints: dict[str, Constraint]
    evaluation_constraints: dict[str, Constraint]
    formulations: dict[str, Formulation]
    training_settings: Training
    closing: Closing | None
    trainer: Any
    _lagrangian: Any
    _notes: Notes

    host_keys: tuple[str, ...] = ("index",)
    """Entries of a batch that stay on the CPU."""
    shared_objective: str = "objective"
    shared_violation: str = ""

    # The terms of each sample -------------------------------------------------------------------

    def objective(self, outputs: Any, batch: Any) -> Tensor:
        """ℓ₀ of each sample, (B,), from the forward pass's output."""
        raise TrainingError(
            f"{type(self).__name__} has no objective(outputs, batch): define it."
        )

    def constraint_values(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        """ℓ_k of each sample by constraint, (B,) or (B, K): values, not yet violations."""
        raise TrainingError(
            f"{type(self).__name__} has no constraint_values(outputs, batch): define it."
        )

    def membership(self, batch: Any) -> dict[str, Tensor]:
        """Which samples each term applies to: bool (B,) by "objective" or constraint, or (B, K).

        Computed from the batch alone. A term left out applies to every sample.
        """
        return {}

    def strict_values(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        """ℓ_k as the requirement means it, where ``constraint_values`` is a surrogate of it.

        For what has no gradient, such as a test that an answer passes: of all constraints or some,
        in the shapes of ``constraint_values``. Weights follow the gradient of ψ(ṽ, λ) of the
        surrogate's violation ṽ; multipliers and reports the strict v: the proxy Lagrangian of
        Cotter et al. (2019). A CVaR is refused: its threshold is a quantile of ṽ. Called without
        gradients; modes and buffers it must leave unchanged.
        """
        return {}

    def select(self, batch: Any, rows: Tensor) -> Any:
        """The given rows (R,) of a batch; override it where a batch is not made of rows."""
        return take_rows(batch, rows)

    def prepare_fit(self) -> None:
        """At the start of a fit, before ``on_fit_start``, whether or not that is overridden."""

    def prepare_training(self) -> None:
        """After a sanity check, before ``on_train_start``, whether or not that is overridden."""

    def number_of_steps(self) -> int:
        """Steps of the whole run, for a schedule.

        ``estimated_stepping_batches`` would set the loaders up too early for a resume in an epoch.
        """
        trainer = self.trainer
        batches: float = trainer.num_training_batches
        epochs = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs
        if trainer.train_dataloader is None and epochs < math.inf:
            batches = self._batches_before_the_loaders()
        steps = math.inf if trainer.max_steps in (None, -1) else trainer.max_steps
        if epochs < math.inf:
            steps = min(steps, epochs * batches)
        if math.isinf(steps):
            raise TrainingError(
                "The run has no end: set max_epochs or max_steps, or take "
                'schedule="constant" without a warm-up.'
            )
        return int(steps)

    def _batches_before_the_loaders(self) -> float:
        """Batches of an epoch, by a loader that is made for it alone."""
        trainer = self.trainer
        loader: Any = _process_dataloader(
            trainer,
            TrainerFn.FITTING,
            RunningStage.TRAINING,
            trainer.fit_loop._data_source.dataloader(),
        )
        batches = len(loader) if hasattr(loader, "__len__") else math.inf
        limit = trainer.overfit_batches or trainer.limit_train_batches
        if isinstance(limit, int):  # A number of batches; else a share of them.
            return min(batches, limit)
        return int(batches * limit) if batches < math.inf else batches

    # Evaluation and export ----------------------------------------------------------------------

    def evaluation_metrics(self) -> Metrics:
        """Fresh metrics for one evaluated data set, by name; one never updated is not reported."""
        return {}

    def update_evaluation_metrics(
        self, metrics: Metrics, outputs: Any, batch: Any, real: Tensor, stage: str
    ) -> None:
        """Adds a batch of the data set ``stage``, by its name in the log keys.

        real: bool (B,), False for rows that only fill up a rank.
        """

    def finish_evaluation_metrics(self, metrics: dict[str, Metrics]) -> None:
        """Before the metrics are computed, after the last batch of all data sets, on every rank.

        metrics: by data set and name.
        """

    def starting_model(self) -> AbstractContextManager[None] | None:
        """What makes the forward pass that of the model before training; None: it is not at hand.

        Within it ``validate`` and ``test`` measure once more, as data sets ``before_…`` of the log
        keys. Entered after a batch's own forward pass, without gradients.
        """
        return None

    def closing_sentences(self) -> list[str]:
        """What the end of a fit says of this task besides its table: one plain sentence each.

        In order of importance, each with what to do; [] for nothing. Every rank calls it, after the
        last step; it may cost little, and moves no random state of the fit.
        """
        return []

    def export(self, path: str | Path) -> Path:
        """Writes the model as a folder that other libraries load; a task says which."""
        raise TypeError(
            f"{type(self).__name__} has no export(); define it to write {path}."
        )


def notes_of(task: Task) -> Notes:
    """What others noted of a model, to be read and written."""
    return task._notes


def history_of(task: Task) -> History:
    """What the steps of the last fit measured."""
    history: History = task._lagrangian.history
    return history


def judges_strictly(task: Task) -> bool:
    """Whether :meth:`Task.strict_values` is asked; the same for all steps of a fit."""
    return type(task).strict_values is not Task.strict_values


def warn(task: Task, message: str) -> None:
    """Logs a warning, once for all ranks."""
    if task.trainer.is_global_zero:
        log.warning(message)


def log_of_all_ranks(
    module: LightningModule, values: Mapping[str, Tensor | float], **options: Any
) -> None:
    """Logs values of an epoch that every rank has alike: by their largest, as a mean may round."""
    ranks = module.trainer.world_size > 1
    module.log_dict(
        values, sync_dist=ranks, reduce_fx="max" if ranks else "mean", **options
    )


def objects_of_all_ranks(of_this_rank: Any) -> list[Any]:
    """What every rank gives, in their order: a collective."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [of_this_rank]
    of_all = [of_this_rank] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_all, of_this_rank)
    return of_all


def take_rows(batch: Mapping[str, Any], rows: Tensor) -> Any:
    """The given rows (R,), on the CPU, of a batch, a mapping with ``index``, (B,).

    Whatever has length B has a row for each sample; mappings and other lists are followed.
    """
    size = len(batch["index"])
    return {key: _take(value, rows, size) for key, value in batch.items()}


def _take(value: Any, rows: Tensor, size: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _take(entry, rows, size) for key, entry in value.items()}
    if isinstance(value, (Tensor, np.ndarray)):
        if not value.ndim or len(value) != size:
            return value
        return (
            value[rows.to(value.device)]
            if isinstance(value, Tensor)
            else value[rows.numpy()]
        )
    if not isinstance(value, (list, tuple)):
        return value
    if len(value) == size:
        taken = [value[position] for position in rows.tolist()]
    else:  # A list of tensors, say: each has rows.
        taken = [_take(entry, rows, size) for entry in value]
    if isinstance(value, list):
        return taken
    make = getattr(value, "_make", tuple)  # A named tuple's.
    return make(taken)


@contextmanager
def replayed_random_state(device: torch.device) -> Iterator[None]:
    """Runs the block, then puts torch's generators back, so that what follows draws the same."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
