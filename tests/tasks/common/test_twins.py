"""Prompts that differ by case and spaces alone are one unit, in every language task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pl_pointwise.data import units_of
from pl_pointwise.tasks import (
    ConversationDataModule,
    PreferenceDataModule,
    SafetyDataModule,
    When2CallDataModule,
)
from tests.tasks.conftest import make_data, shared_units, written_files

TWINS = [text for i in range(20) for text in (f"What is  {i} q?", f"what is {i} Q? ")]
PREFERENCE = {
    "chosen_response": {"content": "A."},
    "rejected_response": {"content": "B."},
}
CONVERSATIONS = [
    {"prompt": q, "responses": [{"role": "prefer", "content": "A."}]} for q in TWINS
]
CALLS = [
    {"tools": [], "messages": [{"role": "user", "content": q}], **PREFERENCE}
    for q in TWINS
]
PAIRS = [{"prompt": q, "chosen": "A.", "rejected": "B."} for q in TWINS]
SAFETY = {
    "benign_file": [{"instruction": f"benign {q}", "output": "A."} for q in TWINS],
    "unsafe_file": [{"prompt": q} for q in TWINS],
    "unsafe_schema": "labelled",
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ConversationDataModule, {"train_file": CONVERSATIONS}),
        (When2CallDataModule, {"train_file": CALLS}),
        (PreferenceDataModule, {"train_file": PAIRS}),
        (SafetyDataModule, SAFETY),
    ],
)
def test_twins_stand_in_one_split_and_count_once(
    kind: Any, options: dict[str, Any], language_model_folder: Path, tmp_path: Path
) -> None:
    parts = {"val_fraction": 0.2, "test_fraction": 0.3}
    data = make_data(
        kind, language_model_folder, written_files(tmp_path, options), **parts
    )
    data.setup(None)
    assert set(shared_units(data).values()) == {0}
    for name in ("train", "val", "test"):
        units = units_of(data.datasets[name]) or []
        assert len(units) == 2 * len(set(units))
