"""``compare --dry-run``: the list of runs, and what one of each method would take.

Of each method four training batches are run, of which the last counts, and two evaluation batches.
A run is then estimated as

    start + batches of a fit × seconds a batch + evaluation batches × seconds a batch

where the start ends with the first training batch. Nothing is written into the output folder.
"""

from __future__ import annotations

import gc
import math
import time
from contextlib import suppress
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from pl_pointwise.cli import PointwiseCLI
from pl_pointwise.cli_errors import debugging, place_in_own_code, sentence

from .runner import quieten
from .runs import Comparison, MethodsError, Run

MEASURED = 2
"""Evaluation batches, of which the first warms up."""
TRAINED = 4
"""Training batches, of which the last counts: the ones before it find the unit of the multipliers
as well (gradient_units.py), which few later batches do."""

NOT_MEASURED = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
"""What a trainer has that writes or prints."""


@dataclass
class Estimate:
    """What one run takes, in seconds; filled in by :class:`Stopwatch`."""

    start: float = 0.0
    """Until the first training batch is done."""
    batch: float = 0.0
    """A training batch."""
    batches: float = 0.0
    """Training batches of a fit after the first; inf where nothing ends it."""
    evaluation_batch: float = 0.0
    evaluation_batches: float = 0.0
    """Of the passes during the fit and after it."""

    @property
    def seconds(self) -> float:
        """Of the whole run."""
        evaluation = self.evaluation_batch * self.evaluation_batches
        return self.start + self.batch * self.batches + evaluation

    def __str__(self) -> str:
        training = f"{self.batches:,.0f} × {duration(self.batch)}, " if self.batch else ""
        evaluation = f"{self.evaluation_batches:,.0f} × {duration(self.evaluation_batch)}"
        return (
            f"about {duration(self.seconds)} (start {duration(self.start)}, {training}"
            f"evaluation {evaluation})"
        )


class Enough(BaseException):
    """Ends a fit or a test once the batches are measured."""


class Stopwatch(Callback):
    """Times the first batches of a fit and of a test, and counts the batches that there are."""

    def __init__(self) -> None:
        self.found = Estimate()
        self._built = time.perf_counter()
        self._started = 0.0
        self._trained = self._evaluated = 0

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._started = now(trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._trained += 1
        self.found.batch = now(trainer) - self._started
        if self._trained == 1:
            self.found.start = now(trainer) - self._built
        batches = batches_of_a_fit(trainer, self._trained)
        self.found.batches = batches - 1
        self.found.evaluation_batches = validation_batches(trainer, batches)
        if self._trained == TRAINED:
            raise Enough

    def on_test_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._started = now(trainer)

    def on_test_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._end_evaluation_batch(trainer, sum(trainer.num_test_batches))

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._started = now(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.state.fn == "validate":
            self._end_evaluation_batch(trainer, sum(trainer.num_val_batches))

    def _end_evaluation_batch(self, trainer: Trainer, count: float) -> None:
        if not self.found.start:  # Nothing is trained.
            self.found.start = self._started - self._built
        self._evaluated += 1
        if self._evaluated == min(MEASURED, count):
            self.found.evaluation_batch = now(trainer) - self._started
            self.found.evaluation_batches += count
            self._evaluated = 0
            raise Enough


def now(trainer: Trainer) -> float:
    """Returns the time in seconds, once the device has done what it was given."""
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize(trainer.strategy.root_device)
    return time.perf_counter()


def batches_of_a_fit(trainer: Trainer, done: int) -> float:
    """Returns how many training batches the whole fit has.

    done: batches so far, by which steps of the optimizers, which ``max_steps`` counts, are known.
    """
    epochs = trainer.max_epochs if trainer.max_epochs is not None else -1
    batches = math.inf if epochs < 0 else epochs * trainer.num_training_batches
    if trainer.max_steps >= 0 and trainer.global_step:
        batches = min(batches, math.ceil(trainer.max_steps * done / trainer.global_step))
    return batches


def validation_batches(trainer: Trainer, batches: float) -> float:
    """Returns the evaluation batches during a fit of so many training batches."""
    every = (trainer.val_check_batch or math.inf) * (trainer.check_val_every_n_epoch or 1)
    passes = batches // every if math.isfinite(batches) and every else 0
    return passes * sum(trainer.num_val_batches)


def measure(run: Run) -> Estimate:
    """Runs the first batches of a run's fit and evaluation, in a folder that is deleted."""
    with TemporaryDirectory() as folder:
        gc.collect()
        watch = Stopwatch()
        options = [f"--trainer.default_root_dir={folder}", "--trainer.num_sanity_val_steps=0"]
        options += [f"--trainer.{name}=false" for name in NOT_MEASURED]
        cli = PointwiseCLI([*run.arguments, *options, "--trainer.callbacks=null"], run=False)
        cli.model.training_settings.multiplier_folder = None  # Its files are the user's.
        stages = ["fit"] if cli.trainer.max_epochs != 0 else []
        stages += ["validate", "test"] if run.certified else ["test"]
        for stage in stages:
            trainer: Any = cli.trainer
            if stage != "fit":
                trainer = cli.instantiate_trainer(limit_val_batches=1.0)  # 0 is for the fit.
            trainer.callbacks.append(watch)
            with suppress(Enough):
                getattr(trainer, stage)(cli.model, datamodule=cli.datamodule)
    return watch.found


def dry_run(comparison: Comparison) -> str:
    """Returns the list of runs and the estimates, as text.

    Raises:
        MethodsError: a method ends in an error in its first batches.
    """
    quieten()
    runs = comparison.runs
    to_come = [run for run in runs if not run.finished]
    lines = [f"{len(runs)} runs, {len(to_come)} of them to do:"]
    for number, run in enumerate(runs, start=1):
        state = "finished" if run.finished else "to do"
        lines.append(f"  [{number}/{len(runs)}] {run.title}: {state}")
    if not to_come:
        return "\n".join(lines)
    lines += ["", "A run of each method:"]
    total, measured = 0.0, dict[str, Estimate]()
    for run in to_come:
        if run.method not in measured:
            try:
                measured[run.method] = measure(run)
            except Exception as error:
                if debugging():
                    raise
                text = f"{sentence(error)}{place_in_own_code(error)}"
                raise MethodsError({run.method: text}, comparison.planned[2]) from error
            lines.append(f"  {run.method}: {measured[run.method]}")
        total += measured[run.method].seconds
    return "\n".join([*lines, "", f"All runs to do, one after the other: about {duration(total)}."])


def duration(seconds: float) -> str:
    """Returns a time in the unit one would say it in.

    >>> duration(0.0042), duration(75), duration(5400), duration(math.inf)
    ('4.2 ms', '1.25 min', '1.5 h', 'no end (neither max_epochs nor max_steps)')
    """
    if math.isinf(seconds):
        return "no end (neither max_epochs nor max_steps)"
    for unit, size, limit in (("ms", 1e-3, 1.0), ("s", 1.0, 60.0), ("min", 60.0, 3600.0)):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 3600:,.1f} h"
