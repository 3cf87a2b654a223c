"""What ``compare`` keeps of the end of a run, for the drawer of a run that was finished before."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..files import write_whole
from .closing_table import Closing
from .plots import Plot

FILE = "closing.json"


def store(folder: Path, closing: Closing, plots: Sequence[Plot]) -> None:
    """Writes the closing table and the curves of a run."""
    content = {"closing": closing.plain(), "plots": [_plain(plot) for plot in plots]}
    write_whole(folder / FILE, json.dumps(content))


def stored(folder: Path) -> tuple[Closing | None, list[Plot]]:
    """What :func:`store` wrote; nothing where there is none, as of an earlier version."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        closing = Closing.from_plain(content["closing"])
        return closing, [_plot(plot) for plot in content["plots"]]
    return None, []


def _plain(plot: Plot) -> dict[str, Any]:
    """A plot for JSON, which has no number that is not finite: None stands for it."""
    lines = {}
    for name, line in plot.lines.items():
        lines[name] = [value if math.isfinite(value) else None for value in line]
    return {**vars(plot), "steps": list(plot.steps), "lines": lines}


def _plot(content: dict[str, Any]) -> Plot:
    lines = {}
    for name, line in content["lines"].items():
        lines[name] = [math.nan if value is None else float(value) for value in line]
    return Plot(**{**content, "lines": lines})
