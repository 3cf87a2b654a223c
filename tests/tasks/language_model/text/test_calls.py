"""Tool calls in generated answers: what counts as a valid one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pl_pointwise.tasks.language_model.text.calls import (
    call_report,
    calls_in,
    is_valid_call,
)

ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "dict", "properties": {"a": {}, "b": {}}, "required": ["a"]},
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "…"}}
TOOLS = [ADD, WEATHER]
CALL = '{"name": "add", "arguments": {"a": 1}}'
CALLS = [{"name": "add", "arguments": {"a": 1}}]


@pytest.mark.parametrize(
    "answer",
    [
        CALL,
        f"[{CALL}]",
        f"<tool_call>\n{CALL}\n</tool_call>",
        f"<TOOLCALL>[{CALL}]</TOOLCALL>",
        f"[TOOL_CALLS][{CALL}]",
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]',
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}',
        f"<think>\nWhich? add.\n</think>\n\n<tool_call>{CALL}</tool_call>",
        '{"name": "add", "arguments": "{\\"a\\": 1}"}',
    ],
)
def test_calls_are_read_in_the_forms_that_templates_write(answer: str) -> None:
    assert calls_in(answer) == CALLS
    assert is_valid_call(answer, TOOLS)


def test_several_calls_are_all_read_and_all_judged() -> None:
    other = '{"name": "weather", "arguments": {}}'
    both = f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{other}\n</tool_call>"
    assert [call["name"] for call in calls_in(both) or ()] == ["add", "weather"]
    assert is_valid_call(both, TOOLS)
    assert not is_valid_call(both, [ADD])
    assert not is_valid_call(both.replace('"a": 1', ""), TOOLS)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "It is 42.",
        '{"name": "add", "arguments": [1]}',
        f"I will add. <tool_call>{CALL}</tool_call>",
        f"{CALL} There.",
        f"<think>{CALL}",
    ],
)
def test_anything_else_is_no_call(answer: str) -> None:
    assert calls_in(answer) is None
    assert not is_valid_call(answer, TOOLS)


def test_a_call_needs_a_tool_that_exists_and_all_it_requires() -> None:
    missing = '{"name": "add", "arguments": {"b": 1}}'
    invented = '{"name": "subtract", "arguments": {"a": 1}}'
    assert not any(is_valid_call(answer, TOOLS) for answer in (missing, invented))


def test_report_compares_with_the_preferred_calls() -> None:
    record = SimpleNamespace(tools=TOOLS)
    weather = '{"name": "weather", "arguments": {}}'
    found = call_report(weather, [CALL], record)
    assert found == {"valid_call": True, "right_tool": False}
    assert call_report(CALL, [CALL], record)["right_tool"]
    assert call_report(CALL, ["No tool is needed."], record) == {}
