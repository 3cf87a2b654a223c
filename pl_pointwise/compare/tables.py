"""A comparison's results as tables: the figures, the gap to training data, certificates, costs."""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .runs import Run

Outcome = tuple[Run, Mapping[str, Any]]
"""A run and its result, as ``result.json`` holds it."""

STAGES = ("test", "train")
"""Held-out first, then the training data, each one full pass after the fit. Tasks may add more."""

GIB = 2**30


@dataclass(frozen=True)
class Table:
    """Cells as text; ``note`` says what they are."""

    title: str
    note: str
    header: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        cells = [[_one_line(cell) for cell in line] for line in lines]
        body = "\n".join("| " + " | ".join(line) + " |" for line in cells)
        return f"## {self.title}\n\n{self.note}\n\n{body}\n"


def tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """Every table there is something to say in."""
    found = [
        results_table(outcomes),
        gap_table(outcomes),
        certificate_table(outcomes),
        cost_table(outcomes),
    ]
    return [table for table in found if table.rows]


def results_table(outcomes: Sequence[Outcome]) -> Table:
    """A line per row, "held-out · train" per metric, mean ± std over seeds.

    Of further data sets that ``test`` ran on, the task's own metrics follow by ``stage/metric``.
    """
    columns: dict[str, list[str]] = {}
    for name in metric_names(outcomes):
        stage, _, metric = name.partition("/")
        if stage in STAGES:
            columns.setdefault(metric, []).append(name)
        elif "/" not in metric:
            columns[name] = [name]
    lines = []
    for row, results in by_row(outcomes).items():
        errors = [str(result["error"]) for result in results if "error" in result]
        done = [result["metrics"] for result in results if "error" not in result]
        if not done:
            blank = [""] * (len(columns) - 1)
            lines.append([row, f"failed: {_one_line(errors[0])}", *blank])
            continue
        cells = [
            " · ".join(mean_and_std([m.get(name, math.nan) for m in done]) for name in in_column)
            for in_column in columns.values()
        ]
        failed = f" ({len(errors)} failed: {_one_line(errors[0])})" if errors else ""
        lines.append([row + failed, *cells])
    note = (
        f"Each cell: held-out · train, one full pass after the fit; {_seeds(outcomes)}. "
        "A violation ≤ 0 is satisfied."
    )
    return Table("Results", note, ["method", *(columns or ["error"])], lines)


def gap_table(outcomes: Sequence[Outcome]) -> Table:
    """Held-out minus train, of the objective and of every violation statistic."""
    names = metric_names(outcomes)
    both = [
        name.removeprefix("test/")
        for name in names
        if name.startswith("test/") and f"train/{name.removeprefix('test/')}" in names
    ]
    shown = [name for name in both if name == "objective" or "/" in name]
    lines = []
    for row, results in by_row(outcomes).items():
        done = [result["metrics"] for result in results if "error" not in result]
        if done and shown:
            gaps = [[_gap(metrics, name) for metrics in done] for name in shown]
            lines.append([row, *map(mean_and_std, gaps)])
    note = (
        f"Each cell: held-out minus train, {_seeds(outcomes)}. Far above 0, only the training "
        "data satisfy the constraint."
    )
    return Table("The gap between held-out and training data", note, ["method", *shown], lines)


def certificate_table(outcomes: Sequence[Outcome]) -> Table:
    """What every trained model's held-out violations certify, one line per model."""
    lines = []
    for run, result in outcomes:
        for constraint, certificate in result.get("certificates", {}).items():
            start = [run.row, str(run.seed), constraint]
            if "error" in certificate:
                lines.append([*start, "", "", f"none: {certificate['error']}", "", ""])
                continue
            low, high = certificate["interval"]
            cells = [certificate["share"], certificate["bound"], certificate["dkw"]]
            lines.append(
                [
                    *start,
                    str(certificate["n"]),
                    *(f"{cell:.3g}" for cell in cells),
                    f"{certificate['cvar']:.3g} ({low:.3g} to {high:.3g})",
                ]
            )
    note = (
        "Of each trained model, by its worst element of every held-out sample, at 95 % confidence: "
        "an upper bound on the probability that a new input violates (Clopper–Pearson), the half "
        "width of the band around the CDF (Dvoretzky–Kiefer–Wolfowitz), CVaR95 with its bootstrap "
        "interval, which is approximate. They hold one at a time, for independent held-out samples "
        "that chose neither model nor hyper-parameters: picking the best line here breaks that."
    )
    header = [
        "method",
        "seed",
        "constraint",
        "samples",
        "share violated",
        "bound",
        "band",
        "CVaR95",
    ]
    return Table("Certificates", note, header, lines)


def cost_table(outcomes: Sequence[Outcome]) -> Table:
    """Seconds per training epoch and peak memory, of what was measured."""
    columns = {name: cost for name, cost in COSTS.items() if any(cost(r) for _, r in outcomes)}
    lines = []
    for row, results in by_row(outcomes).items():
        found = [[value for r in results for value in cost(r)] for cost in columns.values()]
        if any(found):
            lines.append([row, *(mean_and_std(values) if values else "" for values in found)])
    note = (
        f"{_seeds(outcomes).capitalize()}. An epoch is training alone, validation left out; the "
        "first includes warming up. Memory is the peak of the fit; of the host only for runs in a "
        "process of their own (`--jobs`)."
    )
    return Table("Time and memory", note, ["method", *columns], lines)


COSTS: dict[str, Callable[[Mapping[str, Any]], list[float]]] = {
    "seconds per epoch": lambda result: (
        [statistics.fmean(result["epoch_seconds"])] if result.get("epoch_seconds") else []
    ),
    "host memory, GiB": lambda result: (
        [result["host_bytes"] / GIB] if result.get("host_bytes") else []
    ),
    "GPU memory, GiB": lambda result: (
        [result["gpu_bytes"] / GIB] if result.get("gpu_bytes") else []
    ),
}
"""Costs of one run by name, from its result: one value, or none where it was not measured."""


def write_csv(outcomes: Sequence[Outcome], path: Path) -> None:
    """A line per run: row, seed, costs, every metric, and the error if it failed."""
    names = metric_names(outcomes)
    costs = {"fit_seconds": "fit_seconds", "host_bytes": "host_bytes", "gpu_bytes": "gpu_bytes"}
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "seed", *costs, "epoch_seconds", *names, "error"])
        for run, result in outcomes:
            metrics = result.get("metrics", {})
            epoch = COSTS["seconds per epoch"](result)
            writer.writerow(
                [
                    run.row,
                    run.seed,
                    *(_blank(result.get(name)) for name in costs),
                    epoch[0] if epoch else "",
                    *(metrics.get(name, "") for name in names),
                    result.get("error", ""),
                ]
            )


def metric_names(outcomes: Sequence[Outcome]) -> list[str]:
    """Every metric that any run has, in the order they were logged."""
    return list(dict.fromkeys(n for _, result in outcomes for n in result.get("metrics", {})))


def by_row(outcomes: Sequence[Outcome]) -> dict[str, list[Mapping[str, Any]]]:
    """The results of every row, over its seeds."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for run, result in outcomes:
        found.setdefault(run.row, []).append(result)
    return found


def family(row: str) -> tuple[str, str]:
    """A row's name cut into method and setting: rows of one method get one colour.

    >>> family("penalty 0.1"), family("pointwise, alpha=1, beta=3"), family("relevance only")
    (('penalty', '0.1'), ('pointwise', 'alpha=1, beta=3'), ('relevance only', ''))
    """
    found = re.fullmatch(r"(.*?)[, ]+((?:\S+=\S+(?:, )?)+|[-+]?[\d.]+(?:e[-+]?\d+)?)", row)
    return (found[1], found[2]) if found else (row, "")


def mean_and_std(values: Sequence[float]) -> str:
    """ "mean ± std" with the sample's standard deviation, or the one value."""
    mean = f"{statistics.fmean(values):.3g}"
    # Not statistics.stdev, which has no answer to a NaN.
    return mean if len(values) == 1 else f"{mean} ± {float(np.std(values, ddof=1)):.2g}"


def _gap(metrics: Mapping[str, float], name: str) -> float:
    return metrics.get(f"test/{name}", math.nan) - metrics.get(f"train/{name}", math.nan)


def _seeds(outcomes: Sequence[Outcome]) -> str:
    seeds = len({run.seed for run, _ in outcomes})
    return f"mean ± std over {seeds} seeds" if seeds > 1 else "1 seed"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:200]


def _blank(value: Any) -> Any:
    return "" if value is None else value
