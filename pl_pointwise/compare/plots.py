"""A comparison's results as plots: violations, and two metrics against each other."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame

from pl_pointwise.data import title_of

from .runs import Outcome
from .tables import deciding_stage, metric_names, run_lines, shared_objective

BLUE, RED, GREEN, PURPLE, ORANGE, CYAN, BLACK = COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)
"""Okabe and Ito's palette, told apart by most colour-blind readers."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
LINES = ("-", "--", "-.", ":")

FAR = 30
"""The factor from which on values of an axis are too far apart for a linear one."""

Styles = Mapping[str, Mapping[str, Any]]
"""matplotlib's options of a line, by curve."""


def styles_of(methods: Iterable[str]) -> Styles:
    """Returns the style of every method, by their order; no two of 84 are the same."""
    styles = {}
    for position, name in enumerate(dict.fromkeys(methods)):
        styles[name] = {
            "color": COLOURS[position % len(COLOURS)],
            "marker": MARKERS[position % len(MARKERS)],
            "linestyle": LINES[position % len(LINES)],
        }
    return styles


PLOTS = ("cdf.png", "pareto.png")
"""Violations, two metrics against each other."""


def pareto_axes(
    metrics: Sequence[str], objective: str, violation: str = ""
) -> list[str]:
    """Returns the objective and the task's ``violation``, else the share of the first constraint's
    samples that violate it. Empty where there is none.
    """
    stage = deciding_stage(metrics)
    if violation and {objective, f"{stage}/{violation}"} <= {*metrics}:
        return [objective, f"{stage}/{violation}"]
    rates = [name for name in metrics if re.fullmatch(f"{stage}/.*/violated", name)]
    if objective not in metrics or not rates:  # As without constraints.
        return []
    of_samples = f"{rates[0]}_samples"  # Where a sample has several values.
    return [objective, of_samples if of_samples in metrics else rates[0]]


def draw(done: Sequence[Outcome], output: Path, note: str = "") -> None:
    """Draws every plot there is something for, of runs that did not fail; removes earlier ones.

    note: stands above every plot, as whoever is shown one has not read the table.
    """

    def save(figure: Figure, name: str) -> None:
        if note:
            figure.suptitle(note, color=RED, weight="bold", wrap=True)
        figure.savefig(output / name, dpi=150)

    for name in PLOTS:
        (output / name).unlink(missing_ok=True)
    runs = DataFrame(run_lines(done))
    names = metric_names(done)
    violations = _violations_of(done)
    styles = styles_of(run.method for run, _ in done)
    if violations:
        save(violation_cdfs(violations, styles), "cdf.png")
    axes = pareto_axes(
        names, shared_objective(done), done[0][1].get("shared_violation", "")
    )
    # A run without one of the two has no point, and without a point there is no plot.
    if axes and runs[axes].notna().all(axis=1).any():
        save(pareto(runs, axes, styles), "pareto.png")


def _violations_of(done: Sequence[Outcome]) -> dict[str, dict[str, np.ndarray]]:
    """By ``stage/constraint`` and method, those of all its seeds together."""
    violations: dict[str, dict[str, np.ndarray]] = {}
    for run, _ in done:
        for name, values in run.violations().items():
            by_method = violations.setdefault(name, {})
            earlier = by_method.get(run.method, values[:0])
            by_method[run.method] = np.append(earlier, values)
    return violations


def pareto(runs: DataFrame, axes: Sequence[str], styles: Styles) -> Figure:
    """Returns two metrics against each other, mean ± std over seeds, with the frontier drawn.

    axes: of x and y; in both, lower is better.
    """
    x, y = axes
    groups = runs.dropna(subset=[x, y]).groupby("method", sort=False)[[x, y]]
    means = groups.mean()
    stds = groups.std()  # NaN of one seed: no bar
    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    panel = figure.subplots()
    points = means.to_numpy()
    stairs = np.array(sorted(points[frontier(points)].tolist())).reshape(-1, 2)
    # Between two points of the frontier lies what the worse coordinates of both attain.
    panel.step(
        stairs[:, 0],
        stairs[:, 1],
        where="post",
        color="black",
        linewidth=1.2,
        zorder=1,
        label="frontier",
    )
    for method, mean, std in zip(means.index, points, stds.to_numpy(), strict=True):
        look = {**styles[method], "linestyle": "none", "markersize": 8, "capsize": 2}
        panel.errorbar(
            mean[0],
            mean[1],
            yerr=std[1],
            xerr=std[0],
            elinewidth=0.9,
            label=method,
            **look,
        )
    panel.set_xlabel(f"{x}\n(lower is better)")
    panel.set_ylabel(f"{y}\n(lower is better)")
    panel.grid(alpha=0.3)
    _compress([points[:, 0]], [panel])
    # A share may be 0, which has no logarithm: its axis stays linear.
    if 0 < FAR * points[:, 1].min() < points[:, 1].max():
        panel.set_yscale("log")
    note = "Mean ± standard deviation over the seeds. Frontier: no method is better in both."
    return with_legend(figure, 3, note)


def frontier(points: Any) -> list[int]:
    """Returns which points no other beats: lower in one coordinate, no higher in the other.

    Points with a coordinate that is not a number belong to nothing.

    >>> frontier([(0, 3), (1, 1), (2, 2), (3, 0)])
    [0, 1, 3]
    """
    costs = np.array(points, dtype=float).reshape(-1, 2)
    no_higher = costs[:, None] <= costs
    lower = costs[:, None] < costs
    beaten = (no_higher.all(2) & lower.any(2)).any(0)
    return np.flatnonzero(np.isfinite(costs).all(1) & ~beaten).tolist()


def violation_cdfs(
    violations: Mapping[str, Mapping[str, np.ndarray]], styles: Styles
) -> Figure:
    """Returns the empirical CDFs of violations, a curve per method: a line of panels per
    constraint, on one axis, and a column per split.

    violations: (n,) by panel, ``stage/constraint``, and curve; NaN are left out.
    """
    held_out = deciding_stage([*violations])
    names = [
        name for name in violations if name.partition("/")[0] in (held_out, "train")
    ]
    stages = list(dict.fromkeys(name.partition("/")[0] for name in names))
    constraints = list(dict.fromkeys(name.partition("/")[2] for name in names))
    looks = _looks_of_curves(styles)
    size = (0.8 + 4.2 * len(stages), 0.7 + 3.3 * len(constraints))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(
        len(constraints), len(stages), squeeze=False, sharey=True, sharex="row"
    )
    for line, constraint in zip(panels, constraints, strict=True):
        drawn = []
        for panel, stage in zip(line, stages, strict=True):
            curves = violations.get(f"{stage}/{constraint}", {})
            drawn += _draw_cdf(panel, curves, looks)
            panel.set_title(f"{constraint}, {title_of(stage)}")
        _compress(drawn, line)
        line[0].set_ylabel("share of values")
    note = "All seeds of a method together. Left of the line: satisfied."
    return with_legend(figure, 3 if len(stages) > 1 else 2, note)


def _looks_of_curves(styles: Styles) -> Styles:
    looks = {}
    for position, (method, style) in enumerate(styles.items()):
        looks[method] = {
            **style,
            "linewidth": 1.6,
            "markersize": 5,
            "markeredgewidth": 0,
            # By length along the curve, and each method's elsewhere, or markers hide one another.
            "markevery": (0.02 + 0.011 * position, 0.17),
        }
    return looks


def _draw_cdf(
    panel: Any, curves: Mapping[str, np.ndarray], looks: Styles
) -> list[np.ndarray]:
    """Draws a curve for each method; returns the values drawn, without NaN."""
    # A constraint may have values in one of the splits alone.
    panel.set_visible(bool(curves))
    drawn = []
    for method, values in curves.items():
        values = values[~np.isnan(values)]
        drawn.append(values)
        if len(values):  # Infinite values count, outside the plot.
            panel.ecdf(values, label=method, **looks[method])
    panel.axvline(0.0, color="black", linewidth=1)
    panel.set_xlabel("violation (≤ 0 is satisfied)")
    panel.set_ylim(0, 1.01)
    panel.grid(alpha=0.3)
    return drawn


def _compress(values: Sequence[np.ndarray], panels: Iterable[Any]) -> None:
    """Makes the x axis logarithmic beyond ±c where the largest |v| is over 30 times the median."""
    sizes = np.abs(np.concatenate([np.zeros(0), *values]))
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
    if not len(sizes) or sizes.max() <= FAR * np.median(sizes):
        return
    bound = 10.0 ** round(math.log10(np.median(sizes)))
    for panel in panels:
        panel.set_xscale("symlog", linthresh=bound)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.set_xlabel(f"{panel.get_xlabel()}, logarithmic beyond ±{bound:g}")


def with_legend(figure: Figure, columns: int, note: str) -> Figure:
    """Returns the figure with the curves of its first panel, and a note below it."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=columns,
        title=note,
        title_fontsize="small",
        fontsize="small",
        frameon=False,
    )
    return figure
