"""One run of what is planned, in this process; processes.py has several at once.

A run is a fit, then one full pass over held-out and training data with ``test``, all judged by the
same evaluation tolerance. Its folder then holds

    result.json     metrics, times, memory, certificates, versions; or the error
    config.yaml     the whole configuration, every default included, for ``fit --config``
    violations.npz  all violations by stage and constraint
    log.txt         what was printed, of a run in a process of its own

Where a requirement is to be certified, "held-out" is the selection split ("val"). What ``test``
measures then goes into ``samples.parquet`` and, but for the training data, nowhere else: to no
logger, callback or file of answers. What is measured is the model of ``model.ckpt``, read from it.
"""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import platform
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from filelock import FileLock, Timeout
from lightning.pytorch import Callback, LightningModule, Trainer

from pl_pointwise.certificates import certify
from pl_pointwise.cli import PointwiseCLI
from pl_pointwise.data import categories_of
from pl_pointwise.evaluation import SampleViolations
from pl_pointwise.module import PointwiseModule
from pl_pointwise.random_state import random_state, restore_random_state
from pl_pointwise.requirements.exported import CHECKPOINT
from pl_pointwise.requirements.samples import (
    CERTIFICATION,
    SELECTION,
    SPLITS,
    bounds_of,
    samples_of,
    write_samples,
)
from pl_pointwise.task import notes_of

from .loggers import end_runs, name_runs, on_first_rank
from .runs import SAMPLES, TESTED, VIOLATIONS, Run
from .uses import SHOWN, remember_use

log = logging.getLogger(__name__)

OPEN = ("val", "train")
"""Stages whose results are for all to see; of others the test of a requirement has samples."""

MULTIPLIERS = "dual"
"""What metrics of the multipliers start with: share and overshoot, of the last epoch."""


CPU = torch.device("cpu")


class Built(NamedTuple):
    """A run's trainer, model and data module, and the random state that they left behind."""

    cli: PointwiseCLI
    state: dict[str, Any]

    @classmethod
    def of(cls, cli: PointwiseCLI) -> Built:
        return cls(cli, random_state(CPU))


class BusyError(ValueError):
    """Another process is at work in a folder."""


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """One process at a time within a folder, made if need be; its other ranks come with the first.

    Raises:
        BusyError: another one is.
    """
    if not on_first_rank():
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise BusyError(f"{folder}: another comparison is at work there. Wait for it.") from error
    try:
        yield
    finally:
        lock.release()


def execute(run: Run, own_process: bool = False, built: Built | None = None) -> dict[str, Any]:
    """Fits and tests one run; an error becomes the result instead of ending the others.

    A run that was interrupted, or failed, goes on from the newest checkpoint it left, if any.

    own_process: nothing else ran in this process, so its peak memory is the run's.
    built: the run, if it has been built already.
    Returns: what ``result.json`` then holds, unless it cannot be written, or another process is at
        work on the run.
    """
    result: dict[str, Any] = {"digest": run.digest, "versions": versions()}
    try:
        with alone_in(run.folder):
            try:
                _execute(run, result, own_process, built)
            except Exception as error:
                result["error"] = reason(run, error)
                write_result(run, result)
    except (BusyError, OSError) as error:
        result.setdefault("error", reason(run, error))
    finally:
        end_runs()
        gc.collect()
    return result


def _execute(run: Run, result: dict[str, Any], own_process: bool, built: Built | None) -> None:
    """Fits, tests, adds to the result and writes it."""
    open_folder(run)
    checkpoint = _checkpoint(run)
    if built is None:
        cli = PointwiseCLI(run.arguments, run=False)
    else:
        cli = built.cli
        restore_random_state(built.state, CPU)
    config = yaml.safe_dump(cli.config_dump, sort_keys=False)
    (run.folder / "config.yaml").write_text(config)
    name_runs(cli.trainer.loggers, run, cli.model.hparams_initial)
    result |= _fit(cli, checkpoint, own_process)
    if run.certified:
        cli.trainer.save_checkpoint(run.folder / CHECKPOINT, weights_only=True)
    try:
        result |= _evaluate(cli, run)
        if cli.trainer.is_global_zero:
            write_result(run, result)
            _marker(run).unlink(missing_ok=True)
    finally:
        cli.trainer.strategy.barrier()  # The other ranks look at the files too.


def reason(run: Run, error: Exception) -> str:
    """Returns what a run failed by, and logs it: with the traceback where it is the run's."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        text = f"{error.filename or run.folder}: {error.strerror}"
    elif isinstance(error, BusyError):
        text = str(error)
    else:
        log.exception(run.title)
        return text
    log.error("%s: %s", run.title, text)
    return text


def _fit(cli: PointwiseCLI, checkpoint: Path | None, own_process: bool) -> dict[str, Any]:
    """Fits, and returns times and memory."""
    timer = EpochTimer()
    cli.trainer.callbacks.append(timer)  # type: ignore[attr-defined]
    on_gpu = cli.trainer.strategy.root_device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=checkpoint, weights_only=True)
    return {
        "fit_seconds": time.perf_counter() - started,
        "epoch_seconds": timer.seconds,
        "host_bytes": peak_memory() if own_process else None,
        "gpu_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }


def _evaluate(cli: PointwiseCLI, run: Run) -> dict[str, Any]:
    """Evaluates, writes the violations, and returns metrics and certificates."""
    metrics, objective = evaluate(cli, run)
    held_out = cli.model.evaluated.get("val" if run.certified else "test", {})
    if cli.trainer.is_global_zero:
        pooled = {
            f"{stage}/{name}": values.numpy()
            for stage, by_constraint in cli.model.violations.items()
            for name, values in by_constraint.items()
            if not run.certified or stage in OPEN
        }
        np.savez(run.folder / VIOLATIONS, **pooled)
        _keep_what_certifies(cli, run, objective)
    certificates = {} if run.certified else held_out  # Of a model that is to be chosen by them.
    return {
        "metrics": metrics | shares_of(cli.model),
        "higher_is_better": {
            name: metric.higher_is_better
            for name, metric in cli.model.evaluation_metrics().items()
            if metric.higher_is_better is not None
        },
        "certificates": {name: _certificate(found) for name, found in certificates.items()},
        "bounds": bounds_of(cli.model),
        "constrained": bool(cli.model.formulations),
        "shared_objective": cli.model.shared_objective,
        "categories": categories_in(datasets_of(cli.datamodule)),
        "objective": {n: v for n, v in objective.items() if n == SELECTION or not run.certified},
        "truncation": getattr(cli.datamodule, "truncation", {}),
    }


def _keep_what_certifies(cli: PointwiseCLI, run: Run, objective: dict[str, float]) -> None:
    """Writes what a requirement is judged by; of another run, that its test data were shown."""
    samples = samples_of(cli.model, datasets_of(cli.datamodule))
    if not run.certified:
        tested = samples[samples["split"] == CERTIFICATION]
        remember_use(SHOWN, tested["unit"] if len(tested) else (), run.folder)
        return
    samples.attrs["objective"] = {n: v for n, v in objective.items() if n != SELECTION}
    write_samples(samples, run.folder / SAMPLES)
    violations = {
        stage: {name: asdict(found) for name, found in by_constraint.items()}
        for stage, by_constraint in cli.model.evaluated.items()
        if stage not in OPEN
    }
    torch.save(violations, run.folder / TESTED)


def shares_of(module: PointwiseModule) -> dict[str, float]:
    """λ's share of the pull and its overshoot in the last epoch, as metrics."""
    return {
        f"{MULTIPLIERS}/{name}/{key}": value
        for name, figures in module.pull_shares.figures().items()
        for key, value in figures.items()
    }


def evaluate(cli: PointwiseCLI, run: Run) -> tuple[dict[str, float], dict[str, float]]:
    """Tests, and validates before where there is a selection split; then of the run's file.

    Returns: what was logged, without the certification split's if there is one; the objective that
    all methods share, by split.
    """
    found: dict[str, float] = {}
    read: dict[str, Any] = {"verbose": False}
    if run.certified:
        read |= {"ckpt_path": run.folder / CHECKPOINT, "weights_only": True}
        cli.trainer.limit_val_batches = 1.0  # 0 is for the fit.
        cli.trainer.validate(cli.model, cli.datamodule, **read)
        found = {name: float(v) for name, v in cli.trainer.callback_metrics.items()}
        cli.trainer.loggers, cli.trainer.callbacks = [], []  # type: ignore[attr-defined]
        notes_of(cli.model).confidential = True
    cli.trainer.test(cli.model, cli.datamodule, **read)
    found |= {name: float(v) for name, v in cli.trainer.callback_metrics.items()}
    objective = {
        split: found[name]
        for stage, split in SPLITS.items()
        if (name := f"{stage}/{cli.model.shared_objective}") in found
    }
    if run.certified:
        found = {n: v for n, v in found.items() if n.partition("/")[0] in OPEN}
    return found, objective


def datasets_of(data: Any) -> dict[str, Any]:
    """The data sets of a data module by name, as far as it has them by name."""
    return dict(getattr(data, "datasets", {}))


def categories_in(datasets: dict[str, Any]) -> list[str]:
    """The categories of all data sets, by name."""
    found = [categories_of(rows) or [] for rows in datasets.values()]
    return sorted(set().union(*found) - {""})


def open_folder(run: Run) -> None:
    """Makes a folder for the run, without an error of an earlier attempt."""
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "result.json").unlink(missing_ok=True)


def write_result(run: Run, result: dict[str, Any]) -> None:
    """Writes the result completely or not at all, whenever the process dies."""
    _write_whole(run.folder / "result.json", json.dumps(result, indent=1))


def _write_whole(path: Path, text: str) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")  # Every rank may write.
    part.write_text(text)
    part.replace(path)


def _marker(run: Run) -> Path:
    return run.folder / "started.json"


def _checkpoint(run: Run) -> Path | None:
    """Returns the newest checkpoint that an unfinished run of this very configuration left behind.

    Its start is marked by a file, so that checkpoints of an earlier configuration are older.
    """
    marker = _marker(run)
    if not marker.is_file() or json.loads(marker.read_text()) != {"digest": run.digest}:
        _write_whole(marker, json.dumps({"digest": run.digest}))
        return None
    since = marker.stat().st_mtime_ns
    times = {path: path.stat().st_mtime_ns for path in run.folder.rglob("*.ckpt")}
    newest_first = sorted((p for p in times if times[p] >= since), key=lambda p: -times[p])
    return next(filter(_resumable, newest_first), None)


def _resumable(checkpoint: Path) -> bool:
    """Whether a fit can go on from it: it is whole, and of more than the weights."""
    if checkpoint.is_dir():  # Of shards.
        return True
    try:
        state = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    except Exception:
        log.warning("%s cannot be read, and is left out.", checkpoint, exc_info=True)
        return False
    return "optimizer_states" in state


def _certificate(found: SampleViolations) -> dict[str, Any]:
    """Returns the certificate of a constraint on the held-out data, or why there is none."""
    try:
        certificate = certify(found.worst())
    except ValueError as error:
        return {"error": str(error)}
    return {**certificate.as_dict(), "statement": certificate.statement()}


class EpochTimer(Callback):
    """Seconds of every complete training epoch, those of validation left out."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = self._validation = 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.perf_counter()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started += time.perf_counter() - self._validation

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_last_batch:
            self.seconds.append(time.perf_counter() - self._started)


def peak_memory() -> int | None:
    """Returns the most bytes this process has held so far (resident set); None but on Linux."""
    status = Path("/proc/self/status")  # getrusage starts from the peak of the parent process.
    if not status.is_file():
        return None
    return 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])


def versions() -> dict[str, str]:
    """Returns the versions of Python and of what the metrics depend on."""
    packages = ("pl-pointwise", "torch", "lightning", "transformers")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def quieten() -> None:
    """Leaves the progress bars and this package's own messages; says the rest once, not per run."""
    for name in ("lightning.pytorch", "lightning.fabric", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with suppress(ModuleNotFoundError):
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
    for message in (".*does not have many workers.*", ".*isinstance.treespec, LeafSpec.*"):
        warnings.filterwarnings("ignore", message=message)
