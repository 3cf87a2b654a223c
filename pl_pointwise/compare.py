"""``pl-pointwise compare``: one configuration × rows × seeds, into one table and one picture.

A row is a method: its name and what it changes. A rows file is YAML, name → overlay, where an
overlay is a mapping merged over the configuration (``model: {init_args: {tolerance: 3}}``), the
name or path of another configuration, or a list of such.

Every run is a fit, then one full pass over held-out and training data with ``test``, all judged by
the same evaluation tolerance. Its folder, ``runs/<row>/seed-<s>/``, is complete once it holds
``result.json``; a run whose configuration has not changed since is not run again.
"""

from __future__ import annotations

import argparse
import csv
import gc
import hashlib
import json
import logging
import math
import re
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from transformers.utils.logging import disable_progress_bar

from .cli import PointwiseCLI
from .configs import config_path
from .figures import violation_cdfs

log = logging.getLogger(__name__)

STAGES = ("test", "train")
"""Held-out first, then the training data, each one full pass after the fit. Tasks may add more."""


@dataclass(frozen=True)
class Run:
    """One row at one seed."""

    row: str
    seed: int
    folder: Path
    arguments: list[str]
    digest: str

    def result(self) -> dict[str, Any] | None:
        """What a finished run of this very configuration left behind."""
        path = self.folder / "result.json"
        if not path.is_file():
            return None
        result: dict[str, Any] = json.loads(path.read_text())
        return result if result.get("digest") == self.digest else None

    def violations(self) -> dict[str, np.ndarray]:
        """Held-out and training violations by ``stage/constraint``, (n,) each."""
        with np.load(self.folder / "violations.npz") as stored:
            return {name: stored[name] for name in stored.files}


def main(args: Sequence[str]) -> None:
    """The command; unknown options, ``--trainer.max_epochs 1`` for one, go to every run."""
    parser = argparse.ArgumentParser(
        prog="pl-pointwise compare", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "-c", "--config", action="append", required=True, help="base, then overlays; name or path"
    )
    parser.add_argument("--rows", required=True, help="YAML of name: overlay; name or path")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for runs and results")
    known, overrides = parser.parse_known_args(list(args))
    failed = compare(known.config, known.rows, known.seeds, known.output, overrides)
    if failed:
        raise SystemExit(f"{len(failed)} runs failed: {', '.join(failed)}; see the table.")


def compare(
    configs: Sequence[str],
    rows: str,
    seeds: Sequence[int],
    output: Path,
    overrides: Sequence[str] = (),
) -> list[str]:
    """Runs what has not been run, writes ``comparison.csv``, ``comparison.md`` and ``cdf.png``.

    Returns: the names of the runs that failed; the table says why.
    """
    _quieten()
    planned = plan(configs, rows, seeds, output, overrides)
    results: list[tuple[Run, dict[str, Any]]] = []
    for number, run in enumerate(planned, start=1):
        finished = run.result()
        note = " (finished before)" if finished else ""
        print(f"[{number}/{len(planned)}] {run.row} · seed {run.seed}{note}", flush=True)
        results.append((run, finished or execute(run)))
    write_csv(results, output / "comparison.csv")
    table = markdown(results)
    (output / "comparison.md").write_text(table)
    finished_runs = [run for run, result in results if "error" not in result]
    if finished_runs:
        violation_cdfs(_pooled(finished_runs), output / "cdf.png")
    print(f"\n{table}\nWritten to {output}: comparison.md, comparison.csv, cdf.png, runs/")
    return [f"{run.row} (seed {run.seed})" for run, result in results if "error" in result]


def plan(
    configs: Sequence[str],
    rows: str,
    seeds: Sequence[int],
    output: Path,
    overrides: Sequence[str] = (),
) -> list[Run]:
    """Every run of a comparison, in the rows file's order.

    Raises:
        ValueError: the rows file is not a mapping of names to overlays.
    """
    bases = [config_path(config) for config in configs]
    overlays = yaml.safe_load(Path(config_path(rows)).read_text())
    if not isinstance(overlays, Mapping) or not overlays:
        raise ValueError(f"{rows}: expected a mapping of row names to overlays.")
    runs = []
    for row, overlay in overlays.items():
        parts = overlay if isinstance(overlay, list) else [overlay]
        for seed in seeds:
            folder = output / "runs" / re.sub(r"[^\w.=-]+", "-", str(row)).strip("-")
            folder = folder / f"seed-{seed}"
            folder.mkdir(parents=True, exist_ok=True)
            files = list(bases)
            for position, part in enumerate(parts):
                if isinstance(part, str):
                    files.append(config_path(part))
                elif isinstance(part, Mapping):
                    path = folder / f"overlay-{position}.yaml"
                    path.write_text(yaml.safe_dump(dict(part), sort_keys=False))
                    files.append(str(path))
                elif part is not None:
                    raise ValueError(f"{rows}: row {row!r} holds {part!r}, not an overlay.")
            texts = [Path(file).read_text() for file in files]
            digest = hashlib.sha256(json.dumps([texts, list(overrides), seed]).encode())
            arguments = [word for file in files for word in ("--config", file)]
            arguments += [*overrides, "--seed_everything", str(seed)]
            arguments += ["--trainer.default_root_dir", str(folder)]
            runs.append(Run(str(row), seed, folder, arguments, digest.hexdigest()))
    return runs


def execute(run: Run) -> dict[str, Any]:
    """Fits and tests one run; an error becomes part of the result instead of ending the rest."""
    result: dict[str, Any] = {"digest": run.digest}
    try:
        cli = PointwiseCLI(run.arguments, run=False)
        started = time.perf_counter()
        cli.trainer.fit(cli.model, cli.datamodule)
        result["fit_seconds"] = time.perf_counter() - started
        cli.trainer.test(cli.model, cli.datamodule, verbose=False)
        metrics = cli.trainer.callback_metrics
        result["metrics"] = {name: float(value) for name, value in metrics.items()}
        arrays = {
            f"{stage}/{name}": values.numpy()
            for stage, by_constraint in cli.model.violations.items()
            for name, values in by_constraint.items()
        }
        np.savez(run.folder / "violations.npz", **arrays)
        (run.folder / "result.json").write_text(json.dumps(result, indent=1))
    except Exception as error:
        log.exception("%s, seed %s", run.row, run.seed)
        result["error"] = f"{type(error).__name__}: {error}"
    finally:
        gc.collect()
    return result


def _quieten() -> None:
    """Leaves the progress bars and this package's own messages; says the rest once, not per run."""
    for name in ("lightning.pytorch", "lightning.fabric", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    disable_progress_bar()
    for message in (".*does not have many workers.*", ".*isinstance.treespec, LeafSpec.*"):
        warnings.filterwarnings("ignore", message=message)


def write_csv(results: Sequence[tuple[Run, dict[str, Any]]], path: Path) -> None:
    """A row per run: row, seed, seconds of the fit, every metric, and the error if it failed."""
    names = _metric_names(results)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "seed", "fit_seconds", *names, "error"])
        for run, result in results:
            metrics = result.get("metrics", {})
            cells = [metrics.get(name, "") for name in names]
            seconds = result.get("fit_seconds", "")
            writer.writerow([run.row, run.seed, seconds, *cells, result.get("error", "")])


def markdown(results: Sequence[tuple[Run, dict[str, Any]]]) -> str:
    """The table: a line per row, "held-out · train" per metric, mean ± std over seeds.

    Of further data sets that ``test`` ran on, the task's own metrics follow by ``stage/metric``.
    """
    names = _metric_names(results)
    columns: dict[str, list[str]] = {}
    for name in names:
        stage, _, metric = name.partition("/")
        if stage in STAGES:
            columns.setdefault(metric, []).append(name)
        elif "/" not in metric:
            columns[name] = [name]
    seeds = len({run.seed for run, _ in results})
    lines = [
        "Each cell: held-out · train, one full pass after the fit; "
        + (f"mean ± std over {seeds} seeds" if seeds > 1 else "1 seed")
        + ". A violation ≤ 0 is satisfied.",
        "",
        "| method | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for row in dict.fromkeys(run.row for run, _ in results):
        of_row = [result for run, result in results if run.row == row]
        errors = [result["error"] for result in of_row if "error" in result]
        done = [result["metrics"] for result in of_row if "error" not in result]
        if not done:
            lines.append(f"| {row} | failed: {_one_line(errors[0])} |" + " |" * (len(columns) - 1))
            continue
        cells = []
        for in_column in columns.values():
            values = [[m.get(name, math.nan) for m in done] for name in in_column]
            cells.append(" · ".join(_mean_and_std(each) for each in values))
        label = row if not errors else f"{row} ({len(errors)} failed: {_one_line(errors[0])})"
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _metric_names(results: Sequence[tuple[Run, dict[str, Any]]]) -> list[str]:
    return list(dict.fromkeys(n for _, result in results for n in result.get("metrics", {})))


def _mean_and_std(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):.3g}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.2g}"


def _one_line(error: str) -> str:
    return " ".join(error.split()).replace("|", "/")[:200]


def _pooled(runs: Sequence[Run]) -> dict[str, dict[str, np.ndarray]]:
    """Violations by ``stage/constraint`` and row, over all seeds of the row."""
    gathered: dict[str, dict[str, list[np.ndarray]]] = {}
    for run in runs:
        for name, values in run.violations().items():
            gathered.setdefault(name, {}).setdefault(run.row, []).append(values)
    return {
        name: {row: np.concatenate(parts) for row, parts in by_row.items()}
        for name, by_row in gathered.items()
    }
