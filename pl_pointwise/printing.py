"""What commands show: tables as Markdown, and nothing that the libraries below print meanwhile."""

from __future__ import annotations

import io
import logging
import re
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import printable

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Table:
    """``cells`` as text, one line per method or model; ``note`` says what they are."""

    title: str
    note: str
    cells: DataFrame

    def markdown(self) -> str:
        """The table with its title and note."""
        head = [*self.cells]
        lines = [head, ["---"] * len(head), *self.cells.to_numpy().tolist()]
        body = "\n".join(f"| {' | '.join(map(one_line, line))} |" for line in lines)
        return f"## {self.title}\n\n{self.note}\n\n{body}\n"


LONGEST = 200
"""Characters of a cell."""


def one_line(text: str) -> str:
    """Returns a text for a cell of a table in Markdown."""
    in_a_cell = printable(text).replace("|", "/")[:LONGEST]
    return escaped(in_a_cell)


def csv_cell(value: Any) -> Any:
    """Returns a value for a CSV file: a text is on one line, printable, and no formula of a
    spreadsheet, as one that begins with "=" would be.

    >>> csv_cell("=1+1"), csv_cell(-0.5), csv_cell("-0.5")
    ("'=1+1", -0.5, "'-0.5")
    """
    if not isinstance(value, str):
        return value
    text = printable(value, 10_000)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def escaped(text: str) -> str:
    """Returns Markdown in which names of methods, categories and files make no HTML and no link."""
    return re.sub(r"<(?=[A-Za-z/!?])|(?<=\])\(", r"\\\g<0>", text)


def say(text: str) -> None:
    """Prints on any terminal and into any pipe: what its encoding has not is a question mark."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), flush=True)


def print_in_any_encoding() -> None:
    """Keeps the streams of this process from ending it by a λ that their encoding has not."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def quieten() -> None:
    """Leaves the progress bars and this package's own messages; says the rest once, not per run."""
    for name in ("lightning.pytorch", "lightning.fabric", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # An extra's package, which the core does without.
    with suppress(ModuleNotFoundError):
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
    for message in (
        ".*does not have many workers.*",
        ".*isinstance.treespec, LeafSpec.*",
    ):
        warnings.filterwarnings("ignore", message=message)
