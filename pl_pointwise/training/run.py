"""A run in Lightning's hooks. Stopped at any point, it resumes as if it had not stopped."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any

from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..data import fingerprint, groups_of
from ..data.fingerprints import RANDOM_ROWS
from ..errors import OF_METHODS, TrainingError, refuse_damaged
from ..evaluation import Evaluator
from ..lagrangian.checks import Door
from ..lagrangian.gradient_units import norm_of
from ..lagrangian.lagrangian import Lagrangian
from ..printing import say
from ..report.closing_table import Conditions
from ..task import Task, notes_of, objects_of_all_ranks, warn
from .checkpoints import (
    STATE_KEY,
    VERSION,
    WholeCheckpointIO,
    damaged,
    state_of,
)
from .checks import (
    check_frozen,
    check_module,
    check_settings,
    frozen_weights,
    refuse_own_step,
    warn_of_checkpoints,
    why_no_step,
)
from .random_states import generators_of, random_state, restore_random_state
from .resume import AfterTraining, Next, Resume, place_loops, resume_of
from .shared_rows import warn_of_data, warn_of_shared_rows
from .stepper import Stepper
from .training_set import refuse, training_set

log = logging.getLogger(__name__)

# It says that weights are saved after the step: here they are, with the multipliers after it.
warnings.filterwarnings(
    "ignore", message="Using ModelCheckpoint with manual optimization"
)
# Then it logs once an epoch: see Run.on_train_start.
warnings.filterwarnings("ignore", message=r"The number of training batches \(")
# Lightning says so of every module that moves its batches itself; here that is how it should be.
warnings.filterwarnings(
    "ignore", message="You have overridden `transfer_batch_to_device`"
)


OF_MODULE = Door(
    objective="objective() and forward()",
    values="constraint_values() and forward()",
    instead="What is only to be measured belongs in evaluation_metrics().",
    remedy=(
        "call module.multipliers.reset({name!r}) before fit; of a checkpoint, after "
        "load_from_checkpoint, and fit without ckpt_path"
    ),
    words=OF_METHODS,
)
"""How errors call the parts of a module."""


class Run:
    """What the base module does in Lightning's hooks, in methods of their names.

    They run before the module's own hook, that of an epoch's end after it: see module.py.
    """

    def __init__(
        self,
        task: Task,
        lagrangian: Lagrangian,
        stepper: Stepper,
        evaluator: Evaluator,
    ) -> None:
        self.task = task
        self._lagrangian = lagrangian
        self.stepper = stepper
        self.evaluator = evaluator
        # None before training, and where the rate is constant.
        self.total_steps: int | None = None
        # Taken when the one that was loaded was saved; for its card.
        self.steps_of_checkpoint = 0
        # Without a plain form, with their types.
        self.arguments_left_out: dict[str, str] = {}
        self._resume: Resume | None = None  # Until the first step after a checkpoint.
        # None but after the last step of a fit.
        self._at_end: AfterTraining | None = None
        # The random state before an evaluation within the fit that may come, or has begun.
        self._before_evaluation: dict[str, Any] | None = None
        # Whether an epoch's end, with what is due then, is to come.
        self._epoch_is_open = False
        self._stepped = False  # Whether this fit has taken a step.

    # The start of a fit -------------------------------------------------------------------------

    def configure_callbacks(self) -> None:
        """Before Lightning's own check of the Trainer, whose advice does not fit."""
        if self.task.trainer.state.fn == TrainerFn.FITTING:
            check_settings(self.task)

    def setup(self, stage: str) -> None:
        """Before Lightning loads a checkpoint."""
        refuse(
            stage != "predict"
            and isinstance(
                self.task.trainer.strategy.launcher, _MultiProcessingLauncher
            ),
            "This strategy starts processes that bring home the weights alone, without multipliers "
            'and violations. Use strategy="ddp" in a script; in a notebook, devices=1.',
        )
        self.configure_callbacks()  # Of the module's own callbacks too.
        # The forward pass of a module from torch.compile stays compiled, the steps do not: they
        # hold the backward pass, which a compiler does not take.
        context = getattr(self.task, "_compiler_ctx", None)
        for step in ("training_step", "validation_step", "test_step", "predict_step"):
            if context is not None:
                setattr(self.task, step, context[f"original_{step}"])
        trainer = self.task.trainer
        loops = (
            trainer.fit_loop.epoch_loop.val_loop,
            trainer.validate_loop,
            trainer.test_loop,
            trainer.predict_loop,
        )
        for loop in loops:
            # torch.no_grad() does, within which a task may enable gradients of inputs.
            loop.inference_mode = False
        # Not one set by a user.
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = WholeCheckpointIO()

    def on_fit_start(self) -> None:
        self._stepped = False
        self.task.prepare_fit()

    def on_train_start(self) -> None:
        task = self.task
        trainer = task.trainer
        check_module(task)
        warn_of_checkpoints(task, self.arguments_left_out)
        # Lightning's 50 steps between two lines of the log are more than many an epoch has.
        trainer.log_every_n_steps = int(
            min(trainer.log_every_n_steps, trainer.num_training_batches)
        )
        optimization = task.training_settings.optimization
        if optimization.schedule != "constant" or optimization.warmup_ratio:
            self.total_steps = task.number_of_steps()
        self._lagrangian.total_steps = None
        with suppress(TrainingError):  # A run without an end.
            self._lagrangian.total_steps = task.number_of_steps()
        dataset = training_set(task)
        warn_of_data(task, dataset)
        self._start_multipliers(dataset)
        self.evaluator.forget()
        self.stepper.start_fit()
        if not self._lagrangian.history.steps:
            self._lagrangian.history.norm = norm_of(trained_weights(task))
        self._at_end = None
        self._epoch_is_open = False
        self._stepped = False
        if self._resume is not None:
            self._epoch_is_open = self._resume.next is not Next.EPOCH
            self._resume.frozen_at_start = frozen_weights(task)
            place_loops(trainer, self._resume)
            self._restore_random_state(self._resume.entry["random_states"])
        task.prepare_training()

    def _start_multipliers(self, dataset: Any) -> None:
        """Keeps them if they are of this training set; refuses a checkpoint's of another."""
        before = None if self._resume is None else self._resume.entry.get("fingerprint")
        now = None
        groups = None if dataset is None else groups_of(dataset)
        if dataset is not None:
            now = fingerprint(dataset)
            if groups is not None:
                now += f", groups {sha256(groups.numpy().tobytes()).hexdigest()}"
            if now.startswith(RANDOM_ROWS):
                warn(
                    self.task,
                    "Rows of the training set differ each time they are read, so a resume checks "
                    "only their number. Give the data set an attribute `fingerprint`, a text of "
                    "your own.",
                )
            if before is not None and before != now:
                raise TrainingError(
                    "These multipliers belong to another training set, order or groups "
                    f"(checkpoint: {self._lagrangian.multipliers.samples:,} rows of λ; now: "
                    f"{len(dataset):,} samples). Restore the data, or start without `ckpt_path`."
                )
        samples = 0 if dataset is None else len(dataset)
        resumed = dataset is not None and before is not None
        first = self._resume is None and not self.task.global_step
        settings = self.task.training_settings
        self._lagrangian.configure(
            self.task.formulations,
            settings.primal_steps,
            dual_first=settings.order == "dual_first",
            groups=groups,
        )
        self._lagrangian.start(samples, now, resumed, first)

    # Learning rates -----------------------------------------------------------------------------

    def factor(self, step: int) -> float:
        """The factor on the peak learning rate, as ``transformers.get_scheduler`` has it."""
        optimization = self.task.training_settings.optimization
        total = self.total_steps
        if total is None:  # Before the fit's start: step 0's.
            return 0.0 if optimization.warmup_ratio else 1.0
        warmup = math.ceil(optimization.warmup_ratio * total)
        if step < warmup:
            return step / warmup
        decay = max(1, total - warmup)
        if optimization.schedule == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * ((step - warmup) / decay)))
        return (
            max(0.0, (total - step) / decay)
            if optimization.schedule == "linear"
            else 1.0
        )

    def step_schedulers(self, interval: str) -> None:
        """Steps the schedulers that are due after a "step", or after an "epoch"'s validation."""
        trainer = self.task.trainer
        batches = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        count = batches if interval == "step" else self.task.current_epoch + 1
        for config in trainer.lr_scheduler_configs:
            scheduler = config.scheduler
            on_plateau = isinstance(scheduler, ReduceLROnPlateau)
            if config.interval != interval or count % config.frequency:
                continue
            metric = self._monitored(scheduler) if on_plateau else None
            if not on_plateau or metric is not None:
                self.task.lr_scheduler_step(scheduler, metric)
            elif self._resume is None:
                # Else the evaluation was still to come at the save.
                message = (
                    f'"monitor" of a {type(scheduler).__name__} is '
                    f"{getattr(scheduler, 'monitor', None)!r}, which is not logged. "
                    f"Logged: {', '.join(sorted(trainer.callback_metrics))}."
                )
                if getattr(scheduler, "strict", True):
                    raise TrainingError(message)
                warn(self.task, message)

    def _monitored(self, scheduler: Any) -> Any:
        """What the scheduler monitors: as logged, or as the checkpoint has it; else None."""
        name = getattr(scheduler, "monitor", None)
        before: Mapping[Any, Any] = (
            {} if self._resume is None else self._resume.monitored
        )
        return self.task.trainer.callback_metrics.get(name, before.get(name))

    # Epochs and the end -------------------------------------------------------------------------

    def on_train_epoch_start(self) -> None:
        self.stepper.start_epoch()

    def on_train_batch_end(self, *_: Any) -> None:
        if not self._stepped:
            refuse_own_step(self.task, "training_step")

    def on_train_epoch_end(self) -> None:
        """After an override, since a scheduler may monitor what it logs."""
        steps = self.stepper.repairs
        loop = self.task.trainer.fit_loop.epoch_loop
        if steps.skipped_now and not steps.taken_now:
            raise TrainingError(
                f"All {steps.skipped_now} steps of epoch {self.task.current_epoch} were skipped: "
                "values or gradients were not finite, or membership() left all samples out. Check "
                "the data, and lower the learning rate."
            )
        # In an epoch that is cut short, what is due at its end comes later.
        if loop._num_ready_batches_reached():
            self.step_schedulers("epoch")
        self._epoch_is_open = False

    def on_train_end(self) -> None:
        """A window of steps that is open stays open: a longer fit closes it."""
        loaders = self.task.trainer.fit_loop._combined_loader
        self._at_end = AfterTraining(self._random_state(), loaders._state_dicts())

    def on_fit_end(self) -> None:
        trainer = self.task.trainer
        if not trainer.num_training_batches and trainer.limit_train_batches:
            raise TrainingError(
                "The training DataLoader has no batch: its data set is empty, or with drop_last "
                "smaller than a batch. Give it data, or a smaller batch_size."
            )
        if not self._stepped and trainer.ckpt_path is None and not trainer.fast_dev_run:
            warn(self.task, f"No step was taken: {why_no_step(trainer)}")
        if self._stepped and not trainer.fast_dev_run:
            self._close()
        if self._resume is not None:  # Resumed at its end: no step was taken.
            self._restore_random_state(self._resume.entry["random_states"])
            self._at_end = AfterTraining(self._random_state(), self._resume.loaders)
        self._resume = None

    def _close(self) -> None:
        """The closing table: shown, or where Lightning's own messages are off, what it asks for."""
        task = self.task
        trainer = task.trainer
        history = self._lagrangian.history
        norm = norm_of(trained_weights(task))
        repairs = self.stepper.repairs
        (optimizer,) = trainer.optimizers
        rates = [
            group.get("initial_lr", group["lr"]) for group in optimizer.param_groups
        ]
        datamodule = getattr(trainer, "datamodule", None)
        conditions = Conditions(
            rate=float(max(rates)),
            epochs=trainer.current_epoch,
            growth=norm / history.norm if history.norm else None,
            skipped=repairs.skipped_steps,
            left_out=repairs.left_out,
            longer=how_to_train_longer(trainer),
            not_trained=getattr(datamodule, "not_trained_on", list)(),
            of_task=task.closing_sentences(),
        )
        closing = self._lagrangian.closing(self.evaluator.held_out(), conditions)
        self.task.closing = closing
        if not trainer.is_global_zero:
            return
        if logging.getLogger("lightning.pytorch").isEnabledFor(logging.INFO):
            say(f"\n{closing}\n")
            return
        for sentence in closing.warnings:
            warn(task, sentence)

    # An evaluation, which within a fit draws no random number of the fit ------------------------

    def on_validation_model_zero_grad(self) -> None:
        """Before an evaluation that may come, whose loaders draw before it starts."""
        self._before_evaluation = self._random_state()

    def on_validation_end(self) -> None:
        """A stop may add an evaluation, and a resume leave one out: neither may change the rest."""
        kept = self._before_evaluation
        self._before_evaluation = None
        if kept is not None:
            restore_random_state(kept, self.task.device)

    def on_validation_epoch_start(self) -> None:
        self.evaluator.start()
        if self.task.trainer.testing and self.task.trainer.is_global_zero:
            datasets = self.evaluator.datasets
            held_out = {
                name: datasets[name] for name in datasets if name in ("val", "test")
            }
            warn_of_shared_rows(self.task, datasets.get("train"), held_out)

    def on_validation_batch_end(self, *_: Any) -> None:
        if not self.evaluator.added:
            stage = "test" if self.task.trainer.testing else "validation"
            refuse_own_step(self.task, f"{stage}_step")

    def on_validation_epoch_end(self) -> None:
        self.evaluator.finish()

    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end

    # Saving and loading -------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._at_end is not None and "loops" in checkpoint:
            # Asked after training, a loader tells of an epoch that it did not begin.
            of_loop = checkpoint["loops"]["fit_loop"]["state_dict"]
            of_loop["combined_loader"] = self._at_end.loaders
        checkpoint[STATE_KEY] = {
            "version": VERSION,
            **self._lagrangian.state_dict(),
            "epoch_is_open": self._epoch_is_open,
            "in_evaluation": self._is_in_evaluation(),
            "frozen": frozen_weights(self.task),
            "left_out": self.stepper.repairs.left_out,
            "skipped_steps": self.stepper.repairs.skipped_steps,
            "monitored": self._all_monitored(),
            "random_states": objects_of_all_ranks(self._state_after_last_step()),
            "arguments_left_out": dict(self.arguments_left_out),
            "kept": dict(notes_of(self.task).kept),
        }

    def _is_in_evaluation(self) -> bool:
        """Whether one has begun and not ended."""
        if self._before_evaluation is None:
            return False
        trainer = self.task.trainer
        evaluated = trainer.fit_loop.epoch_loop.val_loop.batch_progress
        interrupted = trainer.state.status == TrainerStatus.INTERRUPTED
        return bool(interrupted or not evaluated.is_last_batch)

    def _all_monitored(self) -> dict[str, float]:
        """What schedulers monitor, by its name in the log."""
        monitored = {}
        for config in self.task.trainer.lr_scheduler_configs:
            value = self._monitored(config.scheduler)
            if value is not None:
                monitored[config.scheduler.monitor] = float(value)
        return monitored

    def _state_after_last_step(self) -> dict[str, Any]:
        """The random state: later draws belong to an evaluation, a fetch or nothing."""
        if self._at_end is not None:
            return self._at_end.random_state
        return self._before_evaluation or self._random_state()

    def _random_state(self) -> dict[str, Any]:
        """Of this process, and of the training loader's own generators."""
        generators = generators_of(self.task.trainer.train_dataloader)
        state = random_state(self.task.device)
        return state | {"loader": [generator.get_state() for generator in generators]}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = state_of(checkpoint)
        trainer = self.task._trainer
        resuming = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        with refuse_damaged(lambda error: damaged(str(error))):
            missing = sorted(
                set(state["arguments_left_out"]).difference(self.arguments_left_out)
            )
            if trainer is None:  # Made by load_from_checkpoint.
                self._check_arguments(checkpoint, missing)
            if resuming:
                self._check_constraints(state)
            self._lagrangian.load_state_dict(state)
            notes_of(self.task).kept = dict(state.get("kept", {}))
            self.stepper.repairs.left_out = int(state["left_out"])
            self.stepper.repairs.skipped_steps = int(state["skipped_steps"])
            self.steps_of_checkpoint = int(checkpoint.get("global_step", 0))
            self._at_end = None
            self._resume = resume_of(checkpoint, state) if resuming else None

    def _check_arguments(
        self, checkpoint: Mapping[str, Any], missing: Sequence[str]
    ) -> None:
        """Refuses a module made without arguments that no checkpoint holds; names dropped ones."""
        if missing:  # Their defaults were taken.
            raise TrainingError(
                "This checkpoint does not hold all arguments of the module. Give again: "
                f"load_from_checkpoint(path, {'=…, '.join(missing)}=…)."
            )
        stored = {
            name for name in checkpoint.get("hyper_parameters") or {} if name[0] != "_"
        }
        dropped = stored.difference(self.task.hparams, self.arguments_left_out)
        if dropped:
            log.warning(
                f"{type(self.task).__name__} does not take the checkpoint's "
                f"{', '.join(sorted(dropped))}, so their values are dropped. Of a renamed "
                "argument give load_from_checkpoint the value."
            )

    def _check_constraints(self, state: Mapping[str, Any]) -> None:
        """Refuses multipliers that a resume would drop."""
        formulations = self.task.formulations
        learned = [name for name in formulations if formulations[name].scope != "none"]
        unknown = sorted(set(state["multipliers"]).difference(learned))
        if unknown:
            raise TrainingError(
                f"This checkpoint has multipliers of constraint {', '.join(unknown)}, which has "
                "none in this module. Resume as it was configured, or load its weights."
            )

    # Going on -----------------------------------------------------------------------------------

    def _restore_random_state(self, states: Sequence[Any]) -> None:
        """Puts it back where it stood, unless the number of ranks is another now."""
        task = self.task
        if len(states) != task.trainer.world_size:
            return
        state = states[task.global_rank]
        of_rank = f"the random state of rank {task.global_rank}"
        with refuse_damaged(lambda _: damaged(of_rank)):
            restore_random_state(state, task.device)
            generators = generators_of(task.trainer.train_dataloader)
            for generator, its_state in zip(
                generators, state.get("loader", []), strict=False
            ):
                generator.set_state(its_state)

    def open_step(self, batch_idx: int) -> None:
        """Before a step; the first one after a resume goes on where the run stood."""
        self._stepped = True
        self._epoch_is_open = True
        self._before_evaluation = None
        resume = self._resume
        self._resume = None
        if resume is None:
            return
        loader = self.task.trainer.train_dataloader
        # States that Lightning was to load and did not: something made the loaders too early.
        unused = getattr(
            self.task.trainer.fit_loop, "_combined_loader_states_to_load", []
        )
        stands = getattr(loader, "position", batch_idx + 1) == batch_idx + 1
        goes_on = stands and not unused and hasattr(loader, "load_state_dict")
        if resume.next is Next.BATCH and not goes_on:
            raise TrainingError(
                f"This checkpoint stopped after {batch_idx} batches of an epoch, and the training "
                "DataLoader cannot continue there. Use PointwiseDataModule, do not read "
                "trainer.estimated_stepping_batches, or resume from the end of an epoch."
            )
        check_frozen(self.task, resume.entry.get("frozen"), resume.frozen_at_start)


def how_to_train_longer(trainer: Trainer) -> str:
    """What a closing sentence advises where more steps would help."""
    epochs = trainer.max_epochs
    if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
        return "raise max_steps"
    if epochs not in (None, -1) and trainer.current_epoch < epochs:
        return f"it was stopped after {trainer.current_epoch} of {epochs} epochs"
    return "raise max_epochs"


def trained_weights(task: Task) -> list[Tensor]:
    """The weights that a gradient reaches."""
    return [weight for weight in task.parameters() if weight.requires_grad]
