"""The page of a comparison: its tables and plots, and a drawer for each run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from urllib.parse import quote

from pl_pointwise.printing import Table
from pl_pointwise.report.of_test import by_name
from pl_pointwise.report.page import FILE, Page, Picture
from pl_pointwise.report.stored import stored

from .plots import PLOTS
from .runs import Outcome

CAPTIONS = {
    "cdf.png": "Violations of every method: the share of values at or below each.",
    "pareto.png": "The objective against what is violated.",
}


def page_of_comparison(
    outcomes: Sequence[Outcome], tables: Sequence[Table], output: Path, note: str = ""
) -> Page:
    """What a comparison found.

    Args:
        outcomes: every run and its result.
        tables: as ``comparison.md`` has them.
        output: the folder of the comparison, with its plots.
        note: stands above all else.
    """
    pictures = []
    for name in PLOTS:
        if (output / name).is_file():
            pictures.append(Picture(CAPTIONS[name], (output / name).read_bytes()))
    return Page(
        title=f"Comparison of {len({run.method for run, _ in outcomes})} methods",
        facts={
            "runs": f"{len(outcomes):,}",
            "seeds": ", ".join(dict.fromkeys(str(run.seed) for run, _ in outcomes)),
            "written": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "pl-pointwise": version("pl-pointwise"),
        },
        warning=note,
        tables=tables,
        pictures=pictures,
        runs=[_drawer(outcome, output) for outcome in outcomes],
    )


def _drawer(outcome: Outcome, output: Path) -> Page:
    """The end of one run."""
    run, result = outcome
    closing, plots = stored(run.folder)
    seconds = result.get("fit_seconds")
    page = run.folder / FILE
    error = str(result.get("error", ""))
    return Page(
        title=run.title,
        facts={} if seconds is None else {"training": f"{float(seconds):,.1f} s"},
        warning=f"Failed: {error}" if error else "",
        closing=closing,
        plots=plots,
        metrics=by_name(result.get("metrics", {}), {}),
        link=quote(page.relative_to(output).as_posix()) if page.is_file() else "",
    )
