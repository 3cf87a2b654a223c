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
    """The fields of a row that :func:`text_of` has words for.

    Those of a row without names are called "0", "1", ….
    """
    if hasattr(row, "_asdict"):
        row = row._asdict()
    if not isinstance(row, Mapping):
        row = dict(enumerate(row)) if isinstance(row, (list, tuple)) else {0: row}
    texts = {str(name): text_of(value) for name, value in row.items()}
    return {name: text for name, text in texts.items() if text is not None}


NUMBERS = 16
"""A vector that is no longer is written out."""


def text_of(value: Any) -> str | None:
    """A text, a number, a short vector, or what an array is; None of anything else."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.item() if not value.ndim else value
    if isinstance(value, np.ndarray):
        if value.ndim == 1 and len(value) <= NUMBERS:
            written = "{:.4g}" if value.dtype.kind == "f" else "{}"
            return ", ".join(map(written.format, value.tolist()))
        return f"{value.dtype} array, {' × '.join(map(str, value.shape))}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value) if isinstance(value, (str, int)) else None
