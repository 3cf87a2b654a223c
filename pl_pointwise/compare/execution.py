"""One run of a comparison: training, then one full pass over held-out and training data.

Its folder then holds

    report.html     the end of its training: table, curves, hardest samples
    closing.json    its table and curves, for the page of the comparison
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pandas as pd
import yaml

from pl_pointwise.cli import PointwiseCLI
from pl_pointwise.command_line.cli_errors import OURS, sentence
from pl_pointwise.data import TEST, TRAIN, VAL, dataset_of
from pl_pointwise.errors import printable
from pl_pointwise.evaluation import BEFORE
from pl_pointwise.files import write_whole
from pl_pointwise.identity.code import digest_of_code, own_code
from pl_pointwise.identity.files import digest_now, files_read
from pl_pointwise.identity.models import bases_of
from pl_pointwise.report.of_run import write_fit_page
from pl_pointwise.report.page import FILE
from pl_pointwise.report.plots import plots_of
from pl_pointwise.report.stored import FILE as CLOSING
from pl_pointwise.report.stored import store
from pl_pointwise.requirements.exported import CHECKPOINT, SAMPLES
from pl_pointwise.requirements.samples import (
    bounds_of,
    contents_of,
    samples_of,
    units_in,
)
from pl_pointwise.requirements.source import Source
from pl_pointwise.requirements.uses import SHOWN, remember_use
from pl_pointwise.task import history_of, notes_of

from .runs import RESULT, VIOLATIONS, Outcome, Run, alone_in, on_first_rank

log = logging.getLogger(__name__)


def run_all(runs: Sequence[Run]) -> list[Outcome]:
    """Runs what is not finished; returns what came of every run."""
    outcomes = list[Outcome]()
    for number, run in enumerate(runs, start=1):
        finished = run.finished
        note = " (finished before)" if finished else ""
        print(f"[{number}/{len(runs)}] {printable(run.title)}{note}", flush=True)
        # A result is not taken for one of this configuration if its file could not be written.
        failed = {} if finished else execute(run)
        outcomes.append((run, run.result() or failed))
    return outcomes


def execute(run: Run) -> dict[str, Any]:
    """Fits and tests one run; an error becomes the result."""
    result: dict[str, Any] = {"digest": run.digest}
    with alone_in(run.folder):
        try:
            _execute(run, result)
        except Exception as error:
            result["error"] = sentence(error)
            # A fault of code: where it stands is logged too.
            if not isinstance(error, OURS):
                log.exception(run.title)
                result["error"] = f"{type(error).__name__}: {error}"
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
    _clear(run)
    cli = PointwiseCLI(run.arguments, run=False)
    (run.folder / "config.yaml").write_text(
        yaml.safe_dump(cli.config_dump, sort_keys=False)
    )
    bases = bases_of(cli.config_dump.get("model"))
    code = own_code(_written_by_users(cli))
    result["read"] = {**files_read(cli.config_dump), **bases, **code}
    result["base"] = bases
    result["code"] = digest_of_code(code)
    if on_first_rank():
        _log_settings(cli, run)
    started = time.perf_counter()
    cli.trainer.fit(cli.model, cli.datamodule)
    result["fit_seconds"] = time.perf_counter() - started
    if cli.trainer.is_global_zero and cli.model.closing is not None:
        _keep_the_end(cli, run)
    if run.certified:
        cli.trainer.save_checkpoint(run.folder / CHECKPOINT, weights_only=True)
    try:
        result |= _evaluate(cli, run)
        if cli.trainer.is_global_zero:
            written = (
                [VIOLATIONS, CHECKPOINT, SAMPLES] if run.certified else [VIOLATIONS]
            )
            result["wrote"] = {name: digest_now(run.folder / name) for name in written}
            write_whole(run.folder / RESULT, json.dumps(result, indent=1))
    finally:
        cli.trainer.strategy.barrier()  # The other ranks look at the files too.


def _clear(run: Run) -> None:
    """Makes the folder of a run, without what an earlier attempt left."""
    # Another rank than the first may be here first.
    run.folder.mkdir(parents=True, exist_ok=True)
    for name in (RESULT, FILE, CLOSING):
        (run.folder / name).unlink(missing_ok=True)
    for part in run.folder.rglob("*.ckpt.part"):  # Of one that was killed.
        part.unlink(missing_ok=True)


def _log_settings(cli: PointwiseCLI, run: Run) -> None:
    """With the module's own, as TensorBoard shows the first set alone."""
    settings: dict[str, Any] = {}
    for name, value in cli.model.hparams_initial.items():
        if not name.startswith("_"):
            settings[name] = value
    for logger in cli.trainer.loggers:
        logger.log_hyperparams({**settings, "method": run.method, "seed": run.seed})


def _keep_the_end(cli: PointwiseCLI, run: Run) -> None:
    """Writes the page of the run's fit, and what the comparison's page shows of it."""
    module: Any = cli.model
    history = history_of(module)
    plots = plots_of(history.curves(), module.closing.rows, history.constraints)
    store(run.folder, module.closing, plots)
    write_fit_page(module, cli.trainer, run.folder / FILE)


def _written_by_users(cli: PointwiseCLI) -> list[Any]:
    """What may be of classes of one's own."""
    formulations = getattr(cli.model, "formulations", {}).values()
    trainer: Any = cli.trainer
    return [cli.model, cli.datamodule, *formulations, *trainer.callbacks]


def _evaluate(cli: PointwiseCLI, run: Run) -> dict[str, Any]:
    """Evaluates, writes what was measured, and returns metrics."""
    module = cli.model
    # None if nothing was to be trained.
    trained = dataset_of(cli.trainer.train_dataloader)
    metrics = _measure(cli, run)
    if cli.trainer.is_global_zero:
        _write_violations(module.violations, run)
        samples = samples_of(module)
        if run.certified:
            samples = pd.concat([samples, Source(TRAIN.key, trained).training_lines()])
            samples.to_parquet(run.folder / SAMPLES, index=False)
        else:
            # Whoever sees the tables has seen these samples: they certify nothing any more.
            shown = samples[samples["dataset"] != VAL.key].assign(dataset=TEST.key)
            remember_use(SHOWN, units_in(shown), run.folder)
    return {
        "metrics": metrics,
        "data": contents_of(module) if run.certified else {},
        "bounds": bounds_of(module),
        "shared_objective": module.shared_objective,
        "shared_violation": module.shared_violation,
    }


def _measure(cli: PointwiseCLI, run: Run) -> dict[str, float]:
    """Runs ``test``, and ``validate`` before it of a candidate; returns what is for all to see."""
    trainer: Any = cli.trainer
    options: dict[str, Any] = {"verbose": False}
    logged: dict[str, Any] = {}
    if run.certified:
        options |= {"ckpt_path": run.folder / CHECKPOINT, "weights_only": True}
        trainer.limit_val_batches = 1.0  # 0 is for the fit.
        trainer.validate(cli.model, cli.datamodule, **options)
        logged |= trainer.callback_metrics
        # What follows is the certification split: nobody may see it.
        trainer.loggers = []
        trainer.callbacks = []
        notes_of(cli.model).confidential = True
    trainer.test(cli.model, cli.datamodule, **options)
    logged |= trainer.callback_metrics
    metrics = {}
    for name, value in logged.items():
        stage = name.partition("/")[0]
        # All methods start from one model.
        if not stage.startswith(BEFORE) and _is_shown(stage, run):
            metrics[name] = float(value)
    return metrics


def _is_shown(stage: str, run: Run) -> bool:
    """Whether a data set is for all to see: of others the test of a requirement has samples."""
    return not run.certified or stage in (TRAIN.key, VAL.key)


def _write_violations(violations: Mapping[str, Mapping[str, Any]], run: Run) -> None:
    pooled = {}
    for stage, by_constraint in violations.items():
        if _is_shown(stage, run):
            for name, values in by_constraint.items():
                pooled[f"{stage}/{name}"] = values.numpy()
    np.savez(run.folder / VIOLATIONS, **pooled)
