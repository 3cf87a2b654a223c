"""Two ranks with one prompt each do what one rank does with two; gloo, on the CPU.

A rank's prompt is of one kind, so in every step some rank has no sample of some term.
"""

from __future__ import annotations

import pytest

from tests.programs.safety_two_ranks import two_and_one
from tests.tasks.conftest import read_rows


def test_two_ranks_train_test_and_answer_as_one(
    language_model_folder, safety_files, tmp_path
) -> None:
    folders = (tmp_path / "two", tmp_path / "one")
    for folder in folders:
        folder.mkdir()
    two, one = two_and_one(language_model_folder, safety_files, folders)
    for name, value in one.items():
        assert two[name] == pytest.approx(value, abs=1e-3), name
    rows = [read_rows(folder / "answers/test.jsonl") for folder in folders]
    assert [row["index"] for row in rows[0]] == list(range(6))
    assert rows[0] == rows[1]
