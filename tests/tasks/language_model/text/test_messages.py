"""Conversations in the forms in which people write them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.language_model.text.messages import (
    Parts,
    parse_answer,
    parse_messages,
    parse_tools,
    parts_of,
    turn_text,
)

CALL = {"name": "add", "arguments": {"a": 1}}
OPENAI = {"id": "c1", "type": "function", "function": CALL | {"arguments": '{"a": 1}'}}
LISTED = {"type": "function", "function": CALL}


def call_turn(calls: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": calls} | more


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    "content", [{}, {"content": None}, {"content": ""}, {"content": "Ok."}]
)
@pytest.mark.parametrize(
    "call", [CALL, CALL | {"arguments": '{"a": 1}'}, LISTED, OPENAI]
)
def test_calls_are_read_in_every_form_and_texts_beside_them_kept(content, call) -> None:
    (turn,) = parse_messages([call_turn([call], **content)], "x")
    given = {"id": "c1"} if call is OPENAI else {}
    text = content.get("content") or ""
    assert turn == {
        "role": "assistant",
        "content": text,
        "tool_calls": [LISTED | given],
    }
    assert turn_text(turn).endswith(json.dumps(CALL))


@pytest.mark.parametrize("arguments", ["", " ", None, {}, "{}"])
def test_a_call_without_arguments_has_none(arguments) -> None:
    (turn,) = parse_messages(
        [call_turn([OPENAI | {"function": CALL | {"arguments": arguments}}])], "x"
    )
    assert turn["tool_calls"][0]["function"] == {"name": "add", "arguments": {}}
    assert parse_answer([CALL | {"arguments": arguments}], "x", "a") == [
        CALL | {"arguments": {}}
    ]


@pytest.mark.parametrize("content", ["", " ", None, []])
def test_an_empty_system_turn_is_left_out(content) -> None:
    turns = [{"role": "system", "content": content}, {"role": "user", "content": "Hi"}]
    assert parse_messages(turns, "x") == turns[1:]


def test_a_conversation_keeps_what_it_has() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [text_part("Be "), {"type": "text", "value": "kind."}]},
        {"role": "user", "content": "1 + 0?", "tool_calls": None},
        call_turn([OPENAI], reasoning="Add."),
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": {"sum": 1}},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "1"},
    ]  # fmt: skip
    found = parse_messages(messages, "x")
    assert [turn["content"] for turn in found] == [
        "Be brief.", "Be kind.", "1 + 0?", "", '{"sum": 1}', "", "1"
    ]  # fmt: skip
    assert found[3]["reasoning_content"] == "Add."
    assert found[4] | {"content": ""} == messages[4] | {"content": ""}
    assert parse_messages(found, "x") == found


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], '"messages" is empty'),
        (["Hi"], r'"messages\[0\]" is a text'),
        ([{"content": "x"}], r'"messages\[0\].role" is missing'),
        (
            [{"role": "human", "content": "x"}],
            r"messages\[0\].role.* is 'human'. Give one of",
        ),
        ([{"role": "user", "content": None}], r"messages\[0\].content.* is null"),
        ([{"role": "assistant", "content": ""}], r"messages\[0\].content.* is empty"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "holds what is no text",
        ),
        (
            [{"role": "user", "content": "x", "tool_calls": [CALL]}],
            "Only the assistant calls",
        ),
        ([call_turn({"name": "add"})], r"messages\[0\].tool_calls.* is an object"),
        (
            [call_turn([{"name": "add"}])],
            r"tool_calls.* malformed .*name and arguments",
        ),
    ],
)
def test_a_bad_message_is_named(messages, message) -> None:
    with pytest.raises(DataError, match=f"^f.jsonl, line 3: .*{message}"):
        parse_messages(messages, "f.jsonl, line 3")


def test_tools_are_objects_or_json_alone_or_all_together() -> None:
    tool = {"name": "add", "parameters": {}}
    for value in ([tool], [json.dumps(tool)], json.dumps([tool])):
        assert parse_tools(value, "x") == [tool]
    assert parse_tools(None, "x") == parse_tools([], "x") == []
    with pytest.raises(DataError, match=r'"tools\[0\]" has no name'):
        parse_tools([{}], "x")


TURN = {"role": "assistant", "content": "Ok."}


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ("Ok.", Parts("Ok.")),
        (TURN, Parts("Ok.")),
        ([TURN], Parts("Ok.")),
        ({"content": "Ok."}, Parts("Ok.")),
        (CALL, Parts(calls=[CALL])),
        ([CALL], Parts(calls=[CALL])),
        ([OPENAI], Parts(calls=[CALL])),
        (call_turn([OPENAI], content=None), Parts(calls=[CALL])),
        (f"<TOOLCALL>[{json.dumps(CALL)}]</TOOLCALL>", Parts(calls=[CALL])),
        ({"content": f"<TOOLCALL>{json.dumps(CALL)}</TOOLCALL>"}, Parts(calls=[CALL])),
        (json.dumps(CALL), Parts(json.dumps(CALL))),
        (TURN | {"tool_calls": [OPENAI]}, Parts("Ok.", [CALL])),
        (TURN | {"thinking": "So."}, Parts("Ok.", (), "So.")),
    ],
)
def test_an_answer_is_a_text_calls_or_both(value, parts) -> None:
    answer = parse_answer(value, "x", "chosen")
    assert parts_of(answer) == parts
    assert type(answer) is (
        dict
        if parts.text and (parts.calls or parts.reasoning)
        else list
        if parts.calls
        else str
    )
    assert parse_answer(answer, "x", "chosen") == answer


def test_json_of_a_call_is_one_where_that_is_wanted() -> None:
    assert parse_answer(json.dumps(CALL), "x", "a", bare_calls=True) == [CALL]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", '"chosen" is empty'),
        ([], '"chosen" is empty'),
        ({"role": "user", "content": "x"}, "chosen.role.* is 'user'"),
        ([TURN, TURN], '"chosen" has 2 turns'),
        ("Sure: <TOOLCALL>[]</TOOLCALL>", "mixes text and a tool call"),
        ([{"a": 1}], "chosen.* is malformed"),
    ],
)
def test_a_bad_answer_is_named(value, message) -> None:
    with pytest.raises(DataError, match=f"^f.jsonl, line 3: .*{message}"):
        parse_answer(value, "f.jsonl, line 3", "chosen")
