"""``compare --dry-run``: the list of runs, and what they would take, without running any.

Of each method four training batches are run, of which the last counts, and two evaluation batches.
A run is then estimated as

    start + batches of a fit × seconds a batch + evaluation batches × seconds a batch

where the start ends with the first training batch. Nothing is written into the output folder.
"""

from __future__ import annotations

import gc
import heapq
import math
import textwrap
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from pl_pointwise.cli import PointwiseCLI
from pl_pointwise.cli_errors import debugging, place_in_own_code, sentence

from .runner import peak_memory, quieten
from .runs import Comparison, MethodsError, Run

MEASURED = 2
"""Evaluation batches, of which the first warms up."""
TRAINED = 4
"""Training batches, of which the last counts: the ones before it find the unit of the multipliers
as well (gradient_units.py), which few later batches do."""

NOT_MEASURED = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
"""What a trainer has that writes or prints."""

LEFT_OUT = (
    "The start ends with the first training batch. Not in the estimate: batches that are larger "
    "than the first ones, answers that are generated after the last batch, callbacks, loggers and "
    "checkpoints, early stopping and max_time, tables and plots; and that runs at once share the "
    "cores, so each takes longer. Host memory is that of this process, libraries included."
)


@dataclass(frozen=True)
class Estimate:
    """What one run of a method takes."""

    start: float
    """Seconds until the first training batch is done."""
    batch: float
    """Seconds of a training batch."""
    batches: float
    """Training batches of a fit; inf where nothing ends it."""
    evaluation_batch: float
    """Seconds of an evaluation batch."""
    evaluation_batches: float
    """Of the passes during the fit and after it."""
    host_bytes: int | None
    gpu_bytes: int | None

    @property
    def seconds(self) -> float:
        """Of the whole run."""
        evaluation = self.evaluation_batch * self.evaluation_batches
        return self.start + self.batch * self.batches + evaluation


class Enough(BaseException):
    """Ends a fit or a test once the batches are measured."""


class Stopwatch(Callback):
    """Seconds of the first batches of a fit and of a test, and how many batches there are."""

    def __init__(self) -> None:
        self.training: list[float] = []
        self.evaluation: list[float] = []
        self.batches = self.evaluation_batches = self.evaluation_batch = 0.0
        self.first = math.nan
        """When the first training batch was done."""
        self._started = 0.0

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._started = now(trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.training.append(now(trainer) - self._started)
        if len(self.training) == 1:
            self.first = now(trainer)
        self.batches = batches_of_a_fit(trainer, len(self.training))
        self.evaluation_batches = validation_batches(trainer, self.batches)
        if len(self.training) == TRAINED:
            raise Enough

    def on_test_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._started = now(trainer)

    def on_test_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._evaluated(trainer, sum(trainer.num_test_batches))

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._started = now(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.state.fn == "validate":
            self._evaluated(trainer, sum(trainer.num_val_batches))

    def _evaluated(self, trainer: Trainer, count: float) -> None:
        self.evaluation.append(now(trainer) - self._started)
        if len(self.evaluation) == min(MEASURED, count):
            self.evaluation_batches += count
            self.evaluation_batch = self.evaluation.pop()
            self.evaluation = []
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
        _reset_peaks()
        started = time.perf_counter()
        options = [f"--trainer.default_root_dir={folder}", "--trainer.num_sanity_val_steps=0"]
        options += [f"--trainer.{name}=false" for name in NOT_MEASURED]
        cli = PointwiseCLI([*run.arguments, *options, "--trainer.callbacks=null"], run=False)
        cli.model.multiplier_folder = None  # Its files are the user's.
        watch = Stopwatch()
        if cli.trainer.max_epochs != 0:
            _until_measured(cli.trainer, "fit", cli, watch)
        first = watch.first if watch.training else time.perf_counter()
        for stage in ("validate", "test") if run.certified else ("test",):
            trainer = cli.instantiate_trainer(limit_val_batches=1.0)  # 0 is for the fit.
            _until_measured(trainer, stage, cli, watch)
        on_gpu = cli.trainer.strategy.root_device.type == "cuda"
        return Estimate(
            start=first - started,
            batch=watch.training[-1] if watch.training else 0.0,
            batches=max(0.0, watch.batches - 1),
            evaluation_batch=watch.evaluation_batch,
            evaluation_batches=watch.evaluation_batches,
            host_bytes=peak_memory(),
            gpu_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
        )


def _until_measured(trainer: Trainer, stage: str, cli: PointwiseCLI, watch: Stopwatch) -> None:
    trainer.callbacks.append(watch)  # type: ignore[attr-defined]
    with suppress(Enough):
        getattr(trainer, stage)(cli.model, datamodule=cli.datamodule)


def _reset_peaks() -> None:
    """Peaks of memory are those from here on, where the system can do that."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


# In words ---------------------------------------------------------------------------------------


def dry_run(comparison: Comparison, jobs: int | None = None) -> str:
    """Returns the list of runs and the estimate, as text; measures every method with runs to come.

    jobs: how many are to run at once.
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
    estimates: dict[str, Estimate] = {}
    for run in to_come:
        if run.method not in estimates:
            try:
                estimates[run.method] = measure(run)
            except Exception as error:
                if debugging():
                    raise
                text = f"{sentence(error)}{place_in_own_code(error)}"
                names = comparison.planned[2]
                raise MethodsError({run.method: text}, names) from error
    of_each = [estimates[run.method] for run in to_come]
    text = textwrap.fill(f"{total(of_each, jobs)} {LEFT_OUT}", 100)
    return "\n".join([*lines, "", *table(estimates), "", text])


def table(estimates: Mapping[str, Estimate]) -> list[str]:
    """Returns a line per method, under a header, in columns."""
    header = ["method", "start", "training", "evaluation", "a run", "host memory", "GPU memory"]
    cells = [header] + [
        [
            method,
            duration(found.start),
            f"{found.batches + 1:,.0f} × {duration(found.batch)}" if found.batch else "–",
            f"{found.evaluation_batches:,.0f} × {duration(found.evaluation_batch)}",
            duration(found.seconds),
            memory(found.host_bytes),
            memory(found.gpu_bytes),
        ]
        for method, found in estimates.items()
    ]
    if all(found.gpu_bytes is None for found in estimates.values()):
        cells = [line[:-1] for line in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        f"{line[0]:<{widths[0]}}"
        + "".join(f"  {cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))
        for line in cells
    ]


def total(estimates: Sequence[Estimate], jobs: int | None) -> str:
    """Returns the time of all runs, so many at once in their order, and the memory at most."""
    at_once = min(jobs or 1, len(estimates))
    ends = [0.0] * at_once
    for found in estimates:
        heapq.heapreplace(ends, ends[0] + found.seconds)
    how = f"with --jobs {jobs}" if jobs is not None else "one after the other"
    text = f"All runs to do, {how}: about {duration(max(ends))}"
    host = sorted((found.host_bytes or 0 for found in estimates), reverse=True)[:at_once]
    gpu = sorted((found.gpu_bytes or 0 for found in estimates), reverse=True)[:at_once]
    text += f", up to {memory(sum(host))} of host memory" if all(host) else ""
    text += f" and {memory(sum(gpu))} of GPU memory, all GPUs together" if all(gpu) else ""
    return f"{text}."


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


def memory(size: int | None) -> str:
    """Returns bytes as the GiB or MiB they are, – where they are not known."""
    if size is None:
        return "–"
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
