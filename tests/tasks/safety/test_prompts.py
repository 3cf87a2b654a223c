"""A record's own refusal; conversations."""

from __future__ import annotations

from pl_pointwise.tasks.safety.data import REFUSAL_TEXT
from pl_pointwise.tasks.safety.records import (
    REFUSAL,
    parse_instruction,
    parse_labelled,
)
from tests.tasks.safety.conftest import said, unsafe_rows

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
