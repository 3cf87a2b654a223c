"""Tool calls in generated answers: which there are, and whether they could be carried out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .messages import tool_calls
from .reasoning import final_answer

_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)  # Qwen, Hermes, MiniMind, SmolLM3
_PREFIXES = ("[TOOL_CALLS]", "<|python_tag|>", "<|tool_call|>")  # Mistral, Llama, Granite


def calls_in(answer: str) -> list[dict[str, Any]] | None:
    """The tool calls that an answer consists of, [{"name", "arguments"}]; None of any other.

    Read are ``<tool_call>…</tool_call>``, ``<TOOLCALL>[…]</TOOLCALL>``, the JSON of one call or a
    list of them alone, and that behind the marks of Mistral, Llama and Granite; "parameters" is
    another name of "arguments".
    """
    text = final_answer(answer).strip()
    pieces = _BLOCK.findall(text)
    if pieces and _BLOCK.sub("", text).strip():
        return None
    for prefix in _PREFIXES:
        text = text.removeprefix(prefix)
    found: list[dict[str, Any]] = []
    for piece in pieces or [text]:
        if '"arguments"' not in piece:
            piece = piece.replace('"parameters"', '"arguments"', 1)
        try:
            calls = tool_calls(piece)
        except ValueError:
            return None
        if calls is None:
            return None
        found += calls
    return found


def is_valid_call(answer: str, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether it consists of calls of these tools, each with all arguments its schema requires."""
    required: dict[str, set[Any]] = {}
    for tool in (each.get("function", each) for each in tools):
        schema = tool.get("parameters")
        names = schema.get("required") if isinstance(schema, Mapping) else None
        listed = names if isinstance(names, list) else ()
        required[tool["name"]] = {name for name in listed if isinstance(name, str)}
    calls = calls_in(answer) or ()
    return bool(calls) and all(
        call["name"] in required and required[call["name"]] <= set(call["arguments"])
        for call in calls
    )


def call_report(answer: str, preferred: Sequence[str], record: Any) -> dict[str, bool]:
    """What holds of an answer where a preferred response calls tools; {} where none does."""

    def names_of(text: str) -> list[str]:
        return [call["name"] for call in calls_in(text) or ()]

    wanted = [names for text in preferred if (names := names_of(text))]
    if not wanted:
        return {}
    return {
        "valid_call": is_valid_call(answer, record.tools),
        "right_tool": names_of(answer) in wanted,
    }
