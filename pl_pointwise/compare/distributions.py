"""Empirical CDFs of violations, by method and by epoch; and how every plot is saved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from .styles import Style
from .tables import deciding_stage

Curves = Mapping[str, Mapping[str, np.ndarray]]
"""Values (n,), of which NaN are left out, by panel, ``stage/constraint``, and curve."""

SATISFIED = "Left of the line: satisfied."

TITLES = {"test": "held-out", "val": "held-out (selection)", "running": "training (running)"}


def violation_cdfs(violations: Curves, styles: Mapping[str, Style], path: Path) -> None:
    """Writes the empirical CDF of violations, a panel per ``stage/constraint``, a curve per method.

    What a curve lacks to 1 at the line, 0, is the share violated. Where a few values would flatten
    all others, the axis is logarithmic far from 0.
    """
    looks = {
        method: {
            "color": style.colour,
            "linestyle": style.line,
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
        for stage in dict.fromkeys((deciding_stage([*violations]), "train"))
        for name, by_method in violations.items()
        if name.startswith(f"{stage}/")
    }
    _cdf_grid(shown, looks, path, f"All seeds of a method together. {SATISFIED}")


def cdfs_by_epoch(violations: Mapping[str, Mapping[int, np.ndarray]], path: Path) -> None:
    """Writes the empirical CDF of violations, a panel per ``stage/constraint``, a curve per epoch.

    violations: values (n,) by ``stage/constraint`` and epoch; NaN are left out.
    """
    epochs = sorted({epoch for by_epoch in violations.values() for epoch in by_epoch})
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
    _cdf_grid(named, styles, path, f"Darkest: the newest epoch. {SATISFIED}")


def _cdf_grid(
    curves: Curves, styles: Mapping[str, Mapping[str, Any]], path: Path, note: str
) -> None:
    """Writes empirical CDFs: a line of panels per constraint, on one axis, and a column per stage.

    styles: by curve, in the legend's order. note: what the curves are of.
    """
    stages = list(dict.fromkeys(name.partition("/")[0] for name in curves))
    constraints = list(dict.fromkeys(name.partition("/")[2] for name in curves))
    size = (0.8 + 4.2 * len(stages), 0.7 + 3.3 * len(constraints))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(
        len(constraints), len(stages), squeeze=False, sharey=True, sharex="row"
    )
    for beside, constraint in zip(panels, constraints, strict=True):
        of_row = []
        for panel, stage in zip(beside, stages, strict=True):
            found = curves.get(f"{stage}/{constraint}", {})
            panel.set_visible(bool(found))
            for name, values in found.items():
                of_row.append(values := values[~np.isnan(values)])
                if len(values):  # Infinite values count, outside the plot.
                    panel.ecdf(values, label=name, **styles[name])
            panel.axvline(0.0, color="black", linewidth=1)
            panel.set_title(f"{constraint}, {TITLES.get(stage, stage)}")
            panel.set_xlabel("violation (≤ 0 is satisfied)")
            panel.set_ylim(0, 1.01)
            panel.grid(alpha=0.3)
        _compress(of_row, beside)
        beside[0].set_ylabel("share of values")
    save(figure, panels.flat, list(styles), 3 if len(stages) > 1 else 2, note, path)


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


def save(
    figure: Figure, panels: Iterable[Any], names: Sequence[str], columns: int, note: str, path: Path
) -> None:
    """Writes a plot in the format that the path ends in. The same plot, the same bytes.

    Below the panels stand a line that says what is shown, and their named curves, each once and in
    the order of ``names``.
    """
    handles = {
        label: handle.lines[0] if isinstance(handle, ErrorbarContainer) else handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    shown = [name for name in names if name in handles]
    figure.legend(
        [handles[name] for name in shown],
        shown,
        loc="outside lower center",
        ncols=max(1, min(columns, len(shown))),
        title=note,
        title_fontsize="small",
        fontsize="small",
        frameon=False,
    )
    undated = {"CreationDate": None} if path.suffix == ".pdf" else {}
    with matplotlib.rc_context({"pdf.fonttype": 42}):  # TrueType, which publishers ask for.
        figure.savefig(path, dpi=150, metadata=undated)
