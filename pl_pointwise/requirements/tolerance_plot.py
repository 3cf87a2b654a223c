"""The plot of ``pl-pointwise tolerances``: the share of the samples that meets ε, over ε."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pl_pointwise.compare.distributions import compress
from pl_pointwise.compare.drawing import legend, save
from pl_pointwise.compare.styles import COLOURS, LINES
from pl_pointwise.constraint import Constraint

ALL = "all samples"
CONFIGURED = "configured ε"
FAR = 5
"""A configured ε is not drawn that is so many widths of the curves away from them."""
MOST = 12
"""Categories that are drawn, those with the most samples; the tables have all."""

ByCategory = Mapping[str | None, NDArray[np.float64]]
"""(n,), the ε that each sample just meets, by category; None: all samples."""


def draw(
    constraints: Mapping[str, Constraint],
    curves: Mapping[str, Mapping[str, ByCategory]],
    path: Path,
) -> None:
    """Writes a line of panels per constraint, a column per data set, a curve per category.

    curves: by constraint and data set; where no sample carries the constraint, nothing.
    """
    shown = {name: by_dataset for name, by_dataset in curves.items() if any(by_dataset.values())}
    datasets = list(next(iter(shown.values())))
    size = (0.8 + 4.2 * len(datasets), 0.9 + 3.3 * len(shown))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(shown), len(datasets), squeeze=False, sharey=True, sharex="row")
    styles = _styles(shown)
    for line, (name, by_dataset) in zip(panels, shown.items(), strict=True):
        constraint = constraints[name]
        for panel, (dataset, by_category) in zip(line, by_dataset.items(), strict=True):
            panel.set_visible(bool(by_category))
            for category, values in by_category.items():
                if category in styles:
                    _curve(panel, values, constraint, label=_name(category), **styles[category])
            panel.axvline(_configured(constraint), color="black", linestyle=":", label=CONFIGURED)
            panel.set_title(f"{name}, {dataset}")
            panel.set_xlabel(_label(name, constraint))
            panel.set_ylim(0, 1.01)
            panel.grid(alpha=0.3)
        drawn = [each for by_category in by_dataset.values() for each in by_category.values()]
        _limit(drawn, constraint, line)
        compress(drawn, line)
        line[0].set_ylabel("share of samples that meets ε")
    legend(figure, panels.flat, [CONFIGURED, *map(_name, styles)], columns=4)
    save(figure, path)


def _styles(curves: Mapping[str, Mapping[str, ByCategory]]) -> dict[str | None, dict[str, Any]]:
    """Returns the style of all samples, over the others, and of the largest categories."""
    sizes: dict[str, int] = {}
    for by_dataset in curves.values():
        for by_category in by_dataset.values():
            for category, values in by_category.items():
                if category is not None:
                    sizes[category] = sizes.get(category, 0) + len(values)
    largest = sorted(sorted(sizes, key=lambda name: -sizes[name])[:MOST])
    return {None: {"color": "black", "linewidth": 2.0, "zorder": 3}} | {
        name: {"color": COLOURS[number % 6], "linestyle": LINES[number // 6], "linewidth": 1.4}
        for number, name in enumerate(largest)  # The seventh colour is black.
    }


def _name(category: str | None) -> str:
    """Returns the label of a curve; matplotlib leaves those out that begin with "_"."""
    return ALL if category is None else category if category[0] != "_" else f"\u2009{category}"


def _lower(constraint: Constraint) -> bool:
    return constraint.at_least is not None and constraint.at_most is None


def _curve(panel: Any, values: NDArray[np.float64], constraint: Constraint, **style: Any) -> None:
    """Draws the share that meets ε: of a lower bound those at or above it, else at or below."""
    panel.ecdf(values, complementary=_lower(constraint), **style)


def _configured(constraint: Constraint) -> float:
    """The ε as it is configured; of an interval or equality, bounds that are not widened."""
    if constraint.sides == 2 or constraint.equals is not None:
        return 0.0
    bound = constraint.at_least if constraint.at_most is None else constraint.at_most
    assert bound is not None
    return bound


def _label(name: str, constraint: Constraint) -> str:
    if constraint.equals is not None:
        return f"δ of {constraint.equals:g} ± δ"
    if constraint.sides == 2:
        return f"bounds of {name} wider by ε (< 0: narrower)"
    return f"ε of {name} {'≥' if _lower(constraint) else '≤'} ε"


def _limit(drawn: Any, constraint: Constraint, panels: Any) -> None:
    """Sets the limits by what is finite: samples that meet no ε are outside the plot.

    So is a configured ε that would flatten the curves; then the label says so.
    """
    every = np.concatenate(drawn)
    finite, configured = every[np.isfinite(every)], _configured(constraint)
    width = np.ptp(finite) if len(finite) else 0.0
    beyond = np.abs(finite - configured).min() if len(finite) else 0.0
    if width and beyond > FAR * width:
        for panel in panels:
            panel.set_xlabel(f"{panel.get_xlabel()}; configured: {configured:g}, outside")
    else:
        finite = np.append(finite, configured)
    margin = 0.03 * np.ptp(finite) or 1.0
    panels[0].set_xlim(finite.min() - margin, finite.max() + margin)
