"""Samples with ``index``, their position in the data set, and the data set behind a loader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from ..errors import DataError
from ..lagrangian.terms import PADDING
from .sampler import Drawing


class Rows(Protocol):
    """A map-style data set of dict rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> Any: ...


class IndexedDataset(Dataset[dict[str, Any]]):
    """Adds ``index`` to the rows of a map-style data set.

    Position i ≥ 0 gives ``{**row, "index": i}``. Position −1−i, which :class:`PointwiseSampler`
    hands out as padding, gives row i with index −1.

    Args:
        rows: a map-style data set. Wrap a Subset or ConcatDataset as a whole.
        fields: names of the entries of rows that are tuples or tensors, such as ``("x", "y")``.
        groups: (N,), the number of each row's group, from 0: see :class:`PointwiseDataModule`.

    >>> from pl_pointwise.data import IndexedDataset
    >>> rows = IndexedDataset([(1.0, 2.0), (3.0, 4.0)], fields=("x", "y"))
    >>> rows[1]
    {'x': 3.0, 'y': 4.0, 'index': 1}
    """

    def __init__(
        self,
        rows: Rows,
        fields: Sequence[str] | None = None,
        groups: Sequence[int] | Tensor | None = None,
    ) -> None:
        self.rows = rows
        self.groups = groups
        self.fields = (fields,) if isinstance(fields, str) else fields

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: int | Drawing) -> dict[str, Any]:
        if isinstance(position, Drawing):
            position = position.start()
        if position >= 0:
            return {**self._named(self.rows[int(position)]), "index": int(position)}
        # Padding: a real row, so that it has the shapes of one, which no term applies to.
        return {**self._named(self.rows[-1 - position]), "index": PADDING}

    def _named(self, row: Any) -> Mapping[str, Any]:
        """The entries of a row by name."""
        if hasattr(row, "_asdict"):  # A named tuple.
            row = row._asdict()
        if isinstance(row, Mapping):
            return row
        entries = row if isinstance(row, (tuple, list)) else (row,)
        if self.fields is None or len(self.fields) != len(entries):
            names = ", ".join(
                f'"{name}"' for name in ("x", "y", "z", "…")[: len(entries)]
            )
            raise DataError(
                f"Rows of {type(self.rows).__name__} are {type(row).__name__}s of {len(entries)} "
                f"without names: IndexedDataset(rows, fields=[{names}])."
            )
        return dict(zip(self.fields, entries, strict=True))


def without_index(rows: Rows) -> Rows:
    """The data set in an :class:`IndexedDataset`."""
    while isinstance(rows, IndexedDataset):
        rows = rows.rows
    return rows


def dataset_of(loader: Any) -> Any:
    """The data set behind a loader; None where there is none with positions."""
    dataset: Any = getattr(loader, "dataset", None)
    return dataset if has_positions(dataset) else None


def has_positions(rows: Any) -> bool:
    """Whether it is a map-style data set with a length; a stream may have both and no rows."""
    map_style = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
    return map_style and not isinstance(rows, IterableDataset)
