"""What a comparison's pictures show: values out of the results, by picture and row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import plots as figures
from .plots import Axis
from .runs import Run
from .tables import COSTS, Outcome, by_row, family, metric_names

PARETO = ("test/objective", "test/*/cvar95")
"""The metrics of the Pareto picture if none are named; ``*`` is the first constraint."""

PICTURES = {
    "cdf.png": "Violations, held-out beside train, all seeds together",
    "cdf_by_method.png": "Held-out violations by method, with the 95 % band around the CDF",
    "pareto.png": "Two metrics against each other, with the frontier",
    "gap.png": "What is lost between training and held-out data",
    "categories.png": "Metrics by category",
    "costs.png": "Time and memory",
}
"""Every picture by file, and what it shows."""


class UnknownMetricError(ValueError):
    """A metric was named that no run has."""


def draw(done: Sequence[Outcome], output: Path, axes: Sequence[str]) -> list[str]:
    """Draws every picture there is something for, and removes the others from an earlier time.

    done: the runs that did not fail.
    axes: metrics of the Pareto picture; ``METRIC:max`` or ``:min`` says which end is better.
    Returns: the names of the files.

    Raises:
        UnknownMetricError: in ``axes``; the other pictures are there by then.
    """
    for name in PICTURES:
        (output / name).unlink(missing_ok=True)
    runs = [run for run, _ in done]
    costs = {cost: _by_row(done, of_run) for cost, of_run in COSTS.items()}
    pictures: list[tuple[str, Callable[[Any, Path], None], Mapping[str, Any]]] = [
        ("cdf.png", figures.violation_cdfs, pooled(runs)),
        ("cdf_by_method.png", figures.cdf_panels, worst(runs)),
        ("gap.png", figures.gaps, gaps(done)),
        ("categories.png", figures.category_bars, categories(done)),
        ("costs.png", figures.costs, {cost: found for cost, found in costs.items() if found}),
    ]
    for name, function, values in pictures:
        if values:
            function(values, output / name)
    chosen = [_axis(name, done) for name in axes]
    points = pareto_points(done, chosen)
    if points:
        families = {row: family(row) for row in points}
        figures.pareto(points, families, (chosen[0], chosen[1]), output / "pareto.png")
    return [name for name in PICTURES if (output / name).is_file()]


def pooled(runs: Sequence[Run]) -> dict[str, dict[str, np.ndarray]]:
    """Violations by ``stage/constraint`` and row, over all seeds of the row."""
    gathered: dict[str, dict[str, list[np.ndarray]]] = {}
    for run in runs:
        for name, values in run.violations().items():
            gathered.setdefault(name, {}).setdefault(run.row, []).append(values)
    return {
        name: {row: np.concatenate(parts) for row, parts in of_row.items()}
        for name, of_row in gathered.items()
    }


def worst(runs: Sequence[Run]) -> dict[str, dict[str, np.ndarray]]:
    """Worst held-out violations by constraint and row, of the row's first seed."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for run in runs:
        for constraint, values in run.worst().items():
            found.setdefault(constraint, {}).setdefault(run.row, values)
    return found


def pareto_points(
    done: Sequence[Outcome], axes: Sequence[Axis]
) -> dict[str, tuple[list[float], list[float]]]:
    """x and y of every seed by row, of the runs that have both."""
    points: dict[str, tuple[list[float], list[float]]] = {}
    for run, result in done:
        x, y = (result["metrics"].get(axis.name) for axis in axes)
        if x is not None and y is not None:
            xs, ys = points.setdefault(run.row, ([], []))
            xs.append(x)
            ys.append(y)
    return points


def _axis(name: str, done: Sequence[Outcome]) -> Axis:
    """
    Raises:
        UnknownMetricError: no run has that metric.
    """
    metric, _, better = name.partition(":")
    known = metric_names(done)
    if "*" in metric:
        start, _, end = metric.partition("*")
        metric = next((n for n in known if n.startswith(start) and n.endswith(end)), metric)
    if metric not in known or better not in ("", "max", "min"):
        raise UnknownMetricError(
            f"--pareto {name}: no run has that metric; choose two of {', '.join(known)}. "
            "Each may end in :max or :min."
        )
    said: dict[str, bool] = {}
    for _, result in done:
        said |= result.get("higher_is_better", {})
    higher = better == "max" if better else said.get(metric.partition("/")[2], False)
    return Axis(metric, higher)


def gaps(done: Sequence[Outcome]) -> dict[str, dict[str, tuple[float, float]]]:
    """(train, held-out) means of CVaR95 and share violated, by metric and row."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for name in metric_names(done):
        metric = name.removeprefix("train/")
        if metric != name and metric.endswith(("/cvar95", "/violated")):
            train, held_out = (_metric(done, f"{stage}/{metric}") for stage in ("train", "test"))
            found[metric] = {
                row: (float(np.mean(train[row])), float(np.mean(held_out[row])))
                for row in train
                if row in held_out
            }
    return found


def categories(done: Sequence[Outcome]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Values of every seed by group, row and category.

    A group is what three or more metrics of one data set share before the first "_" of their
    names, such as ``f1_tool_call``; training data are left out.
    """
    groups: dict[str, list[str]] = {}
    for name in metric_names(done):
        stage, _, metric = name.partition("/")
        shared, _, category = metric.partition("_")
        if stage != "train" and "/" not in metric and category:
            groups.setdefault(f"{stage}/{shared}", []).append(name)
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for group, names in groups.items():
        for name in names if len(names) >= 3 else []:
            category = name.removeprefix(f"{group}_").replace("_", " ")
            for row, values in _metric(done, name).items():
                found.setdefault(group, {}).setdefault(row, {})[category] = values
    return found


def _metric(done: Sequence[Outcome], name: str) -> dict[str, list[float]]:
    """The values of a metric over the seeds, of every row that has it."""
    return _by_row(
        done, lambda result: [result["metrics"][name]] if name in result["metrics"] else []
    )


def _by_row(
    done: Sequence[Outcome], values: Callable[[Mapping[str, Any]], list[float]]
) -> dict[str, list[float]]:
    found = {
        row: [value for result in results for value in values(result)]
        for row, results in by_row(done).items()
    }
    return {row: some for row, some in found.items() if some}
