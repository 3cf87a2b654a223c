"""On two ranks the callbacks log, write and decide what they do on one; rank 0 writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.callbacks.test_predictions import check
from tests.programs.callbacks_two_ranks import run
from tests.programs.launch import run_on_ranks


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("callbacks")


@pytest.fixture(name="ranks", scope="module")
def _ranks(folder: Path) -> list[dict[str, Any]]:
    run_on_ranks(2, "tests.programs.callbacks_two_ranks", [str(folder)], folder)
    return [
        torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)
    ]


@pytest.fixture(name="single", scope="module")
def _single(folder: Path) -> dict[str, Any]:
    return run(folder / "single", ranks=1)


def test_figures_are_those_of_one_process(
    ranks: list[dict[str, Any]], single: dict[str, Any]
) -> None:
    assert len(single["figures"]) == 3
    for rank in ranks:
        torch.testing.assert_close(
            rank["weights"], single["weights"], rtol=0, atol=1e-6
        )
        for found, wanted in zip(rank["figures"], single["figures"], strict=True):
            assert len(wanted) == 18
            assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_files_are_those_of_one_process(
    folder: Path, ranks: list[dict[str, Any]], single: dict[str, Any]
) -> None:
    places = [folder / run / "lightning_logs/version_0" for run in ("all", "single")]

    def hardest(path: Path) -> list[Any]:
        lines = (path / "hardest/samples.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    listed, expected = map(hardest, places)
    assert [row["index"] for row in listed] == [row["index"] for row in expected]
    for row, other in zip(listed, expected, strict=True):
        assert row["multiplier"] == pytest.approx(other["multiplier"], rel=1e-4)
        assert row["violation"] == pytest.approx(other["violation"], rel=1e-4, abs=1e-5)
        assert row["text"] == other["text"]


def test_answers_are_written_once_a_step(
    folder: Path, ranks: list[dict[str, Any]], single: dict[str, Any]
) -> None:
    """Epochs of three steps: before the first, after the second epoch, and after the last step."""
    for place in ("all", "single"):
        (path,) = (folder / place).rglob("answers.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["step"] for row in rows] == [0, 6, 9]


@pytest.mark.usefixtures("ranks")
def test_predictions_are_one_file_without_repeats(folder: Path) -> None:
    check(folder / "found.jsonl")


def test_the_best_checkpoint_is_that_of_one_process(
    ranks: list[dict[str, Any]], single: dict[str, Any]
) -> None:
    for rank in ranks:
        assert Path(rank["best"]).name == Path(single["best"]).name
        assert rank["score"] == pytest.approx(single["score"], rel=1e-5)
        assert Path(rank["best"]).exists()
