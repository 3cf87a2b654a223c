"""The raw results of a task as a table: a line per finished run, with every number it has.

Written by the report, and read again by ``--published``, which goes on from what is committed.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .grids import named

RESULTS = Path(__file__).parent / "results"

PARTS = {"tune": "validation", "judge": "test"}
"""The held-out part by the stage that measures on it."""

KNOWN = ("part", "method", "setting", "seed", "fit_seconds")
"""The columns that are no metric."""

Result = Mapping[str, Any]
"""``metrics`` and ``fit_seconds`` of a finished run."""

Place = tuple[str, str, int]
"""Stage, method with setting, seed."""


def write_results(
    lines: Iterable[tuple[str, str, str, int, Result]], path: Path
) -> None:
    """Writes stage, method, setting, seed and result of each run; "test/…" is the held-out part.

    Nine digits say a float32 exactly, so that tables made from the file are those of the runs.
    """
    rows: list[dict[str, Any]] = []
    for stage, method, setting, seed, result in lines:
        values = (PARTS[stage], method, setting, seed, f"{result['fit_seconds']:.1f}")
        metrics = {
            name.replace("test/", "held-out/"): f"{value:.9g}"
            for name, value in result["metrics"].items()
        }
        rows.append({**dict(zip(KNOWN, values, strict=True)), **metrics})
    names = dict.fromkeys(name for row in rows for name in row)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*names], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_results(path: Path) -> dict[Place, Result]:
    """Returns the results that ``write_results`` wrote; none without a file."""
    if not path.is_file():
        return {}
    stages = {part: stage for stage, part in PARTS.items()}
    found: dict[Place, Result] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            part, method, setting, seed, seconds = (row.pop(name) for name in KNOWN)
            metrics = {
                name.replace("held-out/", "test/"): float(value)
                for name, value in row.items()
                if value
            }
            place = (stages[part], named(method, setting), int(seed))
            found[place] = {"metrics": metrics, "fit_seconds": float(seconds)}
    return found
