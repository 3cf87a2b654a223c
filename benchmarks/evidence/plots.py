"""Objective against violations: every setting a dot, and the chosen ones with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from pl_pointwise.compare.plots import Axis, frontier
from pl_pointwise.compare.styles import MARKERS

from .choice import Measured
from .statistics import estimate

if TYPE_CHECKING:
    from .report import Judged

SHOWN = {"cvar95": "CVaR95", "violated": "share violated"}
FAR = 0.9
"""The share of the dots that sets the limits of an axis: a few blown-up settings would take all."""
FEW = 10
"""With fewer dots, all of them set the limits."""


def draw(judged: Judged, tuned: Sequence[Measured], path: Path) -> bool:
    """Writes the plot: above all settings on validation data, below the chosen ones on test data.

    Returns: whether there was anything to draw.
    """
    entries = {entry.method: entry for entry in [run.entry for run in tuned]}
    entries |= {planned.entry.method: planned.entry for planned in judged.runs}
    if not (tuned or judged.results):
        return False
    styles = {
        method: {
            "color": matplotlib.colormaps["tab20"](number % 20),
            "marker": MARKERS[number % len(MARKERS)],
            "markeredgecolor": "black" if entry.role == "ours" else None,
        }
        for number, (method, entry) in enumerate(entries.items())
    }
    lines = (["tuned"] if tuned else []) + (["judged"] if judged.results else [])
    figure = Figure(figsize=(9, 0.9 + 3.4 * len(lines)), layout="constrained")
    panels = figure.subplots(len(lines), 2, squeeze=False)
    for panel_line, what in zip(panels, lines, strict=True):
        for panel, name in zip(panel_line, SHOWN, strict=True):
            if what == "tuned":
                _settings(panel, tuned, name, styles)
            else:
                _judged(panel, judged, name, styles)
            panel.set_xlabel(f"objective ({judged.study.objective}), lower is better")
            panel.set_ylabel(f"{SHOWN[name]}, lower is better")
            panel.grid(alpha=0.3)
    handles: dict[str, Any] = {}
    for panel in panels.flat:
        found, labels = panel.get_legend_handles_labels()
        handles |= dict(zip(labels, found, strict=True))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=5, fontsize="small"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    return True


def _settings(panel: Any, tuned: Sequence[Measured], name: str, styles: dict[str, Any]) -> None:
    """Every setting on validation data, with the frontiers of our methods and of the rivals."""
    points = [(run.entry, (run.objective, getattr(run, name))) for run in tuned]
    for role, line in (("ours", "-"), ("rival", ":")):
        those = np.array([point for entry, point in points if entry.role == role]).reshape(-1, 2)
        best = those[frontier(those, (Axis("x"), Axis("y")))]
        best = best[np.argsort(best[:, 0])]
        panel.step(
            *best.T,
            where="post",
            color="black",
            linestyle=line,
            linewidth=1,
            zorder=1,
            label=f"frontier, {role if role == 'ours' else 'rivals'}",
        )
    for entry, point in points:
        panel.plot(
            *point,
            linestyle="none",
            markersize=5,
            label=entry.method,
            **styles[entry.method],
        )
    values = np.array([point for _, point in points])
    outside = _limit(panel, values[np.isfinite(values).all(1)])
    note = f"; {outside} outside" if outside else ""
    panel.set_title(f"every setting, validation, one seed{note}", fontsize="medium")


def _judged(panel: Any, judged: Judged, name: str, styles: dict[str, Any]) -> None:
    """The chosen settings on test data, mean and 95 % interval over seeds."""
    entries = {planned.entry.name: planned.entry for planned in judged.runs}
    centres = []
    for label, by_seed in judged.results.items():
        method = entries[label].method
        both = [
            estimate([judged.study.value(n)(metrics) for metrics in by_seed.values()])
            for n in ("objective", name)
        ]
        x, y = both
        widths = [np.nan_to_num(each.high - each.mean) for each in both]
        centres.append((x.mean, y.mean))
        panel.errorbar(
            x.mean,
            y.mean,
            xerr=widths[0],
            yerr=widths[1],
            linestyle="none",
            markersize=6,
            elinewidth=0.8,
            label=method,
            **styles[method],
        )
    outside = _limit(panel, np.array(centres))
    note = f"; {outside} outside" if outside else ""
    panel.set_title(f"chosen settings, test, 95 % intervals{note}", fontsize="medium")


def _limit(panel: Any, points: np.ndarray) -> int:
    """Sets the axes' limits by most of the points; returns how many lie outside."""
    if len(points) < FEW:
        return 0
    low, high = points.min(axis=0), np.quantile(points, FAR, axis=0)
    room = 0.15 * (high - low) + 1e-6
    panel.set_xlim(low[0] - room[0], high[0] + 2 * room[0])
    panel.set_ylim(low[1] - room[1], high[1] + 2 * room[1])
    return int((points > high + 2 * room).any(axis=1).sum())
