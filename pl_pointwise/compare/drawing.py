"""What all plots of a comparison share: files, names on the axes, the lines below the panels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from .tables import HELD_OUT

STATISTICS = {
    "mean": "mean violation",
    "max": "largest violation",
    "violated_samples": "share of samples violated",
    "violated": "share violated",
    "cvar95": "CVaR95 of the violations",
}
"""What the statistics of a constraint are called on an axis."""


def save(figure: Figure, path: Path) -> None:
    """Writes a plot in the format that the path ends in. The same plot, the same bytes."""
    undated = {"CreationDate": None} if path.suffix == ".pdf" else {}
    with matplotlib.rc_context({"pdf.fonttype": 42}):  # TrueType, which publishers ask for.
        figure.savefig(path, dpi=150, metadata=undated)


def metric_title(name: str) -> str:
    """Returns what a metric, ``stage/metric`` or ``stage/constraint/statistic``, is on an axis.

    >>> metric_title("test/relevance/cvar95"), metric_title("val/length_objective")
    ('relevance: CVaR95 of the violations, held-out', 'length objective, held-out (selection)')
    >>> metric_title("mcq/macro_f1")
    'macro f1, mcq'
    """
    stage, _, metric = name.partition("/")
    constraint, _, statistic = metric.rpartition("/")
    if statistic in STATISTICS and constraint:
        shown = f"{constraint}: {STATISTICS[statistic]}"
    else:
        shown = (metric or name).replace("_", " ").replace("/", ": ")
    return f"{shown}, {HELD_OUT.get(stage, stage)}" if metric else shown


def seeds_note(seeds: Iterable[int]) -> str:
    """Returns what marks and error bars show, given how many seeds each method has.

    >>> seeds_note([3, 3]), seeds_note([1])
    ('Mean ± standard deviation over 3 seeds.', 'One seed, so no error bars.')
    """
    span = _span(seeds)
    if span in ("0", "1"):
        return "One seed, so no error bars."
    return f"Mean ± standard deviation over {span} seeds."


def count_note(sizes: Iterable[int], of: str) -> str:
    """Returns how many values there are: "n = 300 samples", or from which to which.

    >>> count_note([20, 20], "values"), count_note([20, 2000], "values")
    ('n = 20 values', 'n = 20 to 2,000 values')
    """
    return f"n = {_span(sizes)} {of}"


def _span(counts: Iterable[int]) -> str:
    found = sorted({*counts}) or [0]
    return " to ".join(f"{count:,}" for count in dict.fromkeys((found[0], found[-1])))


def legend(
    figure: Figure, panels: Iterable[Any], names: Sequence[str], columns: int, note: str
) -> None:
    """Puts the named curves of all panels, each once and in this order, below the panels.

    note: a line that says what is shown, between panels and curves.
    """
    handles = {
        label: handle.lines[0] if isinstance(handle, ErrorbarContainer) else handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    shown = [name for name in names if name in handles]
    figure.legend(
        [handles[name] for name in shown],
        shown,
        loc="outside lower center",
        ncols=max(1, min(columns, len(shown))),
        title=note,
        title_fontsize="small",
        fontsize="small",
        frameon=False,
    )
