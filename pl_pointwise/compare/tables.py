"""A comparison's results as tables: metrics, the gap to training data, certificates, costs."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pandas import DataFrame, Series

from .runs import Outcome

HELD_OUT = ("test", "val")
"""Stages of the held-out results: "val", the selection split, where there are none of "test".

That is so where a requirement is to be certified. Tasks may test on further data sets.
"""

OF_MULTIPLIERS = {"share": "λ's share of the pull", "overshoot": "overshoot"}
"""What is shown of multipliers by title: the metric ``dual/{constraint}/{…}`` that has it."""

COSTS = {
    "seconds per epoch": ("epoch_seconds", 1),
    "host memory, GiB": ("host_bytes", 2**30),
    "GPU memory, GiB": ("gpu_bytes", 2**30),
}
"""Costs of one run by title: the column that has it, and the column's value that is one unit."""

CERTIFICATE_COLUMNS = "method,seed,constraint,samples,share violated,bound,band,CVaR95".split(",")


@dataclass(frozen=True)
class Table:
    """``cells`` as text, one line per method or model; ``note`` says what they are."""

    title: str
    note: str
    cells: DataFrame

    def markdown(self) -> str:
        lines = [list(self.cells), ["---"] * self.cells.shape[1], *self.cells.to_numpy().tolist()]
        body = "\n".join("| " + " | ".join(map(_one_line, line)) + " |" for line in lines)
        return f"## {self.title}\n\n{self.note}\n\n{body}\n"


def run_lines(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Returns for every run method, seed, costs, every metric, and the error if it failed."""
    lines = []
    for run, result in outcomes:
        costs = {name: result.get(name) for name in ("fit_seconds", "host_bytes", "gpu_bytes")}
        seconds = result.get("epoch_seconds")
        costs["epoch_seconds"] = statistics.fmean(seconds) if seconds else None
        metrics = result.get("metrics", {})
        error = str(result.get("error", ""))
        lines.append({"method": run.method, "seed": run.seed, **costs, **metrics, "error": error})
    return lines


def metric_names(outcomes: Sequence[Outcome]) -> list[str]:
    """Returns every metric that any run has, in the order they were logged."""
    return list(dict.fromkeys(n for _, result in outcomes for n in result.get("metrics", {})))


def write_csv(outcomes: Sequence[Outcome], path: Path) -> None:
    """Writes a line per run. Not by pandas, which takes a NaN for a missing metric."""
    lines = run_lines(outcomes)
    names = dict.fromkeys(name for line in lines for name in line if name != "error")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*names, "error"], restval="")
        writer.writeheader()
        writer.writerows(lines)


def tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """Returns every table there is something to say in."""
    runs, names = DataFrame(run_lines(outcomes)), metric_names(outcomes)
    found = [
        results_table(runs, names),
        gap_table(runs, names),
        multiplier_table(runs, names),
        certificate_table(outcomes),
        cost_table(runs),
    ]
    return [table for table in found if len(table.cells)]


def results_table(runs: DataFrame, names: Sequence[str]) -> Table:
    """Returns a line per method, "held-out · train" per metric, mean ± std over seeds.

    Of further data sets that ``test`` ran on, the task's own metrics follow by ``stage/metric``.
    """
    done = runs[runs["error"] == ""]
    shown = (held_out_stage(names), "train")
    columns: dict[str, list[str]] = {}
    for name in names:
        stage, _, metric = name.partition("/")
        if stage in shown:
            columns.setdefault(metric, []).append(name)
        elif "/" not in metric and stage not in HELD_OUT:
            columns[name] = [name]
    methods = runs["method"].unique()
    cells = DataFrame("", index=methods, columns=[*(columns or ["error"])])
    for method, of_method in done.groupby("method", sort=False):
        for column, parts in columns.items():
            cells.loc[method, column] = " · ".join(mean_and_std(of_method[n]) for n in parts)
    labels = {method: method for method in methods}
    for method, errors in runs[runs["error"] != ""].groupby("method", sort=False)["error"]:
        why = _one_line(errors.iloc[0])
        if method in set(done["method"]):
            labels[method] = f"{method} ({len(errors)} failed: {why})"
        else:
            cells.loc[method, cells.columns[0]] = f"failed: {why}"
    cells.insert(0, "method", list(labels.values()))
    note = (
        f"Each cell: held-out · train, one full pass after the fit; {_seeds(runs)}. "
        "A violation ≤ 0 is satisfied."
    )
    return Table("Results", note, cells)


def gap_table(runs: DataFrame, names: Sequence[str]) -> Table:
    """Returns held-out minus train, of the objective and of every violation statistic."""
    done = runs[runs["error"] == ""]
    held_out = held_out_stage(names)
    metrics = [n.removeprefix(f"{held_out}/") for n in names if n.startswith(f"{held_out}/")]
    shown = [m for m in metrics if f"train/{m}" in names and (m == "objective" or "/" in m)]
    gaps = DataFrame({m: done[f"{held_out}/{m}"] - done[f"train/{m}"] for m in shown})
    note = (
        f"Each cell: held-out minus train, {_seeds(runs)}. Far above 0, only the training "
        "data satisfy the constraint."
    )
    return Table("The gap between held-out and training data", note, _by_method(gaps, done))


def held_out_stage(names: Sequence[str]) -> str:
    """Returns which stage the held-out results are of, from names that start with a stage."""
    stages = {name.partition("/")[0] for name in names}
    return next((stage for stage in HELD_OUT if stage in stages), HELD_OUT[0])


def multiplier_table(runs: DataFrame, names: Sequence[str]) -> Table:
    """Returns λ's share of the pull and its overshoot by constraint, a line per method.

    "–" for a method without multipliers, or whose last epoch pulled nothing.
    """
    done = runs[runs["error"] == ""]
    shown = {}
    for name in names:
        stage, _, metric = name.partition("/")
        constraint, _, key = metric.rpartition("/")
        if stage == "dual" and key in OF_MULTIPLIERS:
            shown[f"{constraint}: {OF_MULTIPLIERS[key]}"] = done[name].astype(float)
    note = (
        f"Each cell: of the training data, in the last epoch, {_seeds(runs)}. λ's share of the "
        "pull λ + 2αv: near 0 the run was that of a fixed penalty. Overshoot: the share of the "
        "pull that falls on samples that are satisfied already. – without multipliers, or "
        "without any pull."
    )

    def summary(values: Series) -> str:
        return mean_and_std(values.dropna()) or "–"

    return Table("Multipliers", note, _by_method(DataFrame(shown), done, summary))


def certificate_table(outcomes: Sequence[Outcome]) -> Table:
    """Returns what every trained model's held-out violations certify, one line per model."""
    lines = []
    for run, result in outcomes:
        for constraint, found in result.get("certificates", {}).items():
            if "error" in found:
                cells = ["", "", f"none: {found['error']}", "", ""]
            else:
                shown = [f"{found[name]:.3g}" for name in ("share", "bound", "dkw", "cvar")]
                low, high = found["interval"]
                cells = [str(found["n"]), *shown[:3], f"{shown[3]} ({low:.3g} to {high:.3g})"]
            lines.append([run.method, str(run.seed), constraint, *cells])
    note = (
        "Of each trained model, by its worst element of every held-out sample, at 95 % confidence: "
        "an upper bound on the probability that a new input violates (Clopper–Pearson), the half "
        "width of the band around the CDF (Dvoretzky–Kiefer–Wolfowitz), CVaR95 with its bootstrap "
        "interval, which is approximate. They hold one at a time, for independent held-out samples "
        "that chose neither model nor hyper-parameters: picking the best line here breaks that."
    )
    return Table("Certificates", note, DataFrame(lines, columns=CERTIFICATE_COLUMNS))


def cost_table(runs: DataFrame) -> Table:
    """Returns seconds per training epoch and peak memory, of what was measured."""
    note = (
        f"{_seeds(runs).capitalize()}. An epoch is training alone, validation left out; the "
        "first includes warming up. Memory is the peak of the fit; of the host only for runs in a "
        "process of their own (`--jobs`)."
    )
    measured = costs(runs).dropna(how="all")
    cells = _by_method(measured, runs, lambda values: mean_and_std(values.dropna()))
    return Table("Time and memory", note, cells)


def costs(runs: DataFrame) -> DataFrame:
    """Returns the costs of every run by title, those that no run has left out."""
    found = {title: runs[column].astype(float) / unit for title, (column, unit) in COSTS.items()}
    return DataFrame(found).dropna(axis=1, how="all")


def mean_and_std(values: Series) -> str:
    """Returns "mean ± std" with the sample's standard deviation, the one value, or "" of none.

    A NaN makes both NaN: a method that failed at one seed must not look as if it had not.
    """
    numbers = values.to_numpy(float)
    if not len(numbers):
        return ""
    mean = f"{numbers.mean():.3g}"
    return mean if len(numbers) == 1 else f"{mean} ± {np.std(numbers, ddof=1):.2g}"


def _by_method(
    values: DataFrame, runs: DataFrame, summary: Callable[[Series], str] = mean_and_std
) -> DataFrame:
    """Returns the summary over the seeds of every column; ``values`` has the runs' index."""
    if values.empty:
        return DataFrame()
    methods = runs["method"].loc[values.index]
    return values.groupby(methods, sort=False).agg(summary).reset_index()


def _seeds(runs: DataFrame) -> str:
    seeds = runs["seed"].nunique()
    return f"mean ± std over {seeds} seeds" if seeds > 1 else "1 seed"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:200]
