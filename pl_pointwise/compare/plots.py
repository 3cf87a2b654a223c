"""Pictures of a comparison. A violation ≤ 0 is satisfied; every axis says what it shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from pl_pointwise.certificates import cdf_band

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, told apart by most colour-blind readers."""
STYLES = ("-", "--", "-.", ":")
HATCHES = ("", "//", "..", "xx")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
TITLES = {"test": "held-out", "train": "train"}
OTHERS = "#BBBBBB"


@dataclass(frozen=True)
class Axis:
    """A quantity to draw, and which end of it is better."""

    name: str
    higher_is_better: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} ({'higher' if self.higher_is_better else 'lower'} is better)"


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def violation_cdfs(violations: Mapping[str, Mapping[str, np.ndarray]], path: Path) -> None:
    """Writes the empirical CDF of violations, a panel per ``stage/constraint``, a curve per method.

    violations: values (n,) by ``stage/constraint`` and method; NaN are left out.
    The vertical line at 0 is the constraint: what a curve lacks to 1 there is the share violated.
    Where a few values would flatten all others, the axis is logarithmic far from 0.
    """
    stages = [s for s in TITLES if any(name.startswith(f"{s}/") for name in violations)]
    constraints = list(dict.fromkeys(name.partition("/")[2] for name in violations))
    figure = Figure(
        figsize=(0.8 + 4.2 * len(stages), 0.6 + 3.4 * len(constraints)), layout="constrained"
    )
    panels = figure.subplots(
        len(constraints), len(stages), squeeze=False, sharey=True, sharex="row"
    )
    for line, constraint in enumerate(constraints):
        for column, stage in enumerate(stages):
            panel = panels[line, column]
            for number, (method, values) in enumerate(
                violations.get(f"{stage}/{constraint}", {}).items()
            ):
                panel.step(
                    *_steps(values),
                    where="post",
                    label=method,
                    color=colour(number),
                    linestyle=STYLES[number // len(COLOURS) % len(STYLES)],
                    linewidth=1.8,
                )
            _cdf_axes(panel, f"{constraint}, {TITLES[stage]}")
            panel.set_xlabel("violation (≤ 0 is satisfied)")
        of_line = [violations.get(f"{stage}/{constraint}", {}).values() for stage in stages]
        _compress([values for by_method in of_line for values in by_method], panels[line])
        panels[line, 0].set_ylabel("share of values")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, max(1, len(labels))))
    figure.savefig(path, dpi=150)


def cdf_panels(worst: Mapping[str, Mapping[str, np.ndarray]], path: Path) -> None:
    """Writes held-out CDFs, a panel per method: its curve with its DKW band over all the others.

    worst: by constraint and method, (samples,), the worst violation of each sample of one trained
        model: the band of :func:`~pl_pointwise.certificates.cdf_band` holds for independent values.
    """
    methods = list(dict.fromkeys(method for by_method in worst.values() for method in by_method))
    columns = min(3, len(methods))
    lines = math.ceil(len(methods) / columns)
    figure = Figure(
        figsize=(0.6 + 3.3 * columns, 0.5 + 2.6 * lines * len(worst)), layout="constrained"
    )
    panels = figure.subplots(
        lines * len(worst), columns, squeeze=False, sharey=True, sharex=len(worst) == 1
    )
    for panel in panels.flat:
        panel.set_visible(False)
    for block, (constraint, by_method) in enumerate(worst.items()):
        curves = {method: _steps(values) for method, values in by_method.items()}
        ends = np.concatenate([np.zeros(1), *(steps[0] for steps in curves.values())])
        margin = 0.03 * (ends.max() - ends.min()) or 1.0
        low, high = ends.min() - margin, ends.max() + margin
        for number, method in enumerate(methods):
            if method not in by_method:
                continue
            panel = panels[block * lines + number // columns, number % columns]
            panel.set_visible(True)
            for steps in curves.values():
                panel.step(*steps, where="post", color=OTHERS, linewidth=0.9)
            values = by_method[method]
            if len(values) and not np.isnan(values).any():  # Else nothing is certain.
                points = np.unique([low, *curves[method][0], high])
                lower, upper = (edge.numpy() for edge in cdf_band(values, points))
                panel.fill_between(
                    points, lower, upper, step="post", color=colour(number), alpha=0.25, linewidth=0
                )
            panel.step(*curves[method], where="post", color=colour(number), linewidth=1.8)
            prefix = f"{constraint}: " if len(worst) > 1 else ""
            _cdf_axes(panel, prefix + method)
            panel.set_xlim(low, high)
            panel.tick_params(labelbottom=True)
            if number % columns == 0:
                panel.set_ylabel("share of samples")
    figure.supxlabel(
        "worst violation of a held-out sample (≤ 0 is satisfied); band: 95 % DKW, one model",
        fontsize="medium",
    )
    figure.savefig(path, dpi=150)


def cdfs_by_epoch(violations: Mapping[str, Mapping[int, np.ndarray]], path: Path) -> None:
    """Writes the empirical CDF of violations, a panel per ``stage/constraint``, a curve per epoch.

    violations: values (n,) by ``stage/constraint`` and epoch; NaN are left out.
    """
    stages = list(dict.fromkeys(name.partition("/")[0] for name in violations))
    constraints = list(dict.fromkeys(name.partition("/")[2] for name in violations))
    epochs = sorted({epoch for values in violations.values() for epoch in values})
    epoch_titles = {"running": "training (running)", "val": "held-out (val)"}
    # From light to dark: in grey, and to colour-blind eyes, the order stays.
    shades = matplotlib.colormaps["viridis"](np.linspace(0.85, 0.05, len(epochs) + 1)[1:])
    figure = Figure(
        figsize=(0.8 + 4.2 * len(stages), 0.8 + 3.2 * len(constraints)), layout="constrained"
    )
    panels = figure.subplots(
        len(constraints), len(stages), squeeze=False, sharey=True, sharex="row"
    )
    for line, constraint in enumerate(constraints):
        for column, stage in enumerate(stages):
            panel = panels[line, column]
            for epoch, values in violations.get(f"{stage}/{constraint}", {}).items():
                panel.step(
                    *_steps(values),
                    where="post",
                    label=f"epoch {epoch}",
                    color=shades[epochs.index(epoch)],
                    linewidth=2.2 if epoch == epochs[-1] else 1.4,
                )
            _cdf_axes(panel, f"{constraint}, {epoch_titles.get(stage, stage)}")
            panel.set_xlabel("violation (≤ 0 is satisfied)")
        panels[line, 0].set_ylabel("share of values")
    handles = {
        label: handle
        for panel in panels.flat
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    labels = [f"epoch {epoch}" for epoch in epochs]
    figure.legend([handles[label] for label in labels], labels, loc="outside lower center", ncols=6)
    figure.savefig(path, dpi=150)


def pareto(
    points: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    families: Mapping[str, tuple[str, str]],
    axes: tuple[Axis, Axis],
    path: Path,
) -> None:
    """Writes two metrics against each other, mean ± std over seeds, with the frontier drawn.

    points: x and y of every seed by row.
    families: of every row, its method, which gets a colour, and its setting, written beside it.
    """
    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    panel = figure.subplots()
    means = {row: (float(np.mean(xs)), float(np.mean(ys))) for row, (xs, ys) in points.items()}
    best = frontier(list(means.values()), axes)
    stairs = np.array(sorted(list(means.values())[i] for i in best))
    # Between two points of the frontier lies what the worse coordinates of both attain.
    where: Any = "post" if not axes[0].higher_is_better else "pre"
    panel.step(
        stairs[:, 0],
        stairs[:, 1],
        where=where,
        color="black",
        linewidth=1.2,
        zorder=1,
        label="frontier",
    )
    methods = list(dict.fromkeys(families[row][0] for row in points))
    for row, (xs, ys) in points.items():
        method, setting = families[row]
        number = methods.index(method)
        panel.errorbar(
            *means[row],
            xerr=_spread(xs),
            yerr=_spread(ys),
            color=colour(number),
            marker=MARKERS[number % len(MARKERS)],
            markersize=8,
            linestyle="none",
            capsize=2,
            elinewidth=0.9,
            label=method,
        )
        panel.annotate(
            setting,
            means[row],
            xytext=(6, 5),
            textcoords="offset points",
            fontsize="small",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
            zorder=1.5,  # Over the frontier, under the points.
        )
    for axis, along in zip(axes, (panel.xaxis, panel.yaxis), strict=True):
        along.set_label_text(axis.label)
    panel.margins(0.12, 0.08)  # Room for the settings.
    panel.grid(alpha=0.3)
    handles = dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(3, len(handles))
    )
    figure.savefig(path, dpi=150)


def frontier(points: Sequence[tuple[float, float]], axes: tuple[Axis, Axis]) -> list[int]:
    """Positions of the points that no other point beats: better in one, no worse in the other.

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


def category_bars(
    groups: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]], path: Path
) -> None:
    """Writes bars by category, a group of bars per category, one bar per method, std over seeds.

    groups: values of every seed by picture, method and category.
    """
    methods = list(dict.fromkeys(method for by_method in groups.values() for method in by_method))
    sizes = [
        len({c for found in by_method.values() for c in found}) for by_method in groups.values()
    ]
    width = max(4.5, 1.2 + 0.25 * max(sizes) * (len(methods) + 1))
    figure = Figure(figsize=(min(width, 14.0), 0.7 + 3.0 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    for panel, (title, by_method) in zip(panels, groups.items(), strict=True):
        categories = list(dict.fromkeys(c for found in by_method.values() for c in found))
        for number, (method, found) in enumerate(by_method.items()):
            values = [found.get(category, [math.nan]) for category in categories]
            panel.bar(
                np.arange(len(categories)) + _offset(number, len(methods)),
                [np.mean(value) for value in values],
                0.8 / len(methods),
                yerr=[_spread(value) for value in values],
                color=colour(number),
                hatch=HATCHES[number // len(COLOURS) % len(HATCHES)],
                edgecolor="white",
                error_kw={"elinewidth": 0.9},
                label=method,
            )
        panel.set_xticks(range(len(categories)), categories)
        panel.set_ylabel(title)
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
    figure.savefig(path, dpi=150)


def gaps(values: Mapping[str, Mapping[str, tuple[float, float]]], path: Path) -> None:
    """Writes what is lost between training and held-out data: two marks per method, joined.

    values: (train, held-out) means by metric and method.
    """
    methods = list(dict.fromkeys(method for by_method in values.values() for method in by_method))
    figure = Figure(
        figsize=(1.8 + 3.0 * len(values), 1.3 + 0.3 * len(methods)), layout="constrained"
    )
    panels = figure.subplots(1, len(values), squeeze=False, sharey=True)[0]
    for panel, (metric, by_method) in zip(panels, values.items(), strict=True):
        for place, method in enumerate(methods):
            train, held_out = by_method.get(method, (math.nan, math.nan))
            panel.plot([train, held_out], [place, place], color=OTHERS, linewidth=2, zorder=1)
            for value, number, marker, label in (
                (train, 0, "o", "train"),
                (held_out, 1, "D", "held-out"),
            ):
                panel.scatter(value, place, color=colour(number), marker=marker, s=45, label=label)
        panel.set_yticks(range(len(methods)), methods)
        panel.set_xlabel(metric)
        panel.locator_params(axis="x", nbins=4)  # long numbers of narrow ranges touch otherwise
        panel.grid(axis="x", alpha=0.3)
    panels[0].set_ylim(len(methods) - 0.5, -0.5)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles[:2], labels[:2], loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=150)


def costs(values: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """Writes a panel of bars per cost, mean ± std over seeds.

    values: of every seed by cost, its unit in the name, and method.
    """
    methods = list(dict.fromkeys(method for by_method in values.values() for method in by_method))
    figure = Figure(
        figsize=(1.8 + 3.0 * len(values), 0.9 + 0.34 * len(methods)), layout="constrained"
    )
    panels = figure.subplots(1, len(values), squeeze=False, sharey=True)[0]
    for panel, (cost, by_method) in zip(panels, values.items(), strict=True):
        for place, method in enumerate(methods):
            found = by_method.get(method, [math.nan])
            panel.barh(place, np.mean(found), xerr=_spread(found), color=colour(0), height=0.7)
        panel.set_yticks(range(len(methods)), methods)
        panel.set_xlabel(cost)
        panel.grid(axis="x", alpha=0.3)
        panel.set_axisbelow(True)
    panels[0].set_ylim(len(methods) - 0.5, -0.5)
    figure.savefig(path, dpi=150)


def _steps(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The empirical CDF as steps. NaN are left out; infinite values count, outside the picture."""
    ordered = np.sort(values[~np.isnan(values)])
    heights = np.arange(1, len(ordered) + 1) / max(1, len(ordered))
    shown = np.isfinite(ordered)
    return ordered[shown], heights[shown]


def _cdf_axes(panel: Any, title: str) -> None:
    panel.axvline(0, color="black", linewidth=1)
    panel.set_title(title)
    panel.set_ylim(0, 1.01)
    panel.grid(alpha=0.3)


def _compress(values: Sequence[np.ndarray], panels: Sequence[Any]) -> None:
    """Makes the x axis logarithmic beyond ±c where the largest |v| is over 30 times the median."""
    sizes = np.abs(np.concatenate(values)) if values else np.zeros(0)
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
    if not len(sizes) or sizes.max() <= 30 * np.median(sizes):
        return
    bound = 10.0 ** round(math.log10(np.median(sizes)))
    for panel in panels:
        panel.set_xscale("symlog", linthresh=bound)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.set_xlabel(f"{panel.get_xlabel()}, logarithmic beyond ±{bound:g}")


def _spread(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def _offset(number: int, bars: int) -> float:
    """Where the centre of one of several bars stands beside its group's tick."""
    return 0.8 * ((number + 0.5) / bars - 0.5)
