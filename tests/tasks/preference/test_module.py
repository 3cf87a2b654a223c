"""Preference pairs: each loss and each bound by hand, and what a floor is for."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pl_pointwise import Optimization, Pointwise, Training
from pl_pointwise.errors import DataError, TrainingError
from pl_pointwise.tasks import PreferenceDataModule, PreferenceModule
from pl_pointwise.tasks.preference.module import DEFAULT_TRAINING
from tests.tasks.conftest import (
    ADAPTERS,
    before_and_after,
    make_data,
    make_module,
    quiet_trainer,
    random_batch,
    response_by_hand,
    write_rows,
    written_files,
)
from tests.tasks.preference.conftest import pair_rows


@pytest.fixture
def made(language_model_folder: Path) -> Callable[..., PreferenceModule]:
    """made(moved=True, **options) → a module on the tiny Llama, with moved adapters."""

    def make(moved: bool = True, **options: Any) -> PreferenceModule:
        options = {"lora": ADAPTERS} | options
        folder = language_model_folder
        return make_module(PreferenceModule, folder, DEFAULT_TRAINING, moved, **options)

    return make


def data_of(
    folder: Path, rows: list[dict[str, Any]], **options: Any
) -> PreferenceDataModule:
    files = written_files(folder, {"train_file": rows})
    return make_data(
        PreferenceDataModule, None, files, **{"val_fraction": 0.2} | options
    )


def batch_of() -> dict[str, Any]:
    """Three prompts; the second has one rejected answer fewer."""
    return random_batch((5, 9, 7), ((4, 6, 3), (2, 8), (7, 3, 5)))


def softplus(value: float) -> float:
    """−log σ(−value)."""
    return math.log1p(math.exp(-abs(value))) + max(value, 0.0)


# With s̄ the mean and r the log-ratio of the chosen (w) and the rejected answer (l), METHOD 5.
LOSSES: dict[str, Callable[[dict[str, float], dict[str, float]], float]] = {
    "dpo": lambda w, r: softplus(-0.2 * ((w["s"] - w["ref"]) - (r["s"] - r["ref"]))),
    "simpo": lambda w, r: softplus(-(2.5 * (w["mean"] - r["mean"]) - 0.3)),
    "cpo": lambda w, r: softplus(-0.25 * (w["s"] - r["s"])) - 0.7 * w["mean"],
    "cal_dpo": lambda w, r: (
        softplus(-((w["s"] - w["ref"]) - (r["s"] - r["ref"])))
        + 0.5 * ((w["s"] - w["ref"] - 5) ** 2 + (r["s"] - r["ref"] + 5) ** 2)
    ),
}
SETTINGS = {
    "dpo_beta": 0.2,
    "simpo_beta": 2.5,
    "simpo_gamma": 0.3,
    "cpo_likelihood_weight": 0.7,
    "cal_dpo_beta": 0.1,
    "cal_dpo_calibration_weight": 0.5,
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_every_bound_are_what_a_loop_over_the_pairs_gives(
    name, made
) -> None:
    bounds = {"floor_tolerance": 0.1, "chosen_tolerance": -1.0}
    bounds |= {"rejected_tolerance": -5.0, "ratio_tolerance": 0.5}
    module = made(objective=name, losses=SETTINGS, **bounds)
    batch = batch_of()
    outputs = module(batch)
    found, values = (
        module.objective(outputs, batch),
        module.constraint_values(outputs, batch),
    )
    for row in range(3):
        chosen, *rejected = (
            response_by_hand(module, batch, row, column)
            for column in range(3 - (row == 1))
        )
        expected = [LOSSES[name](chosen, each) for each in rejected]
        assert found[row].item() == pytest.approx(
            sum(expected) / len(expected), rel=1e-4
        )
        size = int(batch["response_lengths"][row, 0])
        floor = chosen["ref"] / size - chosen["mean"]
        assert values["floor"][row].item() == pytest.approx(floor, abs=1e-5)
        assert values["chosen"][row].item() == pytest.approx(chosen["mean"], rel=1e-5)
        for column, each in enumerate(rejected):
            assert values["rejected"][row, column].item() == pytest.approx(
                each["mean"], rel=1e-5
            )
            ratio = chosen["mean"] - each["mean"]
            assert values["ratio"][row, column].item() == pytest.approx(ratio, abs=1e-5)
    sides = {k: (each.at_least, each.at_most) for k, each in module.constraints.items()}
    assert sides == {
        "floor": (None, 0.1),
        "chosen": (-1.0, None),
        "rejected": (None, -5.0),
        "ratio": (0.5, None),
    }


def test_a_floor_keeps_the_chosen_answers_that_the_loss_gives_up(
    made, tmp_path
) -> None:
    """A rejected answer that shares its beginning with the chosen one pulls it down as well."""
    rows = [
        {
            "prompt": f"{i}?",
            "chosen": f"The sum is {i} and {i}",
            "rejected": f"The sum is {i}",
        }
        for i in range(6)
    ]
    training = Training(Optimization(learning_rate=0.05))
    after = {}
    for formulation in (None, Pointwise()):
        torch.manual_seed(0)
        module = made(moved=False, objective="simpo", formulation=formulation)
        module.training_settings.optimization = training.optimization
        data = data_of(tmp_path, rows, batch_size=6, val_fraction=0.0)
        after[formulation is not None] = before_and_after(
            module, data, tmp_path, max_epochs=12
        )[1]
    assert after[False]["train/floor/max"] > 0.3
    assert after[True]["train/floor/max"] < 0.05
    assert after[True]["train/pairwise_accuracy"] == 1
    assert after[True]["train/reward_accuracy"] == 1


def test_without_adapters_there_is_no_reference(made, tmp_path) -> None:
    data = data_of(tmp_path, pair_rows(5), batch_size=4)
    module = made(moved=False, lora=None, objective="simpo", floor_tolerance=None)
    quiet_trainer(tmp_path, max_steps=2).fit(module, data)
    results = quiet_trainer(tmp_path).test(module, data, verbose=False)
    assert "train/pairwise_accuracy" in results[1]
    with pytest.raises(TrainingError, match=r"policy\.lora is null"):
        quiet_trainer(tmp_path, max_steps=1).fit(made(lora=None, moved=False), data)


# Data ---------------------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "Add."}
ASK = {"role": "user", "content": "1 + 1?"}
FORMS: dict[str, dict[str, Any]] = {
    "texts": {"system": "Add.", "prompt": "1 + 1?", "chosen": "2", "rejected": "3"},
    "intel": {"system": "Add.", "input": "1 + 1?", "chosen": "2", "rejected": "3"},
    "turns": {
        "prompt": [SYSTEM, ASK],
        "chosen": [{"role": "assistant", "content": "2"}],
        "rejected": [{"role": "assistant", "content": "3"}],
    },
    "whole conversations": {
        "chosen": [SYSTEM, ASK, {"role": "assistant", "content": "2"}],
        "rejected": [SYSTEM, ASK, {"role": "assistant", "content": "3"}],
    },
    "when2call": {
        "messages": [SYSTEM, ASK],
        "chosen_response": {"role": "assistant", "content": "2"},
        "rejected_response": {"role": "assistant", "content": "3"},
    },
}


@pytest.mark.parametrize("name", FORMS)
def test_each_form_of_pairs_is_the_same_record(
    name, tmp_path, language_model_folder
) -> None:
    data = data_of(tmp_path, [FORMS[name]], val_fraction=0.0)
    data.given_name = str(language_model_folder)
    data.setup("fit")
    (record,) = data.datasets["train"].records
    assert [turn["content"] for turn in record.messages] == ["Add.", "1 + 1?"]
    assert (record.answers, record.roles) == (["2", "3"], ["prefer", "avoid"])


def test_several_rejected_answers_of_one_prompt_are_one_sample(
    tmp_path, language_model_folder
) -> None:
    options = {"group_rejected": True, "val_fraction": 0.2, "batch_size": 4}
    data = data_of(tmp_path, pair_rows(5), **options)
    data.given_name = str(language_model_folder)
    data.setup("fit")
    assert [len(data.datasets[name]) for name in ("train", "val")] == [4, 1]
    batch = next(iter(data.train_dataloader()))
    assert batch["avoid"].tolist() == [[1, 2]] * 4


def test_a_folder_on_the_hub_and_prompts_to_answer(
    tmp_path, language_model_folder
) -> None:
    (tmp_path / "set").mkdir()
    write_rows(tmp_path / "set/train.jsonl", pair_rows(5))
    asked = [{"prompt": "1?"}, {"messages": [ASK]}, pair_rows(1)[0]]
    path = write_rows(tmp_path / "asked.jsonl", asked)
    data = PreferenceDataModule(
        str(language_model_folder),
        source="hub",
        hub_path=str(tmp_path / "set"),
        predict_file=str(path),
    )
    data.setup("fit")
    assert sum(len(each) for each in data.datasets.values()) == 10
    data.setup("predict")
    assert [len(record.responses) for record in data.datasets["predict"].records] == [
        0,
        0,
        0,
    ]
    with pytest.raises(DataError, match="set both, or neither"):
        PreferenceDataModule(source="hub")


def test_what_is_no_pair_is_named(tmp_path, language_model_folder) -> None:
    rows = pair_rows(1)
    for row, said in (
        ({"prompt": "1?", "chosen": "2"}, r'line 3: field "rejected" is missing'),
        (rows[0] | {"rejected": rows[0]["chosen"]}, "line 3: .*equals the chosen one"),
    ):
        data = data_of(tmp_path, [*rows, row])
        data.given_name = str(language_model_folder)
        with pytest.raises(DataError, match=said):
            data.setup("fit")
