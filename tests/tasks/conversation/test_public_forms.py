"""Forms of public records, and what contradicts itself in them."""

from __future__ import annotations

from typing import Any

import pytest

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.records import records_of
from pl_pointwise.tasks.conversation.records import read_record
from pl_pointwise.tasks.language_model.text.tool_results import in_order_of_calls
from pl_pointwise.tasks.language_model.text.turns import every_turn

ASKED = {"role": "user", "content": "Who?"}
SAID = {"role": "assistant", "content": "Ann."}
CALL = {"name": "find", "arguments": {"a": 1}}


def read(row: dict[str, Any], **options: Any) -> Any:
    (record,) = records_of(
        [("f, line 1", row)], "f", lambda r, w: read_record(r, w, **options)
    )
    return record


def test_transcripts_of_humans_and_assistants_are_conversations() -> None:
    """Anthropic's HH: one text, of which the last answer is the chosen one."""
    before = "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Who?\n\nAssistant: "
    record = read({"chosen": before + "Ann.", "rejected": before + "Bob.\n\nNot Ann."})
    assert [turn["content"] for turn in record.messages] == ["Hi", "Yes?", "Who?"]
    assert record.answers == ["Ann.", "Bob.\n\nNot Ann."]
    assert read({"prompt": "Who?", "answer": "Human: a species."}).answers == [
        "Human: a species."
    ]
    with pytest.raises(DataError, match='"rejected" follows another conversation'):
        read(
            {"chosen": before + "Ann.", "rejected": "\n\nHuman: Yo\n\nAssistant: Bob."}
        )


@pytest.mark.parametrize("names", ["score_{}", "{}_rating", "{}-score"])
def test_scores_that_put_the_rejected_answer_first_are_refused(names: str) -> None:
    pair = {"prompt": "Who?", "chosen": "Ann.", "rejected": "Bob."}
    scores = {names.format("chosen"): 1.5, names.format("rejected"): 4}
    with pytest.raises(DataError, match=r"\(1.5\) is below .* Exchange the answers"):
        read(pair | scores)
    assert read(pair | {"chosen_rank": 1, "rejected_rank": 2}).roles == [
        "prefer",
        "avoid",
    ]


def test_answers_that_differ_by_blanks_at_their_ends_are_one() -> None:
    with pytest.raises(DataError, match='"rejected" equals the chosen one'):
        read({"prompt": "Who?", "chosen": "Ann.", "rejected": "Ann.\n"})


def test_the_older_form_of_a_call_is_read() -> None:
    turn = {"role": "assistant", "content": None, "function_call": CALL}
    assert read({"messages": [ASKED, turn]}).answers == [[CALL]]


def test_a_call_without_its_result_and_a_result_of_no_call_are_named() -> None:
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a", "function": CALL}],
    }
    with pytest.raises(DataError, match=r"without the call's result .* role tool"):
        read({"messages": [ASKED, call, SAID]})
    result = {"role": "tool", "content": "Ann", "tool_call_id": "b"}
    record = read({"messages": [ASKED, call, result, SAID]})
    with pytest.raises(
        DataError, match=r"here: a result .* names the call 'b'.* tool_call_id"
    ):
        in_order_of_calls(record.messages, "here")


def test_with_every_turn_a_weight_between_is_refused_as_of_the_last() -> None:
    """It was dropped, and the turn trained as a whole."""
    turns = [ASKED, SAID | {"weight": 0.5}, ASKED, SAID]
    with pytest.raises(DataError, match=r"messages\[1\].weight\" is 0.5, is not read"):
        read({"messages": turns}, all_turns=True)
    assert read({"messages": turns}).answers == ["Ann."]
    turns[1] = SAID | {"weight": "0"}
    assert len(every_turn([read({"messages": turns}, all_turns=True)])) == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"conversations": [{"from": "human", "value": "a"}]},
            '"conversations" has no answer',
        ),
        ({"conversation": [{"human": "a"}]}, r'"conversation\[0\].role" is missing'),
        (
            {"prompt": "a", "answer": {"text": "b"}},
            "is an object of 'text'. Give a text",
        ),
        (
            {"task": "Say it in German", "prompt": "a", "answer": "b"},
            '"task" is .* not read',
        ),
        ({"title": "Emma", "prompt": "a", "answer": "b"}, '"title" is .* not read'),
        (
            {"weights": 0.5, "prompt": "a", "answer": "b"},
            '"weights" is 0.5, is not read',
        ),
    ],
)
def test_fields_are_named_as_the_file_names_them(
    given: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=f"f, line 1: .*{said}"):
        read(given)
    assert read({"task": "summarization", "prompt": "a", "answer": "b"}).answers == [
        "b"
    ]
