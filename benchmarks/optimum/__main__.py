"""Every problem whose optimum, or whose truth, is known: what is paid, what is violated.

    python -m benchmarks.optimum --output results/optimum          (all: hours; needs cvxpy)
    python -m benchmarks.optimum --problem margins budget --epochs 10 30 --seeds 0

``Pointwise()``, ``Relaxed(price=10)`` and hinges of a weight each decade, of .1 to 1,000. --units
states the constraints in other units: the problem stays the same, so the result should.
Writes optimum.csv and optimum.png; goes on where it stopped.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

from .run import METHODS, PROBLEMS, quiet, sweep
from .show import draw, standing

DECADES = [name for name in METHODS if "3" not in name and "squared" not in name]


def main(arguments: list[str] | None = None) -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument(
        "--problem", nargs="+", default=list(PROBLEMS), choices=PROBLEMS
    )
    parser.add_argument("--methods", nargs="+", default=DECADES, choices=METHODS)
    parser.add_argument("--epochs", nargs="+", type=int, default=[None])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--units", nargs="+", type=float, default=[1.0])
    parser.add_argument("--output", type=Path, default=Path("results/optimum"))
    of = parser.parse_args(arguments)
    path, trials = of.output / "optimum.csv", product(of.problem, of.epochs)
    table = sweep(path, trials, of.methods, of.seeds, of.units)
    draw(table, path.with_suffix(".png"))
    print(standing(table))


if __name__ == "__main__":
    quiet()
    main()
