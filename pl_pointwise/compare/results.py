"""A comparison's results as tables and plots. A violation ≤ 0 is satisfied."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from pl_pointwise.data import SPLITS, title_of
from pl_pointwise.lagrangian.terms import OBJECTIVE
from pl_pointwise.printing import Table, csv_cell, one_line

from .runs import Outcome


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
        writer.writerows({name: csv_cell(value) for name, value in line.items()} for line in lines)


def tables(outcomes: Sequence[Outcome], note: str = "") -> list[Table]:
    """Returns every table there is something to say in; the first one has what decides.

    note: what a reader has to know first of this comparison.
    """
    runs, names = DataFrame(run_lines(outcomes)), metric_names(outcomes)
    first = results_table(runs, names, shared_objective(outcomes))
    if note:
        first = replace(first, note=f"**{one_line(note)}**\n\n{first.note}")
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
    done = runs[runs["error"] == ""]
    of_method = done.groupby("method", sort=False)
    columns = {name: of_method[name].agg(mean_and_std) for name in names}
    return DataFrame(columns, index=done["method"].unique()).rename_axis("method").reset_index()


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


# Plots ------------------------------------------------------------------------------------------

BLUE, RED, GREEN, PURPLE, ORANGE, CYAN, BLACK = COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)
"""Okabe and Ito's palette, told apart by most colour-blind readers."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
LINES = ("-", "--", "-.", ":")

Styles = Mapping[str, Mapping[str, Any]]
"""matplotlib's options of a line, by curve."""


def styles_of(methods: Iterable[str]) -> Styles:
    """Returns the style of every method, by their order; no two of 84 are the same."""
    looks = zip(dict.fromkeys(methods), cycle(COLOURS), cycle(MARKERS), cycle(LINES), strict=False)
    return {name: {"color": c, "marker": m, "linestyle": line} for name, c, m, line in looks}


PLOTS = ("cdf.png", "pareto.png")
"""Violations, two metrics against each other."""


def pareto_axes(metrics: Sequence[str], objective: str, violation: str = "") -> list[str]:
    """Returns the objective and the task's ``violation``, else the share of the first constraint's
    samples that violate it. Empty where there is none.
    """
    stage = deciding_stage(metrics)
    if violation and {objective, f"{stage}/{violation}"} <= {*metrics}:
        return [objective, f"{stage}/{violation}"]
    rates = [name for name in metrics if re.fullmatch(f"{stage}/.*/violated", name)]
    if objective not in metrics or not rates:  # As without constraints.
        return []
    of_samples = f"{rates[0]}_samples"  # Where a sample has several values.
    return [objective, of_samples if of_samples in metrics else rates[0]]


def draw(done: Sequence[Outcome], output: Path, note: str = "") -> None:
    """Draws every plot there is something for, of runs that did not fail; removes earlier ones.

    note: stands above every plot, as whoever is shown one has not read the table.
    """

    def save(figure: Figure, name: str) -> None:
        if note:
            figure.suptitle(note, color=RED, weight="bold", wrap=True)
        figure.savefig(output / name, dpi=150)

    for name in PLOTS:
        (output / name).unlink(missing_ok=True)
    runs, names = DataFrame(run_lines(done)), metric_names(done)
    violations: dict[str, dict[str, np.ndarray]] = {}
    for run, _ in done:
        for name, values in run.violations().items():  # All seeds together.
            known = violations.setdefault(name, {})
            known[run.method] = np.append(known.get(run.method, values[:0]), values)
    styles = styles_of(run.method for run, _ in done)
    if violations:
        save(violation_cdfs(violations, styles), "cdf.png")
    axes = pareto_axes(names, shared_objective(done), done[0][1].get("shared_violation", ""))
    if axes and runs[axes].notna().all(axis=1).any():
        save(pareto(runs, axes, styles), "pareto.png")


def pareto(runs: DataFrame, axes: Sequence[str], styles: Styles) -> Figure:
    """Returns two metrics against each other, mean ± std over seeds, with the frontier drawn.

    axes: of x and y; in both, lower is better.
    """
    x, y = axes
    groups = runs.dropna(subset=[x, y]).groupby("method", sort=False)[[x, y]]
    means, stds = groups.mean(), groups.std()  # NaN of one seed: no bar
    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    panel = figure.subplots()
    points = means.to_numpy()
    stairs = np.array(sorted(points[frontier(points)].tolist())).reshape(-1, 2)
    # Between two points of the frontier lies what the worse coordinates of both attain.
    panel.step(*stairs.T, where="post", color="black", linewidth=1.2, zorder=1, label="frontier")
    for method, mean, std in zip(means.index, points, stds.to_numpy(), strict=True):
        look = {**styles[method], "linestyle": "none", "markersize": 8, "capsize": 2}
        panel.errorbar(*mean, *std[::-1], **look, elinewidth=0.9, label=method)  # y's std first.
    panel.set_xlabel(f"{x}\n(lower is better)")
    panel.set_ylabel(f"{y}\n(lower is better)")
    panel.grid(alpha=0.3)
    _compress([points[:, 0]], [panel])
    if 0 < 30 * points[:, 1].min() < points[:, 1].max():
        panel.set_yscale("log")
    note = "Mean ± standard deviation over the seeds. Frontier: no method is better in both."
    return with_legend(figure, 3, note)


def frontier(points: Any) -> list[int]:
    """Returns which points no other beats: lower in one coordinate, no higher in the other.

    Points with a coordinate that is not a number belong to nothing.

    >>> frontier([(0, 3), (1, 1), (2, 2), (3, 0)])
    [0, 1, 3]
    """
    costs = np.array(points, dtype=float).reshape(-1, 2)
    no_higher, lower = costs[:, None] <= costs, costs[:, None] < costs
    beaten = (no_higher.all(2) & lower.any(2)).any(0)
    return np.flatnonzero(np.isfinite(costs).all(1) & ~beaten).tolist()


def violation_cdfs(violations: Mapping[str, Mapping[str, np.ndarray]], styles: Styles) -> Figure:
    """Returns the empirical CDFs of violations, a curve per method: a line of panels per
    constraint, on one axis, and a column per split.

    violations: (n,) by panel, ``stage/constraint``, and curve; NaN are left out.
    """
    held_out = deciding_stage([*violations])
    names = [name for name in violations if name.partition("/")[0] in (held_out, "train")]
    stages = list(dict.fromkeys(name.partition("/")[0] for name in names))
    constraints = list(dict.fromkeys(name.partition("/")[2] for name in names))
    # By length along the curve, and each method's elsewhere, or markers hide one another.
    places = {method: (0.02 + 0.011 * number, 0.17) for number, method in enumerate(styles)}
    look = {"linewidth": 1.6, "markersize": 5, "markeredgewidth": 0}
    size = (0.8 + 4.2 * len(stages), 0.7 + 3.3 * len(constraints))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(
        len(constraints), len(stages), squeeze=False, sharey=True, sharex="row"
    )
    for beside, constraint in zip(panels, constraints, strict=True):
        of_row = []
        for panel, stage in zip(beside, stages, strict=True):
            curves = violations.get(f"{stage}/{constraint}", {})
            panel.set_visible(bool(curves))
            for method, values in curves.items():
                of_row.append(values := values[~np.isnan(values)])
                if len(values):  # Infinite values count, outside the plot.
                    style = {**styles[method], **look, "markevery": places[method]}
                    panel.ecdf(values, label=method, **style)
            panel.axvline(0.0, color="black", linewidth=1)
            panel.set_title(f"{constraint}, {title_of(stage)}")
            panel.set_xlabel("violation (≤ 0 is satisfied)")
            panel.set_ylim(0, 1.01)
            panel.grid(alpha=0.3)
        _compress(of_row, beside)
        beside[0].set_ylabel("share of values")
    note = "All seeds of a method together. Left of the line: satisfied."
    return with_legend(figure, 3 if len(stages) > 1 else 2, note)


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


def with_legend(figure: Figure, columns: int, note: str) -> Figure:
    """Returns the figure with the curves of its first panel, and a note below it."""
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=columns,
        title=note,
        title_fontsize="small",
        fontsize="small",
        frameon=False,
    )
    return figure
