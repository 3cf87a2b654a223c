"""Distributions of violations: their empirical CDFs by method, by epoch and by tolerance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from pl_pointwise.certificates import cdf_band

from .drawing import count_note, legend, save
from .styles import LINES, OTHERS, Style
from .tables import HELD_OUT, held_out_stage

Curves = Mapping[str, Mapping[str, np.ndarray]]
"""Values (n,) by panel, ``stage/constraint`` or a constraint, and by method."""

SATISFIED = "Left of the line: satisfied."

TITLES = HELD_OUT | {"running": "training (running)"}


@dataclass(frozen=True)
class Row:
    """The panels of one constraint beside each other, on one axis.

    Attributes:
        name: the constraint's.
        curves: values (n,) by panel and curve; NaN are left out.
        label: of the axis.
        line: where a vertical line stands, if anywhere.
        falling: the share at or above a value is drawn, not at or below it.
    """

    name: str
    curves: Mapping[str, Mapping[str, np.ndarray]]
    label: str = "violation (≤ 0 is satisfied)"
    line: float | None = 0.0
    falling: bool = False


def cdf_grid(
    rows: Sequence[Row],
    styles: Mapping[str, Mapping[str, Any]],
    path: Path,
    note: str,
    of: str = "values",
) -> None:
    """Writes empirical CDFs, a line of panels per constraint.

    styles: by curve, in the legend's order. note: what the curves are of.
    """
    columns = list(dict.fromkeys(title for row in rows for title in row.curves))
    size = (0.8 + 4.2 * len(columns), 0.7 + 3.3 * len(rows))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(rows), len(columns), squeeze=False, sharey=True, sharex="row")
    for beside, row in zip(panels, rows, strict=True):
        for panel, title in zip(beside, columns, strict=True):
            curves = row.curves.get(title, {})
            panel.set_visible(bool(curves))
            for name, values in curves.items():
                _cdf(panel, values, label=name, complementary=row.falling, **styles[name])
            _cdf_axes(panel, f"{row.name}, {title}", row.line)
            panel.set_xlabel(row.label)
        compress([values for curves in row.curves.values() for values in curves.values()], beside)
        beside[0].set_ylabel(f"share of {of}")
    legend(figure, panels.flat, list(styles), 3 if len(columns) > 1 else 2, note)
    save(figure, path)


def violation_cdfs(violations: Curves, styles: Mapping[str, Style], path: Path) -> None:
    """Writes the empirical CDF of violations, a panel per ``stage/constraint``, a curve per method.

    What a curve lacks to 1 at the line, 0, is the share violated. Where a few values would flatten
    all others, the axis is logarithmic far from 0.
    """
    looks = {
        method: {
            **_look(number, list(styles.values())),
            "linewidth": 1.6,
            "marker": style.marker,
            "markersize": 5,
            "markeredgewidth": 0,
            # By length along the curve, and each method's elsewhere, or they hide one another.
            "markevery": (0.02 + 0.011 * number, 0.17),
        }
        for number, (method, style) in enumerate(styles.items())
    }
    shown = {
        name: by_method
        for stage in (held_out_stage([*violations]), "train")
        for name, by_method in violations.items()
        if name.startswith(f"{stage}/")
    }
    sizes = (len(values) for by_method in shown.values() for values in by_method.values())
    note = f"All seeds of a method together, {count_note(sizes, 'values')} a curve. {SATISFIED}"
    cdf_grid(_rows(shown), looks, path, note)


def _rows(by_panel: Mapping[str, Mapping[str, np.ndarray]]) -> list[Row]:
    """Returns a row per constraint of ``stage/constraint``, a panel per stage."""
    found: dict[str, dict[str, Mapping[str, np.ndarray]]] = {}
    for name, curves in by_panel.items():
        stage, _, constraint = name.partition("/")
        found.setdefault(constraint, {})[TITLES.get(stage, stage)] = curves
    return [Row(constraint, panels) for constraint, panels in found.items()]


def _look(number: int, styles: Sequence[Style]) -> dict[str, Any]:
    """Returns colour and line of a curve: of one colour, each darker than the one before."""
    colour = styles[number].colour
    before = sum(style.colour == colour for style in styles[:number])
    shade = np.array(to_rgb(colour)) * (1.0, 0.65, 0.4)[before % 3]
    return {"color": tuple(shade), "linestyle": LINES[before % len(LINES)]}


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
    cdf_grid(_rows(named), styles, path, f"Darkest: the newest epoch. {SATISFIED}")


def cdf_panels(worst: Curves, styles: Mapping[str, Style], path: Path) -> None:
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
            style = styles[method]
            _band(panel, by_method[method], low, high, style.colour)
            look = {"color": style.colour, "marker": style.marker, "markersize": 5}
            _cdf(panel, by_method[method], linewidth=1.8, markevery=(0.02, 0.2), **look)
            _cdf_axes(panel, f"{constraint}: {method}" if len(worst) > 1 else method)
            panel.set_xlim(low, high)
            panel.tick_params(labelbottom=True)
            if number % columns == 0:
                panel.set_ylabel("share of samples")
    sizes = (len(values) for by_method in worst.values() for values in by_method.values())
    figure.supxlabel(
        "worst violation of a held-out sample (≤ 0, left of the line, is satisfied)\n"
        f"First seed, {count_note(sizes, 'samples')} a curve. Band: where the CDF of new inputs "
        "lies\nat 95 % confidence (DKW), for one model by itself. Grey: the other methods.",
        fontsize="small",
    )
    save(figure, path)


def _cdf(panel: Any, values: np.ndarray, **style: Any) -> None:
    """Draws an empirical CDF. NaN are left out; infinite values count, outside the plot."""
    values = values[~np.isnan(values)]
    if len(values):
        panel.ecdf(values, **style)


def _band(panel: Any, values: np.ndarray, low: float, high: float, shade: str) -> None:
    """Fills the 95 % band around the CDF; without values, or with NaN, nothing is certain."""
    if not len(values) or np.isnan(values).any():
        return
    points = np.unique([low, *values[np.isfinite(values)], high])
    lower, upper = (edge.numpy() for edge in cdf_band(values, points))
    panel.fill_between(points, lower, upper, step="post", color=shade, alpha=0.25, linewidth=0)


def _cdf_axes(panel: Any, title: str, line: float | None = 0.0) -> None:
    if line is not None:
        panel.axvline(line, color="black", linewidth=1)
    panel.set_title(title)
    panel.set_ylim(0, 1.01)
    panel.grid(alpha=0.3)


def compress(values: Sequence[np.ndarray], panels: Iterable[Any]) -> None:
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


def _unique(by_name: Iterable[Mapping[Any, Any]]) -> list[Any]:
    """Returns the names of all mappings, each once, in their order."""
    return list(dict.fromkeys(name for values in by_name for name in values))
