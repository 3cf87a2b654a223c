"""What the rows say: one table, and of each task and length whether a rival is ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from benchmarks.evidence.appendix import markdown

AHEAD = 0.02, 0.05
"""A rival is ahead by more than so much violated, and such a share of the objective."""
TOLERANCE = 0.02
"""The share violated up to which a method counts as feasible in the picture."""
TRAINED = ("violated", "size", "objective", "optimum", "gap")
COLUMNS = (*TRAINED, "new violated", "new size", "new objective")


def means(table: pd.DataFrame) -> pd.DataFrame:
    """Means over the seeds; of a method that diverged NaN."""
    rows = table.reindex(
        columns=[*table.columns, *(c for c in COLUMNS if c not in table)]
    )
    grouped = rows.groupby(["task", "epochs", "method"], sort=False)
    found = grouped[list(COLUMNS)].agg(lambda column: column.mean(skipna=False))
    return found.assign(seeds=grouped["seed"].nunique()).reset_index()


def is_rival(method: str) -> bool:
    """Whether it is no formulation of the package."""
    return not method.endswith(")")


@dataclass
class Verdict:
    """Of a method beside all rivals on one task and length.

    Attributes:
        both: rivals ahead in both columns by more than :data:`AHEAD`.
        one: rivals ahead in one by more than that, and in the other not behind by more.
        nearest: the rival that pays least of those that violate at most .02 more than it.
        behind: by which share of its objective it pays more than that; below 0: less.
    """

    both: list[str]
    one: list[str]
    nearest: str
    behind: float


def verdict(part: pd.DataFrame, method: str) -> Verdict:
    """part: the means of one task and length. An objective below the optimum counts as that."""
    found = part.set_index("method")
    own, rivals = found.loc[method], found[found.index.map(is_rival)]
    paid = floored(found)
    few, scale = rivals["violated"] - own["violated"], abs(paid[method])
    more = paid[rivals.index] - paid[method]
    fewer, less = few < -AHEAD[0], more < -AHEAD[1] * scale
    not_more, level = few <= AHEAD[0], more <= AHEAD[1] * scale
    either = (fewer & level) | (less & not_more)
    as_good = rivals[not_more].assign(paid=paid).dropna(subset="paid")
    # Of several at the optimum the feasible.
    as_good = as_good.sort_values(["paid", "violated"])
    nearest, behind = "", 0.0
    if len(as_good) and scale:
        nearest = str(as_good.index[0])
        behind = float((paid[method] - as_good["paid"].iloc[0]) / scale)
    both = list(rivals.index[fewer & less])
    return Verdict(both, list(rivals.index[either]), nearest, behind)


def floored(found: pd.DataFrame) -> pd.Series:
    """The objective by method; where the optimum is known, not below it."""
    paid, optimum = found["objective"], found["optimum"]
    return paid.where(optimum.isna() | ~(paid < optimum), optimum)


def summary(
    table: pd.DataFrame, methods: list[str], against: pd.DataFrame | None = None
) -> str:
    """Markdown: a line of each task and length, and how many of them no rival is ahead of.

    The last columns are of the first of the methods; ``against``: other rows, whose cells of it
    come last.
    """
    before = {} if against is None else _cells(against)
    last: tuple[str, ...] = (
        "nearest rival",
        "behind it",
        "ahead in both",
        "ahead in one, level in the other",
    )
    last += ("before",) if before else ()
    lines: list[tuple[str, ...]] = [("task", "epochs", *methods, *last)]
    kept = {name: [0, 0, 0] for name in methods}
    for (task, epochs), part in means(table).groupby(["task", "epochs"], sort=False):
        cells = {row["method"]: cell(row) for row in part.to_dict("records")}
        found = {m: verdict(part, m) for m in methods if m in cells}
        for name, of in found.items():
            kept[name][0] += 1
            kept[name][1] += not of.both
            kept[name][2] += not of.both and not of.one
        if not found:
            continue
        first = next(iter(found.values()))
        nearest = f"{first.nearest}: {cells[first.nearest]}" if first.nearest else ""
        ahead = [_shortened(first.both), _shortened(first.one)]
        own = [cells.get(m, "") for m in methods]
        ahead += [before.get((task, epochs, methods[0]), "")] if before else []
        lines.append((task, str(epochs), *own, nearest, f"{first.behind:+.1%}", *ahead))
    said = [
        f"{name}: of {number} task-lengths no rival is ahead in both on {both}, and none in "
        f"one while level in the other on {one}."
        for name, (number, both, one) in kept.items()
    ]
    return "\n".join([markdown(lines), *said])


def _cells(table: pd.DataFrame) -> dict[tuple[str, int, str], str]:
    rows = means(table).to_dict("records")
    return {(row["task"], row["epochs"], row["method"]): cell(row) for row in rows}


def _shortened(names: list[str]) -> str:
    return ", ".join(
        [*names[:3], f"and {len(names) - 3} more"] if len(names) > 3 else names
    )


def cell(row: dict[Any, Any]) -> str:
    """Violated · size · above the optimum, or the objective ‖ of unseen rows the same."""
    known = not pd.isna(row["gap"])
    paid = f"{row['gap']:+.1%}" if known else f"{row['objective']:.3g}"
    found = f"{row['violated']:.3f} · {row['size']:.2g} · {paid}"
    if pd.isna(row["new violated"]):
        return found
    new = f"{row['new violated']:.3f} · {row['new size']:.2g}"
    if not pd.isna(row["new objective"]):
        new += f" · {row['new objective']:.3g}"
    return f"{found} ‖ {new}"
