"""What Lightning leaves to a module that steps by itself, and needs from it to resume exactly.

Schedulers and the optimizer, the start and end of a fit, checkpoints, devices. The mathematics is
in ``module.py``.
"""

from __future__ import annotations

import logging
import math
import uuid
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from .checkpoints import WholeCheckpointIO, plain_arguments
from .checks import (
    FirstSteps,
    check_launcher,
    check_module,
    check_settings,
    check_trained,
    training_set,
    warn_of_checkpoints,
)
from .data import ResumableDataLoader, fingerprint
from .errors import TrainingError
from .evaluation import Evaluated
from .fingerprints import RANDOM_ROWS
from .formulations import Formulation
from .gradient_units import GradientUnits
from .initial_multipliers import check_multipliers
from .multiplier_share import PullShares
from .multipliers import Multipliers
from .optimizers import (
    FirstGroupsLambdaLR,
    Optimization,
    keeping_monitors,
    monitor_of,
    number_of_steps,
)
from .own_hooks import wrap_hooks
from .repeated_step import RunningStatistics
from .resume import Resuming
from .step import Measured

log = logging.getLogger(__name__)

# It says that weights are saved after the step: here they are, with the multipliers after it.
warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")
# Then it logs once an epoch: see _start_training.
warnings.filterwarnings("ignore", message=r"The number of training batches \(")
# Lightning says so of every module that moves its batches itself; here that is how it should be.
warnings.filterwarnings("ignore", message="You have overridden `transfer_batch_to_device`")

_BEFORE = {
    "configure_callbacks": "_check_settings",
    "setup": "_set_up",
    "on_train_start": "_start_training",
    "on_train_epoch_start": "_start_epoch",
    "on_train_end": "_end_training",
    "on_fit_end": "_end_fit",
    "on_validation_model_zero_grad": "_note_random_state",
    "on_validation_start": "_keep_random_state",
    "on_validation_end": "_put_random_state_back",
    "on_validation_epoch_start": "_start_evaluations",
    "on_validation_epoch_end": "_log_evaluations",
    "on_test_epoch_start": "_start_evaluations",
    "on_test_epoch_end": "_log_evaluations",
    "on_save_checkpoint": "_save_state",
    "on_load_checkpoint": "_load_state",
}
"""What the module itself does in a hook of Lightning's, before a subclass's own part of it."""

_AFTER = {"on_train_epoch_end": "_end_epoch"}
"""Likewise, after it: a scheduler may monitor what the subclass logs there."""


class ManualOptimization(Evaluated, Resuming):
    """The part of :class:`~pl_pointwise.module.PointwiseModule` that knows no constraint.

    What it does in Lightning's hooks is out of reach of a subclass that overrides a hook without
    calling ``super()``: see ``_BEFORE`` and ``_AFTER``, and :mod:`~pl_pointwise.own_hooks`.
    """

    own_hooks: ClassVar[Mapping[str, str]] = _BEFORE
    """By hook of Lightning's: the method in which this class does its own part of it, before an
    override's. A subclass that states its own adds to this one's."""
    own_hooks_after: ClassVar[Mapping[str, str]] = _AFTER
    """Likewise, after an override's."""

    formulations: dict[str, Formulation]
    optimization: Optimization
    gradient_clip_val: float | None
    micro_batch_size: int | None
    measured: Measured | None
    _statistics: RunningStatistics

    host_keys: tuple[str, ...] = ("index",)
    """Entries of a batch that stay on the CPU."""
    shared_keys: tuple[str, ...] = ()
    """Entries of a batch that all its samples share, although they may be as long as it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "configure_optimizers" in vars(cls):
            cls.configure_optimizers = keeping_monitors(cls.configure_optimizers)  # type: ignore[assignment]
        wrap_hooks(cls)

    def __init__(self) -> None:
        super().__init__()
        self._hooks_running: set[str] = set()
        self._first_steps = FirstSteps()
        self._loaders_set_up_early = False
        """Whether ``configure_optimizers`` made Lightning set up the loaders."""
        self._arguments_left_out: dict[str, str] = {}
        self.automatic_optimization = False
        self.multipliers = Multipliers(0)
        self.multiplier_folder: str | None = None
        self.thresholds: dict[str, Tensor] = {}
        self.gradient_units = GradientUnits()
        self.pull_shares = PullShares()
        self.left_out = 0
        """Samples left out of a step so far because a value was not finite."""
        self.skipped_steps = 0
        """Steps skipped so far because the gradient was not finite, or no sample was left."""
        self._taken_this_epoch = 0
        self._skipped_this_epoch = 0
        self._window: list[tuple[int, dict[str, list[Tensor]]]] = []
        """Epoch and visits of the steps since the last dual step."""
        self._fingerprint: str | None = None
        self._total_steps: int | None = None
        self._factors: Callable[[int], float] | None = None

    # Around the fit -----------------------------------------------------------------------------

    def _check_settings(self) -> None:
        """Before Lightning's own check of the Trainer, whose advice does not fit."""
        if self.trainer.state.fn == TrainerFn.FITTING:
            check_settings(self)

    def _set_up(self, stage: str) -> None:
        """Before Lightning loads a checkpoint."""
        if stage != "predict":
            check_launcher(self)
        self._check_settings()  # Of the module's own callbacks too.
        self._undo_compilation()
        loops = self.trainer.fit_loop.epoch_loop.val_loop, self.trainer.validate_loop
        for loop in (*loops, self.trainer.test_loop, self.trainer.predict_loop):
            # torch.no_grad() does, within which a task may enable gradients of inputs.
            loop.inference_mode = False
        if type(self.trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # Not one set by a user.
            self.trainer.strategy.checkpoint_io = WholeCheckpointIO()

    def _undo_compilation(self) -> None:
        """Of a module from ``torch.compile`` the forward pass stays compiled.

        The steps do not: they hold the backward pass, which a compiler does not take.
        """
        context = getattr(self, "_compiler_ctx", None)
        for step in ("training_step", "validation_step", "test_step", "predict_step"):
            if context is not None:
                setattr(self, step, context[f"original_{step}"])

    def _start_training(self) -> None:
        check_module(self)
        warn_of_checkpoints(self)
        trainer: Any = self.trainer
        # Lightning's 50 steps between two lines of the log are more than many an epoch has.
        trainer.log_every_n_steps = int(
            min(trainer.log_every_n_steps, trainer.num_training_batches)
        )
        self._total_steps, self._factors = number_of_steps(trainer), None
        if not self.optimization.is_constant:
            self.number_of_steps()
        dataset = training_set(self)
        self._limit_loader()
        if dataset is not None:
            self._keep_or_reset_multipliers(dataset)
        check_multipliers(self)
        if self.multiplier_folder is not None:
            self._map_multipliers(self.multiplier_folder)
        self._first_steps.start(self, dataset)
        self._forget_evaluations()
        self._random_state_at_end = None
        if self._restored is None:
            self.pull_shares = PullShares()
        self._epoch_is_open = not (self._restored or {"new_epoch": True})["new_epoch"]
        if self._restored is not None:
            self._continue_run(self._restored)

    def _weights_are_sharded(self) -> bool:
        return isinstance(self.trainer.strategy, ModelParallelStrategy)

    def _keep_or_reset_multipliers(self, dataset: Any) -> None:
        """Keeps the multipliers if they belong to this data set; refuses or resets them if not."""
        found = fingerprint(dataset)
        if found.startswith(RANDOM_ROWS):
            self._warn(
                "Rows of the training set differ each time they are read, so only their number "
                "tells a resumed run whether they are the same. Give the data set an attribute "
                "`fingerprint`, a text of your own, to have that checked."
            )
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
            self.multipliers = self.multipliers.for_samples(len(dataset))
            self.thresholds, self.gradient_units = {}, GradientUnits()
            self._window = []
        self._fingerprint = found

    def _map_multipliers(self, folder: str) -> None:
        """Moves the tables into files, one set a machine, which its local rank 0 writes."""
        run = self.trainer.strategy.broadcast(uuid.uuid4().hex)
        self.multipliers = self.multipliers.mapped(
            Path(folder) / f"multipliers-{run}-node{self.trainer.node_rank}",
            writer=self.trainer.local_rank == 0,
        )
        self._await_ranks()

    def _await_ranks(self) -> None:
        """Keeps reads and writes of shared tables apart; nothing where each rank has its own."""
        if self.multiplier_folder is not None:
            self.trainer.strategy.barrier()

    def _limit_loader(self) -> None:
        """Tells the training loader how many batches the trainer takes of it."""
        loader: Any = self.trainer.train_dataloader
        if isinstance(loader, ResumableDataLoader):
            loader.limit = min(len(loader), self.trainer.num_training_batches)

    def _start_epoch(self) -> None:
        self._first_steps.epoch(self)
        self._limit_loader()
        self._taken_this_epoch = self._skipped_this_epoch = 0
        self._statistics.refresh()

    def _end_epoch(self) -> None:
        if self._skipped_this_epoch and not self._taken_this_epoch:
            raise TrainingError(
                f"All {self._skipped_this_epoch} steps of epoch {self.current_epoch} were skipped "
                "because values or gradients were not finite. Check the data and the model's "
                "outputs, and lower the learning rate."
            )
        if not self._is_cut_short():
            self._step_schedulers("epoch", plateau=True)
        self._epoch_is_open = False

    def _end_fit(self) -> None:
        self._warn_of_no_step()
        if not self.trainer.fast_dev_run:
            for message in self.pull_shares.warnings(self.formulations):
                self._warn(message)
        super()._end_fit()

    def _warn_of_no_step(self) -> None:
        trainer = self.trainer
        if self.measured is None and trainer.ckpt_path is None and not trainer.fast_dev_run:
            self._warn(
                f"No step was taken. The trainer stands at epoch {trainer.current_epoch} of "
                f"{trainer.max_epochs} and step {trainer.global_step} of {trainer.max_steps} (−1: "
                f"without end), and its training DataLoader has {trainer.num_training_batches} "
                "batches. A Trainer that has fitted another module counts on from there: give each "
                "module a Trainer of its own. A training_step of your own calls "
                "super().training_step(batch, batch_idx)."
            )

    # Checkpoints (resume.py) --------------------------------------------------------------------

    def _set_hparams(self, hp: Any) -> None:
        kept, self._arguments_left_out = plain_arguments(hp)
        super()._set_hparams(kept)

    # Optimizers and devices ---------------------------------------------------------------------

    def configure_optimizers(self) -> OptimizerLRScheduler:
        check_trained(self)
        trainable = [p for p in self.parameters() if p.requires_grad]
        settings = self.optimization
        optimizer = torch.optim.AdamW(
            trainable,
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            fused=True,  # One pass over the weights; on a CPU a sixth of the plain one's time.
        )
        scheduler = FirstGroupsLambdaLR(optimizer, lambda step: self._factor(step))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    @property
    def peak_learning_rate(self) -> float:
        """The default optimizer's; ``Tuner.lr_find`` takes it as ``attr_name``."""
        return self.optimization.learning_rate

    @peak_learning_rate.setter
    def peak_learning_rate(self, value: float) -> None:
        self.optimization = replace(self.optimization, learning_rate=value)
        with suppress(KeyError, TypeError):  # What a checkpoint will say of it.
            self.hparams["training"]["optimization"]["learning_rate"] = value

    def _factor(self, step: int) -> float:
        """Of the peak learning rate; before the number of steps is known, step 0's."""
        if self.optimization.is_constant:
            return 1.0
        if self._total_steps is None:
            return 0.0 if self.optimization.warmup_ratio else 1.0
        if self._factors is None:
            self._factors = self.optimization.factors(self._total_steps)
        return self._factors(step)

    def number_of_steps(self) -> int:
        """Of the whole run, for a schedule; unlike ``estimated_stepping_batches`` without harm.

        Raises:
            TrainingError: the run has no end.
        """
        steps = number_of_steps(self.trainer)
        if steps is None:
            raise TrainingError(
                "The run has no end, and a schedule needs an end: set max_epochs or max_steps, or "
                'take schedule="constant" without a warm-up.'
            )
        return steps

    def _before_zero_grad(self) -> None:
        """Calls ``on_before_zero_grad``, which Lightning does under automatic optimization only."""
        optimizer = self.trainer.optimizers[0]
        call._call_callback_hooks(self.trainer, "on_before_zero_grad", optimizer)
        call._call_lightning_module_hook(self.trainer, "on_before_zero_grad", optimizer)

    def _step_schedulers_after_batch(self) -> None:
        self._step_schedulers("step", plateau=False)
        self._step_schedulers("step", plateau=True)
        if self.trainer.is_last_batch:
            self._step_schedulers("epoch", plateau=False)

    def _step_schedulers(self, interval: str, plateau: bool, count: int | None = None) -> None:
        """Steps the schedulers declared for this interval, which Lightning leaves to the module.

        When Lightning would: by epoch after the last batch, but on a plateau after validation.
        count: epochs or batches so far; None takes the trainer's.
        """
        if count is None:
            count = self.current_epoch + 1 if interval == "epoch" else self._batches_seen()
        for config in self.trainer.lr_scheduler_configs:
            due = config.interval == interval and count % config.frequency == 0
            scheduler = config.scheduler
            if not due or plateau != getattr(
                scheduler, "reduce_on_plateau", isinstance(scheduler, ReduceLROnPlateau)
            ):
                continue
            metric = self._monitored(scheduler) if plateau else None
            if plateau and metric is None and self._restored is not None:
                continue  # Of an evaluation that was still to come when the run was saved.
            if plateau and metric is None:
                known = ", ".join(sorted(self.trainer.callback_metrics))
                message = (
                    f"The scheduler monitors {monitor_of(scheduler)!r}, which is not logged. "
                    f"Logged: {known}."
                )
                if getattr(scheduler, "strict", True):
                    raise TrainingError(message)
                self._warn(message)
                continue
            self.lr_scheduler_step(scheduler, metric)

    def _batches_seen(self) -> int:
        return self.trainer.fit_loop.epoch_loop.total_batch_idx + 1

    def _optimizer(self) -> Any:
        return self.optimizers()  # One: see check_module.

    def _clip_gradient(self) -> Tensor:
        """The norm of the whole gradient, which is scaled down to ``gradient_clip_val``."""
        norm = self._gradient_norm()
        if self.gradient_clip_val is not None:
            parameters = [p for p in self.parameters() if p.grad is not None]
            # Under float16 the gradients carry the scaler's factor until its step.
            torch.nn.utils.clip_grads_with_norm_(
                parameters, self.gradient_clip_val * self._gradient_scale(), norm
            )
        return norm / self._gradient_scale()

    def _gradient_norm(self) -> Tensor:
        """Of the whole gradient, with the scaler's factor in it."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _gradient_scale(self) -> float:
        """What the gradients are multiplied by under float16."""
        scaler = self._gradient_scaler()
        return 1.0 if scaler is None else float(scaler.get_scale())

    def _may_step(self, measured: Measured) -> bool:
        """Whether the gradient is finite and some sample is left; the same answer on every rank."""
        self._first_steps.step(self, measured)
        expected = False
        if not any(bool(mask.any()) for mask in measured.masks.values()):
            reason = "no sample of the batch is left"
        elif math.isfinite(measured.gradient_norm):
            return True
        else:
            reason = (
                f"the norm of the gradient is {measured.gradient_norm}, of finite values (perhaps "
                "a root, logarithm or division at 0, also where membership() masks the value)"
            )
            scaler = self._gradient_scaler()
            if scaler is not None:
                scale = scaler.get_scale()
                scaler.update(scale * scaler.get_backoff_factor())
                expected = scale > 1  # It starts from a factor too large for float16.
        self._optimizer().zero_grad()
        self.skipped_steps += 1
        self._skipped_this_epoch += not expected
        self._warn(
            f"Step skipped ({self._when()}): {reason}. Neither weights nor multipliers moved; "
            f"{self.skipped_steps} so far."
        )
        return False

    def _gradient_scaler(self) -> Any:
        return getattr(self.trainer.precision_plugin, "scaler", None)

    def _without_gradient_sync(self) -> Any:
        block = getattr(self.trainer.strategy, "block_backward_sync", None)
        return nullcontext() if block is None else block()

    def _over_ranks(self, value: Tensor, operation: Literal["sum", "max"]) -> Tensor:
        if self.trainer.world_size > 1 and dist.is_initialized():
            # Lightning's reduce puts a barrier first, at which the host waits for every GPU.
            value = value.clone()
            dist.all_reduce(value, dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX)
            return value
        reduced = self.trainer.strategy.reduce(value, reduce_op=operation)
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

    def _when(self) -> str:
        return f"train, epoch {self.current_epoch}, step {self.global_step}"

    def _warn(self, message: str) -> None:
        if self.trainer.is_global_zero:
            log.warning(message)
