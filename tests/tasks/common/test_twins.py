"""Prompts that differ by case and spaces alone are one unit, in every language task."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from pl_pointwise.data import units_of
from pl_pointwise.tasks import ConversationDataModule, SafetyDataModule, When2CallDataModule
from tests.tasks.conftest import make_data, shared_units, write_rows

TWINS = [text for i in range(20) for text in (f"What is  {i} q?", f"what is {i} Q? ")]
PARTS = {"val_fraction": 0.2, "test_fraction": 0.3}
Write = Callable[[str, Iterable[Any]], str]


def conversation(folder: Path, write: Write) -> Any:
    rows = [{"prompt": q, "responses": [{"role": "prefer", "content": "A."}]} for q in TWINS]
    return make_data(ConversationDataModule, folder, {"train_file": write("t", rows)}, **PARTS)


def when2call(folder: Path, write: Write) -> Any:
    answers = {"chosen_response": {"content": "A."}, "rejected_response": {"content": "B."}}
    asked = [{"tools": [], "messages": [{"role": "user", "content": q}]} for q in TWINS]
    path = write("t", [row | answers for row in asked])
    return make_data(When2CallDataModule, folder, {"train_file": path}, **PARTS)


def safety(folder: Path, write: Write) -> Any:
    benign = [{"instruction": f"benign {q}", "output": "A."} for q in TWINS]
    files = {
        "benign_file": write("b", benign),
        "unsafe_file": write("u", [{"prompt": q} for q in TWINS]),
    }
    return make_data(SafetyDataModule, folder, files, unsafe_schema="labelled", **PARTS)


@pytest.mark.parametrize("task", [conversation, when2call, safety])
def test_twins_stand_in_one_split_and_count_once(task, language_model_folder, tmp_path) -> None:
    def write(name: str, rows: Iterable[Any]) -> str:
        return str(write_rows(tmp_path / f"{name}.jsonl", rows))

    data = task(language_model_folder, write)
    data.setup(None)
    assert set(shared_units(data).values()) == {0}
    for name in ("train", "val", "test"):
        units = units_of(data.datasets[name]) or []
        assert len(units) == 2 * len(set(units))
