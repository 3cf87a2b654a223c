"""Others' published tables, by their formulas, in their own columns; methods side by side.

    python -m benchmarks.published     # all of it: hours on one core
    python -m benchmarks.published --table "HardNet" --method "Pointwise()" --seeds 0 1 2
    python -m benchmarks.published --again --method "Pointwise()"      # after the rule has changed
    python -m benchmarks.published --show            # tables, picture, and docs/family.md from them

Every method has the same network (2 × 200), data, learning rate and epochs; nothing is tuned. A row
of the CSV is a finished run, which is not repeated without --again. Answers are judged as they are
("none") and after Newton steps to 1e-8 ("newton").
"""

from __future__ import annotations

import argparse
import csv
import logging
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from . import hardnet, integer, nlpoptnet, nonconvex, qcqp, unicycle, unicycle_training
from .integer import IntegerTable
from .runs import OURS, PRICED, Run, run
from .show import AnyTable, draw, summarise, write
from .table import Table, common_columns
from .unicycle import LoopTable

RESULTS = Path(__file__).parents[1] / "evidence/results"
DOCS = Path(__file__).parents[2] / "docs"
CONTINUOUS = [each.TABLE for each in (nonconvex, qcqp, hardnet, nlpoptnet)]
TABLES: dict[str, AnyTable] = {
    each.name: each for each in [*CONTINUOUS, *integer.TABLES, unicycle.TABLE]
}
KEY = ["table", "method", "seed", "correction"]


def methods_of(table: AnyTable) -> list[str]:
    hinges = [f"hinge {weight:g}" for weight in table.weights]
    if isinstance(table, LoopTable):
        squared = [f"squared hinge {weight:g}" for weight in table.squared]
        # Its states are drawn anew: docs/few_instances.md.
        return [unicycle_training.WITHOUT_MEMORY, *hinges, *squared]
    return [OURS, *([PRICED] if isinstance(table, Table) else []), *hinges]


def read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path) if path.exists() else pd.DataFrame(columns=KEY)


def columns_of(table: Table, found: Run) -> dict[str, dict[str, float]]:
    """Of the answers as they are, and corrected."""
    cost = {"seconds": found.seconds, "ms an answer": found.milliseconds}
    values = {}
    for correction, judged in (("none", found.raw), ("newton", found.corrected)):
        values[correction] = {**table.columns(judged), **common_columns(judged), **cost}
    return values


def rows_of(
    name: str, method: str, seed: int, values: dict[str, dict[str, float]]
) -> list[dict[str, Any]]:
    """A row for each column: tables differ in theirs."""
    rows = []
    for correction, columns in values.items():
        for column, value in columns.items():
            cells = [name, method, seed, correction, column, f"{value:.5g}"]
            rows.append(dict(zip([*KEY, "column", "value"], cells, strict=True)))
    return rows


def instances_of(table: Table, method: str, found: Run) -> list[dict[str, Any]]:
    """A row for each instance, of the picture."""
    gap = found.corrected.objective - found.corrected.best
    worst = found.raw.inequality.amax(1)
    rows = []
    for above, violation in zip(gap.tolist(), worst.tolist(), strict=True):
        cells = [table.name, method, f"{above:.3g}", f"{violation:.3g}"]
        names = ["table", "method", "gap", "worst before"]
        rows.append(dict(zip(names, cells, strict=True)))
    return rows


def append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerows(rows)


def forget(
    output: Path, table: str, methods: Sequence[str], seeds: Sequence[int]
) -> None:
    """Takes these runs out of the CSV, and their instances."""
    for path in (output, output.with_name(f"{output.stem}-instances.csv")):
        if path.exists():
            rows = pd.read_csv(path, dtype=str)
            gone = (rows["table"] == table) & rows["method"].isin(methods)
            if "seed" in rows:
                gone &= rows["seed"].isin([str(seed) for seed in seeds])
            elif 0 not in seeds:
                continue
            rows[~gone].to_csv(path, index=False, lineterminator="\n")


def study(
    output: Path,
    table: AnyTable,
    methods: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
) -> None:
    """Runs what the CSV lacks."""
    for method in methods:
        for seed in seeds:
            done = read(output)
            same = (done["table"] == table.name) & (done["method"] == method)
            if (same & (done["seed"] == seed)).any():
                continue
            if isinstance(table, Table):
                found = run(table, table.family(folder), method, seed)
                values = columns_of(table, found)
            elif isinstance(table, IntegerTable):
                values = integer.run(table, method, seed)
            else:
                values = unicycle_training.run(method, seed)
            rows = rows_of(table.name, method, seed, values)
            append(output, rows)
            if seed == 0 and isinstance(table, Table) and table.judged is None:
                path = output.with_name(f"{output.stem}-instances.csv")
                append(path, instances_of(table, method, found))
            shown = [f"{row['column']} {row['value']}" for row in rows]
            print(table.name, method, seed, *shown, sep="; ", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", nargs="+", choices=TABLES, default=[*TABLES])
    parser.add_argument("--method", nargs="+", help="without: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=RESULTS / "published.csv")
    parser.add_argument("--again", action="store_true", help="runs what is there too")
    parser.add_argument(
        "--show", action="store_true", help="no run: tables, picture and page anew"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("pl_pointwise", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not given.show:
        with tempfile.TemporaryDirectory() as folder:
            for name in given.table:
                methods = given.method or methods_of(TABLES[name])
                if given.again:
                    forget(given.output, name, methods, given.seeds)
                study(given.output, TABLES[name], methods, given.seeds, Path(folder))
        return
    for name in given.table:
        print(summarise(TABLES[name], read(given.output)))
    draw(TABLES, given.output, DOCS / "published.png")
    write(TABLES, given.output, DOCS / "family.md")


if __name__ == "__main__":
    main()
