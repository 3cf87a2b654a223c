"""The table of docs/physics.md, from the stored rows."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

RESULTS = Path(__file__).parents[1] / "evidence" / "results" / "physics.csv"
HEAD = (
    "| equation | `Pointwise()` | best of seven weights | worst | in another unit |\n"
    "|---|---|---|---|---|"
)


def page_table(rows: pd.DataFrame) -> str:
    """Errors, means over the seeds: an equation a row, in the order of the rows."""
    lines = [HEAD]
    for name, of in rows.groupby("equation", sort=False):
        cells = [str(name), *cells_of(of)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def cells_of(rows: pd.DataFrame) -> list[str]:
    """Ours; the best weight with its number; the worst; the change with the equation's unit."""
    errors = rows.groupby("method")["error"].mean()
    weights = errors[errors.index.str.startswith("weight ")]
    ours = errors.get("Pointwise()")
    cells = ["–" if ours is None else f"{ours:.2g}"]
    if len(weights):
        best = weights.idxmin()
        cells += [f"{weights[best]:.2g} ({best.split()[1]})", f"{weights.max():.2g}"]
    else:
        cells += ["–", "–"]
    changes = changes_with_units(rows)
    cells.append("–" if changes is None else f"{100 * changes:.0f} %")
    return cells


def changes_with_units(rows: pd.DataFrame) -> float | None:
    """By how much of itself the error changes at most with the unit of the equation, one seed."""
    other = rows[rows["method"].str.contains("×")]
    same = rows[(rows["method"] == "Pointwise()") & rows["seed"].isin(other["seed"])]
    if not len(other) or not len(same):
        return None
    before = same["error"].iloc[0]
    return float((other["error"] / before - 1).abs().max())
