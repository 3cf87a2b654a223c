"""Conversations, tools and answers as they stand in a record.

Thin on purpose: what both language tasks read alike belongs to language_model/, and these three
functions are the seam.
"""

from __future__ import annotations

from typing import Any

from pl_pointwise.tasks.common.records import (
    bad_field,
    field,
    kind,
    problem_of,
    read_json,
    shown,
    text_field,
)
from pl_pointwise.tasks.language_model.conversations import Answer

_OPEN, _CLOSE = "<TOOLCALL>", "</TOOLCALL>"
_TURNS = ("system", "user", "assistant", "tool")


def parse_messages(value: Any, where: str, prefix: str = "") -> list[dict[str, Any]]:
    """The turns of a conversation: [{"role", "content"}], an assistant's perhaps with "tool_calls".

    A turn with calls may have no content. ``prefix`` stands before the field's name in messages.

    Raises:
        DataError: something else; names the record, the turn and the remedy.
    """
    name = f"{prefix}messages"
    if not isinstance(value, list) or not value:
        problem = "is empty" if value == [] else f"is {kind(value)}"
        raise bad_field(where, name, problem, "Give a list of {role, content}")
    return [_turn(turn, f"{name}[{place}]", where) for place, turn in enumerate(value)]


def parse_tools(value: Any, where: str) -> list[dict[str, Any]]:
    """Descriptions of tools as objects; each may be given as JSON, null is none.

    Raises:
        DataError: something else.
    """
    value = _from_text(value, "tools", where)
    if not isinstance(value, list):
        raise bad_field(where, "tools", f"is {kind(value)}", "Give a list of tools, or []")
    found = []
    for place, tool in enumerate(value):
        name = f"tools[{place}]"
        tool = _from_text(tool, name, where)
        described = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(described, dict) or not isinstance(described.get("name"), str):
            raise bad_field(where, name, "has no name", "Give {name, description, parameters}")
        if problem := problem_of(tool):
            raise bad_field(where, name, problem, "Give what JSON can hold")
        found.append(tool)
    return found


def parse_answer(value: Any, where: str, name: str) -> Answer:
    """The assistant's answer: a text, a message {"content", "tool_calls"}, or tool calls.

    Calls may be written as ``<TOOLCALL>[{"name", "arguments"}]</TOOLCALL>``, as When2Call's are.

    Raises:
        DataError: something else, or a text beside calls, which is not supported.
    """
    if isinstance(value, dict) and ("content" in value or "tool_calls" in value):
        if value.get("role", "assistant") != "assistant":
            problem = f"is {shown(value['role'])}"
            raise bad_field(where, f"{name}.role", problem, "An answer is the assistant's")
        if not value.get("tool_calls"):
            return parse_answer(field(value, "content", where, f"{name}."), where, name)
        if isinstance(value.get("content"), str) and value["content"].strip():
            problem = "has a text beside tool calls"
            raise bad_field(where, name, problem, "Leave one of them out")
        return parse_calls(value["tool_calls"], where, f"{name}.tool_calls")
    if isinstance(value, (dict, list)):
        return parse_calls(value if isinstance(value, list) else [value], where, name)
    text = text_field(value, name, where)
    marked = text.strip()
    if not marked.startswith(_OPEN):
        return text
    calls = _from_text(marked.removeprefix(_OPEN).removesuffix(_CLOSE), name, where)
    return parse_calls(calls if isinstance(calls, list) else [calls], where, name)


def parse_calls(value: Any, where: str, name: str) -> list[dict[str, Any]]:
    """Tool calls as [{"name", "arguments"}], from that or from [{"function": {…}}].

    Raises:
        DataError: something else.
    """
    if not isinstance(value, list) or not value:
        raise bad_field(where, name, "is no list of tool calls", "Give [{name, arguments}]")
    found = []
    for call in value:
        call = call.get("function", call) if isinstance(call, dict) else call
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise bad_field(where, name, "has a call without a name", "Give {name, arguments}")
        arguments = call.get("arguments")
        arguments = {} if arguments is None else _from_text(arguments, name, where)
        if not isinstance(arguments, dict) or problem_of({call["name"]: arguments}):
            raise bad_field(where, name, "has arguments that are no object", "Give {name: value}")
        found.append({"name": call["name"], "arguments": arguments})
    return found


def _turn(turn: Any, name: str, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise bad_field(where, name, f"is {kind(turn)}", "Give {role, content}")
    role = field(turn, "role", where, f"{name}.")
    if role not in _TURNS:
        remedy = f"Give one of {', '.join(_TURNS)}"
        raise bad_field(where, f"{name}.role", f"is {shown(role)}", remedy)
    calls = turn.get("tool_calls")
    if not calls:
        content = field(turn, "content", where, f"{name}.")
        return {"role": role, "content": text_field(content, f"{name}.content", where)}
    if role != "assistant":
        raise bad_field(where, f"{name}.tool_calls", f"is of role {role}", "The assistant calls")
    found = [{"type": "function", "function": call} for call in parse_calls(calls, where, name)]
    content = turn.get("content")
    return {"role": role, "content": content or "", "tool_calls": found}


def _from_text(value: Any, name: str, where: str) -> Any:
    """What a JSON text holds, [] of null; any other value as it is."""
    if value is None:
        return []
    if not isinstance(value, str):
        return value
    try:
        return read_json(value)
    except (ValueError, RecursionError) as error:
        problem = f"is not readable JSON ({error})"
        raise bad_field(where, name, problem, "Give a JSON value") from error
