"""What a data set says of each of its samples: groups, units, categories."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from ..errors import DataError
from ..lagrangian.terms import group_numbers
from .indexed import IndexedDataset, Rows, without_index


def categories_of(rows: Rows) -> list[str] | None:
    """The attribute ``categories`` of each sample, (N,), also through what wraps a data set."""
    return _texts_of(rows, "categories")


def groups_of(rows: Rows) -> Tensor | None:
    """The attribute ``groups`` of each sample, (N,) int64, if the data set has it."""
    groups = _entries_of(rows, "groups")
    if groups is None:
        return None
    whose = f"groups of {type(without_index(rows)).__name__}"
    return group_numbers(groups, len(rows), whose)


def units_of(rows: Rows) -> list[str] | None:
    """The attribute ``units``, if the data set has it."""
    return _texts_of(rows, "units")


def _texts_of(rows: Any, name: str) -> list[str] | None:
    texts = _entries_of(rows, name)
    if texts is None:
        return None
    return ["" if text is None else str(text) for text in texts]


def _entries_of(rows: Any, name: str) -> Any:
    """An attribute of each sample, (N,), also through what wraps a data set; None without one."""
    entries = getattr(rows, name, None)
    if entries is not None:
        if len(entries) != len(rows):
            raise DataError(
                f"{type(rows).__name__}.{name} has {len(entries):,} entries for {len(rows):,} "
                "samples: give a text or None for each; of groups a number."
            )
        return entries
    if isinstance(rows, IndexedDataset):
        return _entries_of(rows.rows, name)
    if isinstance(rows, Subset):
        whole = _entries_of(rows.dataset, name)
        return None if whole is None else [whole[position] for position in rows.indices]
    if isinstance(rows, ConcatDataset):
        parts = [_entries_of(part, name) for part in rows.datasets]
        if any(part is None for part in parts):
            return None
        return list(chain.from_iterable(parts))
    return None
