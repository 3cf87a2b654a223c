"""Tests of generated answers: what counts as a valid call, and which strict values follow."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from pl_pointwise.checkpoints import NotPlainError, from_plain, plain
from pl_pointwise.tasks.language_model.conversations import ConversationEncoder
from pl_pointwise.tasks.language_model.strict import (
    Strict,
    call_report,
    calls_existing,
    calls_in,
    check_readable,
    is_valid_call,
    passes,
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


def short(answer: str, record: Any) -> bool:
    """A user's test."""
    return len(answer) < 10


@pytest.mark.parametrize(
    "answer",
    [
        CALL,
        f"[{CALL}]",
        f"<tool_call>\n{CALL}\n</tool_call>",
        f"<TOOLCALL>[{CALL}]</TOOLCALL>",
        f"[TOOL_CALLS][{CALL}]",
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
        "{}",
        "[]",
        '{"name": "add"}',
        '{"name": "add", "arguments": [1]}',
        CALL[:-1],
        f"<tool_call>{CALL}",
        f"<tool_call>{CALL[:-1]}</tool_call>",
        f"I will add. <tool_call>{CALL}</tool_call>",
        f"{CALL} There.",
        f"<think>{CALL}",
    ],
)
def test_anything_else_is_no_call(answer: str) -> None:
    assert calls_in(answer) is None
    assert not is_valid_call(answer, TOOLS)
    assert not calls_existing(answer, TOOLS)


def test_a_call_needs_a_tool_that_exists_and_all_it_requires() -> None:
    missing = '{"name": "add", "arguments": {"b": 1}}'
    invented = '{"name": "subtract", "arguments": {"a": 1}}'
    judged = [(calls_existing(a, TOOLS), is_valid_call(a, TOOLS)) for a in (missing, invented)]
    assert judged == [(True, False), (False, False)]
    assert not is_valid_call(CALL, [])


def test_report_compares_with_the_preferred_calls() -> None:
    record = SimpleNamespace(tools=TOOLS)
    weather = '{"name": "weather", "arguments": {}}'
    found = call_report(weather, [CALL], record)
    assert found == {"valid_call": True, "existing_tool": True, "right_tool": False}
    assert call_report(CALL, [CALL], record)["right_tool"]
    assert call_report(CALL, ["No tool is needed."], record) == {}


def test_named_tests_and_functions() -> None:
    record = SimpleNamespace(tools=TOOLS)
    answers = (CALL, "I cannot do that.", "Yes.")
    for test, expected in (("tool_call", 0), ("refusal", 1), (short, 2)):
        passed = [passes(test, answer, record) for answer in answers]
        assert passed == [place == expected for place in range(3)]


def test_the_template_of_a_model_is_read_back(tiny_tokenizer: Any) -> None:
    check_readable(ConversationEncoder(tiny_tokenizer))


def test_a_template_whose_calls_are_not_read_is_refused(tiny_tokenizer: Any) -> None:
    other = type(tiny_tokenizer)(
        tokenizer_object=tiny_tokenizer.backend_tokenizer, eos_token="<|end|>"
    )
    template = tiny_tokenizer.chat_template
    other.chat_template = template.replace("| tojson }}{{ '</tool_call>'", "}}{{ '</tool_call>'")
    with pytest.raises(ValueError, match=r"which tool_call does not read\. Give a function"):
        check_readable(ConversationEncoder(other))


# Options ------------------------------------------------------------------------------------------


def test_a_function_is_imported_from_a_configuration() -> None:
    """As LightningCLI does it, with the type that a module's argument has."""
    parser = ArgumentParser()
    parser.add_argument("--strict", type=Strict | None)
    path = f"{__name__}.short"
    given = {"tests": {"prefer": path, "refuse": "refusal"}}
    found = parser.instantiate(parser.parse_args([f"--strict={json.dumps(given)}"])).strict
    assert found.tests == {"prefer": short, "refuse": "refusal"}
    assert path in parser.dump(parser.parse_args([f"--strict={json.dumps(given)}"]))


def test_a_checkpoint_holds_names_and_no_function() -> None:
    named = Strict({"prefer": "tool_call"}, every_n_epochs=2)
    assert from_plain(Strict, plain(named)) == named
    with pytest.raises(NotPlainError, match="function"):
        plain(Strict({"prefer": short}))


def test_a_path_in_a_checkpoint_is_not_imported() -> None:
    """Neither by load_from_checkpoint nor on the command line with --ckpt_path."""
    stored = {"tests": {"prefer": "os.getcwd"}}
    with pytest.raises(
        ValueError, match=r"judged_by\.tests\.prefer='os\.getcwd'.*nothing is import"
    ):
        from_plain(Strict, stored)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tests": {"prefer": "tool_cal"}}, "prefer='tool_cal': give tool_call, refusal"),
        ({"tests": {}, "every_n_epochs": 0}, "at least 1 epoch"),
        ({"tests": {}, "margin": 0.0}, "a margin above 0"),
        ({"tests": {}, "margin": float("nan")}, "a margin above 0"),
    ],
)
def test_bad_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Strict(**options)
