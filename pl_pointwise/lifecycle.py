"""What Lightning leaves to a module under manual optimisation, and needs from it to resume exactly.

Schedulers and the optimizer, the start and end of a fit, checkpoints, devices. The mathematics is
in ``module.py``.
"""

from __future__ import annotations

import logging
import math
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from .data import PointwiseSampler, ResumableDataLoader, fingerprint
from .errors import TrainingError
from .formulations import Formulation
from .multipliers import Multipliers
from .optimization import Optimization, keeping_monitors
from .state import plain, random_state, restore_random_state

log = logging.getLogger(__name__)

# Lightning says so of every module that moves its batches itself; here that is how it should be.
warnings.filterwarnings("ignore", message="You have overridden `transfer_batch_to_device`")

STATE_KEY = "pl_pointwise"
"""The checkpoint entry that holds multipliers, fingerprint, open window and random states."""


class ManualOptimization(LightningModule):
    """The part of :class:`~pl_pointwise.module.PointwiseModule` that knows no constraint."""

    formulations: dict[str, Formulation]
    optimization: Optimization

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "configure_optimizers" in vars(cls):
            cls.configure_optimizers = keeping_monitors(cls.configure_optimizers)  # type: ignore[assignment]

    host_keys: tuple[str, ...] = ("index",)
    """Entries of a batch that stay on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.multipliers = Multipliers(0)
        self.left_out = 0
        """Samples left out of a step so far because a value was not finite."""
        self.skipped_steps = 0
        """Steps skipped so far because the gradient was not finite, or no sample was left."""
        self._taken_this_epoch = 0
        self._skipped_this_epoch = 0
        self._window: list[tuple[int, dict[str, list[Tensor]]]] = []
        """Epoch and visits of the steps since the last dual step."""
        self._fingerprint: str | None = None
        self._restored: dict[str, Any] | None = None
        self._total_steps: int | None = None

    @abstractmethod
    def _close_window(self) -> None:
        """Takes the dual step that is still due, if any."""

    # Around the fit -----------------------------------------------------------------------------

    def on_train_start(self) -> None:
        self._total_steps = self._count_steps()
        dataset = self._training_set()
        if dataset is not None:
            self._refuse_repeating_sampler()
            self._claim_multipliers(dataset)
        loader = self.trainer.train_dataloader
        if isinstance(loader, ResumableDataLoader):
            loader.limit = min(len(loader), self.trainer.num_training_batches)
        if self._restored is not None:
            self._restore_chance(self._restored["random_states"])

    def _restore_chance(self, states: list[Any]) -> None:
        """Puts the random state back where it stood, unless the number of ranks is another now."""
        if len(states) != self.trainer.world_size:
            return
        restore_random_state(states[self.global_rank], self.device)
        loop: Any = self.trainer.fit_loop
        batches = loop.epoch_loop
        new_epoch = loop.resumed_on_epoch_end or (
            batches.restarted_on_train_batch_end and batches.batch_progress.is_last_batch
        )
        if new_epoch and not hasattr(self.trainer.train_dataloader, "load_state_dict"):
            # Of this one epoch Lightning made the iterator, which draws the order, before.
            iter(loop._data_fetcher)

    def _claim_multipliers(self, dataset: Any) -> None:
        """Keeps the multipliers if they belong to this data set; refuses or resets them if not."""
        found = fingerprint(dataset)
        restored = (self._restored or {}).get("fingerprint")
        if restored is not None and restored != found:
            raise TrainingError(
                "These multipliers belong to another training set, or to another order of it "
                f"(checkpoint: {self.multipliers.samples:,} samples; now: {len(dataset):,}). "
                "Restore the data, or start without `ckpt_path`."
            )
        if restored is None and found != self._fingerprint:
            if self._fingerprint is not None:
                self._warn("Another training set than before: the multipliers start at 0 again.")
            self.multipliers = Multipliers(len(dataset))
            self._window = []
        self._fingerprint = found

    def on_train_epoch_start(self) -> None:
        self._taken_this_epoch = self._skipped_this_epoch = 0

    def on_train_epoch_end(self) -> None:
        if self._is_counted_twice():
            return
        if self._skipped_this_epoch and not self._taken_this_epoch:
            raise TrainingError(
                f"All {self._skipped_this_epoch} steps of epoch {self.current_epoch} were skipped "
                "because values or gradients were not finite. Check the data and the model's "
                "outputs, and lower the learning rate."
            )
        self._step_schedulers("epoch", plateau=True)

    def _is_counted_twice(self) -> bool:
        """Whether this is a second end of an epoch, without batches, and if so takes it back.

        Resumed under ``max_steps`` from the end of an epoch, Lightning ends that epoch once more
        and is from then on one epoch ahead in the samplers' order and in ``max_epochs``.
        https://github.com/Lightning-AI/pytorch-lightning/issues/19617
        """
        progress: Any = self.trainer.fit_loop.epoch_progress
        surplus = max(0, progress.current.processed - (progress.current.completed + 1))
        progress.current.processed -= surplus
        progress.total.processed -= surplus
        return surplus > 0

    def on_train_end(self) -> None:
        self._close_window()

    def on_fit_end(self) -> None:
        self._close_window()  # Still open if the run was resumed at its end.
        self._restored = None

    def _training_set(self) -> Any:
        """The data set behind the training loader; None if no multiplier belongs to a sample."""
        dataset = getattr(self.trainer.train_dataloader, "dataset", None)
        if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
            return dataset
        if any(f.scope == "sample" for f in self.formulations.values()):
            raise TrainingError(
                "Multipliers per sample need a training DataLoader over one map-style data set "
                f"with a length, got {type(dataset).__name__}. Load the data into one."
            )
        return None

    def _refuse_repeating_sampler(self) -> None:
        loader: Any = self.trainer.train_dataloader
        uneven = len(loader.dataset) % self.trainer.world_size
        if uneven and not isinstance(loader.sampler, PointwiseSampler):
            raise TrainingError(
                f"{len(loader.dataset)} samples over {self.trainer.world_size} ranks: a "
                f"{type(loader.sampler).__name__} would repeat some and step their multipliers "
                "twice. Use PointwiseDataModule, or a ResumableDataLoader with a PointwiseSampler."
            )

    def _count_steps(self) -> int | None:
        """Batches of the whole run, from the loader; ``estimated_stepping_batches`` would set the
        loaders up too early for a mid-epoch resume."""
        trainer = self.trainer
        limits: list[float] = [trainer.max_steps] if trainer.max_steps not in (None, -1) else []
        if trainer.max_epochs not in (None, -1):
            limits.append(trainer.max_epochs * trainer.num_training_batches)
        if not limits or math.isinf(min(limits)):
            if self.optimization.schedule != "constant" or self.optimization.warmup_ratio:
                raise TrainingError(
                    "A schedule needs an end: set max_epochs or max_steps, or take "
                    'schedule="constant" without a warm-up.'
                )
            return None
        return int(min(limits))

    def _resume_within_epoch(self, batch_idx: int) -> None:
        """On the first step after a resume: the loader must stand where it stood."""
        restored, self._restored = self._restored, None
        if restored is not None and batch_idx > 0:
            loader = self.trainer.train_dataloader
            unused = getattr(self.trainer.fit_loop, "_combined_loader_states_to_load", [])
            position = getattr(loader, "position", batch_idx + 1)
            if unused or position != batch_idx + 1 or not hasattr(loader, "load_state_dict"):
                raise TrainingError(
                    f"This checkpoint stopped after {batch_idx} batches of an epoch, and the "
                    "training DataLoader cannot continue there: it would repeat some samples and "
                    "leave out others. Use PointwiseDataModule or another loader with state_dict "
                    "and load_state_dict, do not read trainer.estimated_stepping_batches, or "
                    "resume from the end of an epoch."
                )

    # Checkpoints --------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        states: list[Any] = [random_state(self.device)]
        if self.trainer.world_size > 1:
            states = states * self.trainer.world_size
            torch.distributed.all_gather_object(states, random_state(self.device))
        checkpoint[STATE_KEY] = {
            "samples": self.multipliers.samples,
            "multipliers": self.multipliers.state_dict(),
            "fingerprint": self._fingerprint,
            "window": self._window,
            "left_out": self.left_out,
            "skipped_steps": self.skipped_steps,
            "monitored": {
                _monitor(config.scheduler): float(value)
                for config in self.trainer.lr_scheduler_configs
                if (value := self._monitored(config.scheduler)) is not None
            },
            "random_states": states,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint.get(STATE_KEY)
        if state is None:
            raise TrainingError(
                f"This checkpoint was not written by a PointwiseModule: it has no {STATE_KEY!r} "
                "entry, so no multipliers. Load its weights into the model instead."
            )
        self.multipliers = Multipliers(state["samples"])
        self.multipliers.load_state_dict(state["multipliers"])
        self._window = state["window"]
        self._fingerprint = state["fingerprint"]
        self.left_out, self.skipped_steps = state["left_out"], state["skipped_steps"]
        resuming = self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        self._restored = state if resuming else None

    def _set_hparams(self, hp: Any) -> None:
        super()._set_hparams(plain(hp))

    # Optimizers and devices ---------------------------------------------------------------------

    def configure_optimizers(self) -> OptimizerLRScheduler:
        trainable = [p for p in self.parameters() if p.requires_grad]
        settings = self.optimization
        optimizer = torch.optim.AdamW(
            trainable, lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: settings.factor(step, self._total_steps)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def _step_schedulers(self, interval: str, plateau: bool) -> None:
        """Steps the schedulers declared for this interval, which Lightning leaves to the module.

        When Lightning would: by epoch after the last batch, but on a plateau after validation.
        """
        count = self.current_epoch + 1 if interval == "epoch" else self._batches_seen()
        for config in self.trainer.lr_scheduler_configs:
            due = config.interval == interval and count % config.frequency == 0
            scheduler = config.scheduler
            if not due or plateau != getattr(
                scheduler, "reduce_on_plateau", isinstance(scheduler, ReduceLROnPlateau)
            ):
                continue
            metric = self._monitored(scheduler) if plateau else None
            if plateau and metric is None:
                known = ", ".join(sorted(self.trainer.callback_metrics))
                message = (
                    f"The scheduler monitors {_monitor(scheduler)!r}, which is not logged. "
                    f"Logged: {known}."
                )
                if getattr(scheduler, "strict", True):
                    raise TrainingError(message)
                self._warn(message)
                continue
            self.lr_scheduler_step(scheduler, metric)

    def _monitored(self, scheduler: Any) -> Any:
        """What the scheduler monitors, None if it is not logged.

        After a resume between a validation and the use of what it logged, the checkpoint's value.
        """
        name = _monitor(scheduler)
        restored = (self._restored or {}).get("monitored", {})
        return self.trainer.callback_metrics.get(name, restored.get(name))

    def _batches_seen(self) -> int:
        return self.trainer.fit_loop.epoch_loop.total_batch_idx + 1

    def _optimizer(self) -> Any:
        optimizers = self.optimizers()
        if isinstance(optimizers, list):
            raise TrainingError(
                f"configure_optimizers returned {len(optimizers)} optimizers; a PointwiseModule "
                "has one, for the weights. Use parameter groups."
            )
        return optimizers

    def _gradient_scaler(self) -> Any:
        return getattr(self.trainer.precision_plugin, "scaler", None)

    def _without_gradient_sync(self) -> Any:
        block = getattr(self.trainer.strategy, "block_backward_sync", None)
        return nullcontext() if block is None else block()

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        reduced = self.trainer.strategy.reduce(value, reduce_op="sum")
        assert isinstance(reduced, Tensor)
        return reduced

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Moves a batch, all but its ``host_keys``."""
        if isinstance(batch, (list, tuple)):
            return [self.transfer_batch_to_device(b, device, dataloader_idx) for b in batch]
        if not isinstance(batch, Mapping):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        kept = {key: value for key, value in batch.items() if key in self.host_keys}
        moved = {key: value for key, value in batch.items() if key not in self.host_keys}
        return {**super().transfer_batch_to_device(moved, device, dataloader_idx), **kept}

    def _warn(self, message: str) -> None:
        if self.trainer.is_global_zero:
            log.warning(message)


def _monitor(scheduler: Any) -> str:
    """The name of what a scheduler monitors; see :func:`keeping_monitors`."""
    return getattr(scheduler, "monitor", None) or ""
