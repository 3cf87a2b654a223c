"""Plots of a comparison. A violation ≤ 0 is satisfied; every axis says what it shows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from .distributions import Curves, cdf_panels, violation_cdfs
from .drawing import legend, metric_title, remove, save, seeds_note
from .styles import OTHERS, family, styles_of
from .tables import deciding_stage, held_out_stage

PARETO = "*/cvar95"
"""The vertical axis of the Pareto plot if none is named; ``*`` is the first constraint."""

FRONTIER = "frontier"

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


class UnknownMetricError(ValueError):
    """A metric was named that no run has."""


@dataclass(frozen=True)
class Axis:
    """A metric to draw, and which end of it is better."""

    name: str
    higher_is_better: bool = False

    @property
    def label(self) -> str:
        better = "higher" if self.higher_is_better else "lower"
        return f"{metric_title(self.name)}\n({better} is better)"


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


def default_axes(metrics: Sequence[str], objective: str) -> list[str]:
    """Returns what the Pareto plot shows if nothing is asked for, both held-out if anything is.

    objective: the metric that says the objective of every method, without its stage.
    """
    stage = deciding_stage(metrics)
    return [f"{stage}/{objective}", f"{stage}/{PARETO}"]


def draw(
    runs: DataFrame,
    costs: DataFrame,
    violations: Curves,
    worst: Curves,
    output: Path,
    known_categories: Collection[str] = (),
) -> None:
    """Draws every plot but the Pareto plot there is something for, and removes earlier ones.

    runs: method, seed and metrics of the runs that did not fail.
    costs: of the same runs, a column per cost.
    violations: by ``stage/constraint``; worst: by constraint, of the first seed.
    known_categories: of the data.
    """
    for name in PLOTS:
        remove(output / name)
    styles_of(runs["method"], output)  # All at once, whatever each plot shows of them.
    plots: list[tuple[Any, Callable[[Any, Path], None], str]] = [
        (violations, violation_cdfs, "cdf.png"),
        (worst, cdf_panels, "cdf_by_method.png"),
        (gaps(runs), gap_marks, "gap.png"),
        (categories(runs, known_categories), category_bars, "categories.png"),
        (costs.set_index(runs["method"]), cost_bars, "costs.png"),
    ]
    for values, function, name in plots:
        if not (values.empty if isinstance(values, DataFrame) else len(values) == 0):
            function(values, output / name)


# Two metrics against each other -----------------------------------------------------------------


def pareto(runs: DataFrame, axes: Sequence[Axis], path: Path) -> None:
    """Writes two metrics against each other, mean ± std over seeds, with the frontier drawn.

    Methods of one family share a colour; the rest of a method's name is written beside its point.
    """
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
    styles = styles_of(means.index, path.parent)
    for (method, style), mean, std in zip(styles.items(), points, stds.to_numpy(), strict=True):
        panel.errorbar(
            *mean,
            *std[::-1],  # y's comes first.
            color=style.colour,
            marker=style.marker,
            markersize=8,
            linestyle="none",
            capsize=2,
            elinewidth=0.9,
            label=method,
        )
    panel.set_xlabel(x.label)
    panel.set_ylabel(y.label)
    panel.margins(0.12, 0.08)  # Room for the settings.
    panel.grid(alpha=0.3)
    outside = far(points[:, 0]) | far(points[:, 1])
    for limit, values in ((panel.set_xlim, points[:, 0]), (panel.set_ylim, points[:, 1])):
        if far(values).any():
            near = values[~outside & np.isfinite(values)]
            margin = 0.12 * (np.ptp(near) or 1.0)
            limit(near.min() - margin, near.max() + margin)
    _write_settings(panel, [family(method)[1] for method in styles], points)
    note = f"{seeds_note(groups.size())} Frontier: no method is better in both."
    if outside.any():
        named = zip(np.array([*styles])[outside], points[outside], strict=True)
        note += "\nOutside: " + ", ".join(f"{name} ({a:.3g}, {b:.3g})" for name, (a, b) in named)
    legend(figure, [panel], [FRONTIER, *styles], 3, note)
    save(figure, path)


def far(values: np.ndarray) -> np.ndarray:
    """Returns which values, at most a quarter, a gap of most of the range cuts off from the others.

    >>> far(np.array([4.0, 33.0, 5.0, 4.5])), far(np.array([4.0, 7.0, 5.0, 4.5]))
    (array([False,  True, False, False]), array([False, False, False, False]))
    """
    ordered = np.sort(values[np.isfinite(values)])
    none = np.zeros(len(values), dtype=bool)
    if len(ordered) < 4:
        return none
    gaps = np.diff(ordered)
    cut = ordered[gaps.argmax()] + gaps.max() / 2
    fewer = min((values > cut, values < cut), key=np.count_nonzero)
    return fewer if gaps.max() > 0.75 * np.ptp(ordered) and 4 * fewer.sum() <= len(values) else none


def _write_settings(panel: Any, texts: Sequence[str], points: np.ndarray) -> None:
    """Writes a text beside each point, on the side where it covers no other; else none."""
    places = panel.transLimits.transform(points) * (400, 260)  # In points, nearly.
    taken = [(*place, 0.0) for place in places]
    for text, point, place in zip(texts, points, places, strict=True):
        width = 5.0 * len(text)
        for dx, dy in ((6, 5), (6, -12), (-6 - width, 5), (-6 - width, -12)):
            left, low = place[0] + dx, place[1] + dy
            if text and any(
                left - 5 < x + w and x < left + width + 5 and abs(low + 4 - y) < 9
                for x, y, w in taken
            ):
                continue
            taken.append((left, low + 4, width))
            panel.annotate(
                text,
                point,
                xytext=(dx, dy),
                textcoords="offset points",
                fontsize="small",
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
                zorder=1.5,  # Over the frontier, under the points.
                annotation_clip=True,
            )
            break


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


# Bars and marks by method -----------------------------------------------------------------------


def categories(runs: DataFrame, known: Collection[str] = ()) -> dict[str, DataFrame]:
    """Returns metrics by category, a line per run, by what their names share.

    A group is what three or more metrics of one data set share before the first "_" of their
    names, such as ``f1_tool_call``; training data are left out.

    known: the categories of the data; without any, whatever stands behind the "_".
    """
    groups: dict[str, dict[str, str]] = {}
    for name in runs.columns:
        stage, _, metric = name.partition("/")
        shared, _, category = metric.partition("_")
        if category and known and category not in known:
            continue  # ``accuracy_tokens`` is an accuracy of its own kind, and of no category.
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
    styles = styles_of(methods, path.parent)
    for panel, (title, runs) in zip(panels, groups.items(), strict=True):
        ticks = np.arange(len(runs.columns))
        for number, (method, mean, std) in enumerate(_mean_and_std(runs)):
            panel.bar(
                ticks + 0.8 * ((number + 0.5) / len(methods) - 0.5),
                mean,
                0.8 / len(methods),
                yerr=std,
                color=styles[method].colour,
                hatch=styles[method].hatch,
                edgecolor="white",
                error_kw={"elinewidth": 0.9},
                label=method,
            )
        panel.set_xticks(ticks, runs.columns)
        panel.set_ylabel(metric_title(title))
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
    note = seeds_note(n for runs in groups.values() for n in _seeds(runs))
    legend(figure, panels, methods, 3, note)
    save(figure, path)


def gaps(runs: DataFrame) -> dict[str, DataFrame]:
    """Returns train and held-out CVaR95 and share of samples violated by metric, a line per run."""
    found = {}
    for train in runs.columns:
        metric = train.removeprefix("train/")
        if f"{train}_samples" in runs.columns:
            continue  # The share of values.
        if metric != train and metric.endswith(("/cvar95", "/violated", "/violated_samples")):
            names = {train: "train", f"{held_out_stage([*runs])}/{metric}": "held-out"}
            if set(names) <= set(runs.columns):
                found[metric] = runs.set_index("method")[[*names]].rename(columns=names)
    return found


def gap_marks(values: Mapping[str, DataFrame], path: Path) -> None:
    """Writes what is lost between training and held-out data: two marks per method, joined.

    values: a line per run, its index the method; a panel each.
    """
    methods = list(dict.fromkeys(next(iter(values.values())).index))
    styles = styles_of(methods, path.parent)
    figure, panels = _panels_by_method(
        map(metric_title, values), methods, height=1.5 + 0.32 * len(methods)
    )
    for panel, runs in zip(panels, values.values(), strict=True):
        for place, (method, mean, std) in enumerate(_mean_and_std(runs)):
            style = styles[method]
            panel.plot(mean, [place, place], color=OTHERS, linewidth=2, zorder=1)
            for x, error, face in zip(mean, std, ("white", style.colour), strict=True):
                panel.errorbar(
                    x,
                    place,
                    xerr=error,
                    color=style.colour,
                    marker=style.marker,
                    markersize=7,
                    markerfacecolor=face,
                    capsize=2,
                    elinewidth=0.9,
                )
        panel.locator_params(axis="x", nbins=4)  # long numbers of narrow ranges touch otherwise
    for name, face in {"train": "white", "held-out": "black"}.items():
        panels[0].plot([], [], "o", color="black", markerfacecolor=face, label=name)
    note = seeds_note(n for runs in values.values() for n in _seeds(runs))
    legend(figure, panels, ["train", "held-out"], 2, note)
    save(figure, path)


def cost_bars(costs: DataFrame, path: Path) -> None:
    """Writes a panel of bars per cost, mean ± std over seeds.

    costs: a line per run, its index the method, a column per cost, its unit in the name.
    """
    means = list(_mean_and_std(costs))
    methods = [method for method, _, _ in means]
    styles = styles_of(methods, path.parent)
    figure, panels = _panels_by_method(costs.columns, methods, height=1.1 + 0.34 * len(methods))
    for place, (method, mean, std) in enumerate(means):
        for panel, value, error in zip(panels, mean, std, strict=True):
            look = {"color": styles[method].colour, "hatch": styles[method].hatch}
            panel.barh(place, value, xerr=error, height=0.7, edgecolor="white", **look)
    figure.supxlabel(seeds_note(_seeds(costs)), fontsize="small")
    save(figure, path)


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
    means, stds = groups.mean(), groups.std()  # NaN of one seed: no bar
    yield from zip(means.index, means.to_numpy(), stds.to_numpy(), strict=True)


def _seeds(runs: DataFrame) -> Series:
    """Returns how many runs each method has."""
    return runs.groupby(level=0, sort=False).size()
