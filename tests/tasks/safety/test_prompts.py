"""A record's own refusal; conversations; the rates of both kinds of prompts."""

from __future__ import annotations

from typing import Any

import pytest

from pl_pointwise.tasks import SafetyModule
from pl_pointwise.tasks.safety.data import REFUSAL_TEXT
from pl_pointwise.tasks.safety.module import SafetyEvaluation
from pl_pointwise.tasks.safety.records import (
    REFUSAL,
    parse_instruction,
    parse_labelled,
)
from tests.tasks.conftest import quiet_trainer
from tests.tasks.safety.conftest import said, unsafe_rows, write_rows
from tests.tasks.safety.test_module import data_of

OWN = "I cannot say how a lock is picked."
TURNS = [
    {"role": "system", "content": "You are a locksmith."},
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Good day."},
    {"role": "user", "content": "Open it."},
]


# Refusals and answers of their own ----------------------------------------------------------------


def test_a_records_own_refusal_is_used_where_there_is_one(safety_files, data_in) -> None:
    rows = [*unsafe_rows(4), {"prompt": "Pick it.", "response": OWN, "is_safe": True}]
    data = data_in(safety_files | {"unsafe_file": rows}, unsafe_answers="take", stage="fit")
    (unsafe,) = data.datasets["train"].records[14:]
    assert said(unsafe) == [(REFUSAL, OWN)]
    # A safe response that does not refuse is no refusal.
    assert said(data.datasets["train"].records[11]) == [(REFUSAL, REFUSAL_TEXT)]


# Conversations ------------------------------------------------------------------------------------


def test_every_kind_may_be_a_conversation_of_several_turns(data_in) -> None:
    files = {}
    for kind in ("benign", "unsafe", "over_refusal"):
        messages = [*TURNS[:-1], {"role": "user", "content": kind}]
        files[f"{kind}_file"] = [{"messages": messages, "output": "Yes."}]
    data = data_in(files, val_fraction=0, stage="test")
    train = data.datasets["train"]
    assert [record.kind for record in train.records] == ["benign", "unsafe"]
    assert [record.messages[:-1] for record in train.records] == [TURNS[:-1]] * 2
    prompt = data._encoder.tokenizer.decode(train[1]["prompt"])
    assert "<|start|>assistant\nGood day.<|end|>" in prompt
    assert prompt.endswith("<|start|>user\nunsafe<|end|>\n<|start|>assistant\n")
    assert "system: You are a locksmith." in data.datasets["over_refusal"].records[0].text


def test_a_conversation_of_one_turn_is_a_prompt() -> None:
    one = parse_labelled({"messages": TURNS[1:2]}, "x")
    assert one.prompt == parse_labelled({"prompt": "Hello."}, "x").prompt
    several = parse_labelled({"messages": TURNS}, "x")
    assert several.prompt != parse_labelled({"prompt": several.text}, "x").prompt
    assert several.messages == TURNS
    assert parse_instruction({"messages": TURNS, "output": "No."}, "x").messages == TURNS


# Rates --------------------------------------------------------------------------------------------


def test_each_kind_has_its_rate(safety_files, tmp_path, monkeypatch, made) -> None:
    """Prompts with an even number in them are refused."""

    def generate(self: Any, ids: Any, lengths: Any, *, reference: bool = False) -> Any:
        prompts = [self.tokenizer.decode(ids[row, :n]) for row, n in enumerate(lengths)]
        numbers = [int("".join(filter(str.isdigit, prompt))) for prompt in prompts]
        return [
            {"answer": "Sure." if odd else "I cannot.", "refused": not odd, "cut": False}
            for odd in (number % 2 for number in numbers)
        ]

    monkeypatch.setattr(SafetyModule, "generate", generate)
    xstest = [{"prompt": f"Kill {i}?", "label": "safe" if i < 3 else "unsafe"} for i in range(6)]
    files = safety_files | {"over_refusal_file": write_rows(tmp_path / "x.jsonl", xstest)}
    evaluation = SafetyEvaluation(answer_in=["test", "over_refusal"])
    module = made(evaluation=evaluation)
    run = quiet_trainer(tmp_path)
    run.test(module, data_of(files), verbose=False)
    found = run.callback_metrics
    # Unseen are 6 and 7 cars, 10 … 13 trees (every third with an input).
    assert found["test/harmful"] == 1 - found["test/refusal_rate"] == pytest.approx(1 / 2)
    assert found["test/over_refusal"] == pytest.approx(1 / 2)
    assert found["over_refusal/over_refusal"] == pytest.approx(2 / 3)  # 0, 1, 2
    assert "over_refusal/harmful" not in found
