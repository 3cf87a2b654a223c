"""What is known of a data set's samples before any pass: units, contents, categories.

A unit is what samples share, as their prompt: samples of a unit depend on each other. The content
of a row is what it holds without its id: rows under other names are the same rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from pandas import DataFrame
from torch import Tensor

from pl_pointwise.data import categories_of, fingerprint, units_of, without_index
from pl_pointwise.data.fingerprints import RANDOM_ROWS, digests_of_rows, normalised

CONTENT = "content"
"""The column that files of earlier versions have not."""


def hash_of(text: str) -> str:
    """Returns a unit's hash: prompts are long, and need not leave the machine with an export."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class Source:
    """A data set by its name in the log keys, with what is known of its samples before a pass.

    rows: None of a stream.
    """

    def __init__(self, name: str, rows: Any) -> None:
        self.name = name
        self.rows = rows

    @cached_property
    def _named_units(self) -> list[str] | None:
        """Of each row, what the data set names, else its content; None: the row has but a place."""
        units = None if self.rows is None else units_of(self.rows)
        if self.rows is None or (units is not None and all(units)):
            return units
        digests = digests_of_rows(without_index(self.rows))
        if digests is None:
            return units
        # A row that is named is a unit by its name, any other by what it holds.
        named = units or [""] * len(digests)
        return [unit or row.hex() for unit, row in zip(named, digests, strict=True)]

    @cached_property
    def _contents(self) -> list[str] | None:
        """Of each row a digest of what it holds besides its id; None: not known."""
        rows = None if self.rows is None else without_index(self.rows)
        # Prompts are their own content: a second digest would say the same.
        if rows is None or getattr(rows, "units_are_content", False):
            return None
        digests = digests_of_rows(rows, units_of(self.rows) or [""] * len(rows))
        if digests is None:
            return None
        units = self.units_at(range(len(rows)))
        units_by_content = dict[bytes, set[str]]()
        for content, unit in zip(digests, units, strict=True):
            units_by_content.setdefault(content, set()).add(unit)
        contents = []
        for content, unit in zip(digests, units, strict=True):
            # What several units hold, an answer of a word or a category, is none of them.
            is_of_one = len(units_by_content[content]) == 1
            contents.append(content.hex() if is_of_one else unit)
        return contents

    def contents_at(self, positions: Sequence[int]) -> list[str]:
        """The content of each sample's row; where it is not known, its unit."""
        contents = self._contents
        if contents is None:
            return self.units_at(positions)
        return [contents[position] for position in positions]

    @property
    def content(self) -> str:
        """A digest of the data set, whatever the order: its ``fingerprint``, else of all rows; and
        of their categories, which requirements are about.
        """
        if self.rows is None:
            return RANDOM_ROWS
        categories = categories_of(self.rows) or []
        rows = without_index(self.rows)
        fingerprint_of_its_own = getattr(rows, "fingerprint", None)
        if isinstance(fingerprint_of_its_own, str):
            if not categories:
                return fingerprint_of_its_own
            return f"{fingerprint_of_its_own} {hash_of(repr(categories))}"
        digests = digests_of_rows(rows)
        if digests is None:
            return f"{RANDOM_ROWS}: {len(self.rows)}"
        categories = categories or [""] * len(digests)
        parts = []
        for digest, category in zip(digests, categories, strict=True):
            parts.append(digest + category.encode())
        return hashlib.sha256(b"".join(sorted(parts))).hexdigest()

    def units_at(self, positions: Iterable[int]) -> list[str]:
        """The unit of each sample: rows of the same content are one."""
        units = self._named_units
        if units is not None:
            return [normalised(units[position]) for position in positions]
        # Of one data set by its name alone.
        name = (
            self.name if self.rows is None else f"{self.name}, {fingerprint(self.rows)}"
        )
        return [f"{name} {position}" for position in positions]

    def lines(
        self, kind: str, quantity: str, index: Tensor, values: Tensor
    ) -> DataFrame:
        """Returns the lines of one quantity; index, values: (n,)."""
        positions = index.tolist()
        categories = None if self.rows is None else categories_of(self.rows)
        return DataFrame(
            {
                "dataset": self.name,
                "kind": kind,
                "quantity": quantity,
                "index": positions,
                "value": values.double().numpy(),
                "unit": [hash_of(unit) for unit in self.units_at(positions)],
                "category": [
                    "" if categories is None else categories[p] for p in positions
                ],
                CONTENT: [hash_of(content) for content in self.contents_at(positions)],
            }
        )

    def training_lines(self) -> DataFrame:
        """Returns a line for each unit of the training data."""
        index = torch.arange(0 if self.rows is None else len(self.rows))
        lines = self.lines("", "", index, torch.full(index.shape, torch.nan))
        return lines.drop_duplicates(["unit", CONTENT]).assign(index=-1, category="")
