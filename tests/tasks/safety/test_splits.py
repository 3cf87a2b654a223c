"""Training, selection and certification split of safety: each kind of prompt by itself."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from pl_pointwise.data import categories_of, units_of
from pl_pointwise.tasks import SafetyDataModule
from pl_pointwise.tasks.language_model.data import Preparation
from pl_pointwise.tasks.safety.data import PAPER_CATEGORIES, Selection
from pl_pointwise.tasks.safety.module import SafetyEvaluation
from tests.tasks.conftest import quiet_trainer
from tests.tasks.safety.conftest import (
    VIOLENCE,
    benign_rows,
    data_in,
    judgement_rows,
    unsafe_rows,
    write_rows,
)
from tests.tasks.safety.test_module import data_of, made


def sizes(data: SafetyDataModule) -> dict[str, dict[bool, int]]:
    names = [name for name in ("train", "val", "test") if name in data.datasets]
    return {name: Counter(r.unsafe for r in data.datasets[name].records) for name in names}


def test_a_part_of_each_kind_certifies(language_model_folder, tmp_path) -> None:
    files = {
        "benign_file": write_rows(tmp_path / "b.jsonl", benign_rows(20)),
        "unsafe_file": write_rows(tmp_path / "u.jsonl", unsafe_rows(10) + unsafe_rows(10)),
    }
    data = data_in(language_model_folder, files, val_fraction=0.2, test_fraction=0.3)
    data.setup(None)
    assert data.certification_is_separate
    assert sizes(data) == {
        "train": {False: 10, True: 10},
        "val": {False: 4, True: 4},
        "test": {False: 6, True: 6},
    }
    assert set(data.shared_units().values()) == {0}
    assert Counter(categories_of(data.datasets["test"])) == {"benign": 6, "unsafe": 6}
    assert len(set(units_of(data.datasets["test"]) or [])) == 9  # Unsafe ones stand twice.
    without = data_in(language_model_folder, files, val_fraction=0.2)
    without.setup(None)
    assert without.datasets["test"] is without.datasets["val"]
    assert without.datasets["val"].fingerprint == data.datasets["val"].fingerprint


def test_files_of_their_own_certify_and_overlap_is_reported(
    language_model_folder, safety_files, tmp_path
) -> None:
    held = [*benign_rows(17)[14:], benign_rows(1)[0]]
    files = safety_files | {
        "benign_test_file": write_rows(tmp_path / "benign_test.jsonl", held),
        "unsafe_test_file": write_rows(tmp_path / "unsafe_test.jsonl", unsafe_rows(10)[8:]),
    }
    data = data_in(language_model_folder, files)
    with pytest.warns(UserWarning, match=r"benign_test.jsonl: 1 of 4 prompts are in .*benign.jso"):
        data.setup("test")
    assert sizes(data) == {"train": {False: 10, True: 6}, "test": {False: 4, True: 2}}
    assert data.certification_is_separate
    assert data.shared_units() == {("train", "test"): 1}


def test_what_the_hub_holds_out_is_divided_by_category(hub) -> None:
    counts = {"benign_count": 10, "benign_held_out": 8}
    counts |= {"per_category": 12, "held_out_per_category": 4}
    data = hub(counts, preparation=Preparation(val_fraction=0.05, test_fraction=0.15))
    data.setup(None)
    assert sizes(data) == {
        "train": {False: 10, True: 24},
        "val": {False: 2, True: 3},
        "test": {False: 6, True: 9},
    }
    for name, each in (("val", 1), ("test", 3)):
        found = Counter(categories_of(data.datasets[name]))
        assert found == {"benign": 2 * each} | dict.fromkeys(PAPER_CATEGORIES, each)
    assert set(data.shared_units().values()) == {0}


def test_a_file_of_beavertails_certifies(language_model_folder, safety_files, tmp_path) -> None:
    def rows(first: int, last: int) -> list[Any]:
        found = [judgement_rows(f"p {i}?", "Do.", [[VIOLENCE]] * 3) for i in range(first, last)]
        return [row for group in found for row in group]

    files = safety_files | {
        "unsafe_file": write_rows(tmp_path / "u.jsonl", rows(0, 10)),
        "unsafe_test_file": write_rows(tmp_path / "t.jsonl", rows(9, 14)),
        "benign_test_file": write_rows(tmp_path / "b.jsonl", benign_rows(16)[14:]),
    }
    del files["unsafe_val_file"]
    limits = Selection(categories=[VIOLENCE], per_category=10, held_out_per_category=2)
    data = data_in(language_model_folder, files, unsafe_schema="beavertails", selection=limits)
    with pytest.warns(UserWarning, match=r"t.jsonl: 1 of 5 prompts are in"):
        data.setup(None)
    assert sizes(data)["val"] == {False: 4, True: 2}
    assert sizes(data)["test"] == {False: 2, True: 5}
    assert categories_of(data.datasets["test"]) == ["benign"] * 2 + [VIOLENCE] * 5


# What is answered ---------------------------------------------------------------------------------


def test_validate_answers_the_selection_split_and_keeps_each_answer(
    language_model_folder, safety_files, tmp_path
) -> None:
    """In a fit it never does: its validation is for the violations, after every epoch."""
    evaluation = SafetyEvaluation(answer_in=["test"])
    module = made(language_model_folder, evaluation=evaluation)
    data = data_of(safety_files)
    run = quiet_trainer(tmp_path, max_epochs=1)
    run.fit(module, data)
    assert "val/kl" in run.callback_metrics
    assert "val/over_refusal" not in run.callback_metrics
    assert module.evaluated_metrics["val"] == {}
    assert not (tmp_path / "answers").exists()

    run = quiet_trainer(tmp_path)
    run.validate(module, data, verbose=False)
    found = dict(run.callback_metrics)
    rows = [json.loads(x) for x in (tmp_path / "answers/val.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(6))
    assert list(module.answers) == ["val"]
    values = module.evaluated_metrics["val"]
    assert set(values) == {"refusal_rate", "harmful", "over_refusal", "cut"}
    for name, unsafe in (("refusal_rate", True), ("over_refusal", False)):
        chosen = [row for row in rows if row["unsafe"] == unsafe]
        refused = [float(row["refused"]) for row in chosen]
        assert found[f"val/{name}"] == pytest.approx(sum(refused) / len(refused))
        assert values[name].index.tolist() == [row["index"] for row in chosen]
        assert values[name].value.tolist() == refused
    run.test(module, data, verbose=False)  # Here "test" is "val", so the answers are the same.
    assert run.callback_metrics["test/cut"] == found["val/cut"]
    again = [json.loads(x) for x in (tmp_path / "answers/test.jsonl").read_text().splitlines()]
    assert again == rows
