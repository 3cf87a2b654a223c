"""A comparison's plot: the CDFs of violations. A violation ≤ 0 is satisfied."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pl_pointwise.data import title_of

from .runs import Outcome
from .tables import deciding_stage

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

PLOT = "cdf.png"


def draw(done: Sequence[Outcome], output: Path) -> bool:
    """Draws the violations of runs that did not fail, if there are any; removes an earlier plot."""
    (output / PLOT).unlink(missing_ok=True)
    violations: dict[str, dict[str, np.ndarray]] = {}
    for run, _ in done:
        for name, values in run.violations().items():  # All seeds together.
            known = violations.setdefault(name, {})
            known[run.method] = np.append(known.get(run.method, values[:0]), values)
    if violations:
        save(violation_cdfs(violations), output / PLOT)
    return bool(violations)


def look_of(number: int) -> dict[str, Any]:
    """matplotlib's options of the curve of a method, by its number; no two of 84 are the same."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        # By length along the curve, and each method's elsewhere, or markers hide one another.
        "markevery": (0.02 + 0.011 * number, 0.17),
        "linewidth": 1.6,
        "markersize": 5,
        "markeredgewidth": 0,
    }


Curves = Mapping[str, Mapping[str, np.ndarray]]
"""Values (n,), of which NaN are left out, by panel, ``stage/constraint``, and curve."""


def violation_cdfs(violations: Curves) -> Figure:
    """Returns the empirical CDFs of violations, a curve per method: a line of panels per
    constraint, on one axis, and a column per split."""
    held_out = deciding_stage([*violations])
    names = [name for name in violations if name.partition("/")[0] in (held_out, "train")]
    stages = list(dict.fromkeys(name.partition("/")[0] for name in names))
    constraints = list(dict.fromkeys(name.partition("/")[2] for name in names))
    methods = list(dict.fromkeys(method for of in violations.values() for method in of))
    looks = {method: look_of(number) for number, method in enumerate(methods)}
    size = (0.8 + 4.2 * len(stages), 0.7 + 3.3 * len(constraints))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(
        len(constraints), len(stages), squeeze=False, sharey=True, sharex="row"
    )
    for beside, constraint in zip(panels, constraints, strict=True):
        of_row = []
        for panel, stage in zip(beside, stages, strict=True):
            curves = violations.get(f"{stage}/{constraint}", {})
            panel.set_visible(bool(curves))
            for method, values in curves.items():
                of_row.append(values := values[~np.isnan(values)])
                if len(values):  # Infinite values count, outside the plot.
                    panel.ecdf(values, label=method, **looks[method])
            panel.axvline(0.0, color="black", linewidth=1)
            panel.set_title(f"{constraint}, {title_of(stage)}")
            panel.set_xlabel("violation (≤ 0 is satisfied)")
            panel.set_ylim(0, 1.01)
            panel.grid(alpha=0.3)
        _compress(of_row, beside)
        beside[0].set_ylabel("share of values")
    handles = {
        label: handle
        for panel in figure.axes
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=max(1, min(3 if len(stages) > 1 else 2, len(handles))),
        title="All seeds of a method together. Left of the line: satisfied.",
        title_fontsize="small",
        fontsize="small",
        frameon=False,
    )
    return figure


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


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=150)
