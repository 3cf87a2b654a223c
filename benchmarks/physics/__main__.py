"""Ten differential equations with known solutions: Pointwise() beside seven weights of a loss.

    python -m benchmarks.physics                       (all: about an hour of a CPU)
    python -m benchmarks.physics --equations heat wave --seeds 0
    python -m benchmarks.physics --output results/mine.csv --methods 'Pointwise()'

``Pointwise()``: each condition is a requirement, its tolerance a thousandth of its largest term;
noisy data are the objective and a requirement too, within three standard deviations of the noise.
``weight W``: the mean square of the equation, and of each other condition times W. ``Pointwise(),
equation × 1000``: the same in another unit. ``Pointwise(), data as objective``: no requirement on
the data. All with one network, Adam, and steps; judged by the relative error of u.

Runs that the file has are not repeated. At the end the section of docs/physics.md is written.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.tasks.task import Task
from benchmarks.tasks.training import train

from . import EQUATIONS, TRIALS, Equation
from .equation import EQUATION, as_weighted_sum, in_tolerances
from .table import RESULTS, section, write_page

WEIGHTS = (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0, 10000.0)
OURS = "Pointwise()"
OBJECTIVE = "Pointwise(), data as objective"
UNITS = {f"Pointwise(), {EQUATION} × {unit:g}": unit for unit in (1000.0, 0.001)}
STEPS = {1: 4_000, 2: 6_000}
"""By the number of coordinates."""
Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("--equations", nargs="+", default=list(EQUATIONS))
    parser.add_argument(
        "--methods", nargs="+", default=[OURS, "weights", *UNITS, OBJECTIVE]
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, help="instead of 4,000 and 6,000")
    parser.add_argument("--output", type=Path, default=RESULTS)
    of = parser.parse_args(arguments)
    known = EQUATIONS | TRIALS
    unknown = [name for name in of.equations if name not in known]
    if unknown:
        parser.error(f"no equation {unknown}: {', '.join(known)}.")
    rows: list[Row] = []
    if of.output.exists():
        rows = pd.read_csv(of.output).to_dict("records")
    for method in of.methods:
        for name in of.equations:
            equation = known[name]()
            steps = of.steps or STEPS[len(equation.low)]
            done = [
                r
                for r in rows
                if r["equation"] == name and r["method"] in names(method)
            ]
            seeds = seeds_for(method, of.seeds, equation)
            left = [seed for seed in seeds if seed not in {r["seed"] for r in done}]
            if not left:
                continue
            begun = time.process_time()
            found = [
                {"equation": name, **row} for row in run(equation, method, left, steps)
            ]
            rows += found
            of.output.parent.mkdir(parents=True, exist_ok=True)
            pd.DataFrame(rows).to_csv(of.output, index=False)
            told = ", ".join(f"{row['error']:.2g}" for row in found)
            seconds = time.process_time() - begun
            print(f"{name}, {method}: {told} ({seconds:.0f} s)", flush=True)
    table = pd.DataFrame(rows)
    if of.output == RESULTS:
        write_page(table)
    print(section(table))


def names(method: str) -> list[str]:
    """Of the rows that a method makes: of the weighted sum one for each weight."""
    return [f"weight {w:g}" for w in WEIGHTS] if method == "weights" else [method]


def seeds_for(method: str, seeds: list[int], equation: Equation) -> list[int]:
    """Other units with the first seed only; data as objective only where there are any."""
    if method == OBJECTIVE and not equation.noise:
        return []
    return seeds[:1] if method in UNITS else seeds


def run(equation: Equation, method: str, seeds: list[int], steps: int) -> Iterable[Row]:
    """A row of each seed, and of each weight of the weighted sum."""
    if method == "weights":
        members = [(w, seed) for w in WEIGHTS for seed in seeds]
        squared = [(f"squared {w:g}", seed) for w, seed in members]
        labels = [(f"weight {w:g}", seed) for w, seed in members]
        task = as_weighted_sum(equation)
    else:
        squared = [(OURS, seed) for seed in seeds]
        labels = [(method, seed) for seed in seeds]
        task = ours(equation, method)
    parameters = train(task, squared, steps)
    errors = equation.error(parameters).tolist()
    for place, (label, seed) in enumerate(labels):
        row: Row = {
            "method": label,
            "seed": seed,
            "error": float(f"{errors[place]:.4g}"),
        }
        for name in equation.unknown:
            row["found"] = float(f"{float(parameters[name][place]):.4g}")
        yield row


def ours(equation: Equation, method: str) -> Task:
    """The requirements, as the name of a method says."""
    if method == OBJECTIVE:
        return in_tolerances(equation, bounded_data=False)
    factors = {EQUATION: UNITS[method]} if method in UNITS else {}
    return in_tolerances(equation, factors=factors)


def quiet() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


if __name__ == "__main__":
    quiet()
    main()
