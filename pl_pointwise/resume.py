"""What a checkpoint keeps of a run, and how a run goes on from it as if it had never stopped.

A run may stop anywhere: within an epoch or at its end, planned or not. Lightning's counters say
where, but not always so that it goes on there; :func:`correct_loaded_progress` makes them say so.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor

from .checkpoint_options import differences, settings_of
from .checkpoints import (
    STATE_KEY,
    VERSION,
    damaged,
    plain,
    plain_random_state,
    random_state,
    require_arguments,
    restore_random_state,
    state_of,
)
from .data import ResumableDataLoader
from .errors import TrainingError
from .formulations import Formulation
from .gradient_units import GradientUnits
from .multiplier_share import PullShares
from .multipliers import Multipliers
from .optimizers import monitor_of

log = logging.getLogger(__name__)

_LOADING = frozenset({"map_location", "hparams_file", "strict", "weights_only"})
"""Arguments of ``load_from_checkpoint`` itself."""


class Resuming(LightningModule):
    """The part of a :class:`~pl_pointwise.module.PointwiseModule` that saves and resumes."""

    formulations: dict[str, Formulation]
    multipliers: Multipliers
    thresholds: dict[str, Tensor]
    gradient_units: GradientUnits
    pull_shares: PullShares
    left_out: int
    skipped_steps: int
    _window: list[tuple[int, dict[str, list[Tensor]]]]
    _fingerprint: str | None
    _arguments_left_out: dict[str, str]

    def __init__(self) -> None:
        super().__init__()
        self._restored: dict[str, Any] | None = None
        """What a checkpoint says, until the first step after it."""
        self._random_state_at_end: dict[str, Any] | None = None
        """That of the last step, where a fit has ended that may be saved, and prolonged, later."""
        self._before_evaluation: dict[str, Any] | None = None
        self._kept_random_state: dict[str, Any] | None = None
        """The random state during an evaluation within the fit: that before it."""
        self._epoch_is_open = False
        """Whether the end of an epoch is still to come, with what is due then."""

    @property
    def trainer(self) -> Any:
        return LightningModule.trainer.fget(self)  # type: ignore[attr-defined]

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        """Tells callbacks too, before the trainer looks for a checkpoint: see SaveOnTermination."""
        LightningModule.trainer.fset(self, trainer)  # type: ignore[attr-defined]
        for callback in getattr(trainer, "callbacks", []):
            if hasattr(callback, "on_module_attached"):
                callback.on_module_attached(trainer, self)

    @abstractmethod
    def _step_schedulers(self, interval: str, plateau: bool, count: int | None = None) -> None: ...

    # The end of a fit ---------------------------------------------------------------------------

    def _end_training(self) -> None:
        """A window of steps that is open stays open: a longer fit closes it."""
        self._random_state_at_end = random_state(self.device)

    def _end_fit(self) -> None:
        if self._restored is not None:  # Resumed at its end: training did not start.
            self._restore_random_state(self._restored["random_states"], new_epoch=False)
            self._step_plateau_schedulers(self._restored, self._restored["new_epoch"])
            self._end_training()
        self._restored = None

    def _is_cut_short(self) -> bool:
        """Whether the epoch stops before its last batch: what is due at its end comes later."""
        loop: Any = self.trainer.fit_loop.epoch_loop
        return not loop._num_ready_batches_reached()

    # An evaluation within a fit draws no random number of the fit ---------------------------------

    def _note_random_state(self) -> None:
        """Where an evaluation is due, which may be none; its loaders draw before it starts."""
        self._before_evaluation = random_state(self.device)

    def _keep_random_state(self) -> None:
        """A stop may add an evaluation, and a resume leave one out: neither may change the rest."""
        self._kept_random_state, self._before_evaluation = self._before_evaluation, None

    def _put_random_state_back(self) -> None:
        kept, self._kept_random_state = self._kept_random_state, None
        if kept is not None:
            restore_random_state(kept, self.device)

    # Saving -------------------------------------------------------------------------------------

    def _save_state(self, checkpoint: dict[str, Any]) -> None:
        states: list[Any] = [self._random_state_to_save()]
        if self.trainer.world_size > 1:
            own = states[0]
            states = states * self.trainer.world_size
            torch.distributed.all_gather_object(states, own)
        checkpoint[STATE_KEY] = {
            "version": VERSION,
            "samples": self.multipliers.samples,
            "multipliers": self.multipliers.state_dict(),
            "thresholds": dict(self.thresholds),
            "gradient_units": self.gradient_units.state_dict(),
            "fingerprint": self._fingerprint,
            "window": self._window,
            "epoch_is_open": self._epoch_is_open,
            "in_evaluation": (
                self._kept_random_state is not None
                and self.trainer.state.status == TrainerStatus.INTERRUPTED
            ),
            "pull": self.pull_shares.state_dict(),
            "left_out": self.left_out,
            "skipped_steps": self.skipped_steps,
            "monitored": {
                monitor_of(config.scheduler): float(value)
                for config in self.trainer.lr_scheduler_configs
                if (value := self._monitored(config.scheduler)) is not None
            },
            "random_states": states,
            "arguments_left_out": dict(self._arguments_left_out),
        }

    def _random_state_to_save(self) -> dict[str, Any]:
        """That of the last step: later draws belong to an evaluation, a fetch or to nobody."""
        if self._random_state_at_end is not None:
            return self._random_state_at_end
        if self._kept_random_state is not None:
            return self._kept_random_state
        state = random_state(self.device)
        loader = self.trainer.train_dataloader
        if isinstance(loader, ResumableDataLoader) and loader.before_fetch is not None:
            state |= plain_random_state(*loader.before_fetch)
        return state

    # Loading ------------------------------------------------------------------------------------

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Lightning's, which leaves an argument out that the class does not have: here a field of
        one of its settings is set in the checkpoint's, such as ``model_name`` in ``policy``.

        Raises:
            TypeError: neither an argument of the class nor such a field.
        """
        own = {name: kwargs.pop(name) for name in _LOADING.intersection(kwargs)}
        arguments = settings_of(cls, checkpoint_path, kwargs)
        load: Any = super().load_from_checkpoint
        return load(checkpoint_path, *args, **own, **arguments)

    def _load_state(self, checkpoint: dict[str, Any]) -> None:
        state = state_of(checkpoint)
        try:
            self._take_state(state, checkpoint)
        except TrainingError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise damaged(str(error)) from error

    def _take_state(self, state: Mapping[str, Any], checkpoint: dict[str, Any]) -> None:
        self.steps_of_checkpoint = int(checkpoint.get("global_step", 0))
        resuming = self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        if self._trainer is None:
            require_arguments(state, self._arguments_left_out)
        unknown = sorted(set(state["multipliers"]).difference(self.formulations))
        if resuming and unknown:
            raise TrainingError(
                f"This checkpoint has multipliers of constraint {', '.join(map(repr, unknown))}, "
                "which has none in this module, so it is of another module or formulation. Resume "
                "with the configuration it was written with, or load its weights only."
            )
        self.multipliers = self.multipliers.for_samples(int(state["samples"]))
        self.multipliers.load_state_dict(state["multipliers"])
        self.thresholds = {
            name: value.to("cpu", torch.float32, copy=True)
            for name, value in state["thresholds"].items()
        }
        self.gradient_units.load_state_dict(state["gradient_units"])
        self.pull_shares = PullShares()
        self.pull_shares.load_state_dict(state["pull"])
        self._window = [(int(epoch), dict(visits)) for epoch, visits in state["window"]]
        self._fingerprint = state["fingerprint"]
        self.left_out, self.skipped_steps = int(state["left_out"]), int(state["skipped_steps"])
        self._random_state_at_end = self._restored = None
        if resuming:
            kept = ("fingerprint", "epoch_is_open", "random_states")
            self._restored = {key: state[key] for key in kept}
            self._restored["monitored"] = dict(state["monitored"])
            self._restored["new_epoch"] = correct_loaded_progress(checkpoint)
            self._name_other_settings(checkpoint)

    def _name_other_settings(self, checkpoint: Mapping[str, Any]) -> None:
        """Says so where a run goes on with other settings than it was started with."""
        before = checkpoint.get("hyper_parameters")
        if not isinstance(before, Mapping) or not self.trainer.is_global_zero:
            return
        now = plain(dict(self.hparams))
        changed = [
            f"{name} ({old!r}, now {new!r})"
            for name, (old, new) in sorted(differences(before, now).items())
        ]
        if changed:
            log.warning(
                "This checkpoint is of a run with other settings, which goes on with those of "
                "now: %s.",
                ", ".join(changed),
            )

    # Going on -----------------------------------------------------------------------------------

    def _continue_run(self, restored: Mapping[str, Any]) -> None:
        """When training starts: the random state, and what was still due when it was saved."""
        loop: Any = self.trainer.fit_loop
        batches = loop.epoch_loop
        new_epoch = restored["new_epoch"] or (
            batches.restarted_on_train_batch_end and batches.batch_progress.is_last_batch
        )
        self._restore_random_state(restored["random_states"], new_epoch)
        self._step_plateau_schedulers(restored, new_epoch)

    def _step_plateau_schedulers(self, restored: Mapping[str, Any], new_epoch: bool) -> None:
        """If the run was saved at the end of an epoch, before that was done."""
        if new_epoch and restored["epoch_is_open"] and self.current_epoch > 0:
            self._step_schedulers("epoch", plateau=True, count=self.current_epoch)

    def _restore_random_state(self, states: list[Any], new_epoch: bool) -> None:
        """Puts the random state back where it stood, unless the number of ranks is another now."""
        if len(states) != self.trainer.world_size:
            return
        try:
            restore_random_state(states[self.global_rank], self.device)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise damaged(f"the random state of rank {self.global_rank}") from error
        if new_epoch and not hasattr(self.trainer.train_dataloader, "load_state_dict"):
            # Of this one epoch Lightning made the iterator, which draws the order, before.
            iter(self.trainer.fit_loop._data_fetcher)

    def _resume_within_epoch(self, batch_idx: int) -> None:
        """On the first step after a resume: the loader must stand where it stood."""
        restored, self._restored = self._restored, None
        self._epoch_is_open = True
        if restored is not None:
            self._correct_running_progress()
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

    def _correct_running_progress(self) -> None:
        """Counts the running epoch and batch as begun, the ones before as complete.

        Resumed from the last batch of an epoch, Lightning does not count the next epoch as begun,
        and what is saved in it misleads the resume after that one: it trains another order.
        """
        loop: Any = self.trainer.fit_loop
        for epochs in (loop.epoch_progress.total, loop.epoch_progress.current):
            epochs.ready = epochs.started = epochs.processed + 1
        for batches in (
            loop.epoch_loop.batch_progress.total,
            loop.epoch_loop.batch_progress.current,
        ):
            batches.processed = batches.completed = batches.ready - 1

    def _monitored(self, scheduler: Any) -> Any:
        """What the scheduler monitors, None if it is not logged.

        After a resume between a validation and the use of what it logged, the checkpoint's value.
        """
        name = monitor_of(scheduler)
        restored = (self._restored or {}).get("monitored", {})
        return self.trainer.callback_metrics.get(name, restored.get(name))


def correct_loaded_progress(checkpoint: Mapping[str, Any]) -> bool:
    """Changes the loops' counters in a checkpoint so that Lightning goes on where the run stood.

    A stop within an epoch (``max_steps``, ``max_time``, ``should_stop``) counts that epoch as
    done, and Lightning would drop its other batches; a save after the fit, or at the start of an
    epoch, leaves the counters of the epoch before, and it would run an empty one. An evaluation
    that broke off is made again whole, and not from its middle.

    Returns: whether an epoch's start comes next.

    Raises:
        TrainingError: a batch was under way, so weights and multipliers may not belong together.
    """
    loops = checkpoint.get("loops")
    if loops is None:  # Weights only: the trainer says so.
        return False
    fit = loops["fit_loop"]
    epochs, batches = fit["epoch_progress"], fit["epoch_loop.batch_progress"]
    of_epoch, of_run = batches["current"], batches["total"]
    if of_run["ready"] != of_run["processed"]:
        raise TrainingError(
            f"This checkpoint was written within step {of_run['ready']}, by an error or a "
            "signal: it may have new weights and old multipliers. Resume from the one before; "
            "ModelCheckpoint(every_n_train_steps=...) and SaveOnTermination save between steps."
        )
    if checkpoint[STATE_KEY]["in_evaluation"]:
        evaluated = fit["epoch_loop.val_loop.batch_progress"]
        evaluated["current"] = dict.fromkeys(evaluated["current"], 0)
        evaluated["total"] = {**evaluated["current"], "ready": 1, "started": 1}
    if epochs["current"]["started"] != epochs["current"]["processed"]:
        return False
    between = bool(batches["is_last_batch"] or not of_epoch["ready"])
    for count in (epochs["total"], epochs["current"]):
        if between:
            count["ready"] = count["started"] = count["completed"] = count["processed"]
        else:
            count["ready"] = count["started"] = count["processed"]
            count["processed"] = count["completed"] = count["processed"] - 1
    if between:
        batches["current"] = dict.fromkeys(of_epoch, 0)
        batches["is_last_batch"] = False
        for loader in fit["state_dict"].get("combined_loader", []):
            ResumableDataLoader.finish_epoch(loader)
    return between
