"""One run in this process: training, then one full pass over held-out and training data. Its folder
then holds

    result.json     metrics, time, digests of files; or the error
    config.yaml     the whole configuration, every default included, for ``fit --config``
    violations.npz  all violations by stage and constraint

Where a requirement is to be certified, "held-out" is the selection split ("val"). What ``test``
measures then goes into ``samples.parquet`` and, except for training data, to no logger or callback.
What is measured is the model of ``model.ckpt``, read from it.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from filelock import FileLock
from lightning.pytorch.utilities import rank_zero_only

from pl_pointwise.cli import PointwiseCLI
from pl_pointwise.command_line.cli_errors import OURS, sentence
from pl_pointwise.data import TRAIN, VAL, dataset_of
from pl_pointwise.files import digest_now, write_whole
from pl_pointwise.requirements.exported import CHECKPOINT, SAMPLES
from pl_pointwise.requirements.samples import (
    Source,
    bounds_of,
    samples_of,
)
from pl_pointwise.requirements.uses import SHOWN, remember_use
from pl_pointwise.task import notes_of

from .runs import VIOLATIONS, Run, files_read

log = logging.getLogger(__name__)

RESULT = "result.json"


def on_first_rank() -> bool:
    """Whether this process is rank 0, also before there is a trainer."""
    return not getattr(rank_zero_only, "rank", 0)


def alone_in(folder: Path) -> AbstractContextManager[Any]:
    """One process at a time in a folder, made if need be; its other ranks come with the first."""
    if not on_first_rank():
        return nullcontext()
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / ".in-use.lock", timeout=0)


def execute(run: Run) -> dict[str, Any]:
    """Fits and tests one run; an error becomes the result."""
    result: dict[str, Any] = {"digest": run.digest}
    with alone_in(run.folder):
        try:
            _execute(run, result)
        except Exception as error:
            result["error"] = _reason(run, error)
            with suppress(OSError):  # Of a disk that is full.
                write_whole(run.folder / RESULT, json.dumps(result, indent=1))
        finally:
            wandb = sys.modules.get("wandb")
            if wandb is not None and getattr(wandb, "run", None) is not None:
                wandb.finish()  # It would go on in the same run with the next.
            gc.collect()
    return result


def _execute(run: Run, result: dict[str, Any]) -> None:
    """Fits, tests, adds to the result and writes it."""
    (run.folder / RESULT).unlink(missing_ok=True)  # The error of an earlier attempt.
    cli = PointwiseCLI(run.arguments, run=False)
    (run.folder / "config.yaml").write_text(yaml.safe_dump(cli.config_dump, sort_keys=False))
    result["read"] = files_read(cli.config_dump)
    # With the module's own, as TensorBoard shows the first set alone.
    of_module = {n: v for n, v in cli.model.hparams_initial.items() if not n.startswith("_")}
    for logger in cli.trainer.loggers if on_first_rank() else ():
        logger.log_hyperparams({**of_module, "method": run.method, "seed": run.seed})
    started = time.perf_counter()
    cli.trainer.fit(cli.model, cli.datamodule)
    result["fit_seconds"] = time.perf_counter() - started
    if run.certified:
        cli.trainer.save_checkpoint(run.folder / CHECKPOINT, weights_only=True)
    try:
        result |= _evaluate(cli, run)
        if cli.trainer.is_global_zero:
            written = (VIOLATIONS, *((CHECKPOINT, SAMPLES) if run.certified else ()))
            result["wrote"] = {name: digest_now(run.folder / name) for name in written}
            write_whole(run.folder / RESULT, json.dumps(result, indent=1))
    finally:
        cli.trainer.strategy.barrier()  # The other ranks look at the files too.


def _reason(run: Run, error: Exception) -> str:
    """Returns what a run failed by, and logs what is no sentence with the traceback."""
    if isinstance(error, OURS):
        return sentence(error)
    log.exception(run.title)
    return f"{type(error).__name__}: {error}"


def _evaluate(cli: PointwiseCLI, run: Run) -> dict[str, Any]:
    """Evaluates, writes what was measured, and returns metrics."""
    trainer: Any = cli.trainer
    module, data, read = cli.model, cli.datamodule, dict[str, Any](verbose=False)
    logged: dict[str, Any] = {}
    trained = dataset_of(trainer.train_dataloader)  # None if nothing was to be trained.
    if run.certified:
        read |= {"ckpt_path": run.folder / CHECKPOINT, "weights_only": True}
        trainer.limit_val_batches = 1.0  # 0 is for the fit.
        trainer.validate(module, data, **read)
        logged |= trainer.callback_metrics
        trainer.loggers, trainer.callbacks, notes_of(module).confidential = [], [], True
    trainer.test(module, data, **read)
    logged = {name: float(value) for name, value in (logged | trainer.callback_metrics).items()}

    def shown(name: str) -> bool:
        """Whether it is for all to see: of others the test of a requirement has samples."""
        return not run.certified or name.partition("/")[0] in (TRAIN.key, VAL.key)

    if trainer.is_global_zero:
        pooled = {
            f"{stage}/{name}": values.numpy()
            for stage, by_constraint in module.violations.items()
            for name, values in by_constraint.items()
            if shown(stage)
        }
        np.savez(run.folder / VIOLATIONS, **pooled)
        samples = samples_of(module)
        if run.certified:
            samples = pd.concat([samples, Source(TRAIN.key, trained).training_lines()])
            samples.to_parquet(run.folder / SAMPLES, index=False)
        else:
            remember_use(SHOWN, samples[samples["dataset"] != VAL.key]["unit"], run.folder)
    return {
        "metrics": {name: value for name, value in logged.items() if shown(name)},
        "bounds": bounds_of(module),
        "shared_objective": module.shared_objective,
        "shared_violation": module.shared_violation,
    }
