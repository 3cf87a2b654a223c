"""A performance profile: on which share of tasks and lengths a method is within x of the best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from .verdicts import TOLERANCE, floored, is_rival, means

LONG = 100
"""Epochs from which a run is long."""
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
    methods = [
        name
        for name in dict.fromkeys(table["method"])
        if "," not in name or ")" in name
    ]
    columns = {}
    for name in methods:
        above = np.array(hits.get(name, []))
        columns[name] = [
            float(np.sum(above <= x + 1e-9)) / max(1, number) for x in WITHIN
        ]
    shares = pd.DataFrame(columns, index=WITHIN)
    shares.attrs["number"] = number  # Of task-lengths on which a method is feasible.
    return shares


def draw(table: pd.DataFrame, path: Path, tolerance: float = TOLERANCE) -> None:
    """All lengths, and the short and the long ones by themselves."""
    short = table["epochs"] < LONG
    parts = {
        "all": table,
        f"fewer than {LONG} epochs": table[short],
        "more": table[~short],
    }
    figure = Figure(figsize=(15, 5), layout="constrained")
    named = _named(profile(table, tolerance))
    for panel, (title, part) in zip(
        figure.subplots(1, 3, sharey=True), parts.items(), strict=True
    ):
        shares = profile(part, tolerance)
        _panel(panel, shares, named)
        panel.set_title(f"{title} ({shares.attrs['number']} task-lengths)")
        panel.set_xlabel(
            "above the least objective of a feasible method, as a share of it"
        )
    first = figure.axes[0]
    first.set_ylabel(f"share of task-lengths, at most {tolerance:g} violated")
    first.legend(frameon=False)
    figure.savefig(path, dpi=110)


def _named(shares: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """The lines of the package's methods, and of the three best rivals."""
    rivals = [name for name in shares if is_rival(name)]
    best = list(shares[rivals].mean().nlargest(3).index)
    own = [name for name in shares if name not in rivals]
    colours = matplotlib.colormaps["tab10"].colors  # type: ignore[attr-defined]
    found = {name: {"linestyle": "-", "linewidth": 2.4} for name in own}
    found |= {name: {"linestyle": "--", "linewidth": 1.3} for name in best}
    return {
        name: {**style, "color": colours[place % len(colours)], "label": name}
        for place, (name, style) in enumerate(found.items())
    }


def _panel(panel: Any, shares: pd.DataFrame, named: dict[str, dict[str, Any]]) -> None:
    rest = {"color": "0.85", "linewidth": 0.8, "zorder": 1}
    for name in shares:
        panel.plot(shares.index, shares[name], **named.get(name, rest))
    panel.set_xscale("symlog", linthresh=1e-3)
    panel.set_ylim(0, 1)
