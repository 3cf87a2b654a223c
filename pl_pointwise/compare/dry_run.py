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

TRAINED, EVALUATED = 4, 2
"""Batches that are run, of which the last counts: the ones before it warm up, and find the unit of
the multipliers (gradient_units.py), which few later batches do."""

NOT_MEASURED = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
"""What a trainer has that writes or prints."""


@dataclass(frozen=True)
class Estimate:
    """What one run takes, in seconds.

    Attributes:
        start: until the first training batch is done.
        batch: of a training batch.
        batches: training batches of a fit after the first; inf where nothing ends it.
        evaluation_batch: of one.
        evaluation_batches: of the passes during the fit and after it.
    """

    start: float
    batch: float
    batches: float
    evaluation_batch: float
    evaluation_batches: float

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


class Enough(Exception):  # noqa: N818 because it is no error.
    """Ends a fit or a test once the batches are measured."""


class Stopwatch(Callback):
    """Notes when the first ``count`` batches of one stage start and end, then ends it."""

    def __init__(self, stage: str, count: int) -> None:
        self.count = count
        self.spans: list[tuple[float, float]] = []
        self._started = 0.0
        hook = {"fit": "train", "validate": "validation"}.get(stage, stage)
        setattr(self, f"on_{hook}_batch_start", self._start)
        setattr(self, f"on_{hook}_batch_end", self._end)

    def _start(self, trainer: Trainer, *_: Any) -> None:
        self._started = now(trainer)

    def _end(self, trainer: Trainer, *_: Any) -> None:
        self.spans.append((self._started, now(trainer)))
        if len(self.spans) == self.count:
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
        built = time.perf_counter()
        options = [f"--trainer.default_root_dir={folder}", "--trainer.num_sanity_val_steps=0"]
        options += [f"--trainer.{name}=false" for name in NOT_MEASURED]
        cli = PointwiseCLI([*run.arguments, *options, "--trainer.callbacks=null"], run=False)
        start = batch = batches = evaluation_batch = evaluation_batches = 0.0
        if cli.trainer.max_epochs != 0:
            spans = first_batches(cli, cli.trainer, "fit", TRAINED)
            start, batch = spans[0][1] - built, seconds(spans[-1])
            fitted = batches_of_a_fit(cli.trainer, len(spans))
            batches, evaluation_batches = fitted - 1, validation_batches(cli.trainer, fitted)
        for stage in ("validate", "test") if run.certified else ("test",):
            trainer = cli.instantiate_trainer(limit_val_batches=1.0)  # 0 is for the fit.
            spans = first_batches(cli, trainer, stage, EVALUATED)
            start = start or spans[0][0] - built
            evaluation_batch = seconds(spans[-1])
            validated = stage == "validate"
            evaluation_batches += sum(
                trainer.num_val_batches if validated else trainer.num_test_batches
            )
    return Estimate(start, batch, batches, evaluation_batch, evaluation_batches)


def first_batches(
    cli: PointwiseCLI, trainer: Any, stage: str, count: int
) -> list[tuple[float, float]]:
    """Runs a stage up to ``count`` batches; returns when they started and ended, one at least."""
    watch = Stopwatch(stage, count)
    trainer.callbacks.append(watch)
    with suppress(Enough):
        getattr(trainer, stage)(cli.model, datamodule=cli.datamodule)
    return watch.spans or [(now(trainer),) * 2]


def seconds(span: tuple[float, float]) -> float:
    return span[1] - span[0]


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
