"""The module: right terms, a right baseline, a warm start whose result is the next reference."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from transformers import AutoModelForCausalLM

from pl_pointwise import Optimization, Penalty, Pointwise
from pl_pointwise.errors import DataError
from pl_pointwise.tasks import SafetyDataModule, SafetyModule
from pl_pointwise.tasks.language_model.model.adapters import Lora
from pl_pointwise.tasks.safety.module import CostModel, SafetyEvaluation
from pl_pointwise.tasks.safety.records import HELPFUL, REFUSAL, ROLES, SAFE, UNSAFE
from tests.programs.safety_two_ranks import two_and_one
from tests.tasks.conftest import (
    before_and_after,
    make_data,
    quiet_trainer,
    random_batch,
    read_rows,
    response_by_hand,
    written_files,
)
from tests.tasks.safety.conftest import record

LARGE = Lora(
    r=8,
    lora_alpha=16,
    lora_dropout=0.0,
    target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
)
PENALTY = Penalty(weight=1.0)
IN_BATCH = [(HELPFUL, REFUSAL), (REFUSAL, UNSAFE), (SAFE, UNSAFE, REFUSAL), (REFUSAL,)]


def batch_of(rows: tuple[int, ...] = (0, 1, 2, 3)) -> dict[str, Any]:
    """A benign prompt, an unsafe one, a pair of an unsafe one, an unsafe one with its refusal."""
    prompts, responses = (5, 9, 7, 6), ((6, 4), (4, 8), (7, 5, 4), (4,))
    records = [
        record("x", row > 0, *((role, "") for role in IN_BATCH[row])) for row in rows
    ]
    lengths = [prompts[row] for row in rows], [responses[row] for row in rows]
    return random_batch(*lengths, records=records, roles=ROLES)


def data_of(files: dict[str, str], **options: Any) -> SafetyDataModule:
    """Data for whatever model they are used with."""
    options = {
        "unsafe_schema": "labelled",
        "batch_size": 4,
        "refusals": ["I'm sorry."],
    } | options
    return make_data(SafetyDataModule, None, files, **options)


# Terms --------------------------------------------------------------------------------------------


def test_objective_and_constraints_are_what_a_response_by_response_loop_gives(
    made,
) -> None:
    module, batch = made(), batch_of()
    outputs = module(batch)
    objective, values = (
        module.objective(outputs, batch),
        module.constraint_values(outputs, batch),
    )
    members = module.membership(batch)
    assert members["objective"].tolist() == [True, False, False, False]
    assert members["comply"].tolist() == [True, False, False, False]
    assert members["refuse"].tolist() == [False, True, True, True]
    answer = response_by_hand(module, batch, 0, 0)
    assert answer["kl"] > 1e-3  # guards the comparison: policy and reference do differ
    assert objective[0].item() == pytest.approx(answer["kl"], rel=1e-4)
    refusals = [
        response_by_hand(module, batch, row, column)["mean"]
        for row, column in enumerate((1, 0, 2, 0))
    ]
    assert values["comply"][0].item() == pytest.approx(refusals[0], rel=1e-5)
    assert values["refuse"][1:].tolist() == pytest.approx(refusals[1:], rel=1e-5)


def test_the_constraint_on_unsafe_answers_bounds_them_and_nothing_else(made) -> None:
    module = made(constrain="answer", avoid_tolerance=-6.0)
    batch = batch_of()
    values = module.constraint_values(module(batch), batch)
    assert list(module.constraints) == ["avoid"]
    assert module.constraints["avoid"].at_most == -6
    assert module.membership(batch)["avoid"].tolist() == [False, True, True, False]
    expected = [response_by_hand(module, batch, row, 1)["mean"] for row in (1, 2)]
    assert values["avoid"][1:3].tolist() == pytest.approx(expected, rel=1e-5)


def test_cross_entropy_is_the_mean_over_the_answers_tokens(made) -> None:
    module, batch = made(objective="cross_entropy"), batch_of()
    module.train()
    outputs = module(batch)
    assert outputs.kl is None  # the warm start computes no reference
    found = module.objective(outputs, batch)[0].item()
    assert found == pytest.approx(
        -response_by_hand(module, batch, 0, 0)["mean"], rel=1e-5
    )
    assert module.membership(batch)["objective"].tolist() == [True, False, False, False]


def safe_dpo_by_hand(
    won: dict[str, float], lost: dict[str, float], unsafe: tuple, margin: float
) -> float:
    """METHOD's formula in Python floats."""
    ratio = (won["s"] - won["ref"]) - (lost["s"] - lost["ref"])
    ratio = 0.1 * ratio - (unsafe[1] - unsafe[0]) * margin
    return math.log1p(math.exp(-ratio))


def test_safe_dpo_is_its_formula_on_every_pair_and_no_other_row(made) -> None:
    module = made(objective="safe_dpo", safe_dpo_margin=2.0)
    batch = batch_of()
    found = module.objective(module(batch), batch)
    assert module.membership(batch)["objective"].tolist() == [True, True, True, False]
    for row, unsafe in enumerate([(0, 0), (0, 1), (0, 1)]):
        pair = (response_by_hand(module, batch, row, column) for column in (0, 1))
        expected = safe_dpo_by_hand(*pair, unsafe, 2.0)
        assert found[row].item() == pytest.approx(expected, rel=1e-4)
    assert found[3] == 0


@pytest.mark.parametrize("objective", ["kl", "cross_entropy", "safe_dpo"])
@pytest.mark.parametrize("row", [0, 3])
def test_a_batch_without_one_kind_gives_zero_and_a_gradient(
    objective, row, made
) -> None:
    """A sum that does not touch the weights cannot be differentiated, and ranks wait for it."""
    module, batch = made(objective=objective), batch_of((row,))
    module.train()
    outputs = module(batch)
    total = module.objective(outputs, batch).sum()
    assert total.requires_grad
    total.backward()
    if row == 3:
        assert total == 0
    members = module.membership(batch)
    assert (members["refuse"].item(), members["comply"].item()) == (row == 3, row == 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "sft"}, "objective='sft'"),
        ({"constrain": "x"}, "constrain='x'"),
        # The paper prints 0.08 and 0.16.
        ({"refuse_tolerance": 0.16}, r"=0.16: .*never above 0. Give a negative number"),
        (
            {"evaluation": {"answer_in": ["tset"]}},
            "answer_in='tset': choose one of test, train",
        ),
    ],
)
def test_a_bad_option_is_refused(options, message, made) -> None:
    with pytest.raises(ValueError, match=message):
        made(**options)


# Fit ----------------------------------------------------------------------------------------------


def test_training_makes_refusals_likely_where_they_belong(
    safety_files, tmp_path, made
) -> None:
    seed_everything(0)
    module = made(
        moved=False,
        formulation=Pointwise(alpha=1.0, dual_lr=0.5),
        refuse_tolerance=-2.0,
        comply_tolerance=-4.0,
        lora=LARGE,
        optimization=Optimization(learning_rate=1e-2),
    )
    before, after = before_and_after(
        module, data_of(safety_files), tmp_path, max_epochs=15
    )
    assert before["train/refuse/mean"] > 2
    assert after["train/refuse/mean"] < before["train/refuse/mean"] - 1
    # The same words stay less likely where they do not belong.
    assert after["train/comply/mean"] + (-4.0) < -2.0 - after["train/refuse/mean"] - 0.3
    assert after["train/kl"] > before["train/kl"] == pytest.approx(0, abs=1e-5)
    assert after["train/kl"] == pytest.approx(after["train/objective"])
    for name, of_it in (("refuse", slice(10, 16)), ("comply", slice(0, 10))):
        multipliers = module.multipliers[name]
        assert multipliers.shape == (16, 1)
        assert multipliers[of_it].max() > 0
        multipliers[of_it] = 0
        assert (multipliers == 0).all()  # a sample's λ belongs to its own constraint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "safe_dpo"}, "unsafe answer.*objective safe_dpo needs.*take"),
        (
            {"constrain": "answer", "formulation": PENALTY},
            r"unsafe answer.*constraint avoid needs.*unsafe_answers: take",
        ),
    ],
)
def test_a_term_that_no_prompt_carries_says_what_it_needs(
    options, message, safety_files, tmp_path, made
) -> None:
    data = data_of(safety_files)
    with pytest.raises(DataError, match=message):
        quiet_trainer(tmp_path, max_epochs=1).fit(made(**options), data)


# The export --------------------------------------------------------------------------------------


def test_a_half_precision_base_is_exported_in_its_own_precision(tmp_path, made) -> None:
    module = made(dtype="bfloat16", merge_on_export=True)
    merged = AutoModelForCausalLM.from_pretrained(module.export(tmp_path), dtype="auto")
    weights = merged.model.layers[0].self_attn
    assert weights.q_proj.weight.dtype == torch.bfloat16
    adapted = module.model.get_base_model().model.layers[0].self_attn.q_proj
    # alpha / r
    lora = adapted.lora_B["default"].weight @ adapted.lora_A["default"].weight * 2
    exact = adapted.base_layer.weight.double() + lora.double()
    torch.testing.assert_close(
        weights.q_proj.weight.double(), exact, atol=0, rtol=2**-8
    )


# Answers ------------------------------------------------------------------------------------------


class Judge:
    """Answers with an even number of characters cost 1, others −1."""

    def costs(self, prompts: list[str], answers: list[str]) -> torch.Tensor:
        assert len(prompts) == len(answers)
        return torch.tensor(
            [1.0 if len(answer) % 2 == 0 else -1.0 for answer in answers]
        )


@pytest.fixture
def spoken(monkeypatch) -> None:
    """Known answers, to some prompts a refusal."""

    def generate(self: Any, ids: Any, lengths: Any, *, reference: bool = False) -> Any:
        rows = zip(ids.tolist(), lengths.tolist(), strict=True)
        prompts = [self.tokenizer.decode(row[:length]) for row, length in rows]
        refused = ["1 cars" in prompt or "10 trees" in prompt for prompt in prompts]
        return [
            {
                "answer": "I’m sorry, no." if each else "Sure: 12.",
                "refused": each,
                "cut": not each,
            }
            for each in refused
        ]

    monkeypatch.setattr(SafetyModule, "generate", generate)
    monkeypatch.setattr(CostModel, "load", lambda name, device: Judge())


def test_answers_are_counted_judged_and_written(
    spoken, safety_files, tmp_path, made
) -> None:
    asked = [("Kill 10 trees?", "safe"), ("Kill 1 cars?", "safe"), ("Kill 9?", "safe")]
    asked += [("Kill 1?", "unsafe"), ("Kill 10 trees? Yes.", "unsafe")]
    xstest = [{"prompt": prompt, "label": label} for prompt, label in asked]
    listed = [{"instruction": f"Name {i}."} for i in range(3)]
    files = {"alpaca_eval_file": listed, "over_refusal_file": xstest}
    files = safety_files | written_files(tmp_path, files)
    answered = ["test", "train", "over_refusal", "alpaca_eval"]
    module = made(evaluation=SafetyEvaluation(answer_in=answered, cost_model="judge"))
    run = quiet_trainer(tmp_path)
    run.test(module, data_of(files), verbose=False)
    found = run.callback_metrics
    assert found["train/refusal_rate"] == pytest.approx(1 / 6)  # "1 cars" of 0 … 5
    assert found["train/harmful"] == pytest.approx(5 / 6)
    assert found["train/over_refusal"] == 0
    assert found["test/refusal_rate"] == 0  # of 6 and 7 cars
    assert found["test/over_refusal"] == pytest.approx(1 / 4)  # "10 trees" of 10 … 13
    # of what is labelled safe
    assert found["over_refusal/over_refusal"] == pytest.approx(2 / 3)
    assert "over_refusal/harmful" not in found
    assert found["train/cut"] == pytest.approx(15 / 16)
    # "I’m sorry, no." has 14 characters, "Sure: 12." nine.
    assert found["train/harmless"] == pytest.approx(5 / 6)
    assert "alpaca_eval/refusal_rate" not in found
    assert "alpaca_eval/harmless" not in found
    rows = read_rows(tmp_path / "answers/train.jsonl")
    assert [row["index"] for row in rows] == list(range(16))
    about = {"index": 11, "prompt": "How do I steal 1 cars?", "unsafe": True}
    about |= {"kind": "unsafe", "category": "unsafe", "before": "I’m sorry, no."}
    about |= {"file": safety_files["unsafe_file"], "line": 2}
    assert rows[11] == about | {
        "answer": "I’m sorry, no.", "refused": True, "cut": False, "cost": 1.0
    }  # fmt: skip
    assert "cost" not in rows[0]
    outputs = json.loads((tmp_path / "alpaca_eval/model_outputs.json").read_text())
    said = {"output": "Sure: 12.", "generator": "policy"}
    assert outputs == [each | said for each in listed]


def test_validate_answers_the_selection_split_and_keeps_each_answer(
    safety_files, tmp_path, made
) -> None:
    """In a fit it never does: its validation is for the violations, after every epoch."""
    evaluation = SafetyEvaluation(answer_in=["test"])
    module = made(evaluation=evaluation)
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
    rows = read_rows(tmp_path / "answers/val.jsonl")
    assert [row["index"] for row in rows] == list(range(6))
    assert list(module.answers) == ["val"]
    values = module.evaluated_metrics["val"]
    assert set(values) == {"refusal_rate", "harmful", "over_refusal", "cut", "flipped"}
    refused = [float(row["refused"]) for row in rows if row["unsafe"]]
    assert found["val/refusal_rate"] == pytest.approx(sum(refused) / len(refused))
    assert values["refusal_rate"].value.tolist() == refused
    # Here "test" is "val", so the answers are the same.
    run.test(module, data, verbose=False)
    assert run.callback_metrics["test/cut"] == found["val/cut"]
    assert read_rows(tmp_path / "answers/test.jsonl") == rows


def test_two_ranks_train_test_and_answer_as_one(
    language_model_folder, safety_files, tmp_path
) -> None:
    """A rank's prompt is of one kind, so in every step some rank has no sample of some term."""
    folders = (tmp_path / "two", tmp_path / "one")
    for folder in folders:
        folder.mkdir()
    two, one = two_and_one(language_model_folder, safety_files, folders)
    for name, value in one.items():
        assert two[name] == pytest.approx(value, abs=1e-3), name
    rows = [read_rows(folder / "answers/test.jsonl") for folder in folders]
    assert [row["index"] for row in rows[0]] == list(range(6))
    assert rows[0] == rows[1]
