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

RANDOM_ROWS = "random rows"
"""Begins the fingerprint of rows that differ each time they are read."""


def fingerprint_of_content(rows: Any) -> str:
    """A digest of the length and the rows; see :func:`pl_pointwise.data.fingerprint`."""
    count = len(rows)
    read = count if count <= 1024 else 64
    digests, stable, _ = _read(rows, [probe * count // read for probe in range(read)])
    if not stable:
        return f"{RANDOM_ROWS}: {count}"
    return hashlib.sha256(b"".join([str(count).encode(), *digests])).hexdigest()


def digests_of_rows(rows: Any) -> list[bytes] | None:
    """A digest of each row's content. None: rows differ when read again, or hold an object of a
    class whose content is not known here.
    """
    digests, stable, whole = _read(rows, range(len(rows)))
    return digests if stable and whole else None


def _read(rows: Any, probes: Sequence[int]) -> tuple[list[bytes], bool, bool]:
    """Digests of these rows; whether they are the same when read again; and of all content."""
    with isolate_rng(include_cuda=False):
        found = [_digest_of(rows[probe]) for probe in probes]
        # As often as this, because a random change may leave a row unchanged.
        places = [n % len(probes) for n in range(16)] if probes else []
        stable = all(_digest_of(rows[probes[place]]) == found[place] for place in places)
    return [digest for digest, _ in found], stable, all(whole for _, whole in found)


def _digest_of(row: Any) -> tuple[bytes, bool]:
    digest = hashlib.sha256()
    whole = _digest(row, digest)
    return digest.digest(), whole


_SIMPLE = (str, bytes, int, float, complex, bool, type(None), date, PurePath)
_SIMPLE_TYPES = frozenset(_SIMPLE)


def _digest(value: Any, digest: Any) -> bool:
    """Adds a value; False: of an object in it only the class."""
    whole = True
    if isinstance(value, Tensor):
        value = (value if value.layout is torch.strided else value.to_dense()).detach().cpu()
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            digest.update(f"{key}:".encode())
            whole &= _digest(value[key], digest)
    elif isinstance(value, np.ndarray) and value.dtype == object:  # Its bytes are addresses.
        whole = _digest(value.tolist(), digest)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        digest.update(f"[{len(value)}]".encode())
        if _SIMPLE_TYPES.issuperset(map(type, value)):
            digest.update(repr(list(value)).encode())
            return True
        for entry in value:
            whole &= _digest(entry, digest)
    elif isinstance(value, (set, frozenset)):
        entries = [_digest_of(entry) for entry in value]
        whole = all(known for _, known in entries)
        _digest(sorted(found for found, _ in entries), digest)
    elif isinstance(value, _SIMPLE):
        digest.update(repr(value).encode())
    elif hasattr(value, "tobytes"):
        digest.update(f"{getattr(value, 'dtype', '')}{getattr(value, 'shape', '')}".encode())
        digest.update(value.tobytes())
    elif is_dataclass(value) and not isinstance(value, type):
        digest.update(type(value).__name__.encode())
        whole = _digest({f.name: getattr(value, f.name) for f in fields(value)}, digest)
    else:
        digest.update(type(value).__name__.encode())
        return False
    return whole
