"""The table of doors in docs/devices.md: every cell is one of these tests, and none is missing."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.programs.door_table import COLUMNS, DOORS
from tests.programs.launch import ROOT, run_on_ranks

NEEDS = {"SFTTrainer": "trl", "DPOTrainer": "trl", "RewardTrainer": "trl"}
NEEDS |= dict.fromkeys(
    ["SentenceTransformerTrainer", "CrossEncoderTrainer"], "sentence_transformers"
)
BOUNDS = {"plain": 1e-6, "bf16": 1e-6, "resumed": 0.0, "killed": 0.0}
BOUNDS |= dict.fromkeys(["accumulated", "compiled", "two ranks"], 1e-9)
"""In float32, and float64 where layouts or graphs are compared."""
QUICK = ["Accelerate", "Fabric"]
"""Of which no other test is quick."""


def cells_of_page() -> dict[tuple[str, str], str]:
    text = (ROOT / "docs" / "devices.md").read_text()
    lines = text.split("### Loops of your own")[1].split("\n## ")[0].splitlines()
    rows = [
        re.split(r" *\| *", line.strip("| ")) for line in lines if line.startswith("|")
    ]
    names = rows[0][1:]
    return {
        (row[0].strip("`"), column): cell
        for row in rows[2:]
        for column, cell in zip(names, row[1:], strict=True)
    }


def test_every_cell_of_the_page_is_a_test() -> None:
    found = cells_of_page()
    assert set(found) == {(door, column) for door in DOORS for column in COLUMNS}
    for (_, column), cell in found.items():
        bound = BOUNDS[column]
        assert cell == (
            "last bit" if not bound else f"{bound:.0e}".replace("e-0", "e-")
        ), column


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def made(door: str, *columns: str) -> Path:
        folder = tmp_path_factory.mktemp(door.replace(" ", "-"))
        run_on_ranks(
            0, "tests.programs.door_table", [str(folder), door, *columns], folder
        )
        return folder

    return made


def alike(one: Any, other: Any, bound: float) -> None:
    pairs = [*zip(one["weights"], other["weights"], strict=True)]
    pairs.append((one["multipliers"], other["multipliers"]))
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=0, atol=bound)
    assert one["multipliers"].any()


def compare(folder: Path, column: str) -> None:
    *first, last = (torch.load(folder / f"{name}.pt") for name in COLUMNS[column])
    bound = BOUNDS[column]
    if "replayed" in last:  # By plain PyTorch, over the batches that it saw.
        alike(last, last["replayed"], bound)
    if column == "bf16":
        # It did train in bfloat16.
        assert (last["multipliers"] - first[0]["multipliers"]).abs().max() > 1e-5
    elif first:
        alike(last, first[0], bound)


@pytest.mark.slow
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("door", DOORS)
def test_a_cell(folder_of: Any, door: str, column: str) -> None:
    pytest.importorskip(NEEDS.get(door, "torch"))
    compare(folder_of(door, *COLUMNS), column)


@pytest.mark.parametrize("door", QUICK)
def test_doors_that_no_other_quick_test_opens(folder_of: Any, door: str) -> None:
    columns = ("plain", "resumed", "two ranks")
    for column in columns:
        compare(folder_of(door, *columns), column)


@pytest.mark.slow
def test_a_trainer_with_sharded_weights_is_one_with_whole_ones(tmp_path: Path) -> None:
    run_on_ranks(0, "tests.programs.door_fsdp", [str(tmp_path)], tmp_path)
    one, two, resumed = (
        torch.load(tmp_path / f"{n}.pt") for n in ("one", "two", "resumed")
    )
    alike(two, one, 1e-9)
    alike(resumed, one, 1e-9)


@pytest.mark.slow
def test_accelerates_sharded_weights_train_as_whole_ones(tmp_path: Path) -> None:
    run_on_ranks(0, "tests.programs.door_fsdp", [str(tmp_path), "accelerate"], tmp_path)
    one, two = (torch.load(tmp_path / f"{name}.pt") for name in ("one", "two"))
    alike(two, one, 1e-9)
