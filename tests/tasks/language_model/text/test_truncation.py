"""A prompt that is too long keeps tools, system turns and its last question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.language_model.text.conversations import ConversationEncoder
from pl_pointwise.tasks.language_model.text.encoded import EncodedResponses
from pl_pointwise.tasks.language_model.text.records import Record, Response
from pl_pointwise.tasks.language_model.text.truncation import fit_prompt
from tests.tasks.conftest import build_tokenizer

ENCODER = ConversationEncoder(build_tokenizer())
TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def turn(role: str, content: str, calls: int = 0) -> dict[str, Any]:
    return {"role": role, "content": content} | ({"tool_calls": [CALL] * calls} if calls else {})


LONG = [
    turn("system", "Be brief."),
    turn("user", "first question"),
    turn("assistant", "", 1),
    turn("tool", "first result"),
    turn("assistant", "first answer"),
    turn("user", "second question"),
    turn("assistant", "second answer"),
    turn("user", "third question"),
]
AGENT = [
    turn("system", "Be brief."),
    turn("user", "the question"),
    turn("assistant", "", 1),
    turn("tool", "old result"),
    turn("assistant", "", 1),
    turn("tool", "new result"),
]


def plain(messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> Record:
    return Record(messages, list(tools), (Response("prefer", "Yes."),), "f.jsonl, line 7")


def tokens(messages, tools=(TOOL,)) -> int:
    return len(ENCODER.encode([ENCODER.prompt(messages, tools, "x")], [[]])[0][0])


def fitted(messages, limit: int) -> list[str] | None:
    found = fit_prompt(ENCODER, Record(messages, [TOOL], (), "x"), limit)
    return None if found is None else [message["content"] for message in found]


def encoded(records: list[Record], limit: int, **options: Any) -> EncodedResponses:
    limits = {"max_prompt_length": limit, "max_length": 2000}
    return EncodedResponses(records, ENCODER, **limits | options)


def test_whole_exchanges_go_oldest_first() -> None:
    all_texts = [message["content"] for message in LONG]
    assert fitted(LONG, tokens(LONG)) == all_texts
    assert fitted(LONG, tokens(LONG) - 1) == ["Be brief.", *all_texts[5:]]
    without = [LONG[0], *LONG[5:]]
    assert fitted(LONG, tokens(without) - 1) == ["Be brief.", "third question"]


def test_behind_the_last_question_a_call_goes_with_its_results() -> None:
    kept = ["Be brief.", "the question", "", "new result"]
    assert fitted(AGENT, tokens(AGENT) - 1) == kept
    short = [AGENT[0], AGENT[1], *AGENT[4:]]
    assert fitted(AGENT, tokens(short)) == kept
    assert fitted(AGENT, tokens(short) - 1) is None


@given(
    st.lists(st.sampled_from(["user", "assistant", "call", "tool", "system"]), max_size=8),
    st.integers(20, 400),
)
def test_whatever_the_conversation_it_fits_and_no_result_loses_its_call(roles, limit) -> None:
    messages: list[dict[str, Any]] = []
    for place, role in enumerate(roles):
        if role == "tool" and not (messages and messages[-1]["role"] == "tool"):
            messages.append(turn("assistant", "", 1))
        text = f"text number {place}"
        messages.append(turn("assistant", "", 1) if role == "call" else turn(role, text))
    messages.append(turn("user", "last"))
    found = fit_prompt(ENCODER, Record(messages, [TOOL], (), "x"), limit)
    if found is None:
        fixed = [m for m in messages if m["role"] == "system"] + [messages[-1]]
        assert tokens(fixed) > limit
        return
    assert tokens(found) <= limit
    assert [m for m in found if m["role"] == "system"] == [
        m for m in messages if m["role"] == "system"
    ]
    for before, after in zip([turn("system", ""), *found], found, strict=False):
        if after["role"] == "tool":
            assert before["role"] == "tool" or before.get("tool_calls")


def test_too_long_is_an_error_by_name_or_a_gap() -> None:
    long = plain([turn("user", "a very long question")], [TOOL])
    fits = plain([turn("user", "short")], [TOOL])
    limit = tokens(fits.messages)
    with pytest.raises(DataError, match=r"f.jsonl, line 7: the prompt has .*invalid: skip"):
        encoded([long, fits], limit, skip_invalid=False)
    with pytest.warns(UserWarning, match=r"left out 1 of 2 .*f.jsonl, line 7: the prompt has"):
        assert encoded([long, fits], limit, skip_invalid=True).records == [fits]


def test_a_shortened_prompt_keeps_tools_and_last_question() -> None:
    limit = tokens(LONG) - 1
    with pytest.warns(UserWarning, match=r"1 of 1 prompts are longer .* lost"):
        cut = encoded([plain(LONG, [TOOL])], limit)
    text = ENCODER.tokenizer.decode(cut[0]["prompt"])
    assert '"description": "Adds."' in text
    assert "first" not in text
    assert "<|start|>user\nthird question<|end|>" in text
    assert ENCODER.tokenizer.decode(cut[0]["responses"][0]) == "Yes.<|end|>"
