"""The constants of the package's rule, at other values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pandas as pd

from benchmarks.evidence.appendix import markdown
from pl_pointwise.lagrangian import gradient_units

from .verdicts import AHEAD, floored, means

OURS, AS_IT_IS = "Pointwise()", "as it is"
NAMES = ("MARGIN", "LEAD", "PATIENCE", "MEMORY", "TEN", "UPDATES")
"""Those that training depends on, not the time that it takes."""


@contextmanager
def constants(given: list[str]) -> Iterator[None]:
    """Within it constants of the package's rule have other values, each given as NAME=NUMBER.

    Raises:
        ValueError: a name that is no constant of gradient_units.py.
    """
    found = dict(each.partition("=")[::2] for each in given)
    unknown = [
        name
        for name in found
        if not isinstance(vars(gradient_units).get(name), int | float)
    ]
    if unknown:
        raise ValueError(
            f"--set {', '.join(unknown)}: no constant of gradient_units.py."
        )
    with ExitStack() as changes:
        for name, text in found.items():
            kind = type(vars(gradient_units)[name])
            changes.enter_context(patch.object(gradient_units, name, kind(float(text))))
        yield


def variants() -> list[str]:
    """Each constant halved and doubled, as NAME=NUMBER."""
    return [
        f"{name}={factor * vars(gradient_units)[name]:g}"
        for name in NAMES
        for factor in (0.5, 2.0)
    ]


def compared(table: pd.DataFrame) -> str:
    """Markdown: of each variant on how many task-lengths it is ahead of the rule, and behind.

    table: rows of ``Pointwise()``, with the variant as ``constant``, or "as it is". Ahead and
    behind are as for rivals: by more than :data:`.verdicts.AHEAD` in one column, and in the other
    no worse by more than that.
    """
    given = table.assign(method=table["constant"]).drop(columns="constant")
    rows = means(given)
    found = rows.assign(paid=floored(rows)).set_index(["task", "epochs", "method"])
    lines = [("", "ahead", "behind", "behind on")]
    for variant in dict.fromkeys(rows["method"]):
        if variant == AS_IT_IS:
            continue
        of = found.xs(variant, level="method")
        base = found.xs(AS_IT_IS, level="method").reindex(of.index)
        ahead, behind = _better(of, base), _better(base, of)
        where = [f"{task}, {epochs}" for task, epochs in of.index[behind]]
        lines.append(
            (variant, str(int(ahead.sum())), str(len(where)), "; ".join(where))
        )
    number = len(found.xs(AS_IT_IS, level="method"))
    return f"{markdown(lines)}\n\nOf {number} task-lengths, Pointwise()."


def _better(one: pd.DataFrame, other: pd.DataFrame) -> pd.Series:
    fewer, less = (
        other["violated"] - one["violated"],
        (other["paid"] - one["paid"]) / other["paid"].abs(),
    )
    enough = (fewer > AHEAD[0]) | (less > AHEAD[1])
    return enough & (fewer >= -AHEAD[0]) & (less >= -AHEAD[1])
