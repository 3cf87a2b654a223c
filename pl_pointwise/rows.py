"""Rows of batches and of data sets: taking some of a batch, reading one as texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from torch import Tensor

from .errors import DataError

Kind = Literal["rows", "parts", "shared"]
"""What an entry of a batch is: a row for each sample, parts that are so in turn, or neither."""


def take_rows(batch: Any, rows: Tensor, layout: Mapping[str, Kind] | None = None) -> Any:
    """The given rows of a batch; what all samples share stays whole.

    Mappings, lists and tuples in the batch are followed. An entry that ``layout`` does not list has
    a row for each sample if it is a tensor, array, list or tuple of length B.

    batch: a mapping with ``index``, (B,), from which B is read.
    rows: (R,) positions in the batch, on the CPU.
    layout: what the entries are, by path ("x", "nested.x", "pair.0").

    Raises:
        DataError: an entry with a row for each sample has not B of them.
    """
    size = len(batch["index"])
    return _take(batch, rows, size, layout or {}, "")


def _take(value: Any, rows: Tensor, size: int, layout: Mapping[str, Kind], path: str) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _take(entry, rows, size, layout, f"{path}.{key}" if path else str(key))
            for key, entry in value.items()
        }
    length = length_of(value)
    kind = layout.get(path)
    if kind == "shared" or length is None:
        return value
    if kind == "rows" and length != size:
        raise DataError(
            f'Batch entry "{path}" has length {length} in a batch of {size} samples, and that '
            "depends on the samples: which rows are whose? Override select() to say so, or list "
            "the entry in the module's shared_keys if it belongs to the batch as a whole."
        )
    if kind != "parts" and length == size:
        if isinstance(value, Tensor):
            return value[rows.to(value.device)]
        if isinstance(value, np.ndarray):
            return value[rows.numpy()]
        taken = [value[position] for position in rows.tolist()]
        return tuple(taken) if type(value) is tuple else taken
    if isinstance(value, (list, tuple)):
        parts = [_take(v, rows, size, layout, f"{path}.{i}") for i, v in enumerate(value)]
        if all(part is v for part, v in zip(parts, value, strict=True)):
            return value
        if hasattr(value, "_make"):
            return value._make(parts)
        return tuple(parts) if isinstance(value, tuple) else parts
    return value


def length_of(value: Any) -> int | None:
    """Of a list, a tuple, or along the first dimension; None for what has none."""
    if isinstance(value, (Tensor, np.ndarray)):
        return len(value) if value.ndim else None
    return len(value) if isinstance(value, (list, tuple)) else None


def plain_fields(row: Any) -> dict[str, str]:
    """The fields of a row that are texts, numbers or truth values, as texts.

    Those of a row without names are called "0", "1", ….
    """
    if hasattr(row, "_asdict"):
        row = row._asdict()
    if not isinstance(row, Mapping):
        row = dict(enumerate(row)) if isinstance(row, (list, tuple)) else {0: row}
    fields = {}
    for name, value in row.items():
        if isinstance(value, (Tensor, np.ndarray, np.generic)) and value.ndim == 0:
            value = value.item()
        if isinstance(value, (str, int, float)):
            fields[str(name)] = str(value)
    return fields
