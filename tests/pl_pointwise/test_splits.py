"""What data sets say of their samples: categories, units, and which splits are apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch.utils.data import ConcatDataset, Subset

from pl_pointwise.data import IndexedDataset, categories_of, units_of
from pl_pointwise.errors import DataError
from tests.pl_pointwise.toy import ToyRows


class Told(ToyRows):
    """Rows that know their category and their unit."""

    def __init__(self, units: list[Any], categories: Any = None) -> None:
        super().__init__(len(units))
        self.units, self.categories = units, categories


def test_categories_and_units_follow_what_wraps_a_data_set() -> None:
    rows: Any = Told(["a", "b", "a"], np.array(["x", "y", "z"]))
    assert categories_of(rows) == ["x", "y", "z"]
    assert units_of(IndexedDataset(rows)) == ["a", "b", "a"]
    subset: Any = Subset(rows, [2, 1])
    assert categories_of(IndexedDataset(subset)) == ["z", "y"]
    assert units_of(Subset(IndexedDataset(subset), [1])) == ["b"]  # type: ignore[arg-type]
    other: Any = Told(["c"], [None])
    both: Any = ConcatDataset([rows, other])
    assert categories_of(both) == ["x", "y", "z", ""]
    assert units_of(both) == ["a", "b", "a", "c"]


def test_a_data_set_that_says_nothing_knows_no_categories() -> None:
    plain: Any = ToyRows(3)
    assert categories_of(plain) is None
    assert units_of(IndexedDataset(plain)) is None
    assert units_of(Subset(plain, [0])) is None  # type: ignore[arg-type]
    assert units_of(ConcatDataset([Told(["a"]), plain])) is None  # type: ignore[arg-type, list-item]


def test_a_category_too_few_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"Told.categories has 1 entries for 2 samples.*or None"
    ):
        categories_of(Told(["a", "b"], ["x"]))
