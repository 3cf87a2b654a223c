"""What commands show: tables as Markdown, and nothing that the libraries below print meanwhile."""

from __future__ import annotations

import logging
import re
import warnings
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Table:
    """``cells`` as text, one line per method or model; ``note`` says what they are."""

    title: str
    note: str
    cells: DataFrame

    def markdown(self) -> str:
        lines = [list(self.cells), ["---"] * self.cells.shape[1], *self.cells.to_numpy().tolist()]
        body = "\n".join("| " + " | ".join(map(one_line, line)) + " |" for line in lines)
        return f"## {self.title}\n\n{self.note}\n\n{body}\n"


def one_line(text: str) -> str:
    return escaped(" ".join(text.split()).replace("|", "/")[:200])


def escaped(text: str) -> str:
    """Returns Markdown in which names of methods, categories and files make no HTML and no link."""
    return re.sub(r"<(?=[A-Za-z/!?])|(?<=\])\(", r"\\\g<0>", text)


def quieten() -> None:
    """Leaves the progress bars and this package's own messages; says the rest once, not per run."""
    for name in ("lightning.pytorch", "lightning.fabric", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with suppress(ModuleNotFoundError):
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
    for message in (".*does not have many workers.*", ".*isinstance.treespec, LeafSpec.*"):
        warnings.filterwarnings("ignore", message=message)
