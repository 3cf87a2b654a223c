"""A comparison's results as tables. A violation ≤ 0 is satisfied."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pandas import DataFrame, Series

from pl_pointwise.data import SPLITS, title_of
from pl_pointwise.lagrangian.terms import OBJECTIVE
from pl_pointwise.printing import Table, csv_cell, one_line

from .runs import Outcome


def run_lines(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Returns for every run method, seed, time, every metric, and the error if it failed."""
    lines = []
    for run, result in outcomes:
        line = {
            "method": run.method,
            "seed": run.seed,
            "fit_seconds": result.get("fit_seconds"),
        }
        error = str(result.get("error", ""))
        lines.append({**line, **result.get("metrics", {}), "error": error})
    return lines


def metric_names(outcomes: Sequence[Outcome]) -> list[str]:
    """Returns every metric that any run has, in the order they were logged."""
    names: dict[str, None] = {}
    for _, result in outcomes:
        names.update(dict.fromkeys(result.get("metrics", {})))
    return [*names]


def write_csv(outcomes: Sequence[Outcome], path: Path) -> None:
    """Writes a line per run. Not by pandas, which takes a NaN for a missing metric."""
    lines = run_lines(outcomes)
    names: dict[str, None] = {}
    for line in lines:
        names.update(dict.fromkeys(line))
    names.pop("error", None)  # Behind all metrics, of whichever run.
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*names, "error"], restval="")
        writer.writeheader()
        for line in lines:
            writer.writerow({name: csv_cell(value) for name, value in line.items()})


def tables(outcomes: Sequence[Outcome], note: str = "") -> list[Table]:
    """Returns every table there is something to say in; the first one has what decides.

    note: what a reader has to know first of this comparison.
    """
    runs = DataFrame(run_lines(outcomes))
    names = metric_names(outcomes)
    first = results_table(runs, names, shared_objective(outcomes))
    if note:
        first = replace(first, note=f"**{one_line(note)}**\n\n{first.note}")
    if not names:
        return [first]
    note = f"{_seeds(runs).capitalize()}. `objective` is what the method itself was trained by."
    return [first, Table("All metrics", note, by_method(runs, names))]


def deciding_stage(names: Sequence[str]) -> str:
    """Returns the split that methods are compared by: the last that any metric's name has."""
    stages = {name.partition("/")[0] for name in names}
    # SPLITS are in the order of train, val, test.
    return next((key for key in reversed(SPLITS) if key in stages), "test")


def shared_objective(outcomes: Sequence[Outcome]) -> str:
    """Returns the metric that is the objective of every method of the task.

    Held-out; of the training data where that has none, as where facts are learnt (keep).
    """
    names = metric_names(outcomes)
    shared = [str(result.get("shared_objective", OBJECTIVE)) for _, result in outcomes]
    candidates = []
    for stage in (deciding_stage(names), "train"):
        candidates += [f"{stage}/{name}" for name in [*shared, OBJECTIVE]]
    measured = [name for name in candidates if name in names]
    return measured[0] if measured else candidates[0]


def results_table(runs: DataFrame, names: Sequence[str], objective: str) -> Table:
    """A line per method: shared objective, violation rates, CVaR95, held-out; and what failed."""
    stage = deciding_stage(names)
    titles = _titles(names, stage, objective)
    why = ", as there are no test data" if stage == "train" else ""
    note = (
        f"{title_of(stage).capitalize()} data{why}, one full pass after training; "
        f"{_seeds(runs)}. Lower is better. A sample is violated if any of its values is above 0. "
        "CVaR95: mean of the worst twentieth of all values."
    )
    for failed in runs[runs["error"] != ""].itertuples():
        why = f"{failed.method} · seed {failed.seed}: {failed.error}"
        note += f"\n\nFailed: {one_line(why)}"
    return Table("Results", note, by_method(runs, [*titles]).rename(columns=titles))


def _titles(names: Sequence[str], stage: str, objective: str) -> dict[str, str]:
    """The columns of the results by metric: the objective, and of every constraint its rates."""
    title = objective.partition("/")[2].replace("_", " ")
    # A task may measure its objective in training alone; the title says so.
    held_out = objective.startswith(f"{stage}/")
    titles = {objective: title if held_out else f"{title}, training"}
    constraints = [
        n.split("/")[1] for n in names if re.fullmatch(f"{stage}/[^/]+/cvar95", n)
    ]
    for constraint in constraints:
        # One constraint needs no name in front of each of its columns.
        start = f"{constraint}: " if len(constraints) > 1 else ""
        key = f"{stage}/{constraint}"
        samples = f"{key}/violated_samples"
        titles[samples] = f"{start}violation rate of samples"
        of = " of values" if samples in names else ""  # A sample has several.
        titles[f"{key}/violated"] = f"{start}violation rate{of}"
        titles[f"{key}/cvar95"] = f"{start}CVaR95"
    return {name: title for name, title in titles.items() if name in names}


def by_method(runs: DataFrame, names: Sequence[str]) -> DataFrame:
    """A line per method, a column per metric: mean and std over the runs that did not fail."""
    done = runs[runs["error"] == ""]
    of_method = done.groupby("method", sort=False)
    columns = {name: of_method[name].agg(mean_and_std) for name in names}
    return (
        DataFrame(columns, index=done["method"].unique())
        .rename_axis("method")
        .reset_index()
    )


def mean_and_std(values: Series) -> str:
    """Returns "mean ± std" with the sample's standard deviation, the one value, or "" of none.

    A NaN makes both NaN: a method that failed at one seed must not look as if it had not.

    >>> mean_and_std(Series([0.4031, 0.4043])), mean_and_std(Series([1234.0, 1301.0]))
    ('0.4037 ± 0.00085', '1268 ± 47')
    """
    numbers = values.to_numpy(float)
    if len(numbers) < 2:
        return "".join(f"{number:.3g}" for number in numbers)
    return f"{numbers.mean():.4g} ± {numbers.std(ddof=1):.2g}"


def _seeds(runs: DataFrame) -> str:
    seeds = runs["seed"].nunique()
    return f"mean ± std over {seeds} seeds" if seeds > 1 else "1 seed"
