"""What the CSV files say: a picture, and tables of Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.evidence.appendix import markdown

OURS: dict[str, dict[str, Any]] = {
    "Pointwise()": {"marker": "*", "markersize": 13, "linestyle": ""},
    "Relaxed(price=10)": {
        "marker": "D",
        "markersize": 5,
        "fillstyle": "none",
        "linestyle": "",
    },
}
AHEAD = 0.02, 0.05
"""A method is ahead by more than so much violated, and such a share of the objective."""


def means(table: pd.DataFrame) -> pd.DataFrame:
    """Means over the seeds, in the constraint's own unit, with the weight of a hinge."""
    rows = table.reindex(
        columns=[*table.columns.drop("above", errors="ignore"), "above"]
    )
    grouped = rows[rows["unit"] == 1].groupby(
        ["problem", "epochs", "method"], sort=False
    )
    found = grouped[["violated", "objective", "above"]].mean()
    found["seeds"] = grouped["seed"].nunique()
    found = found.reset_index()
    found["weight"] = pd.to_numeric(found["method"].str.extract(r"^hinge (.+)$")[0])
    return found


def draw(table: pd.DataFrame, path: Path) -> None:
    """Paid against violated: of each length the hinges a line, ``Pointwise()`` a star."""
    rows = means(table)
    problems = list(dict.fromkeys(rows["problem"]))
    columns = min(4, len(problems))
    lines = -(-len(problems) // columns)
    figure = Figure(figsize=(4 * columns, 3.3 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for panel, name in zip(panels, problems, strict=False):
        _panel(panel, rows[rows["problem"] == name])
    for panel in panels[len(problems) :]:
        panel.set_axis_off()
    handles = [Line2D([], [], color="black", marker=".", label="hinges, by weight")]
    handles += [
        Line2D([], [], color="black", label=name, **OURS[name]) for name in OURS
    ]
    handles.append(Line2D([], [], color="black", linestyle="--", label="the optimum"))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False
    )
    figure.savefig(path, dpi=110)


def _panel(panel: Any, rows: pd.DataFrame) -> None:
    known, worst = rows["above"].notna().all(), rows["violated"].max() > 1
    paid = "above" if known else "objective"
    middle = rows[paid].abs().median()
    rows = rows[rows[paid].abs() < 1e4 * middle]  # Others have diverged.
    lengths = sorted(set(rows["epochs"]))
    for place, length in enumerate(lengths):
        part = rows[rows["epochs"] == length]
        colour = matplotlib.colormaps["viridis"](0.9 * (1 - (place + 1) / len(lengths)))
        sweep = part[part["weight"].notna()].sort_values("weight")
        panel.plot(
            sweep["violated"], sweep[paid], ".-", color=colour, label=f"{length}"
        )
        if length == lengths[-1]:
            for row in sweep.to_dict("records"):
                text, at = f"{row['weight']:g}", (row["violated"], row[paid])
                panel.annotate(text, at, (3, 3), textcoords="offset points", fontsize=7)
        for method, style in OURS.items():
            own = part[part["method"] == method]
            panel.plot(own["violated"], own[paid], color=colour, zorder=3, **style)
    if worst:
        panel.set_xscale("symlog", linthresh=0.01)
    if known or rows[paid].max() > 10 * middle:
        panel.set_yscale("symlog", linthresh=0.1 if known else middle)
    if known:
        panel.axhline(0, color="black", linewidth=0.8, linestyle="--")
    seeds = rows["seeds"].min()
    panel.set_title(
        f"{rows['problem'].iloc[0]} ({seeds} seed{'s' if seeds > 1 else ''})"
    )
    panel.set_xlabel("worst inequality of an instance" if worst else "share violated")
    panel.set_ylabel("above the optimum" if known else "objective")
    panel.legend(title="epochs", fontsize=7, title_fontsize=7)


def standing(table: pd.DataFrame) -> str:
    """``Pointwise()`` by problem and length, beside a hinge, and the hinges that are ahead in both.

    The hinge: of those that violate at most .02 more, the one with the least objective; where there
    is none, that which violates least.
    """
    lines = [("problem", "epochs", *OURS, "a hinge", "ahead in both", "seeds")]
    for (problem, length), part in means(table).groupby(
        ["problem", "epochs"], sort=False
    ):
        found = part.set_index("method")
        hinges, cells = found[found["weight"].notna()], found.apply(_cell, axis=1)
        if hinges.empty or "Pointwise()" not in found.index:
            continue
        own = found.loc["Pointwise()"]
        as_good = hinges[hinges["violated"] <= own["violated"] + AHEAD[0]]
        best = (as_good["objective"] if len(as_good) else hinges["violated"]).idxmin()
        fewer = hinges["violated"] < own["violated"] - AHEAD[0]
        less = hinges["objective"] < own["objective"] - AHEAD[1] * abs(own["objective"])
        ahead = ", ".join(f"{weight:g}" for weight in hinges[fewer & less]["weight"])
        beside = f"{hinges.loc[best, 'weight']:g}: {cells[best]}"
        ours = [cells.get(method, "") for method in OURS]
        lines.append(
            (f"{problem}", f"{length}", *ours, beside, ahead, str(own["seeds"]))
        )
    return markdown(lines)


def _cell(row: Any) -> str:
    """Violated · above the optimum, or violated · the objective where that is not known."""
    paid = (
        f"{row['objective']:.3g}" if pd.isna(row["above"]) else f"{row['above']:+.1%}"
    )
    return f"{row['violated']:.3f} · {paid}"
