"""An answer that is taught calls a tool that its record offers; a rejected one may invent it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.conversation.records import read_record
from pl_pointwise.tasks.language_model.text.pairs import parse_pair
from pl_pointwise.tasks.when2call.data import parse_choice, parse_preference
from tests.tasks.when2call.conftest import CALL, TEXTS, TOOL, choice_row, preference_row

ASK = {"role": "user", "content": "1 + 2?"}
INVENTED = {"name": "sub", "arguments": {"a": 1}}
LISTED = {"type": "function", "function": TOOL}
NO_TOOL = r'here: field "tools" does not offer \'sub\', which an answer .*Add the tool, correct'


def calling(call: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": call}]}


def of_role(role: str, call: dict[str, Any], **more: Any) -> dict[str, Any]:
    responses = [{"role": role, "tool_calls": [call]}]
    return {"messages": [ASK], "tools": [TOOL], "responses": responses} | more


@pytest.mark.parametrize("role", ["prefer", "learn", "keep", "reference"])
@pytest.mark.parametrize("tool", [TOOL, LISTED, json.dumps(TOOL)])
def test_an_answer_to_give_calls_a_tool_that_is_offered(role: str, tool: Any) -> None:
    assert read_record(of_role(role, CALL, tools=[tool]), "here")
    with pytest.raises(DataError, match=NO_TOOL):
        read_record(of_role(role, INVENTED, tools=[tool]), "here")


@pytest.mark.parametrize("role", ["avoid", "forget"])
def test_an_answer_to_avoid_may_invent_a_tool(role: str) -> None:
    assert read_record(of_role(role, INVENTED), "here")


def test_where_no_tools_are_offered_nothing_is_said_of_calls() -> None:
    for tools in ([], None):
        assert read_record(of_role("prefer", INVENTED, tools=tools), "here")


def test_when2calls_rejected_calls_invent_their_tools() -> None:
    """In the published data a third of the rejected calls do, and of the wrong choices most."""
    invented = f"<TOOLCALL>[{json.dumps(INVENTED)}]</TOOLCALL>"
    row = preference_row(chosen="cannot_answer", rejected="tool_call")
    row["rejected_response"] = {"role": "assistant", "content": invented}
    assert parse_preference(row, "here").roles == ["prefer", "avoid"]
    row["chosen_response"], row["rejected_response"] = (
        row["rejected_response"],
        row["chosen_response"],
    )
    with pytest.raises(DataError, match=NO_TOOL):
        parse_preference(row, "here")
    answers = {**TEXTS, "tool_call": json.dumps(INVENTED)}
    wrong = choice_row(correct="cannot_answer") | {"answers": answers}
    assert parse_choice(wrong, "here").roles[0] == "prefer"
    with pytest.raises(DataError, match=NO_TOOL):
        parse_choice(wrong | {"correct_answer": "tool_call"}, "here")


def test_of_pairs_the_chosen_call_is_offered() -> None:
    row = {"prompt": "1 + 2?", "tools": [TOOL], "chosen": [calling(CALL)]}
    row["rejected"] = [calling(INVENTED)]
    assert parse_pair(row, "here")
    row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    with pytest.raises(DataError, match=NO_TOOL):
        parse_pair(row, "here")


def test_earlier_turns_count_where_they_are_answers() -> None:
    past = [ASK, calling(INVENTED), {"role": "tool", "content": "3"}, ASK]
    row = {"messages": [*past, {"role": "assistant", "content": "3."}], "tools": [TOOL]}
    assert read_record(dict(row), "here")
    with pytest.raises(DataError, match=NO_TOOL.replace("an answer", "an earlier")):
        read_record(dict(row), "here", all_turns=True)


@pytest.mark.parametrize(
    "call",
    [
        '<TOOLCALL>[{"name": "add", "arguments": {"a": 1, "a": 2}}]</TOOLCALL>',
        '{"name": "add", "arguments": {"a": 1, "a": 2}}',
        '<TOOLCALL>[{"name": "add", "arguments": "{\\"a\\": 1, \\"a\\": 2}"}]</TOOLCALL>',
    ],
)
def test_an_argument_that_stands_twice_is_refused(call: str) -> None:
    row = preference_row()
    row["chosen_response"] = {"role": "assistant", "content": call}
    with pytest.raises(DataError, match=r"chosen_response.*'a' twice"):
        parse_preference(row, "here")


def test_a_schema_in_which_a_key_stands_twice_is_refused() -> None:
    tool = '{"name": "add", "parameters": {"type": "object", "type": "array"}}'
    with pytest.raises(DataError, match=r"tools\[0\].*'type' twice"):
        parse_preference(preference_row(tools=[tool]), "here")
