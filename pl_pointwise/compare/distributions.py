"""Distributions of violations: their empirical CDFs by method and by epoch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from pl_pointwise.certificates import cdf_band

from .drawing import FORMATS, HELD_OUT, count_note, legend, save
from .styles import LINES, OTHERS, Style, styles_of
from .tables import held_out_stage

Curves = Mapping[str, Mapping[str, np.ndarray]]
"""Values (n,) by panel, ``stage/constraint`` or a constraint, and by method."""


def violation_cdfs(violations: Curves, path: Path) -> None:
    """Writes the empirical CDF of violations, a panel per ``stage/constraint``, a curve per method.

    violations: NaN are left out.
    The vertical line at 0 is the constraint: what a curve lacks to 1 there is the share violated.
    Where a few values would flatten all others, the axis is logarithmic far from 0.
    """
    chosen = styles_of(_unique(violations.values()), path.parent)
    styles = {
        method: {
            **_look(number, [*chosen.values()]),
            "linewidth": 1.6,
            "marker": style.marker,
            "markersize": 5,
            "markeredgewidth": 0,
            # By length along the curve, and each method's elsewhere, or they hide one another.
            "markevery": (0.02 + 0.011 * number, 0.17),
        }
        for number, (method, style) in enumerate(chosen.items())
    }
    stage = held_out_stage([*violations])
    stages = {stage: HELD_OUT[stage], "train": "train"}
    counts = [
        count_note(
            (len(v) for n, by in violations.items() if n.startswith(f"{s}/") for v in by.values()),
            f"values ({title})",
        )
        for s, title in stages.items()
        if any(name.startswith(f"{s}/") for name in violations)
    ]
    note = f"All seeds of a method together: {'; '.join(counts)} a curve."
    _cdf_grid(violations, stages, styles, path, note)


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
    stages = {name.partition("/")[0]: name.partition("/")[0] for name in violations}
    titles = {"running": "training (running)", "val": "held-out (val)"}
    shown = {stage: titles.get(stage, stage) for stage in stages}
    _cdf_grid(named, shown, styles, path, "Darkest: the newest epoch.", [".png"])


def _cdf_grid(
    violations: Curves,
    stages: Mapping[str, str],
    styles: Mapping[str, Mapping[str, Any]],
    path: Path,
    note: str,
    formats: Sequence[str] = FORMATS,
) -> None:
    """Writes a line of panels per constraint, a column per stage, whose titles are ``stages``.

    note: what the curves are of.
    """
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
        compress(shown, line)
        line[0].set_ylabel("share of values")
    columns = 3 if len(stages) > 1 else 2
    legend(figure, panels.flat, list(styles), columns, f"{note} Left of the line: satisfied.")
    save(figure, path, formats)


def cdf_panels(worst: Curves, path: Path) -> None:
    """Writes held-out CDFs, a panel per method: its curve with its DKW band over all the others.

    worst: by constraint and method, (samples,), the worst violation of each sample of one trained
        model: the band of :func:`~pl_pointwise.certificates.cdf_band` holds for independent values.
    """
    methods = _unique(worst.values())
    styles = styles_of(methods, path.parent)
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
            style = styles[method]
            if method not in by_method:
                continue
            panel.set_visible(True)
            for values in by_method.values():
                _cdf(panel, values, color=OTHERS, linewidth=0.9)
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
