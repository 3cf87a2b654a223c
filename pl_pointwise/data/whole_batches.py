"""A collate function whose batches have the samples of their rows, all of them and no others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import DataError
from ..lagrangian.terms import is_index

NAMED = 5
"""So many samples does an error name."""


class WholeBatches:
    """A collate function that refuses its own batch where that lacks a row, or has another.

    A sample that is in no batch is under no requirement, and in no number that is reported.

    Args:
        collate: makes a batch of rows with "index".
        name: how errors call it.
    """

    def __init__(
        self, collate: Callable[[list[dict[str, Any]]], Any], name: str
    ) -> None:
        self.collate = collate
        self.name = name

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        batch = self.collate(rows)
        numbers = _samples_in(batch)
        # Without an index a batch is refused where it is used, with what to do.
        if numbers is not None:
            self._compare([row["index"] for row in rows], numbers)
        return batch

    def _compare(self, expected: list[int], numbers: list[int]) -> None:
        """Of rows and batch; rows of padding, −1, may come and go."""
        wanted = Counter(number for number in expected if number >= 0)
        present = Counter(number for number in numbers if number >= 0)
        if wanted == present:
            return
        lost, others = wanted - present, present - wanted
        if not others:
            raise DataError(
                f"{self.name} leaves out {_named(lost)} of the {len(expected)} rows of a batch: no "
                "requirement would hold for them, and no number would count them. Leave them out "
                "of the data set, in setup(); or keep them, and let membership() say which terms "
                "they have."
            )
        raise DataError(
            f'{self.name} gives a batch whose "index" has {_named(others)}, of rows that have '
            f"{_named(wanted)}. The index is each row's own, once: "
            '"index": torch.tensor([row["index"] for row in rows]).'
        )


def _samples_in(batch: Any) -> list[int] | None:
    """The index of a batch, or of the micro-batches that it is made of; None without one."""
    numbers = list[int]()
    for piece in batch if isinstance(batch, (list, tuple)) else [batch]:
        index = piece.get("index") if isinstance(piece, Mapping) else None
        if index is None or not is_index(index):
            return None
        numbers += index.tolist()
    return numbers


def _named(numbers: Counter[int]) -> str:
    """ "sample 3", or "samples 3, 5 and 4 more"."""
    named = sorted(numbers.elements())
    more = f" and {len(named) - NAMED} more" if len(named) > NAMED else ""
    kind = "sample" if len(named) == 1 else "samples"
    return f"{kind} {', '.join(map(str, named[:NAMED]))}{more}"
