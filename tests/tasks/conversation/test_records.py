"""Records of our own schema and of the hub's: what becomes of each field, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.records import json_object, records_of
from pl_pointwise.tasks.conversation.records import read_record, told
from pl_pointwise.tasks.language_model.text.records import (
    Record,
    Response,
    with_refusals,
)

ASK = [{"role": "user", "content": "Hi"}]
CALL = {"name": "add", "arguments": {"a": 1}}
TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}


def of(response: Any, **row: Any) -> Record:
    return read_record({"messages": ASK, "responses": [response], **row}, "f, line 1")


def roles(record: Record) -> list[tuple[str, Any]]:
    return [(response.role, response.answer) for response in record.responses]


def test_own_bounds_and_refusals() -> None:
    own = of({"role": "avoid", "content": "No.", "tolerance": 1, "relative": True})
    assert own.responses[0] == Response("avoid", "No.", 1.0, relative=True)
    assert of({"role": "refuse"}).responses[0].refusal
    assert of({"role": "avoid", "refusal": True}).kind == "avoid refusal"
    assert of({"role": "avoid", "content": "No."}).kind == "avoid"
    assert (
        of({"role": "prefer", "content": "Yes."}, category="loans").category == "loans"
    )


SAID = {"role": "assistant", "content": "yes"}
NOT_SAID = {"role": "assistant", "content": "no"}

PAIR = [("prefer", "yes"), ("avoid", "no")]
SPOKEN = {"chosen": [*ASK, SAID], "rejected": [*ASK, NOT_SAID]}
CALLED = {"content": f"<TOOLCALL>[{json.dumps(CALL)}]</TOOLCALL>"}
HUMAN = [{"from": "human", "value": "Hi"}]


def spoken(text: str) -> dict[str, Any]:
    return {"from": "gpt", "value": text}


SCHEMAS: list[tuple[str, dict[str, Any], list[tuple[str, Any]]]] = [
    ("preference", {"prompt": "Hi", "chosen": "yes", "rejected": "no"}, PAIR),
    ("preference", {"prompt": ASK, "chosen": [SAID], "rejected": [NOT_SAID]}, PAIR),
    ("preference", {"prompt": "Hi", **SPOKEN, "messages": []}, PAIR),
    (
        "when2call",
        {
            "messages": ASK,
            "tools": [TOOL],
            "chosen_response": SAID,
            "rejected_response": CALLED,
        },
        [("prefer", "yes"), ("avoid", [CALL])],
    ),
    ("answer", {"prompt": "Hi", "answer": "yes", "role": "keep"}, [("keep", "yes")]),
    ("instruction", {"instruction": "Hi", "output": "yes"}, [("reference", "yes")]),
    ("messages", {"messages": [*ASK, SAID]}, [("reference", "yes")]),
    ("messages", {"messages": [*ASK, SAID | {"weight": 1}], "label": True}, PAIR[:1]),
    ("messages", {"messages": [*ASK, NOT_SAID], "label": False}, PAIR[1:]),
    ("messages", {"conversations": [*HUMAN, spoken("yes")]}, [("reference", "yes")]),
    (
        "messages",
        {
            "conversation": [
                *HUMAN,
                {"from": "function_call", "value": json.dumps(CALL)},
            ]
        },
        [("reference", [CALL])],
    ),
    (
        "preference",
        {"conversations": HUMAN, "chosen": spoken("yes"), "rejected": spoken("no")},
        PAIR,
    ),
    (
        "preference",
        {name: json.dumps(turns) for name, turns in {"prompt": ASK, **SPOKEN}.items()},
        PAIR,
    ),
    ("answer", {"prompt": "Hi", "completion": "no", "label": False}, PAIR[1:]),
    ("answer", {"prompt": "Hi", "completion": "no", "label": "0"}, PAIR[1:]),
    ("preference", {"prompt": "Hi", **SPOKEN, "messages": SPOKEN["chosen"]}, PAIR),
    ("answer", {"prompt": ASK, "completion": [SAID], "label": "true"}, PAIR[:1]),
    (
        "answer",
        {"prompt": "Hi", "completion": "no", "role": "keep", "label": None},
        [("keep", "no")],
    ),
    (
        "instruction",
        {"query": "Hi", "response": "yes", "history": []},
        [("reference", "yes")],
    ),
    (
        "records",
        {"prompt": "Hi", "responses": [{"role": "avoid", "tool_calls": [CALL]}]},
        [("avoid", [CALL])],
    ),
]


@pytest.mark.parametrize("row", [{"prompt": "Hi"}, {"messages": ASK, "answer": None}])
def test_a_prompt_to_refuse_needs_no_answer(row) -> None:
    record = read_record({**row, "role": "refuse", "tolerance": -0.5}, "here")
    (response,) = record.responses
    assert (response.role, response.refusal) == ("refuse", True)
    assert (response.answer, response.tolerance) == (None, -0.5)


@pytest.mark.parametrize(("schema", "row", "expected"), SCHEMAS)
def test_schema_is_told_by_its_columns(schema, row, expected) -> None:
    assert told(row, "f") == schema
    record = read_record(row, "f")
    assert record.messages == ASK
    assert roles(record) == expected


def test_pairs_of_different_conversations_are_refused() -> None:
    other = [{"role": "user", "content": "Bye"}, NOT_SAID]
    with pytest.raises(DataError, match="another conversation"):
        read_record({"chosen": [*ASK, SAID], "rejected": other}, "f")


BAD_RESPONSES: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"content": "x"},
        ["responses[0].role", "is missing", "prefer, avoid, refuse, keep"],
    ),
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
    ({"role": "keep", "content": ""}, ["content", "empty"]),
    (
        {"role": "keep", "content": "x", "relative": True, "tolerance": 0.1},
        ["role prefer"],
    ),
    ({"role": "keep", "content": "x", "tolerance": -0.1}, ["a positive number"]),
    ({"role": "keep", "content": "x", "around": -1.0}, ["'around'", "tolerance"]),
    ({"role": "forget", "content": "x", "tolerance": -1.0}, ["'tolerance'", "around"]),
    ({"role": "forget", "content": "x", "around": 1.0}, ["around, a negative"]),
]
BAD_ROWS: list[tuple[dict[str, Any], list[str]]] = [
    ({"frage": "Hi", "antwort": "yes"}, ["'frage'", "no schema", "{prompt, answer}"]),
    ({"prompt": "Hi", "prefer": "yes", "avoid": "no"}, ["no schema", "responses"]),
    ({"prompt": "Hi", "responses": []}, ["at least one"]),
    (
        {"prompt": [{"role": "robot", "content": "x"}], "answer": "a"},
        ["[0].role", "'robot'"],
    ),
    ({"prompt": 5, "answer": "yes"}, ['"prompt" is a number', "Give a text"]),
    (
        {"prompt": "Hi", "answer": "yes", "avoid": "no"},
        ['"avoid"', "responses: [{role"],
    ),
    (
        {"prompt": "Hi", "answer": "yes", "tolerence": 1},
        ["tolerence", 'Write "tolerance"'],
    ),
    ({"prompt": "Hi", "answer": "yes", "Role": "keep"}, ["Role", 'Write "role"']),
    (
        {"prompt": "Hi", "responses": [{"role": "refuse"}], "tool": []},
        ['Write "tools"'],
    ),
    (
        {"prompt": str(ASK), "answer": "yes"},
        ['"prompt" is a list as Python prints it', "JSON lines"],
    ),
    (
        {"prompt": "Hi", "role": "prefer"},
        ["no schema", '"role": "refuse"', "keep_file"],
    ),
    ({"prompt": "Hi", "role": "refuse", "tolerence": -1}, ['Write "tolerance"']),
    ({"prompt": "Hi", "role": "refuse", "text": "No."}, ['"text"', "not read"]),
    ({"prompt": "Hi", "completion": None}, ['"completion" is null', "Give a text"]),
    (
        {"messages": [{"role": "system", "content": ""}], "answer": "a"},
        ["empty", "the user"],
    ),
    (
        {"messages": [{"role": "assistant", "content": "a"}]},
        ["no turn before the answer"],
    ),
]
BAD_ROWS += [
    # What the record has is "role": there is no "answer.role" that anybody could mend.
    (
        {"prompt": "Hi", "answer": "yes", "role": "prefered"},
        ['field "role" is', "'prefered'", 'Did you mean "prefer"?', "keep, forget"],
    ),
    (
        {"prompt": "Hi", "answer": "yes", "role": "keep", "relative": 3},
        ['field "relative" is a number'],
    ),
    (
        {"prompt": "Hi", "role": "refuse", "relative": 3},
        ['field "relative" is a number'],
    ),
    (
        {"prompt": "Hi", "responses": [{"role": "prefered", "content": "x"}]},
        ['field "responses[0].role" is', 'Did you mean "prefer"?'],
    ),
    (
        {"prompt": "Hi", "responses": [{"role": "keep", "contnt": "x"}]},
        ["'contnt'", 'Did you mean "content"?'],
    ),
    ({"prompt": "Hi", "anwser": "yes"}, ["'anwser': Did you mean \"answer\"?"]),
    (
        {"promt": "Hi", "respones": []},
        ['Did you mean "prompt"?', 'Did you mean "responses"?'],
    ),
    ({"promt": "Hi", "answer": "yes"}, ['"prompt" is missing', "Rename 'promt'"]),
    # The option itself.
    ({"prompt": "Hi"}, ["keep_file with --data.init_args.own_answers true"]),
]
BAD_ROWS += [
    ({"prompt": "Hi", "responses": [bad]}, words) for bad, words in BAD_RESPONSES
]


@pytest.mark.parametrize(("row", "words"), BAD_ROWS)
def test_bad_row_is_refused_by_file_and_line(row, words) -> None:
    with pytest.raises(DataError) as found:
        read_record(row, "f, line 3")
    assert all(word in str(found.value) for word in ["f, line 3", *words])
    # Names of the package's own, which no file has.
    assert "answer.role" not in str(found.value)
    assert "when2call" not in str(found.value)


def test_other_fields_of_public_data_are_named_once_a_file() -> None:
    turns = [ASK[0] | {"name": "Ann"}, SAID | {"time": 0, "weight": 1}]
    rows: list[dict[str, Any]] = [
        {"prompt": "Hi", "answer": "yes", "round": 3, "source": "a book", "system": ""},
        {
            "prompt": "Hi",
            "answer": "yes",
            "round": False,
            "images": [],
            "label": "mild",
        },
        {"messages": turns, "tools": [TOOL | {"strict": True}]},
        {
            "prompt": "Hi",
            "responses": [{"role": "prefer", "content": "yes", "tolerance": "-1"}],
        },
    ]
    with pytest.warns(UserWarning, match="^f: ") as warned:
        found = records_of(
            ((f"line {i}", row) for i, row in enumerate(rows)), "f", read_record
        )
    assert [str(each.message) for each in warned] == [
        "f: fields round of 2 of 4 records are not read."
    ]
    assert found[3].responses == (Response("prefer", "yes", -1.0),)


CONVERSED = {"messages": [*ASK, SAID]}
CHANGED: list[tuple[dict[str, Any], str]] = [
    ({"query": "Hi", "response": "yes", "history": [["a", "b"]]}, "history"),
    (CONVERSED | {"images": ["a.png"]}, "images"),
    (CONVERSED | {"train": False}, "train"),
    ({"prompt": "Hi", "answer": "yes", "role": "keep", "label": False}, "label"),
    ({"messages": [*ASK, SAID | {"weight": 0}]}, "messages[1].weight"),
    ({"messages": [*ASK, SAID | {"prefix": True}]}, "messages[1].prefix"),
    (
        {"prompt": "Hi", "completion": [SAID | {"loss_weight": 0.0}]},
        "completion[0].loss_weight",
    ),
    (
        {"prompt": "Hi", "chosen": SAID | {"train": "false"}, "rejected": "no"},
        "chosen.train",
    ),
    (CONVERSED | {"functions": [TOOL]}, "functions"),
    ({"question": "Hi", "answer": "yes", "context": "A book."}, "context"),
    (
        {"question": "Hi", "answer": "yes", "system_prompt": "Be short."},
        "system_prompt",
    ),
    (
        CONVERSED | {"chat_template_kwargs": {"enable_thinking": False}},
        "chat_template_kwargs",
    ),
    (
        {"query": "Hi", "response": "yes", "rejected_response": "no"},
        "rejected_response",
    ),
    ({"prompt": "Hi", "chosen": "yes", "rejected": "no", "tolerance": -1}, "tolerance"),
    ({"messages": [*ASK, SAID | {"masked": True}]}, "messages[1].masked"),
]
OTHERS = {
    "is_safe": 0,
    "label": "bad",
    "kto_tag": "false",
    "documents": [{}],
    "loss_mask": [0, 0],
}
CHANGED += [(CONVERSED | {name: value}, name) for name, value in OTHERS.items()]


@pytest.mark.parametrize(("row", "name"), CHANGED, ids=[name for _, name in CHANGED])
def test_a_field_that_makes_the_record_another_is_refused(row, name) -> None:
    with pytest.raises(DataError) as found:
        read_record(row, "f, line 3")
    assert f'f, line 3: field "{name}" is' in str(found.value)
    assert "makes the record another. " in str(found.value)


def test_a_mark_that_asks_for_what_is_done_anyway_is_no_fault() -> None:
    turns = [ASK[0] | {"train": False}, NOT_SAID | {"weight": 0}, *ASK]
    turns += [SAID | {"train": True, "ignore": False}]
    row = json_object(
        {"messages": turns, "context": "", "history": None, "weight": 1}, "f"
    )
    record = read_record(row, "f")
    assert (len(record.messages), roles(record)) == (3, [("reference", "yes")])
    assert row.unread() == {}  # No warning names it.


BRIEF = {"role": "system", "content": "Be short."}
MORE = [
    *ASK,
    {"role": "assistant", "content": "What?"},
    {"role": "user", "content": "Well?"},
]


@pytest.mark.parametrize(
    ("front", "behind", "expected"),
    [
        ({"system": "Be short."}, ASK, [BRIEF, *ASK]),
        ({"prompt": [BRIEF, *ASK]}, ASK, [BRIEF, *ASK]),
        ({"prompt": [BRIEF, *ASK], "system": "Be short."}, ASK, [BRIEF, *ASK]),
        ({"prompt": "Hi"}, MORE, MORE),
        ({"prompt": ASK}, MORE[1:], MORE),
        ({"messages": [BRIEF, *ASK]}, MORE, [BRIEF, *MORE]),
        ({"prompt": [BRIEF]}, MORE, [BRIEF, *MORE]),
        ({}, [BRIEF, *ASK], [BRIEF, *ASK]),
        ({"prompt": "Bye"}, MORE, None),
    ],
)
def test_a_prompt_and_the_turns_of_the_answers_are_one_conversation(
    front, behind, expected
) -> None:
    """Or two, and then refused."""
    pair = {"chosen": [*behind, SAID], "rejected": [*behind, NOT_SAID]}
    rows = [(pair, PAIR), ({"completion": pair["chosen"]}, [("reference", "yes")])]
    for given, answers in rows:
        if expected is None:
            with pytest.raises(
                DataError, match=r'f: field "prompt" and the turns .* two conv'
            ):
                read_record(front | given, "f")
        else:
            record = read_record(front | given, "f")
            assert (record.messages, roles(record)) == (expected, answers)


def test_turns_of_others_have_our_roles() -> None:
    said = [
        ("system", "S"),
        ("human", "a"),
        ("function_call", json.dumps([CALL, CALL])),
    ]
    said += [("observation", "1"), ("ChatGPT", "b"), ("Human", "c"), ("gpt", "d")]
    turns = [{"from": speaker, "value": text} for speaker, text in said]
    record = read_record({"conversations": turns, "tools": json.dumps([TOOL])}, "f")
    assert [turn["role"] for turn in record.messages] == [
        "system", "user", "assistant", "tool", "assistant", "user"
    ]  # fmt: skip
    assert [call["function"] for call in record.messages[2]["tool_calls"]] == [
        CALL,
        CALL,
    ]
    assert (record.tools, roles(record)) == ([TOOL], [("reference", "d")])
    for speaker, text, said_ in (
        ("robot", "x", "is 'robot'"),
        ("function_call", "f(", "JSON"),
    ):
        with pytest.raises(DataError, match=said_):
            read_record(
                {"conversations": [{"from": speaker, "value": text}, *turns]}, "f"
            )


def test_prediction_needs_no_response() -> None:
    for row in (
        {"prompt": "Hi", "is_safe": False},
        {"messages": ASK},
        {"messages": [*ASK, SAID]},
    ):
        assert read_record(row, "f", responses=False).messages == ASK


def test_a_refusal_is_a_records_own_or_one_of_the_settings() -> None:
    own = Record(ASK, [], (Response("refuse", "My own."), Response("avoid", None)), "f")
    assert with_refusals([own], ["Sorry."])[0].answers == ["My own.", "Sorry."]
