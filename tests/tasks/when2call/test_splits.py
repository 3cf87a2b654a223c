"""The three splits of When2Call: by prompt, of each behaviour its part."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pl_pointwise.data import categories_of, units_of
from pl_pointwise.tasks import When2CallDataModule
from tests.tasks.conftest import make_data
from tests.tasks.when2call.conftest import choice_rows, preference_rows, write_rows


def module(folder: Path, files: dict[str, Any], **options: Any) -> When2CallDataModule:
    return make_data(When2CallDataModule, folder, files, **options)


@pytest.mark.parametrize("grouped", [False, True])
def test_three_splits_have_each_behaviour_in_proportion(
    grouped, language_model_folder, tmp_path
) -> None:
    path = write_rows(tmp_path / "t.jsonl", preference_rows(60))
    fractions = {"val_fraction": 0.2, "test_fraction": 0.3, "group_rejected": grouped}
    data = module(language_model_folder, {"train_file": str(path)}, **fractions)
    data.setup(None)
    assert data.certification_is_separate
    assert data.shared_units() == {("train", "val"): 0, ("train", "test"): 0, ("val", "test"): 0}
    each = 1 if grouped else 2
    for name, prompts in (("train", 10), ("val", 4), ("test", 6)):
        found = Counter(categories_of(data.datasets[name]))
        expected = ("tool_call", "request_for_info", "cannot_answer")
        assert found == dict.fromkeys(expected, prompts * each)
        assert len(set(units_of(data.datasets[name]) or [])) == 3 * prompts


def test_multiple_choice_knows_the_right_behaviour_and_questions_know_none(
    language_model_folder, tmp_path
) -> None:
    path = str(write_rows(tmp_path / "mcq.jsonl", choice_rows(4)))
    data = module(language_model_folder, {"mcq_file": path, "predict_file": path})
    data.setup("test")
    data.setup("predict")
    assert categories_of(data.datasets["mcq"]) == [
        "tool_call",
        "request_for_info",
        "cannot_answer",
        "cannot_answer",
    ]
    assert categories_of(data.datasets["predict"]) is None
    pair = {"input": "1 + 2?", "chosen": "3", "rejected": "4"}
    files = {"train_file": str(write_rows(tmp_path / "p.jsonl", [pair, pair | {"input": "2?"}]))}
    data = module(language_model_folder, files, schema="pairs", val_fraction=0.0)
    data.setup("fit")
    assert categories_of(data.datasets["train"]) is None
