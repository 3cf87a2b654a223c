"""Plots of a comparison. A violation ≤ 0 is satisfied; every axis says what it shows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame

from pl_pointwise.errors import DataError

from .distributions import save, violation_cdfs
from .runs import Outcome
from .styles import Style, styles_of
from .tables import deciding_stage, metric_names, run_lines, shared_objective

FRONTIER = "frontier"

PLOTS = ("cdf.png", "pareto.png")
"""Violations, two metrics against each other."""


class UnknownMetricError(DataError):
    """A metric was named that no run has."""


class Axis(NamedTuple):
    """A metric to draw, and which end of it is better."""

    name: str
    higher_is_better: bool = False

    @property
    def label(self) -> str:
        return f"{self.name}\n({'higher' if self.higher_is_better else 'lower'} is better)"


def parse_axis(name: str, metrics: Sequence[str], higher_is_better: Mapping[str, bool]) -> Axis:
    """Returns the axis of a metric; ``METRIC:max`` or ``:min`` says which end is better.

    higher_is_better: what the metrics say of themselves, by name without the data set.
    """
    metric, _, better = name.partition(":")
    if metric not in metrics or better not in ("", "max", "min"):
        raise UnknownMetricError(
            f"--pareto {name}: no run has that metric; choose two of {', '.join(metrics)}. "
            "Each may end in :max or :min."
        )
    own = higher_is_better.get(metric.partition("/")[2], False)
    return Axis(metric, better == "max" if better else own)


def default_axes(metrics: Sequence[str], objective: str) -> list[str]:
    """Returns the objective, and CVaR95 of the first constraint, "" where there is none.

    objective: the metric that says the objective of every method, without its stage.
    """
    stage = deciding_stage(metrics)
    tails = (name for name in metrics if re.fullmatch(f"{stage}/.*/cvar95", name))
    return [f"{stage}/{objective}", next(tails, "")]


def draw(done: Sequence[Outcome], output: Path, axes: Sequence[str] | None, pdf: bool) -> None:
    """Draws every plot there is something for, and removes earlier ones.

    done: the runs that did not fail. axes: of the Pareto plot; None takes :func:`default_axes`.
    """
    for name in PLOTS:
        for ending in (".png", ".pdf"):
            (output / name).with_suffix(ending).unlink(missing_ok=True)
    endings = (".png", ".pdf") if pdf else (".png",)
    runs, names = DataFrame(run_lines(done)), metric_names(done)
    violations: dict[str, dict[str, np.ndarray]] = {}
    for run, _ in done:
        for name, values in run.violations().items():  # All seeds together.
            known = violations.setdefault(name, {})
            known[run.method] = np.append(known.get(run.method, values[:0]), values)
    styles = styles_of(run.method for run, _ in done)
    for ending in endings:
        if violations:
            violation_cdfs(violations, styles, (output / "cdf.png").with_suffix(ending))
    pair = axes or default_axes(names, shared_objective(done))
    if axes or set(pair) <= set(names):  # Without constraints, for one, there are no two.
        higher = {k: v for _, result in done for k, v in result.get("higher_is_better", {}).items()}
        chosen = [parse_axis(name, names, higher) for name in pair]
        for ending in endings:
            pareto(runs, chosen, styles, (output / "pareto.png").with_suffix(ending))


def pareto(runs: DataFrame, axes: Sequence[Axis], styles: Mapping[str, Style], path: Path) -> None:
    """Writes two metrics against each other, mean ± std over seeds, with the frontier drawn."""
    x, y = axes
    groups = runs.dropna(subset=[x.name, y.name]).groupby("method", sort=False)[[x.name, y.name]]
    means, stds = groups.mean(), groups.std()  # NaN of one seed: no bar
    if means.empty:
        return
    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    panel = figure.subplots()
    points = means.to_numpy()
    stairs = np.array(sorted(points[frontier(points, axes)].tolist())).reshape(-1, 2)
    # Between two points of the frontier lies what the worse coordinates of both attain.
    where: Any = "pre" if x.higher_is_better else "post"
    panel.step(*stairs.T, where=where, color="black", linewidth=1.2, zorder=1, label=FRONTIER)
    for method, mean, std in zip(means.index, points, stds.to_numpy(), strict=True):
        panel.errorbar(
            *mean,
            *std[::-1],  # y's comes first.
            color=styles[method].colour,
            marker=styles[method].marker,
            markersize=8,
            linestyle="none",
            capsize=2,
            elinewidth=0.9,
            label=method,
        )
    panel.set_xlabel(x.label)
    panel.set_ylabel(y.label)
    panel.grid(alpha=0.3)
    note = "Mean ± standard deviation over the seeds. Frontier: no method is better in both."
    save(figure, [panel], [FRONTIER, *means.index], 3, note, path)


def frontier(points: Any, axes: Sequence[Axis]) -> list[int]:
    """Returns which points no other beats: better in one metric, no worse in the other.

    Points with a coordinate that is not a number belong to nothing.

    >>> frontier([(0, 3), (1, 1), (2, 2), (3, 0)], (Axis("x"), Axis("y")))
    [0, 1, 3]
    """
    signs = np.array([-1.0 if axis.higher_is_better else 1.0 for axis in axes])
    costs = np.array(points, dtype=float).reshape(-1, 2) * signs
    return [
        place
        for place, cost in enumerate(costs)
        if np.isfinite(cost).all()
        and not ((costs <= cost).all(axis=1) & (costs < cost).any(axis=1)).any()
    ]
