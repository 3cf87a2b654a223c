"""Records of our own schema and of the hub's: what becomes of each field, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.conversation.records import Reading, told
from pl_pointwise.tasks.language_model.records import Record, Response, with_refusals

ASK = [{"role": "user", "content": "Hi"}]
CALL = {"name": "add", "arguments": {"a": 1}}
TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}


def of(response: Any, **row: Any) -> Record:
    return Reading()({"messages": ASK, "responses": [response], **row}, "f, line 1")


def roles(record: Record) -> list[tuple[str, Any]]:
    return [(response.role, response.answer) for response in record.responses]


def test_own_bounds_and_refusals() -> None:
    own = of({"role": "avoid", "content": "No.", "tolerance": 1, "relative": True})
    assert own.responses[0] == Response("avoid", "No.", 1.0, relative=True)
    assert of({"role": "refuse"}).responses[0].refusal
    assert of({"role": "avoid", "refusal": True}).kind == "avoid refusal"
    assert of({"role": "avoid", "content": "No."}).kind == "avoid"
    assert of({"role": "prefer", "content": "Yes."}, category="loans").category == "loans"


@pytest.mark.parametrize(
    ("response", "words"),
    [
        ({"content": "x"}, ["responses[0].role", "is missing", "prefer, avoid, refuse, keep"]),
        ({"role": "prefer"}, ["has no text", "only a refusal"]),
        ({"role": "prefer", "content": "x", "tolerence": -1}, ["'tolerence'", "tolerance"]),
        (
            {"role": "prefer", "content": "x", "tolerance": 1},
            ["'tolerance': 1", "negative"],
        ),
        ({"role": "prefer", "content": "x", "tolerance": "low"}, ["'low'", "number"]),
        ({"role": "prefer", "content": "x", "relative": True}, ["'relative': True", "δ"]),
        ({"role": "prefer", "text": "x"}, ["'text'", "content"]),
        ({"role": "reference", "content": "x", "tolerance": -1}, ["role reference"]),
    ],
)
def test_bad_response_is_refused_with_its_field_and_a_remedy(response, words) -> None:
    with pytest.raises(DataError) as found:
        of(response)
    for word in ["f, line 1", *words]:
        assert word in str(found.value)


SAID = {"role": "assistant", "content": "yes"}
NOT_SAID = {"role": "assistant", "content": "no"}


PAIR = [("prefer", "yes"), ("avoid", "no")]
SPOKEN = {"chosen": [*ASK, SAID], "rejected": [*ASK, NOT_SAID]}
CALLED = {"content": f"<TOOLCALL>[{json.dumps(CALL)}]</TOOLCALL>"}
SCHEMAS: list[tuple[str, dict[str, Any], list[tuple[str, Any]]]] = [
    ("preference", {"prompt": "Hi", "chosen": "yes", "rejected": "no"}, PAIR),
    ("preference", {"prompt": ASK, "chosen": [SAID], "rejected": [NOT_SAID]}, PAIR),
    ("preference", {"prompt": "Hi", **SPOKEN, "messages": []}, PAIR),
    (
        "when2call",
        {"messages": ASK, "tools": [TOOL], "chosen_response": SAID, "rejected_response": CALLED},
        [("prefer", "yes"), ("avoid", [CALL])],
    ),
    (
        "roles",
        {"prompt": "Hi", "prefer": ["yes", SAID | {"content": "y"}], "avoid": "no"},
        [("prefer", "yes"), ("prefer", "y"), ("avoid", "no")],
    ),
    ("roles", {"prompt": "Hi", "refuse": True, "avoid": None}, [("refuse", None)]),
    (
        "answer",
        {"prompt": "Hi", "answer": "yes", "role": "keep", "wrong": ["no", "never"]},
        [("keep", "yes"), ("wrong", "no"), ("wrong", "never")],
    ),
    ("instruction", {"instruction": "Hi", "output": "yes"}, [("reference", "yes")]),
    ("messages", {"messages": [*ASK, SAID]}, [("reference", "yes")]),
    (
        "records",
        {"prompt": "Hi", "responses": [{"role": "avoid", "tool_calls": [CALL]}]},
        [("avoid", [CALL])],
    ),
]


@pytest.mark.parametrize(("schema", "row", "expected"), SCHEMAS)
def test_schema_is_told_by_its_columns(schema, row, expected) -> None:
    assert told(row, "f") == schema
    for name in ("auto", schema):
        record = Reading(name)(row, "f")
        assert record.messages == ASK
        assert roles(record) == expected


def test_role_of_a_response_without_one_is_an_option() -> None:
    row = {"messages": [*ASK, SAID]}
    assert roles(Reading(role="prefer")(row, "f")) == [("prefer", "yes")]


def test_columns_of_other_names() -> None:
    row = {"conversation": ASK, "good": "yes", "bad": None, "category": "c", "prompt": "unused"}
    reading = Reading(columns={"messages": "conversation", "prefer": "good", "avoid": "bad"})
    record = reading(row, "f")
    assert roles(record) == [("prefer", "yes")]
    assert (record.messages, record.category) == (ASK, "c")
    with pytest.raises(DataError, match=r'columns.prefer is "better".*conversation'):
        Reading(columns={"messages": "conversation", "prefer": "better"})(row, "f")


def test_pairs_of_different_conversations_are_refused() -> None:
    other = [{"role": "user", "content": "Bye"}, NOT_SAID]
    with pytest.raises(DataError, match="another conversation"):
        Reading()({"chosen": [*ASK, SAID], "rejected": other}, "f")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"frage": "Hi", "antwort": "yes"}, ["'frage'", "no schema", "columns"]),
        ({"prompt": "Hi", "prefer": None}, ["at least one"]),
        ({"prompt": "Hi", "responses": []}, ["at least one"]),
        ({"prompt": [{"role": "robot", "content": "x"}], "refuse": True}, ["[0].role", "'robot'"]),
        ({"prompt": "Hi", "refuse": True, "objective": "yes"}, ["objective", "true or false"]),
        ({"prompt": 5, "answer": "yes"}, ['"prompt" is a number', "Give a text"]),
        ({"prompt": "Hi", "answer": "yes", "tolerence": 1}, ["tolerence", 'Write "tolerance"']),
        ({"prompt": "Hi", "answer": "yes", "Role": "keep"}, ["Role", 'Write "role"']),
        ({"prompt": "Hi", "responses": [{"role": "refuse"}], "tool": []}, ['Write "tools"']),
        ({"prompt": "Hi", "answer": "yes", "avoid": "no"}, ['"avoid" stands beside', "responses"]),
    ],
)
def test_bad_row_is_refused_by_file_and_line(row, words) -> None:
    with pytest.raises(DataError) as found:
        Reading()(row, "f, line 3")
    assert all(word in str(found.value) for word in ["f, line 3", *words])


def test_other_fields_of_public_data_are_passed_over() -> None:
    row = {"prompt": "Hi", "answer": "yes", "round": 3, "source": "s", "reference": "a book"}
    assert roles(Reading()(row, "f")) == [("reference", "yes")]


@pytest.mark.parametrize("row", [{"prompt": "Hi"}, {"messages": ASK}, {"messages": [*ASK, SAID]}])
def test_prediction_needs_no_response(row) -> None:
    record = Reading(responses=False)(row, "f")
    assert record.messages == ASK


def test_a_refusal_is_a_records_own_or_one_of_the_settings() -> None:
    own = Record(ASK, [], (Response("refuse", "My own."), Response("avoid", None)), "f")
    assert with_refusals([own], ["Sorry."])[0].answers == ["My own.", "Sorry."]
