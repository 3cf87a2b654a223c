"""A comparison's results as tables."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pandas import DataFrame, Series

from pl_pointwise.data import SPLITS, title_of
from pl_pointwise.printing import Table, one_line

from .runs import Outcome

OBJECTIVE = "objective"


def run_lines(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Returns for every run method, seed, time, every metric, and the error if it failed."""
    lines = []
    for run, result in outcomes:
        line = {"method": run.method, "seed": run.seed, "fit_seconds": result.get("fit_seconds")}
        error = str(result.get("error", ""))
        lines.append({**line, **result.get("metrics", {}), "error": error})
    return lines


def metric_names(outcomes: Sequence[Outcome]) -> list[str]:
    """Returns every metric that any run has, in the order they were logged."""
    return list(dict.fromkeys(n for _, result in outcomes for n in result.get("metrics", {})))


def write_csv(outcomes: Sequence[Outcome], path: Path) -> None:
    """Writes a line per run. Not by pandas, which takes a NaN for a missing metric."""
    lines = run_lines(outcomes)
    names = dict.fromkeys(name for line in lines for name in line if name != "error")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*names, "error"], restval="")
        writer.writeheader()
        writer.writerows(lines)


def tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """Returns every table there is something to say in; the first one has what decides."""
    runs, names = DataFrame(run_lines(outcomes)), metric_names(outcomes)
    first = results_table(runs, names, shared_objective(outcomes))
    if not names:
        return [first]
    note = f"{_seeds(runs).capitalize()}. `objective` is what the method itself was trained by."
    return [first, Table("All metrics", note, by_method(runs, names))]


def deciding_stage(names: Sequence[str]) -> str:
    """Returns the split that methods are compared by: the last that any metric's name has."""
    there = {name.partition("/")[0] for name in names}
    return next((key for key in reversed(SPLITS) if key in there), "test")


def shared_objective(outcomes: Sequence[Outcome]) -> str:
    """Returns the metric that is the objective of every method of the task.

    Held-out; of the training data where that has none, as where facts are learnt (keep).
    """
    names = metric_names(outcomes)
    shared = [str(result.get("shared_objective", OBJECTIVE)) for _, result in outcomes]
    stages = (deciding_stage(names), "train")
    every = [f"{stage}/{name}" for stage in stages for name in [*shared, OBJECTIVE]]
    return next(filter(names.__contains__, every), every[0])


def results_table(runs: DataFrame, names: Sequence[str], objective: str) -> Table:
    """A line per method: shared objective, violation rates, CVaR95, held-out; and what failed."""
    stage = deciding_stage(names)
    title = objective.partition("/")[2].replace("_", " ")
    shown = {objective: title if objective.startswith(f"{stage}/") else f"{title}, training"}
    constraints = [n.split("/")[1] for n in names if re.fullmatch(f"{stage}/[^/]+/cvar95", n)]
    for constraint in constraints:
        start = f"{constraint}: " if len(constraints) > 1 else ""
        samples = f"{stage}/{constraint}/violated_samples"
        shown[samples] = f"{start}violation rate of samples"
        of = " of values" if samples in names else ""
        shown[f"{stage}/{constraint}/violated"] = f"{start}violation rate{of}"
        shown[f"{stage}/{constraint}/cvar95"] = f"{start}CVaR95"
    shown = {name: title for name, title in shown.items() if name in names}
    why = ", as there are no test data" if stage == "train" else ""
    note = (
        f"{title_of(stage).capitalize()} data{why}, one full pass after training; "
        f"{_seeds(runs)}. Lower is better. A sample is violated if any of its values is above 0. "
        "CVaR95: mean of the worst twentieth of all values."
    )
    for failed in runs[runs["error"] != ""].itertuples():
        note += f"\n\nFailed: {one_line(f'{failed.method} · seed {failed.seed}: {failed.error}')}"
    return Table("Results", note, by_method(runs, [*shown]).rename(columns=shown))


def by_method(runs: DataFrame, names: Sequence[str]) -> DataFrame:
    """A line per method, a column per metric: mean and std over the runs that did not fail."""
    done = runs[runs["error"] == ""].groupby("method", sort=False)
    return done[[*names]].agg(mean_and_std).reset_index()


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
