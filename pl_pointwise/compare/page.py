"""A comparison as one page: its tables, its plots, and a drawer for each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pl_pointwise.printing import Table
from pl_pointwise.report.closing import Closing
from pl_pointwise.report.page import FILE, Page, Picture

from .results import PLOTS
from .runs import Outcome, Run

CAPTIONS = {
    "cdf.png": "Share of violations at or below a value; left of 0 is satisfied",
    "pareto.png": "The objective against the violations; lower left is better",
}


def comparison_page(
    outcomes: Sequence[Outcome], tables: Sequence[Table], output: Path, note: str = ""
) -> Page:
    """What ``compare`` has written in ``output``, as a page."""
    there = [name for name in PLOTS if (output / name).is_file()]
    return Page(
        title="A comparison of methods",
        warning=note,
        facts={
            "runs": str(len(outcomes)),
            "written": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "pl-pointwise": version("pl-pointwise"),
        },
        tables=tables,
        pictures=[Picture(CAPTIONS[name], (output / name).read_bytes()) for name in there],
        runs=[_drawer(run, result, output) for run, result in outcomes],
    )


def _drawer(run: Run, result: Mapping[str, Any], output: Path) -> Page:
    metrics: dict[str, dict[str, str]] = {}
    for key, value in result.get("metrics", {}).items():
        stage, _, name = key.partition("/")
        metrics.setdefault(name, {})[stage] = f"{float(value):.4g}"
    closing, own = result.get("closing"), run.folder / FILE
    there = own.is_file() and own.is_relative_to(output)
    return Page(
        title=run.title,
        warning=f"Failed: {result['error']}" if "error" in result else "",
        closing=None if closing is None else Closing.from_plain(closing),
        metrics=metrics,
        link=own.relative_to(output).as_posix() if there else "",
    )
