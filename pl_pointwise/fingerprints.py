"""What tells data sets, and orders of one data set, apart: a digest of their content."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

READ_WHOLE = 1024
"""Rows up to which a fingerprint reads them all."""

RANDOM_ROWS = "random rows"
"""Begins the fingerprint of rows that differ each time they are read."""

_REREAD = 16


def probes_of(count: int) -> list[int]:
    """Positions that are read to tell data sets of ``count`` rows apart: all, or 64 spread ones."""
    read = count if count <= READ_WHOLE else 64
    return [probe * count // read for probe in range(read)]


def fingerprint_of_content(rows: Any) -> str:
    """A digest of the length and the rows; see :func:`pl_pointwise.data.fingerprint`."""
    count = len(rows)
    with isolate_rng(include_cuda=False):
        probes = probes_of(count)
        digests = [_digest_of(rows[probe]) for probe in probes]
        # As often as this, because a random change may leave a row unchanged.
        for n in range(_REREAD if probes else 0):
            if _digest_of(rows[probes[n % len(probes)]]) != digests[n % len(probes)]:
                return f"{RANDOM_ROWS}: {count}"
    return hashlib.sha256(b"".join([str(count).encode(), *digests])).hexdigest()


def _digest_of(row: Any) -> bytes:
    digest = hashlib.sha256()
    _digest(row, digest)
    return digest.digest()


_SIMPLE = (str, bytes, int, float, complex, bool, type(None), date, PurePath)
_SIMPLE_TYPES = frozenset(_SIMPLE)


def _digest(value: Any, digest: Any) -> None:
    if isinstance(value, Tensor):
        value = (value if value.layout is torch.strided else value.to_dense()).detach().cpu()
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            digest.update(f"{key}:".encode())
            _digest(value[key], digest)
    elif isinstance(value, np.ndarray) and value.dtype == object:  # Its bytes are addresses.
        _digest(value.tolist(), digest)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        digest.update(f"[{len(value)}]".encode())
        if _SIMPLE_TYPES.issuperset(map(type, value)):
            digest.update(repr(list(value)).encode())
            return
        for entry in value:
            _digest(entry, digest)
    elif isinstance(value, (set, frozenset)):
        _digest(sorted(map(_digest_of, value)), digest)
    elif isinstance(value, _SIMPLE):
        digest.update(repr(value).encode())
    elif hasattr(value, "tobytes"):
        digest.update(f"{getattr(value, 'dtype', '')}{getattr(value, 'shape', '')}".encode())
        digest.update(value.tobytes())
    elif is_dataclass(value) and not isinstance(value, type):
        digest.update(type(value).__name__.encode())
        _digest({field.name: getattr(value, field.name) for field in fields(value)}, digest)
    else:
        digest.update(type(value).__name__.encode())
