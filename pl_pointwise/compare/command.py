"""``pl-pointwise compare``: one configuration × methods × settings × seeds, as tables and plots.

A run that is complete and whose configuration has not changed since is not run again; one that was
interrupted starts again; one that failed is a line that says why. docs/compare.md lists the files.

A run is training, then one full pass over held-out and training data. Its folder then holds

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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from lightning.pytorch.utilities.model_helpers import is_overridden
from pandas import DataFrame

from pl_pointwise.cli import PointwiseCLI
from pl_pointwise.command_line.cli_errors import OURS, CommandParser, fraction, sentence
from pl_pointwise.command_line.configs import overview
from pl_pointwise.data import TEST, TRAIN, VAL, PointwiseDataModule, dataset_of
from pl_pointwise.errors import printable
from pl_pointwise.evaluation import BEFORE
from pl_pointwise.files import write_whole
from pl_pointwise.identity.code import digest_of_code, own_code
from pl_pointwise.identity.files import digest_now, files_read
from pl_pointwise.identity.models import bases_of
from pl_pointwise.printing import Table, quieten
from pl_pointwise.report.of_run import write_fit_page
from pl_pointwise.report.page import FILE, write_if_possible
from pl_pointwise.report.plots import plots_of
from pl_pointwise.report.stored import FILE as CLOSING
from pl_pointwise.report.stored import store
from pl_pointwise.requirements.exported import CHECKPOINT, SAMPLES
from pl_pointwise.requirements.samples import (
    Source,
    bounds_of,
    contents_of,
    require_same_bounds,
    samples_of,
    units_in,
)
from pl_pointwise.requirements.uses import SHOWN, remember_use
from pl_pointwise.task import history_of, notes_of

from .certification import answer_requirements, check_requirements
from .page import page_of_comparison
from .results import PLOTS, tables, write_csv
from .results import draw as draw_plots
from .runs import (
    RESULT,
    VIOLATIONS,
    Comparison,
    Outcome,
    Run,
    alone_in,
    errors_of,
    on_first_rank,
)

log = logging.getLogger(__name__)

SPENT = (
    "Without --require the tables show the test data, which can then certify no model any more. To "
    "certify one, stop here (Ctrl-C) and give --require."
)
"""Before anything is shown: what a comparison costs that looks at the certification split."""


def main(args: Sequence[str]) -> None:
    """Runs the command; unknown options, ``--trainer.max_epochs 1`` for one, go to every run."""
    quieten()
    parser = CommandParser("compare", __doc__.split("\n")[0], overview())
    several: dict[str, Any] = {"action": "append", "default": []}
    which = "base, then what changes it; name or path"
    parser.add_argument("-c", "--config", action="append", required=True, help=which)
    which = "YAML of name: change; name or path. Without: the configuration alone"
    parser.add_argument("--methods", help=which)
    swept = "sweep model.formulation.init_args.beta=0.1,1,10; several give every combination"
    parser.add_argument("--set", metavar="PATH=V,V,…", help=swept, **several)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for runs and results")
    parser.add_argument(
        "--require",
        metavar="REQUIREMENT",
        help="what the chosen model has to meet on new inputs: 'relevance: violated <= 0.05', "
        "'over_refusal <= 0.05', 'lost(relevance) <= 0.02'; several hold together",
        **several,
    )
    parser.add_argument(
        "--confidence", type=fraction, default=0.95, help="of the certificate, the choice included"
    )
    which = "what stands above every table and plot, such as 'A trial of five steps'"
    parser.add_argument("--note", default="", help=which)
    parser.add_argument("--only", type=int, metavar="N", help="the N-th run, and no tables")
    known, overrides = parser.parse_known_args(list(args))
    seeds = [*dict.fromkeys(known.seeds)]  # Each once: a run that is counted twice shows no spread.
    what = known.config, known.output, known.methods, seeds, known.set, overrides
    comparison = Comparison(*what, known.require, known.confidence)
    if known.only is not None:
        if not 1 <= known.only <= len(comparison.runs):
            parser.error(f"--only {known.only}: this comparison has {len(comparison.runs)} runs.")
        [(run, result)] = _run(comparison.runs[known.only - 1 : known.only])
        if "error" in result:
            raise SystemExit(f"{run.title} failed: {result['error']}")
        return
    start = check_methods(comparison)
    if on_first_rank():
        count = len(comparison.runs)
        runs = "1 run" if count == 1 else f"{count:,} runs"
        print(f"{runs}: of each method, setting and seed one; --only N is the N-th.", flush=True)
    if failed := compare(comparison, start, known.note):
        runs = "1 run" if len(failed) == 1 else f"{len(failed)} runs"
        raise SystemExit(f"{runs} failed: {', '.join(failed)}; see the table.")


def check_methods(comparison: Comparison) -> DataFrame | None:
    """Builds every method that has a run to come, and refuses the first that cannot run.

    Returns what the starting model measures, if something is required.
    """
    runs = comparison.runs
    results = {run.title: run.result() or {} for run in runs}
    bounds = {title: found["bounds"] for title, found in results.items() if "bounds" in found}
    shows_splits = False
    for run in {run.method: run for run in runs if not run.finished}.values():
        gc.collect()  # The next model is loaded.
        with errors_of(run.method):
            cli = PointwiseCLI(run.arguments, run=False)
            _check_data(cli)
            bounds[run.title] = bounds_of(cli.model)
            shows_splits |= isinstance(cli.datamodule, PointwiseDataModule)
            del cli
    if not comparison.requirements:
        if shows_splits and on_first_rank():
            print(SPENT, flush=True)
        return None
    require_same_bounds(bounds)
    return check_requirements(comparison)


def _check_data(cli: PointwiseCLI) -> None:
    """That files are there, of the data module's options ``…_file``, and test data."""
    arguments = (cli.config_dump.get("data") or {}).get("init_args") or {}
    for name, path in arguments.items():
        local = name.endswith("_file") and isinstance(path, str) and "://" not in path
        if local and not Path(path).expanduser().exists():
            raise FileNotFoundError(f"data.{name}: there is no file {path}.")
    source: Any = cli.datamodule or cli.model
    if not is_overridden("test_dataloader", source):
        raise ValueError(
            f"{type(source).__name__} has no test_dataloader(), and every method is measured by "
            "`test`. Define it."
        )


def compare(comparison: Comparison, start: DataFrame | None, note: str = "") -> list[str]:
    """Runs what is left, then writes tables and plots; returns what failed.

    start: of :func:`check_methods`.
    note: stands above the tables and in the plots.
    """
    gc.collect()  # The starting model.
    output = comparison.output
    with alone_in(output):
        outcomes = _run(comparison.runs)
        if on_first_rank():
            found = tables(outcomes, note)
            write_csv(outcomes, output / "comparison.csv")
            text = "\n".join(table.markdown() for table in found)
            (output / "comparison.md").write_text(text, encoding="utf-8")
            print(f"\n{found[0].markdown()}", flush=True)
            if done := [outcome for outcome in outcomes if "error" not in outcome[1]]:
                draw_plots(done, output, note)
            drawn = [name for name in PLOTS if (output / name).is_file()]
            print(f"Written to {output}: {', '.join(['comparison.md', 'comparison.csv', *drawn])}")
            _write_page(outcomes, found, output, note)
        if start is not None:
            answer = answer_requirements(comparison, outcomes, start)
            if answer is not None:  # On the first rank.
                _write_page(outcomes, [answer, *found], output, note)
    return [f"{run.method} (seed {run.seed})" for run, result in outcomes if "error" in result]


def _write_page(
    outcomes: Sequence[Outcome], found: Sequence[Table], output: Path, note: str
) -> None:
    path = output / FILE
    path.unlink(missing_ok=True)  # Of an earlier attempt.
    page = write_if_possible(path, lambda: page_of_comparison(outcomes, found, output, note))
    if page is not None:
        print(f"Tables, plots and a drawer for each run: open {page}")


def _run(runs: Sequence[Run]) -> list[Outcome]:
    """Runs what is not finished; returns what came of every run."""
    outcomes = list[Outcome]()
    for number, run in enumerate(runs, start=1):
        finished = run.finished
        note = " (finished before)" if finished else ""
        print(f"[{number}/{len(runs)}] {printable(run.title)}{note}", flush=True)
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
    run.folder.mkdir(parents=True, exist_ok=True)  # Another rank than the first may be here first.
    for name in (RESULT, FILE, CLOSING):  # Of an earlier attempt.
        (run.folder / name).unlink(missing_ok=True)
    for part in run.folder.rglob("*.ckpt.part"):  # Of one that was killed.
        part.unlink(missing_ok=True)
    cli = PointwiseCLI(run.arguments, run=False)
    (run.folder / "config.yaml").write_text(yaml.safe_dump(cli.config_dump, sort_keys=False))
    bases, code = bases_of(cli.config_dump.get("model")), own_code(_written_by_users(cli))
    result["read"] = {**files_read(cli.config_dump), **bases, **code}
    result |= {"base": bases, "code": digest_of_code(code)}
    # With the module's own, as TensorBoard shows the first set alone.
    of_module = {n: v for n, v in cli.model.hparams_initial.items() if not n.startswith("_")}
    for logger in cli.trainer.loggers if on_first_rank() else ():
        logger.log_hyperparams({**of_module, "method": run.method, "seed": run.seed})
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
            written = (VIOLATIONS, *((CHECKPOINT, SAMPLES) if run.certified else ()))
            result["wrote"] = {name: digest_now(run.folder / name) for name in written}
            write_whole(run.folder / RESULT, json.dumps(result, indent=1))
    finally:
        cli.trainer.strategy.barrier()  # The other ranks look at the files too.


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
    logged = {
        name: float(value)
        for name, value in (logged | trainer.callback_metrics).items()
        if not name.startswith(BEFORE)  # All methods start from one model.
    }

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
            shown_data = samples[samples["dataset"] != VAL.key].assign(dataset=TEST.key)
            remember_use(SHOWN, units_in(shown_data), run.folder)
    return {
        "metrics": {name: value for name, value in logged.items() if shown(name)},
        "data": contents_of(module) if run.certified else {},
        "bounds": bounds_of(module),
        "shared_objective": module.shared_objective,
        "shared_violation": module.shared_violation,
    }
