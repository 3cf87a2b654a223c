"""A performance profile: on which share of tasks and lengths a method is within x of the best."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from .verdicts import TOLERANCE, floored, is_rival, means

WITHIN = np.concatenate([[0.0], np.geomspace(1e-3, 10, 200)])


def profile(table: pd.DataFrame, tolerance: float = TOLERANCE) -> pd.DataFrame:
    """Shares by x (rows) and method (columns).

    The best is the least objective of the methods that violate at most ``tolerance`` there; who
    violates more is within no x. Task-lengths on which nobody is feasible are left out. A weight
    of a grid is no method here, as it belongs to one task.
    """
    hits: dict[str, list[float]] = {}
    number = 0
    for _, part in means(table).groupby(["task", "epochs"], sort=False):
        found = part.set_index("method")
        paid = floored(found).where(found["violated"] <= tolerance)
        if paid.notna().sum() == 0:
            continue
        number += 1
        best = paid.min()
        for name, each in ((paid - best) / abs(best)).dropna().items():
            hits.setdefault(str(name), []).append(float(each))
    methods = [name for name in dict.fromkeys(table["method"]) if "," not in name or ")" in name]
    columns = {}
    for name in methods:
        above = np.array(hits.get(name, []))
        columns[name] = [float(np.sum(above <= x + 1e-9)) / max(1, number) for x in WITHIN]
    return pd.DataFrame(columns, index=WITHIN)


def draw(table: pd.DataFrame, path: Path, tolerance: float = TOLERANCE) -> None:
    """The package's methods in colour, of rivals a grey line each and the three best by name."""
    shares = profile(table, tolerance)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    rivals = [name for name in shares if is_rival(name)]
    best = shares[rivals].mean().nlargest(3).index
    colours = iter(matplotlib.colormaps["tab10"].colors)  # type: ignore[attr-defined]
    for name in shares:
        if name in rivals and name not in best:
            axes.plot(shares.index, shares[name], color="0.85", linewidth=0.8, zorder=1)
            continue
        width = 1.3 if name in rivals else 2.4
        style = "--" if name in rivals else "-"
        axes.plot(
            shares.index, shares[name], style, color=next(colours), linewidth=width, label=name
        )
    axes.set_xscale("symlog", linthresh=1e-3)
    axes.set_ylim(0, 1)
    axes.set_xlabel("above the least objective of all feasible methods, as a share of it")
    axes.set_ylabel(f"share of task-lengths, at most {tolerance:g} violated")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
