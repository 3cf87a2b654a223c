"""Where an interrupted run goes on: what a checkpoint says, as Lightning's loops have to be told.

Lightning counts the epochs and batches of a fit in progress trackers, of which a checkpoint holds
the numbers "ready", "started", "processed" and "completed", of the epoch ("current") and of the run
("total"). It counts an epoch that was cut short as done, and leaves out what stands between an
epoch's last batch and the next epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..data import ResumableDataLoader
from ..errors import TrainingError


class Next(Enum):
    """What a resumed run does first."""

    BATCH = "the next batch of the epoch"
    EPOCH_END = "what is due at the end of the epoch: schedulers, an evaluation"
    EPOCH = "the next epoch"


@dataclass(frozen=True)
class AfterTraining:
    """Where a fit stood after its last step: it may be saved, and prolonged, later."""

    random_state: dict[str, Any]
    loaders: Sequence[Any]  #: states of the training loader


@dataclass
class Resume:
    """What a checkpoint says, until the first step after it."""

    entry: Mapping[str, Any]  #: the module's own, of ``state_of``
    next: Next = Next.BATCH
    loaders: Sequence[Any] = ()  #: states of the training loader
    #: weights, before the run's hooks
    frozen_at_start: list[str] = field(default_factory=list)

    @property
    def monitored(self) -> Mapping[str, Any]:
        """What schedulers monitored at the save."""
        monitored: Mapping[str, Any] = self.entry.get("monitored", {})
        return monitored


def resume_of(checkpoint: dict[str, Any], entry: Mapping[str, Any]) -> Resume:
    """What is to be resumed; changes the loops' counters in the checkpoint to where the run stood.

    entry: the module's own.
    """
    if "loops" not in checkpoint:  # Of weights only: the trainer says so.
        return Resume(entry)
    fit = checkpoint["loops"]["fit_loop"]
    first = correct_loaded_progress(fit, entry)
    loaders = fit["state_dict"].get("combined_loader", [])
    if first is not Next.BATCH:  # Lightning would go on in the epoch that it is of.
        fit["state_dict"]["combined_loader"] = []
    return Resume(entry, first, loaders)


def correct_loaded_progress(fit: dict[str, Any], entry: Mapping[str, Any]) -> Next:
    """Changes the counters of a checkpoint's fit loop to where the run stood; returns what is next.

    An evaluation that had not ended is repeated whole. ``entry``: the module's own.
    """
    epochs = fit["epoch_progress"]
    batches = fit["epoch_loop.batch_progress"]
    of_epoch = batches["current"]
    of_run = batches["total"]
    if of_run["ready"] != of_run["processed"]:
        raise TrainingError(
            f"This checkpoint was written within step {of_run['ready']}: it may have new weights "
            "and old multipliers. Resume from the one before it."
        )
    # Whether Lightning has counted the epoch as done.
    counted = epochs["current"]["started"] == epochs["current"]["processed"]
    cut_short = not counted and of_epoch["completed"] != of_epoch["processed"]
    if entry["in_evaluation"] or cut_short:
        _repeat_evaluation(fit["epoch_loop.val_loop.batch_progress"])
    first = (
        Next.EPOCH_END if batches["is_last_batch"] and of_epoch["ready"] else Next.BATCH
    )
    end_is_done = first is Next.EPOCH_END and not entry["epoch_is_open"]
    if counted and (not of_epoch["ready"] or end_is_done):
        first = Next.EPOCH
        of_epoch["ready"] = 0  # No batch of it has come.
        batches["is_last_batch"] = False
    if counted:
        for count in (epochs["total"], epochs["current"]):
            # All alike: no epoch is open, and Lightning begins one.
            count["ready"] = count["processed"]
            count["started"] = count["processed"]
            # One less is processed than started: Lightning goes on in that one.
            if first is not Next.EPOCH:
                count["processed"] -= 1
            count["completed"] = count["processed"]
    # The step of the loggers, which Lightning counts only after it has saved.
    fit["epoch_loop.state_dict"]["_batches_that_stepped"] = of_run["started"]
    # All alike: no batch is open, also where the save came from a hook of its end.
    batches["current"] = dict.fromkeys(of_epoch, of_epoch["ready"])
    batches["total"] = dict.fromkeys(of_run, of_run["ready"])
    return first


def _repeat_evaluation(progress: dict[str, Any]) -> None:
    """Lets an evaluation that had not ended begin anew."""
    # None of its batches is done.
    progress["current"] = dict.fromkeys(progress["current"], 0)
    # One batch started and not processed: Lightning takes that for a stop within an evaluation.
    progress["total"] = {**progress["current"], "ready": 1, "started": 1}
    progress["is_last_batch"] = False


def place_loops(trainer: Any, resume: Resume) -> None:
    """Makes Lightning's loops go on with what is next."""
    loop = trainer.fit_loop
    loader = trainer.train_dataloader
    batches = loop.epoch_loop
    fetcher = loop._data_fetcher
    if (
        resume.next is not Next.BATCH
        and hasattr(loader, "load_state_dict")
        and resume.loaders
    ):
        # It has given its last batch: the iterator after this one is of the next epoch.
        if isinstance(loader, ResumableDataLoader):
            loader.sampler.seed = resume.loaders[0]["seed"]
        else:
            loader.load_state_dict(resume.loaders[0])
            next(iter(fetcher).iterator, None)
    if resume.next is Next.EPOCH:
        # As if nothing had been loaded: its iterator is made when it starts.
        batches.restarting = False
        loop._resuming_from_checkpoint = False
        return
    if resume.next is Next.EPOCH_END:
        fetcher.done = True
        fetcher.batches = []
    # It, or its place, counts this batch once more.
    if batches._should_check_val_fx(fetcher):
        batches._batches_that_stepped -= 1
