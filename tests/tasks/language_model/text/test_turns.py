"""Every answer of a conversation as a sample of its own, and conversations that are too long."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.records import records_of
from pl_pointwise.tasks.conversation.records import read_record
from pl_pointwise.tasks.language_model.data import EncodedResponses
from pl_pointwise.tasks.language_model.text.conversations import ConversationEncoder
from pl_pointwise.tasks.language_model.text.records import Record
from pl_pointwise.tasks.language_model.text.turns import every_turn, only_read
from tests.tasks.conftest import build_tokenizer


def conversation(count: int, **marks: dict[str, Any]) -> dict[str, Any]:
    """So many questions and answers behind a system turn; ``a1={"weight": 0}`` marks an answer."""
    turns: list[dict[str, Any]] = [{"role": "system", "content": "Be kind."}]
    for place in range(count):
        turns.append({"role": "user", "content": f"q{place}"})
        said = {"role": "assistant", "content": f"a{place}"}
        turns.append(said | marks.get(f"a{place}", {}))
    return {"messages": turns}


def read(row: dict[str, Any], **options: Any) -> list[Record]:
    return records_of([("f, line 1", row)], "f", partial(read_record, **options))


def test_every_answer_is_a_record_of_one_unit() -> None:
    whole = read(conversation(3), all_turns=True)
    found = every_turn(whole)
    assert [each.answers for each in found] == [["a0"], ["a1"], ["a2"]]
    assert [each.messages[-1]["content"] for each in found] == ["q0", "q1", "q2"]
    assert {each.unit for each in found} == {whole[0].unit}
    assert len({each.prompt for each in found}) == 3
    assert [each.where for each in found][:2] == [
        "f, line 1, messages[2]",
        "f, line 1, messages[4]",
    ]
    assert only_read(whole) == (2, 3)


@pytest.mark.parametrize("off", [{"weight": 0}, {"loss_mask": 1}, {"train": False}])
def test_what_a_turn_says_of_its_training_decides(off: dict[str, Any]) -> None:
    row = conversation(3, a0=off, a1={"weight": 1}, a2=off)
    assert [each.answers for each in every_turn(read(row, all_turns=True))] == [["a1"]]
    with pytest.raises(DataError, match=r"messages\[6\].*not read"):
        read(conversation(3, a2=off))


def test_calls_and_thoughts_of_earlier_turns_are_answers_too() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    row = conversation(
        2, a0={"content": "Let me see.", "tool_calls": [call], "reasoning": "Hm."}
    )
    row["messages"].insert(3, {"role": "tool", "content": "one"})
    first, _ = every_turn(read(row, all_turns=True))
    calls = [{"name": "f", "arguments": {}}]
    assert first.answers == [
        {"content": "Let me see.", "reasoning_content": "Hm.", "tool_calls": calls}
    ]


def test_records_of_several_responses_stay() -> None:
    turns = conversation(2)["messages"][:-1]
    row = {"prompt": turns, "chosen": "a", "rejected": "b"}
    (record,) = read(row, all_turns=True)
    assert every_turn([record]) == [record]


# Too long -----------------------------------------------------------------------------------------


def encoded(
    records: list[Record], limit: int, too_long: Any, **options: Any
) -> EncodedResponses:
    encoder = ConversationEncoder(build_tokenizer())
    limits = {"max_prompt_length": limit, "max_length": limit + 50}
    return EncodedResponses(records, encoder, **limits, too_long=too_long, **options)


def test_a_cut_takes_the_earliest_turns_and_keeps_the_systems() -> None:
    records = read(conversation(5)) + read(conversation(1))
    encoder = ConversationEncoder(build_tokenizer())
    prompts = [encoder.texts(each)[0] for each in (*records, *read(conversation(2)))]
    lengths = [len(ids) for ids, _ in encoder.encode(prompts, [[]] * 3)]
    limit = lengths[2]  # two questions fit
    with pytest.warns(UserWarning, match="took 6 early turns out of 1 of 2 records"):
        found = encoded(records, limit, "cut")
    said = [turn["content"] for turn in found.records[0].messages]
    assert said == ["Be kind.", "q3", "a3", "q4"]
    assert found.records[0].unit == records[0].unit
    assert found.records[1] == records[1]
    assert len(found[0]["prompt"]) <= limit
    assert found.long.cut == [6]
    with pytest.raises(
        DataError, match="Without its earlier turns it does not fit either"
    ):
        encoded(records, lengths[1] - 1, "cut")


def test_skip_leaves_out_what_is_too_long_and_refuses_other_faults() -> None:
    records = read(conversation(5)) + read(conversation(1))
    with pytest.warns(
        UserWarning, match="left out 1 of 2 records that are too long.*f, line 1"
    ):
        found = encoded(records, 60, "skip", skip_invalid=False)
    assert [each.answers for each in found.records] == [["a0"]]
    assert len(found.long.skipped) == 1
    with pytest.raises(DataError, match=r"f, line 1: the prompt has .*too_long"):
        encoded(records, 60, "refuse", skip_invalid=False)
    with pytest.raises(DataError, match="f, line 1: the prompt has"):
        encoded(records, 60, "skip", skip_invalid=None)  # Records to predict for.
    with pytest.raises(
        DataError, match=r"data: no record fits .*f, line 1: the prompt has"
    ):
        encoded(records[:1], 60, "skip", skip_invalid=False)
