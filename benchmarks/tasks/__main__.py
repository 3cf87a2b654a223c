"""Small tasks of many fields, each with its optimum or its unseen rows: which method gets there.

    python -m benchmarks.tasks                                  (all: about 25 minutes of a CPU)
    python -m benchmarks.tasks --tasks portfolio 'recall*' --epochs 10 100 --seeds 0
    python -m benchmarks.tasks --methods 'Pointwise()' 'hinge *' --output results/mine

The methods are the package's own (a PointwiseLoss of each member), hinges and squared hinges of
ten weights, grids of weights where units differ, and cooper's multiplier with nine rates. Another
formulation is named as it is called: --methods 'Pointwise(…)'; patterns choose among the others.
Writes tasks.csv, tasks.md and tasks.png; runs that tasks.csv has are not repeated. After a change
of the rule, with the rivals' rows of before:

    python -m benchmarks.tasks --output results/new --rivals results/tasks --against results/tasks

--set LEAD=4 gives a constant of the rule (pl_pointwise/lagrangian/gradient_units.py) another value.
--constants runs Pointwise() with each of them halved and doubled, and writes constants.csv.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from . import TASKS
from .constants import AS_IT_IS, OURS, compared, constants, variants
from .methods import method, names_for
from .picture import draw
from .training import runs
from .verdicts import is_rival, summary


def chosen(names: list[str], patterns: list[str]) -> list[str]:
    """The names that match a pattern, and patterns that are calls of a formulation."""
    found = [name for name in names if any(fnmatchcase(name, p) for p in patterns)]
    own = [p for p in patterns if p.endswith(")") and p not in found]
    for name in own:
        method(name)
    return own + found


def main(arguments: list[str] | None = None) -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("--tasks", nargs="+", default=["*"], help="names or patterns")
    parser.add_argument(
        "--epochs", nargs="+", type=int, help="instead of each task's own lengths"
    )
    parser.add_argument("--methods", nargs="+", default=["*"], help="names or patterns")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path("results/tasks"))
    parser.add_argument(
        "--rivals", type=Path, help="a folder whose rows of rivals are taken over"
    )
    parser.add_argument(
        "--against", type=Path, help="a folder to show beside, of before"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=NUMBER", dest="constants"
    )
    parser.add_argument("--constants", action="store_true", dest="each_constant")
    of = parser.parse_args(arguments)
    tasks = [name for name in TASKS if any(fnmatchcase(name, p) for p in of.tasks)]
    if not tasks:
        parser.error(f"no task matches {of.tasks}: {', '.join(TASKS)}.")
    if of.each_constant:
        print(compared(of_constants(of.output, tasks, of.epochs, of.seeds)))
        return
    path = of.output / "tasks.csv"
    if of.rivals is not None and not path.exists():
        take_over(of.rivals / "tasks.csv", path)
    with constants(of.constants):
        table = sweep(path, tasks, of.epochs, of.methods, of.seeds)
    table = table[table["task"].isin(tasks)]
    shown = [name for name in dict.fromkeys(table["method"]) if not is_rival(name)]
    before = None if of.against is None else pd.read_csv(of.against / "tasks.csv")
    text = summary(table, shown, before)
    (of.output / "tasks.md").write_text(text + "\n")
    draw(table, of.output / "tasks.png")
    print(text)


def take_over(given: Path, path: Path) -> None:
    """Starts a file with the rivals' rows of another: they do not depend on the package's rule."""
    rows = pd.read_csv(given)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows[rows["method"].map(is_rival)].to_csv(path, index=False)


def of_constants(
    output: Path, tasks: list[str], lengths: list[int] | None, seeds: list[int]
) -> pd.DataFrame:
    """The rows of the rule as it is and of each variant; all in constants.csv."""
    parts = []
    for variant in [AS_IT_IS, *variants()]:
        with constants([] if variant == AS_IT_IS else [variant]):
            path = output / "constants" / f"{variant}.csv"
            part = sweep(path, tasks, lengths, [OURS], seeds)
        parts.append(part.assign(constant=variant))
    table = pd.concat(parts)
    table.to_csv(output / "constants.csv", index=False)
    return table


def sweep(
    path: Path,
    tasks: list[str],
    lengths: list[int] | None,
    patterns: list[str],
    seeds: list[int],
) -> pd.DataFrame:
    """The rows of the CSV file ``path``, with what it lacked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = (
        pd.read_csv(path).to_dict("records") if path.exists() else []
    )
    for name in tasks:
        task = TASKS[name]()
        methods = chosen(names_for(task), patterns)
        for epochs in lengths or task.lengths:
            done = {(r["task"], r["epochs"], r["method"], r["seed"]) for r in rows}
            left = [
                m
                for m in methods
                if not all((name, epochs, m, s) in done for s in seeds)
            ]
            if not left:
                continue
            begun = time.process_time()
            found = runs(task, left, seeds, epochs)
            rows += [{"task": name} | row for row in found]
            pd.DataFrame(rows).to_csv(path, index=False)
            seconds = time.process_time() - begun
            print(f"{name}, {epochs}: {len(found)} runs, {seconds:.0f} s", flush=True)
    return pd.DataFrame(rows)


def quiet() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


if __name__ == "__main__":
    quiet()
    main()
