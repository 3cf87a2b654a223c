"""A field that nobody reads is harmless by its name, says nothing new, or is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.records import records_of
from pl_pointwise.tasks.conversation.records import read_record
from pl_pointwise.tasks.language_model.text.messages import parts_of
from pl_pointwise.tasks.safety.records import parse_instruction, parse_prompt

PLAIN = {"prompt": "Who wrote it?", "answer": "Ann did."}
TURNS = [
    {"role": "user", "content": "Who wrote it?"},
    {"role": "assistant", "content": "Ann did, in the spring of 1911."},
]


def read(row: dict[str, Any], ignore: tuple[str, ...] = ()) -> Any:
    (record,) = records_of([("f, line 1", row)], "f", read_record, ignore=ignore)
    return record


@pytest.mark.parametrize(
    "given",
    [
        *(
            {name: "The book is by Ann."}
            for name in ("passage", "article", "document", "schema")
        ),
        *(
            {name: ["The book is by Ann."]}
            for name in ("contexts", "evidence", "choices")
        ),
        *(
            {name: "You are a poet."}
            for name in ("persona", "sys", "system_instruction")
        ),
        {"unheard_of": {"a": "By Ann."}},
        {"rationale": "It says so."},
        {"reasoning_effort": "high"},
        {"enable_thinking": False},
        {"template_kwargs": {"thinking": True}},
        *({name: False} for name in ("trainable", "train_detail", "calculate_loss")),
        *({name: True} for name in ("ignore_loss", "do_not_train", "is_masked")),
        {"loss_scale": 0},
        {"weight": 0.5},
    ],
)
def test_what_makes_another_record_is_refused_by_name_or_ignored(
    given: dict[str, Any],
) -> None:
    (name,) = given
    with pytest.raises(
        DataError, match=rf'f, line 1: field "{name}" .*data.ignore: \["{name}"\]'
    ):
        read(PLAIN | given)
    assert read(PLAIN | given, (name,)).answers == ["Ann did."]


def test_harmless_names_say_nothing_and_numbers_are_named_in_a_warning() -> None:
    harmless = {
        "id": "a7",
        "source": "wiki",
        "num_tokens": 3,
        "lang": "en",
        "metadata": {"a": "b"},
    }
    harmless |= {"prompt_id": "x", "model_name": "m", "weight": 1, "train": True}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(PLAIN | harmless)
    with pytest.warns(UserWarning, match="fields round of 1 of 1 records are not read"):
        read(PLAIN | {"round": 3})


def test_what_stands_in_the_record_already_is_not_missed() -> None:
    """No Robots has the prompt twice, Alpaca a text of all."""
    assert read({"messages": TURNS, "prompt": "Who wrote it?"}).answers
    assert read(
        {"messages": TURNS, "reply": ["ann did, in the  spring of 1911."]}
    ).answers
    alpaca = {"instruction": "Add.", "input": "1, 2", "output": "3"}
    assert parse_instruction(
        alpaca | {"text": "### Task:\nAdd.\n\n1, 2\n\n### Response:\n3"}, "f"
    )
    with pytest.raises(DataError, match='"text" is'):
        parse_instruction(alpaca | {"text": "Add only even ones."}, "f")
    assert parse_prompt(
        {"prompt": "Hi", "focus": "hi", "note": "a greeting", "output": "x"}, "f"
    )


@pytest.mark.parametrize(
    "name", ["reasoning", "thinking", "reasoning_content", "cot", "thought"]
)
def test_a_thought_beside_an_answer_is_its_thought(name: str) -> None:
    for row in (
        PLAIN,
        {"messages": TURNS},
        {"instruction": "Who?", "output": "Ann did."},
    ):
        (answer,) = read(row | {name: "I look it up."}).answers
        assert parts_of(answer).reasoning == "I look it up."
        assert parts_of(answer).text.startswith("Ann did")
    assert read(PLAIN | {name: "I look it up."}, (name,)).answers == ["Ann did."]


@pytest.mark.parametrize(
    "scores",
    [
        {"score_chosen": 7, "score_rejected": 7.0},
        {"chosen-rating": 2, "rejected-rating": 2},
    ],
)
def test_ties_are_refused(scores: dict[str, Any]) -> None:
    pair = {"prompt": "Hi", "chosen": "a", "rejected": "b"}
    (name, *_) = scores
    with pytest.raises(DataError, match=f'"{name}" equals .* neither answer is better'):
        read(pair | scores)
    assert read(pair | scores | {name: 9})
    assert read(pair | {"chosen_length": 1, "rejected_length": 1})
