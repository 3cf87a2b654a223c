"""Rows that are trained on and held out too, and a field that is lost, are named in `fit`."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from pl_pointwise import PointwiseDataModule
from pl_pointwise.data import IndexedDataset
from pl_pointwise.training import shared_rows
from tests.pl_pointwise.toy import trainer
from tests.pl_pointwise.training.test_mistakes import Line


class Points(PointwiseDataModule):
    def __init__(self, **datasets: Any) -> None:
        super().__init__(batch_size=4)
        self.datasets = datasets


def rows(count: int, start: int = 0, **more: Any) -> list[dict[str, Any]]:
    return [
        {"x": torch.tensor([i, 1.0]), "y": torch.tensor(1.0), **more}
        for i in range(start, start + count)
    ]


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Any:
    """warned(data, **options) → what a fit warns of."""

    def fit(data: Any, command: str = "fit", **options: Any) -> str:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="pl_pointwise"):
            getattr(trainer(max_epochs=1, **options), command)(Line(), data)
        return caplog.text

    return fit


def test_held_out_rows_that_are_trained_on_are_counted(warned) -> None:
    said = warned(Points(train=rows(20), val=rows(6, 17), test=rows(5, 30)))
    assert (
        "3 of 6 rows of the data set val that were read are rows of the training set"
        in said
    )
    assert "data set test" not in said
    said = warned(Points(train=rows(20), test=rows(5, 16)), limit_val_batches=0)
    assert "4 of 5 rows of the data set test" in said


def test_test_names_them_too(warned) -> None:
    said = warned(Points(train=rows(20), test=rows(5, 16)), "test")
    assert "4 of 5 rows of the data set test" in said


def test_other_rows_are_no_leak(warned) -> None:
    assert "training set" not in warned(
        Points(train=rows(20), val=rows(6, 20), test=rows(5, 30))
    )


def test_the_training_set_itself_is_named(warned) -> None:
    data = Points(train=rows(8))
    data.datasets["val"] = data.datasets["train"]
    assert "The data set val is the training set itself" in warned(data)


def test_loaders_of_ones_own_are_compared_too(warned) -> None:
    loaders = [
        torch.utils.data.DataLoader(IndexedDataset(given), batch_size=4)
        for given in (rows(12), rows(4, 10))
    ]

    class Both(PointwiseDataModule):
        def train_dataloader(self) -> Any:
            return loaders[0]

        def val_dataloader(self) -> Any:
            return loaders[1]

    assert "2 of 4 rows of the data set val" in warned(Both())


def test_units_say_what_is_shared(warned) -> None:
    """Of other content, as of one user."""

    class Named(list[Any]):
        units: list[str]

    train, val = Named(rows(4)), Named(rows(2, 50))
    train.units, val.units = ["a", "b", "c", "d"], ["d", "e"]
    assert "1 of 2 rows of the data set val" in warned(Points(train=train, val=val))


def test_of_a_large_set_some_rows_are_read(warned, monkeypatch) -> None:
    monkeypatch.setattr(shared_rows, "READ", 50)
    said = warned(Points(train=rows(400), val=rows(200)), limit_train_batches=2)
    assert "At least 25 of 50 rows of the data set val" in said


def test_a_random_row_is_no_leak_and_moves_no_random_state(warned) -> None:
    class Augmented(list[Any]):
        def __getitem__(self, place: Any) -> Any:
            return {**super().__getitem__(place), "x": torch.rand(2)}

    assert "are rows of the training" not in warned(
        Points(train=Augmented(rows(8)), val=rows(2))
    )


@pytest.mark.parametrize("own", [7, "row-7"])
def test_a_column_named_index_is_named(own, warned) -> None:
    said = warned(Points(train=rows(6, index=own)), limit_val_batches=0)
    assert f'Row 0 of the training set has a field "index" of its own ({own!r})' in said


def test_an_index_that_is_the_position_is_as_it_should_be(warned) -> None:
    numbered = [{**row, "index": place} for place, row in enumerate(rows(6))]
    assert '"index"' not in warned(Points(train=numbered), limit_val_batches=0)
    assert '"index"' not in warned(
        Points(train=IndexedDataset(rows(6))), limit_val_batches=0
    )
