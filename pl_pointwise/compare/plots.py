"""Plots of a comparison. A violation ≤ 0 is satisfied; every axis says what it shows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame

from pl_pointwise.certificates import cdf_band

from .tables import held_out_stage

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, told apart by most colour-blind readers."""
STYLES = ("-", "--", "-.", ":")
HATCHES = ("", "//", "..", "xx")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
OTHERS = "#BBBBBB"

PARETO = ("objective", "*/cvar95")
"""The held-out metrics of the Pareto plot if none are named; ``*`` is the first constraint."""

PLOTS = {
    "cdf.png": "Violations, held-out beside train, all seeds together",
    "cdf_by_method.png": "Held-out violations by method, with the 95 % band around the CDF",
    "pareto.png": "Two metrics against each other, with the frontier",
    "gap.png": "What is lost between training and held-out data",
    "categories.png": "Metrics by category",
    "costs.png": "Time and memory",
    "answer.png": "What is required against the objective, on the certification split",
}
"""Every plot by file, and what it shows."""

HELD_OUT = {"test": "held-out", "val": "held-out (selection)"}
"""Titles of the held-out results by stage."""

Curves = Mapping[str, Mapping[str, np.ndarray]]
"""Values (n,) by panel, ``stage/constraint`` or a constraint, and by method."""


class UnknownMetricError(ValueError):
    """A metric was named that no run has."""


@dataclass(frozen=True)
class Axis:
    """A metric to draw, and which end of it is better."""

    name: str
    higher_is_better: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} ({'higher' if self.higher_is_better else 'lower'} is better)"


def parse_axis(name: str, metrics: Sequence[str], higher_is_better: Mapping[str, bool]) -> Axis:
    """Returns the axis of a metric; ``METRIC:max`` or ``:min`` says which end is better.

    metrics: those that there are; ``*`` in a name stands for anything.
    higher_is_better: what the metrics say of themselves, by name without the data set.

    Raises:
        UnknownMetricError: no run has that metric.
    """
    metric, _, better = name.partition(":")
    if "*" in metric:
        start, _, end = metric.partition("*")
        metric = next((n for n in metrics if n.startswith(start) and n.endswith(end)), metric)
    if metric not in metrics or better not in ("", "max", "min"):
        raise UnknownMetricError(
            f"--pareto {name}: no run has that metric; choose two of {', '.join(metrics)}. "
            "Each may end in :max or :min."
        )
    own = higher_is_better.get(metric.partition("/")[2], False)
    return Axis(metric, better == "max" if better else own)


def draw(
    runs: DataFrame, costs: DataFrame, violations: Curves, worst: Curves, output: Path
) -> None:
    """Draws every plot but the Pareto plot there is something for, and removes earlier ones.

    runs: method, seed and metrics of the runs that did not fail.
    costs: of the same runs, a column per cost.
    violations: by ``stage/constraint``; worst: by constraint, of the first seed.
    """
    for name in PLOTS:
        (output / name).unlink(missing_ok=True)
    plots: list[tuple[Any, Callable[[Any, Path], None], str]] = [
        (violations, violation_cdfs, "cdf.png"),
        (worst, cdf_panels, "cdf_by_method.png"),
        (gaps(runs), gap_marks, "gap.png"),
        (categories(runs), category_bars, "categories.png"),
        (costs.set_index(runs["method"]), cost_bars, "costs.png"),
    ]
    for values, function, name in plots:
        if not (values.empty if isinstance(values, DataFrame) else len(values) == 0):
            function(values, output / name)


# Distributions of violations --------------------------------------------------------------------


def violation_cdfs(violations: Curves, path: Path) -> None:
    """Writes the empirical CDF of violations, a panel per ``stage/constraint``, a curve per method.

    violations: NaN are left out.
    The vertical line at 0 is the constraint: what a curve lacks to 1 there is the share violated.
    Where a few values would flatten all others, the axis is logarithmic far from 0.
    """
    styles = {
        method: {
            "color": colour(number),
            "linestyle": STYLES[number // len(COLOURS) % len(STYLES)],
            "linewidth": 1.8,
        }
        for number, method in enumerate(_unique(violations.values()))
    }
    stage = held_out_stage([*violations])
    _cdf_grid(violations, {stage: HELD_OUT[stage], "train": "train"}, styles, path)


def cdfs_by_epoch(violations: Mapping[str, Mapping[int, np.ndarray]], path: Path) -> None:
    """Writes the empirical CDF of violations, a panel per ``stage/constraint``, a curve per epoch.

    violations: values (n,) by ``stage/constraint`` and epoch; NaN are left out.
    """
    epochs = sorted(_unique(violations.values()))
    # From light to dark: in grey, and to colour-blind eyes, the order stays.
    shades = matplotlib.colormaps["viridis"](np.linspace(0.85, 0.05, len(epochs) + 1)[1:])
    styles = {
        f"epoch {epoch}": {"color": shade, "linewidth": 2.2 if epoch == epochs[-1] else 1.4}
        for epoch, shade in zip(epochs, shades, strict=True)
    }
    named = {
        panel: {f"epoch {epoch}": values for epoch, values in by_epoch.items()}
        for panel, by_epoch in violations.items()
    }
    stages = {name.partition("/")[0]: name.partition("/")[0] for name in violations}
    titles = {"running": "training (running)", "val": "held-out (val)"}
    _cdf_grid(named, {stage: titles.get(stage, stage) for stage in stages}, styles, path)


def _cdf_grid(
    violations: Curves,
    stages: Mapping[str, str],
    styles: Mapping[str, Mapping[str, Any]],
    path: Path,
) -> None:
    """Writes a line of panels per constraint, a column per stage, whose titles are ``stages``."""
    stages = {s: t for s, t in stages.items() if any(n.startswith(f"{s}/") for n in violations)}
    constraints = list(dict.fromkeys(name.partition("/")[2] for name in violations))
    size = (0.8 + 4.2 * len(stages), 0.7 + 3.3 * len(constraints))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(
        len(constraints), len(stages), squeeze=False, sharey=True, sharex="row"
    )
    for line, constraint in zip(panels, constraints, strict=True):
        shown = []
        for panel, (stage, title) in zip(line, stages.items(), strict=True):
            for name, values in violations.get(f"{stage}/{constraint}", {}).items():
                _cdf(panel, values, label=name, **styles[name])
                shown.append(values)
            _cdf_axes(panel, f"{constraint}, {title}")
            panel.set_xlabel("violation (≤ 0 is satisfied)")
        _compress(shown, line)
        line[0].set_ylabel("share of values")
    _legend(figure, panels.flat, list(styles), columns=5)
    figure.savefig(path, dpi=150)


def cdf_panels(worst: Curves, path: Path) -> None:
    """Writes held-out CDFs, a panel per method: its curve with its DKW band over all the others.

    worst: by constraint and method, (samples,), the worst violation of each sample of one trained
        model: the band of :func:`~pl_pointwise.certificates.cdf_band` holds for independent values.
    """
    methods = _unique(worst.values())
    columns = min(3, len(methods))
    lines = math.ceil(len(methods) / columns)
    size = (0.6 + 3.3 * columns, 0.5 + 2.6 * lines * len(worst))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(
        lines * len(worst), columns, squeeze=False, sharey=True, sharex=len(worst) == 1
    ).reshape(len(worst), -1)
    for panel in panels.flat:
        panel.set_visible(False)
    for block, (constraint, by_method) in zip(panels, worst.items(), strict=True):
        finite = np.concatenate([np.zeros(1), *(v[np.isfinite(v)] for v in by_method.values())])
        margin = 0.03 * np.ptp(finite) or 1.0
        low, high = finite.min() - margin, finite.max() + margin
        for number, (method, panel) in enumerate(zip(methods, block, strict=False)):
            if method not in by_method:
                continue
            panel.set_visible(True)
            for values in by_method.values():
                _cdf(panel, values, color=OTHERS, linewidth=0.9)
            _band(panel, by_method[method], low, high, colour(number))
            _cdf(panel, by_method[method], color=colour(number), linewidth=1.8)
            _cdf_axes(panel, f"{constraint}: {method}" if len(worst) > 1 else method)
            panel.set_xlim(low, high)
            panel.tick_params(labelbottom=True)
            if number % columns == 0:
                panel.set_ylabel("share of samples")
    figure.supxlabel(
        "worst violation of a held-out sample (≤ 0 is satisfied); band: 95 % DKW, one model",
        fontsize="medium",
    )
    figure.savefig(path, dpi=150)


def _cdf(panel: Any, values: np.ndarray, **style: Any) -> None:
    """Draws an empirical CDF. NaN are left out; infinite values count, outside the plot."""
    values = values[~np.isnan(values)]
    if len(values):
        panel.ecdf(values, **style)
    else:
        panel.plot([], [], **style)  # Its line of the legend.


def _band(panel: Any, values: np.ndarray, low: float, high: float, shade: str) -> None:
    """Fills the 95 % band around the CDF; without values, or with NaN, nothing is certain."""
    if not len(values) or np.isnan(values).any():
        return
    points = np.unique([low, *values[np.isfinite(values)], high])
    lower, upper = (edge.numpy() for edge in cdf_band(values, points))
    panel.fill_between(points, lower, upper, step="post", color=shade, alpha=0.25, linewidth=0)


def _cdf_axes(panel: Any, title: str) -> None:
    panel.axvline(0, color="black", linewidth=1)
    panel.set_title(title)
    panel.set_ylim(0, 1.01)
    panel.grid(alpha=0.3)


def _compress(values: Sequence[np.ndarray], panels: Iterable[Any]) -> None:
    """Makes the x axis logarithmic beyond ±c where the largest |v| is over 30 times the median."""
    sizes = np.abs(np.concatenate([np.zeros(0), *values]))
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
    if not len(sizes) or sizes.max() <= 30 * np.median(sizes):
        return
    bound = 10.0 ** round(math.log10(np.median(sizes)))
    for panel in panels:
        panel.set_xscale("symlog", linthresh=bound)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.set_xlabel(f"{panel.get_xlabel()}, logarithmic beyond ±{bound:g}")


# Two metrics against each other -----------------------------------------------------------------


def pareto(runs: DataFrame, axes: Sequence[Axis], path: Path) -> None:
    """Writes two metrics against each other, mean ± std over seeds, with the frontier drawn.

    Methods of one family share a colour; the rest of a method's name is written beside its point.
    """
    x, y = axes
    groups = runs.dropna(subset=[x.name, y.name]).groupby("method", sort=False)[[x.name, y.name]]
    means, stds = groups.mean(), groups.std().fillna(0.0)
    if means.empty:
        return
    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    panel = figure.subplots()
    points = means.to_numpy()
    stairs = np.array(sorted(points[frontier(points, axes)].tolist())).reshape(-1, 2)
    # Between two points of the frontier lies what the worse coordinates of both attain.
    where: Any = "pre" if x.higher_is_better else "post"
    panel.step(*stairs.T, where=where, color="black", linewidth=1.2, zorder=1, label="frontier")
    families = list(dict.fromkeys(family(method)[0] for method in means.index))
    for method, mean, std in zip(means.index, points, stds.to_numpy(), strict=True):
        name, setting = family(method)
        number = families.index(name)
        panel.errorbar(
            *mean,
            *std[::-1],  # y's comes first.
            color=colour(number),
            marker=MARKERS[number % len(MARKERS)],
            markersize=8,
            linestyle="none",
            capsize=2,
            elinewidth=0.9,
            label=name,
        )
        panel.annotate(
            setting,
            mean,
            xytext=(6, 5),
            textcoords="offset points",
            fontsize="small",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
            zorder=1.5,  # Over the frontier, under the points.
        )
    panel.set_xlabel(x.label)
    panel.set_ylabel(y.label)
    panel.margins(0.12, 0.08)  # Room for the settings.
    panel.grid(alpha=0.3)
    _legend(figure, [panel], ["frontier", *families], columns=3)
    figure.savefig(path, dpi=150)


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


def family(method: str) -> tuple[str, str]:
    """Returns a method's name cut into family and setting: one family gets one colour.

    >>> family("penalty 0.1"), family("pointwise, alpha=1, beta=3"), family("relevance only")
    (('penalty', '0.1'), ('pointwise', 'alpha=1, beta=3'), ('relevance only', ''))
    """
    found = re.fullmatch(r"(.*?)[, ]+((?:\S+=\S+(?:, )?)+|[-+]?[\d.]+(?:e[-+]?\d+)?)", method)
    return (found[1], found[2]) if found else (method, "")


# Bars and marks by method -----------------------------------------------------------------------


def categories(runs: DataFrame) -> dict[str, DataFrame]:
    """Returns metrics by category, a line per run, by what their names share.

    A group is what three or more metrics of one data set share before the first "_" of their
    names, such as ``f1_tool_call``; training data are left out.
    """
    groups: dict[str, dict[str, str]] = {}
    for name in runs.columns:
        stage, _, metric = name.partition("/")
        shared, _, category = metric.partition("_")
        if stage != "train" and "/" not in metric and category:
            groups.setdefault(f"{stage}/{shared}", {})[name] = category.replace("_", " ")
    return {
        group: runs.set_index("method")[[*names]].rename(columns=names)
        for group, names in groups.items()
        if len(names) >= 3
    }


def category_bars(groups: Mapping[str, DataFrame], path: Path) -> None:
    """Writes a group of bars per category, one bar per method, mean ± std over seeds.

    groups: a line per run, its index the method, a column per category; a panel each.
    """
    methods = list(dict.fromkeys(method for runs in groups.values() for method in runs.index))
    most = max(len(runs.columns) for runs in groups.values())
    width = min(max(4.5, 1.2 + 0.25 * most * (len(methods) + 1)), 14.0)
    figure = Figure(figsize=(width, 0.7 + 3.0 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    for panel, (title, runs) in zip(panels, groups.items(), strict=True):
        ticks = np.arange(len(runs.columns))
        for number, (method, mean, std) in enumerate(_mean_and_std(runs)):
            panel.bar(
                ticks + 0.8 * ((number + 0.5) / len(methods) - 0.5),
                mean,
                0.8 / len(methods),
                yerr=std,
                color=colour(number),
                hatch=HATCHES[number // len(COLOURS) % len(HATCHES)],
                edgecolor="white",
                error_kw={"elinewidth": 0.9},
                label=method,
            )
        panel.set_xticks(ticks, runs.columns)
        panel.set_ylabel(title)
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
    _legend(figure, panels, methods, columns=4)
    figure.savefig(path, dpi=150)


def gaps(runs: DataFrame) -> dict[str, DataFrame]:
    """Returns train and held-out means of CVaR95 and share violated, by metric and method."""
    found = {}
    for train in runs.columns:
        metric = train.removeprefix("train/")
        if metric != train and metric.endswith(("/cvar95", "/violated")):
            names = {train: "train", f"{held_out_stage([*runs])}/{metric}": "held-out"}
            if set(names) <= set(runs.columns):
                means = runs.groupby("method", sort=False)[[*names]].mean()
                found[metric] = means.rename(columns=names)
    return found


def gap_marks(values: Mapping[str, DataFrame], path: Path) -> None:
    """Writes what is lost between training and held-out data: two marks per method, joined."""
    methods = next(iter(values.values())).index
    figure, panels = _panels_by_method(values, methods, height=1.3 + 0.3 * len(methods))
    for panel, means in zip(panels, values.values(), strict=True):
        for place, (_, pair) in enumerate(means.iterrows()):
            panel.plot(pair, [place, place], color=OTHERS, linewidth=2, zorder=1)
        for number, (name, marker) in enumerate({"train": "o", "held-out": "D"}.items()):
            panel.scatter(
                means[name],
                range(len(methods)),
                color=colour(number),
                marker=marker,
                s=45,
                label=name,
            )
        panel.locator_params(axis="x", nbins=4)  # long numbers of narrow ranges touch otherwise
    _legend(figure, panels, ["train", "held-out"], columns=2)
    figure.savefig(path, dpi=150)


def cost_bars(costs: DataFrame, path: Path) -> None:
    """Writes a panel of bars per cost, mean ± std over seeds.

    costs: a line per run, its index the method, a column per cost, its unit in the name.
    """
    means = list(_mean_and_std(costs))
    methods = [method for method, _, _ in means]
    figure, panels = _panels_by_method(costs.columns, methods, height=0.9 + 0.34 * len(methods))
    for place, (_, mean, std) in enumerate(means):
        for panel, value, error in zip(panels, mean, std, strict=True):
            panel.barh(place, value, xerr=error, color=colour(0), height=0.7)
    figure.savefig(path, dpi=150)


def _panels_by_method(
    titles: Iterable[str], methods: Sequence[str], height: float
) -> tuple[Figure, Any]:
    """Returns a figure with a panel per title, a line per method, the first one on top."""
    titles = list(titles)
    figure = Figure(figsize=(1.8 + 3.0 * len(titles), height), layout="constrained")
    panels = figure.subplots(1, len(titles), squeeze=False, sharey=True)[0]
    for panel, title in zip(panels, titles, strict=True):
        panel.set_yticks(range(len(methods)), methods)
        panel.set_xlabel(title)
        panel.grid(axis="x", alpha=0.3)
        panel.set_axisbelow(True)
    panels[0].set_ylim(len(methods) - 0.5, -0.5)
    return figure, panels


def _mean_and_std(runs: DataFrame) -> Iterable[tuple[str, np.ndarray, np.ndarray]]:
    """Yields each method with mean and std of every column over its seeds."""
    groups = runs.groupby(level=0, sort=False)
    means, stds = groups.mean(), groups.std().fillna(0.0)
    yield from zip(means.index, means.to_numpy(), stds.to_numpy(), strict=True)


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _unique(by_name: Iterable[Mapping[Any, Any]]) -> list[Any]:
    """Returns the names of all mappings, each once, in their order."""
    return list(dict.fromkeys(name for values in by_name for name in values))


def _legend(figure: Figure, panels: Iterable[Any], names: Sequence[str], columns: int) -> None:
    """Puts the named curves of all panels, each once and in this order, below the panels."""
    handles = {
        label: handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    shown = [name for name in names if name in handles]
    figure.legend(
        [handles[name] for name in shown],
        shown,
        loc="outside lower center",
        ncols=max(1, min(columns, len(shown))),
    )
