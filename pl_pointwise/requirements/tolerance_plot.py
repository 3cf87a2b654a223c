"""The plot of ``pl-pointwise tolerances``: the share of the samples that meets ε, over ε."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pl_pointwise.compare.distributions import Row, cdf_grid
from pl_pointwise.compare.styles import COLOURS, LINES
from pl_pointwise.constraint import Constraint

ALL = "all samples"
FAR = 5
"""A configured ε is not drawn that is so many widths of the curves away from them."""
MOST = 12
"""Categories that are drawn, those with the most samples; the tables have all."""

ByCategory = Mapping[str, NDArray[np.float64]]
"""(n,), the ε that each sample just meets, by category; "": all samples."""


def draw(
    constraints: Mapping[str, Constraint],
    curves: Mapping[str, Mapping[str, ByCategory]],
    path: Path,
) -> None:
    """Writes a line of panels per constraint, a column per data set, a curve per category.

    curves: by constraint and data set; where no sample carries the constraint, nothing.
    """
    sizes = Counter[str]()
    for by_dataset in curves.values():
        for by_category in by_dataset.values():
            sizes.update({name: len(v) for name, v in by_category.items() if name})
    styles: dict[str, dict[str, Any]] = {ALL: {"color": "black", "linewidth": 2.0, "zorder": 3}}
    for number, (name, _) in enumerate(sizes.most_common(MOST)):
        look = {"color": COLOURS[number % 6], "linestyle": LINES[number // 6]}  # The 7th is black.
        styles[_label(name)] = look | {"linewidth": 1.4}
    rows = []
    for name, by_dataset in curves.items():
        panels = {
            dataset: {_label(c): values for c, values in found.items() if _label(c) in styles}
            for dataset, found in by_dataset.items()
        }
        if any(panels.values()):
            rows.append(_row(name, constraints[name], panels))
    cdf_grid(rows, styles, path, "Black line: ε as it is configured.", "samples that meets ε")


def _row(
    name: str, constraint: Constraint, panels: Mapping[str, Mapping[str, NDArray[np.float64]]]
) -> Row:
    falling = constraint.at_least is not None and constraint.at_most is None
    if constraint.equals is not None:
        label, configured = f"δ of {constraint.equals:g} ± δ", 0.0
    elif constraint.sides == 2:
        label, configured = f"bounds of {name} wider by ε (< 0: narrower)", 0.0
    else:
        label = f"ε of {name} {'≥' if falling else '≤'} ε"
        configured = (constraint.at_least if falling else constraint.at_most) or 0.0
    every = np.concatenate([values for curves in panels.values() for values in curves.values()])
    finite = every[np.isfinite(every)]
    line: float | None = configured
    if len(finite) and np.abs(finite - configured).min() > FAR * np.ptp(finite) > 0:
        label, line = f"{label}; configured: {configured:g}, outside", None
    return Row(name, panels, label, line, falling)


def _label(category: str) -> str:
    """Returns the label of a curve; matplotlib leaves those out that begin with "_"."""
    return f"\u2009{category}" if category.startswith("_") else category or ALL
