"""The section of docs/physics.md with the ten equations, from the stored rows."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

BENCHMARKS = Path(__file__).parents[1]
RESULTS = BENCHMARKS / "evidence" / "results" / "physics.csv"
PAGE = BENCHMARKS.parent / "docs" / "physics.md"
BEGIN = "<!-- python -m benchmarks.physics writes from here -->\n"
END = "<!-- to here -->\n"
SECTION = """
## Ten equations

All have the setting of the steps above; equations of two coordinates have 500 points inside
(Burgers 1,000) and 6,000 steps, the others 64 points and 4,000 steps. Beside them stands the
usual loss, with seven weights: the mean square of the equation, plus .01, .1, 1, 10, 100, 1,000
or 10,000 times the mean squares of all other conditions. Network (two layers of 32), points,
steps and Adam are the same. A number is the error ‖u − solution‖/‖solution‖, mean over {seeds};
an error near 1 means that nothing was learnt. The oscillator is not that of the program above:
it is four times as stiff, u″ + 4u′ + 400u = 0, and there are no data. The last column says by
how much of itself the error of `Pointwise()` changes when the equation is written in another
unit, a thousand times as small or as large. What changes it is rounding, which grows in a long
run. A weight would have to be changed by a factor of a million.

{table}

In {unsolved} of the {all} neither solves the equation: the errors of both, with the best weight
too, are above {LARGE}. Of the other {rest} `Pointwise()` is within twice the error of the best
of the seven weights in {near}.

- **Beam:** its error is what its tolerance allows; with a tenth of it the error is .00013 (two
  seeds).
- **Helmholtz:** one of two seeds stays at u ≈ 0, where the edge is met, and in another unit the
  other one does too: every requirement pushes with its whole force, however little it is violated,
  so the first step away from 0 is undone. A squared loss hardly feels so small a violation: with
  weights of 100 and 1,000 it finds the solution.
- **Points and steps matter more than weights.** With 150 points and 1,500 steps in place of 500
  and 6,000 the best weight had .12 on Klein–Gordon and `Pointwise()` .74; where the diffusivity is
  unknown `Pointwise()` had .025, not .0013.
- **Units** change nothing but rounding, which grows in a long run: with a factor of 1,024, which
  rounds nothing, Klein–Gordon ends at the same digits (one seed). How the run is batched does as
  much: the same seed ends at .065 alone and at .041 with another one trained beside it.

`python -m benchmarks.physics` runs all; `benchmarks/evidence/results/physics.csv` has each run.

"""
HEAD = (
    "| equation | `Pointwise()` | best of seven weights | worst of them | in another unit |\n"
    "|---|---|---|---|---|"
)
NEAR = 2.0
LARGE = 0.1
"""An error of an equation that is not solved."""


def write_page(rows: pd.DataFrame) -> None:
    """Puts the section into the page, in place of the one of before."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + section(rows) + END + after, encoding="utf-8")


def section(rows: pd.DataFrame) -> str:
    """Of the equations that have both rows of ours and of all weights."""
    whole = [
        (str(name), of)
        for name, of in rows.groupby("equation", sort=False)
        if {"Pointwise()", "weight 1"} <= set(of["method"])
    ]
    lines = [f"| {' | '.join([name, *cells_of(of)])} |" for name, of in whole]
    near = unsolved = 0
    for _, of in whole:
        ours, weights = errors_of(of)
        if min(ours, weights.min()) > LARGE:
            unsolved += 1
        else:
            near += ours <= NEAR * weights.min()
    count = rows["seed"].nunique()
    return SECTION.format(
        seeds="one seed" if count == 1 else f"{count} seeds",
        table="\n".join([HEAD, *lines]),
        near=near,
        unsolved=unsolved,
        rest=len(whole) - unsolved,
        all=len(whole),
        LARGE=LARGE,
    )


def errors_of(rows: pd.DataFrame) -> tuple[float, pd.Series]:
    """Ours, and those of the weights, means over the seeds."""
    errors = rows.groupby("method")["error"].mean()
    return float(errors["Pointwise()"]), errors[errors.index.str.startswith("weight ")]


def cells_of(rows: pd.DataFrame) -> list[str]:
    """Ours; the best weight with its number; the worst; the change with the equation's unit."""
    ours, weights = errors_of(rows)
    best = str(weights.idxmin())
    change = change_with_unit(rows)
    return [
        f"{ours:.2g}",
        f"{weights.min():.2g} ({best.split()[1]})",
        f"{weights.max():.2g}",
        "–" if change is None else f"{100 * change:.0f} %",
    ]


def change_with_unit(rows: pd.DataFrame) -> float | None:
    """By how much of itself the error changes at most with the unit of the equation, one seed."""
    other = rows[rows["method"].str.contains("×")]
    same = rows[(rows["method"] == "Pointwise()") & rows["seed"].isin(other["seed"])]
    if not len(other) or not len(same):
        return None
    before = same["error"].iloc[0]
    return float((other["error"] / before - 1).abs().max())
