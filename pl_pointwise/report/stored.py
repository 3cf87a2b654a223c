"""What ``compare`` keeps of the end of a run, for the drawer of a run that was finished before."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..files import write_whole
from .closing import Closing, RequirementRow
from .page import Plot

FILE = "closing.json"


def store(folder: Path, closing: Closing, plots: Sequence[Plot]) -> None:
    """Writes the closing table and the curves of a run."""
    found = {"closing": asdict(closing), "plots": [_plain(plot) for plot in plots]}
    write_whole(folder / FILE, json.dumps(found))


def stored(folder: Path) -> tuple[Closing | None, list[Plot]]:
    """What :func:`store` wrote; nothing where there is none, as of an earlier version."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
        told = dict(found["closing"])
        told["rows"] = [RequirementRow(**row) for row in told["rows"]]
        told["objective"] = tuple(told["objective"])
        return Closing(**told), [_plot(plot) for plot in found["plots"]]
    return None, []


def _plain(plot: Plot) -> dict[str, Any]:
    lines = {
        name: [value if math.isfinite(value) else None for value in line]
        for name, line in plot.lines.items()
    }
    return {**vars(plot), "steps": list(plot.steps), "lines": lines}


def _plot(told: dict[str, Any]) -> Plot:
    lines = {
        name: [math.nan if value is None else float(value) for value in line]
        for name, line in told["lines"].items()
    }
    return Plot(**{**told, "lines": lines})
