"""What tells data sets, and orders of one data set, apart: a digest of their content."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from .indexed import Rows, without_index

READ_ALL = 1024
READ_SOME = 64
"""Rows of a larger data set that its fingerprint reads."""
READ_AGAIN = 16
"""Rows that are read twice: a random change may leave one unchanged."""
RANDOM_ROWS = "random rows"
"""Begins the fingerprint of rows that differ each time they are read."""


def fingerprint(rows: Rows) -> str:
    """A digest that tells data sets, and orders of one data set, apart; draws nothing.

    The data set's own text ``fingerprint``, else a digest of its length and the content of rows:
    of all up to 1,024, else of 64 spread evenly. If rows differ when read again, the length alone.
    """
    rows = without_index(rows)
    of_data_set = getattr(rows, "fingerprint", None)
    return of_data_set if isinstance(of_data_set, str) else fingerprint_of_content(rows)


def fingerprint_of_content(rows: Any) -> str:
    """A digest of the length and the rows; see :func:`fingerprint`."""
    count = len(rows)
    read = count if count <= READ_ALL else READ_SOME
    probes = [number * count // read for number in range(read)]
    digests, stable, _ = _read(rows.__getitem__, probes)
    # As of random augmentation: only their number can be compared at a resume.
    if not stable:
        return f"{RANDOM_ROWS}: {count}"
    return hashlib.sha256(b"".join([str(count).encode(), *digests])).hexdigest()


def digests_of_rows(
    rows: Any, names: Sequence[str] | None = None
) -> list[bytes] | None:
    """A digest of each row's content. None: rows differ when read again, or hold an object of a
    class whose content is not known here.

    names: what each row is called; then a row's content is what it has besides: its name, and what
        stands in a column of ids, is left out (:data:`ID_COLUMNS`), and texts are compared after
        Unicode normalisation, so that composed and decomposed letters are one.
    """

    def shown(probe: int) -> Any:
        return rows[probe] if names is None else _without_id(rows[probe], names[probe])

    digests, stable, whole = _read(shown, range(len(rows)))
    return digests if stable and whole else None


ID_COLUMNS = re.compile(
    r"_?(row|record|unit|sample|example|user|doc)?_?(id|uuid|guid|unit|index)"
)
"""Columns that say which row it is, and nothing of what it holds."""


def _without_id(row: Any, name: str) -> Any:
    if not isinstance(row, Mapping):
        return normalised(row)
    content = {}
    for key, value in row.items():
        says_which = ID_COLUMNS.fullmatch(str(key).lower()) or (
            name and str(value) == name
        )
        if not says_which:
            content[key] = normalised(value)
    return content or normalised(row)  # What has nothing but an id is told by it.


def normalised(value: Any) -> Any:
    """A value with its texts in Unicode's composed form (NFC).

    >>> normalised(["e\u0301", 1]) == ["\u00e9", 1]
    True
    """
    if isinstance(value, str):
        return value if value.isascii() else unicodedata.normalize("NFC", value)
    if isinstance(value, Mapping):
        return {normalised(key): normalised(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(normalised(entry) for entry in value)
    return value


def _read(
    row_at: Callable[[int], Any], probes: Sequence[int]
) -> tuple[list[bytes], bool, bool]:
    """Digests of these rows; whether they are the same when read again; and of all content."""
    digests = []
    whole = True
    stable = True
    with isolate_rng(include_cuda=False):
        for probe in probes:
            digest, is_whole = _digest_of(row_at(probe))
            digests.append(digest)
            whole &= is_whole
        for number in range(READ_AGAIN if probes else 0):
            place = number % len(probes)
            again, _ = _digest_of(row_at(probes[place]))
            if again != digests[place]:
                stable = False
                break
    return digests, stable, whole


def _digest_of(row: Any) -> tuple[bytes, bool]:
    """The digest of a row, and whether it is of all that the row holds."""
    digest = hashlib.sha256()
    whole = _digest(row, digest)
    return digest.digest(), whole


_SIMPLE = (str, bytes, int, float, complex, bool, type(None), date, PurePath)
_SIMPLE_TYPES = frozenset(_SIMPLE)


def _digest(value: Any, digest: Any) -> bool:
    """Adds a value; False: of an object in it only the class."""
    whole = True
    if isinstance(value, Tensor):
        _digest_tensor(value, digest)
    elif isinstance(value, Mapping):
        # In an order of its own: two mappings with the same entries are alike.
        for key in sorted(value, key=str):
            digest.update(f"{key}:".encode())
            whole &= _digest(value[key], digest)
    elif isinstance(value, np.ndarray) and value.dtype == object:
        # Its bytes are addresses.
        whole = _digest(value.tolist(), digest)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        digest.update(f"[{len(value)}]".encode())
        # At once: lists of tokens are long.
        if _SIMPLE_TYPES.issuperset(map(type, value)):
            digest.update(repr(list(value)).encode())
            return True
        for entry in value:
            whole &= _digest(entry, digest)
    elif isinstance(value, (set, frozenset)):
        # In an order of their own, not that of the set.
        entries = [_digest_of(entry) for entry in value]
        whole = all(is_whole for _, is_whole in entries)
        _digest(sorted(of_entry for of_entry, _ in entries), digest)
    elif isinstance(value, _SIMPLE):
        digest.update(repr(value).encode())
    # Arrays and scalars of numpy; the type and shape keep apart what has the same bytes.
    elif hasattr(value, "tobytes"):
        digest.update(
            f"{getattr(value, 'dtype', '')}{getattr(value, 'shape', '')}".encode()
        )
        digest.update(value.tobytes())
    elif is_dataclass(value) and not isinstance(value, type):
        digest.update(type(value).__name__.encode())
        whole = _digest({f.name: getattr(value, f.name) for f in fields(value)}, digest)
    else:
        digest.update(type(value).__name__.encode())
        return False
    return whole


def _digest_tensor(value: Tensor, digest: Any) -> None:
    """Adds its type, its shape and its bytes."""
    # A sparse tensor has no bytes in one place.
    dense = value if value.layout is torch.strided else value.to_dense()
    dense = dense.detach().cpu()
    digest.update(f"{dense.dtype}{tuple(dense.shape)}".encode())
    digest.update(dense.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
