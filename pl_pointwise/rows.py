"""Rows of batches and of data sets: taking some of a batch, reading one as texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor


def take_rows(batch: Mapping[str, Any], rows: Tensor) -> Any:
    """The given rows of a batch, a mapping with ``index``, (B,).

    What all samples share stays whole. A tensor, array, list or tuple of length B has a row for
    each sample; mappings, and lists and tuples of another length, are followed.

    rows: (R,) positions in the batch, on the CPU.
    """
    size = len(batch["index"])
    return {key: _take(value, rows, size) for key, value in batch.items()}


def _take(value: Any, rows: Tensor, size: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _take(entry, rows, size) for key, entry in value.items()}
    if isinstance(value, (Tensor, np.ndarray)):
        if not value.ndim or len(value) != size:
            return value
        return value[rows.to(value.device)] if isinstance(value, Tensor) else value[rows.numpy()]
    if not isinstance(value, (list, tuple)):
        return value
    if len(value) == size:
        taken = [value[position] for position in rows.tolist()]
    else:
        taken = [_take(entry, rows, size) for entry in value]
    if isinstance(value, list):
        return taken
    return type(value)._make(taken) if hasattr(value, "_make") else tuple(taken)


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
