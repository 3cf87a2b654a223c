"""Every answer of a conversation as a record of its own: ``data.turns: all``."""

from __future__ import annotations

from typing import Any

import pytest

from pl_pointwise.tasks.conversation.records import read_record
from pl_pointwise.tasks.language_model.text.turns import every_turn, only_read

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "First."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Second."},
    {"role": "user", "content": "Three?"},
    {"role": "assistant", "content": "Third."},
]


def record(turns: list[dict[str, Any]], **fields: Any) -> Any:
    row = {"messages": turns, "role": "prefer", **fields}
    return read_record(
        row, "own.jsonl, line 1", role=None, responses=True, all_turns=True
    )


def test_each_answer_is_a_record_with_what_stands_before_it() -> None:
    whole = record(TURNS)
    found = every_turn([whole])
    assert [each.responses[0].answer for each in found] == [
        "First.",
        "Second.",
        "Third.",
    ]
    assert [len(each.messages) for each in found] == [2, 4, 6]
    assert all(each.messages == TURNS[: len(each.messages)] for each in found)
    assert len({each.unit for each in found}) == 1  # No split divides a conversation.
    assert len({each.where for each in found}) == 3
    assert only_read([whole]) == (2, 3)


def test_a_turn_that_the_file_leaves_out_makes_no_record() -> None:
    turns = [dict(turn) for turn in TURNS]
    turns[2]["weight"] = 0
    found = every_turn([record(turns)])
    assert [each.responses[0].answer for each in found] == ["Second.", "Third."]


@pytest.mark.parametrize("turns", [TURNS[:3]])
def test_a_conversation_of_one_answer_stays(turns: list[dict[str, Any]]) -> None:
    whole = record(turns)
    (found,) = every_turn([whole])
    assert (found.messages, found.responses) == (whole.messages, whole.responses)
