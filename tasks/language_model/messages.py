"""Conversations as people write them, read into one form.

    messages   [{"role", "content"}], roles system, developer, user, assistant and tool. A turn of
               the assistant may have "tool_calls", and then no content; "reasoning_content" is its
               thought.
    tools      descriptions, each an object or its JSON
    answer     an assistant's turn: a text, tool calls, or several of text, calls and thought

Tool calls are read as OpenAI writes them, [{"function": {"name", "arguments"}, …}], and flat,
[{"name", "arguments"}], their arguments as an object or as its JSON. In messages they have OpenAI's
form afterwards, in answers the flat one, arguments always an object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pl_pointwise.tasks.common.records import (
    bad_field,
    field,
    kind,
    shown,
    text_field,
)

Message = Mapping[str, Any]

Answer = str | list[dict[str, Any]] | dict[str, Any]
"""A text, or tool calls, or a turn of at least two of "content", "tool_calls" (likewise flat) and
"reasoning_content"."""

ROLES = ("system", "developer", "user", "assistant", "tool")

_OPEN, _CLOSE = "<TOOLCALL>", "</TOOLCALL>"
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_CALLS_REMEDY = 'Give [{"name": …, "arguments": {…}}]'


@dataclass(frozen=True)
class Parts:
    """What an answer consists of; "" and [] are absent."""

    text: str = ""
    calls: Sequence[Mapping[str, Any]] = ()
    reasoning: str = ""


def parts_of(answer: Answer) -> Parts:
    """The parts of an answer."""
    if isinstance(answer, str):
        return Parts(answer)
    if isinstance(answer, list):
        return Parts(calls=answer)
    return Parts(
        answer.get("content", ""),
        answer.get("tool_calls", ()),
        answer.get("reasoning_content", ""),
    )


def answer_text(answer: Answer) -> str:
    """An answer for reports: its text, and everything else as JSON."""
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def turn_text(message: Message) -> str:
    """A turn for reports: role, content, and tool calls as JSON."""
    calls = message.get("tool_calls") or []
    listed = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
    return f"{message['role']}: " + "\n".join(filter(None, [message["content"], *listed]))


def calls_as_text(calls: Sequence[Message]) -> str:
    """Tool calls for a template that has no form for them."""
    return f"{_OPEN}{json.dumps(list(calls), ensure_ascii=False)}{_CLOSE}"


# Messages -----------------------------------------------------------------------------------------


def parse_messages(value: Any, where: str, prefix: str = "") -> list[dict[str, Any]]:
    """The turns of a conversation; see the head of this module.

    Args:
        value: a list of messages.
        where: the record's place, for errors.
        prefix: stands before the field's name in them.

    Raises:
        DataError: something else; names the record, the field and the remedy.
    """
    name = f"{prefix}messages"
    if not isinstance(value, list) or not value:
        problem = "is empty" if value == [] else f"is {kind(value)}"
        raise bad_field(where, name, problem, "Give a list of {role, content}")
    return [_turn(turn, f"{name}[{place}]", where) for place, turn in enumerate(value)]


def _turn(turn: Any, name: str, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise bad_field(where, name, f"is {kind(turn)}", "Give {role, content}")
    role = field(turn, "role", where, f"{name}.")
    if role not in ROLES:
        remedy = f"Give one of {', '.join(ROLES)}"
        raise bad_field(where, f"{name}.role", f"is {shown(role)}", remedy)
    calls = turn.get("tool_calls")
    if calls and role != "assistant":
        problem = f"stands in a turn of role {role}"
        raise bad_field(where, f"{name}.tool_calls", problem, "Only the assistant calls tools")
    found: dict[str, Any] = {"role": role, "content": _content(turn, name, where)}
    if calls:
        found["tool_calls"] = _listed_calls(calls, where, f"{name}.tool_calls")
    optional = {"assistant": _THOUGHTS, "tool": ("tool_call_id", "name")}.get(role, ())
    for key in optional:
        if str(turn.get(key) or "").strip():
            ours = "reasoning_content" if key in _THOUGHTS else key
            found[ours] = text_field(turn[key], f"{name}.{key}", where)
    return found


def _content(turn: dict[str, Any], name: str, where: str) -> str:
    """The text of a turn; "" of an assistant who only calls, or of a tool that says nothing."""
    calls, of_tool = turn.get("tool_calls"), turn["role"] == "tool"
    if calls and turn.get("content") is None:
        return ""
    content = field(turn, "content", where, f"{name}.")
    if of_tool and isinstance(content, (dict, list)):
        return json.dumps(content, ensure_ascii=False)
    if (of_tool or calls) and isinstance(content, str) and not content.strip():
        return ""
    return text_field(content, f"{name}.content", where)


# Tools --------------------------------------------------------------------------------------------


def parse_tools(value: Any, where: str) -> list[dict[str, Any]]:
    """Descriptions of tools as objects; each, or the list, may be JSON. null is none.

    Raises:
        DataError: something else; names the record, the tool and the remedy.
    """
    if isinstance(value, str):
        value = _from_json(value, "tools", where)
    if not isinstance(value, (list, type(None))):
        raise bad_field(where, "tools", f"is {kind(value)}", "Give a list of tools, or []")
    found = []
    for place, tool in enumerate(value or []):
        name = f"tools[{place}]"
        tool = _from_json(tool, name, where) if isinstance(tool, str) else tool
        if not isinstance(tool, dict):
            raise bad_field(where, name, f"is {kind(tool)}", "Give one JSON object a tool")
        described = tool.get("function", tool)
        if not isinstance(described, dict) or not isinstance(described.get("name"), str):
            raise bad_field(where, name, "has no name", "Give {name, description, parameters}")
        found.append(tool)
    return found


def _from_json(value: str, name: str, where: str) -> Any:
    try:
        return json.loads(value)
    except ValueError as error:
        problem = f"is not readable JSON ({error})"
        raise bad_field(where, name, problem, "Give one JSON object a tool") from error


# Answers ------------------------------------------------------------------------------------------


def parse_answer(value: Any, where: str, name: str, *, bare_calls: bool = False) -> Answer:
    """An answer: a text, tool calls, or an assistant's turn with either or both.

    A text ``<TOOLCALL>[{"name", "arguments"}]</TOOLCALL>`` is tool calls.

    Args:
        value: the answer.
        where: the record's place, for errors.
        name: the field's name, for errors.
        bare_calls: a text that is JSON of a call, or of a list of calls, is tool calls too.

    Raises:
        DataError: something else; names the record, the field and the remedy.
    """
    if isinstance(value, dict) and not {"role", "content", "tool_calls"}.isdisjoint(value):
        return _answering_turn(value, where, name, bare_calls)
    if isinstance(value, (dict, list)):
        value = value if isinstance(value, list) else [value]
        return [call["function"] for call in _listed_calls(value, where, name)]
    text = text_field(value, name, where)
    try:
        calls = tool_calls(text, bare=bare_calls)
    except ValueError as error:
        remedy = f'Give {_OPEN}[{{"name": …, "arguments": {{…}}}}]{_CLOSE}'
        raise bad_field(where, name, str(error), remedy) from None
    return text if calls is None else calls


def _answering_turn(turn: dict[str, Any], where: str, name: str, bare_calls: bool) -> Answer:
    if turn.get("role", "assistant") != "assistant":
        problem = f"is {shown(turn['role'])}"
        raise bad_field(where, f"{name}.role", problem, "An answer is the assistant's")
    read = _turn({**turn, "role": "assistant"}, name, where)
    text = read["content"]
    calls = [call["function"] for call in read.get("tool_calls", ())]
    if not calls:
        found = parse_answer(text, where, f"{name}.content", bare_calls=bare_calls)
        if isinstance(found, list):
            text, calls = "", found
    thought = read.get("reasoning_content", "")
    parts = {"content": text, "tool_calls": calls, "reasoning_content": thought}
    given = {key: part for key, part in parts.items() if part}
    return given if len(given) > 1 else calls or text


# Tool calls ---------------------------------------------------------------------------------------


def _listed_calls(value: Any, where: str, name: str) -> list[dict[str, Any]]:
    """[{"type": "function", "function": {"name", "arguments"}}], with "id" where it is given."""
    if not isinstance(value, list) or not value:
        problem = "is empty" if value == [] else f"is {kind(value)}"
        raise bad_field(where, name, problem, _CALLS_REMEDY)
    found = []
    for place, call in enumerate(value):
        each = f"{name}[{place}]" if len(value) > 1 else name
        function = call.get("function", call) if isinstance(call, dict) else call
        try:
            listed = {"type": "function", "function": _call(function)}
        except ValueError as error:
            raise bad_field(where, each, f"is malformed ({error})", _CALLS_REMEDY) from None
        if call.get("id") is not None:
            listed["id"] = text_field(call["id"], f"{each}.id", where)
        found.append(listed)
    return found


def tool_calls(text: str, *, bare: bool = True) -> list[dict[str, Any]] | None:
    """The calls in a text, [{"name", "arguments"}], or None if it is no tool call.

    A call is ``<TOOLCALL>[…]</TOOLCALL>``; with ``bare`` also the JSON of one call, or of a list of
    them, alone.

    Raises:
        ValueError: ``<TOOLCALL>`` around something else, or beside other text; says what is wrong.
    """
    text = text.strip()
    marked = _OPEN in text
    if marked and not (text.startswith(_OPEN) and text.endswith(_CLOSE)):
        raise ValueError(f"mixes text and a tool call, or lacks {_CLOSE}")
    if not marked and (not bare or text[:1] not in ("{", "[")):
        return None
    try:
        calls = json.loads(text.removeprefix(_OPEN).removesuffix(_CLOSE))
        found = [_call(call) for call in (calls if isinstance(calls, list) else [calls])]
        if not found:
            raise ValueError("no call in it")
    except ValueError as error:
        if not marked:
            return None
        raise ValueError(f"is a malformed tool call ({error})") from None
    return found


def _call(call: Any) -> dict[str, Any]:
    """{"name", "arguments"} of a call, perhaps with "id" and "type", its arguments an object."""
    given = (
        {k: v for k, v in call.items() if k not in ("id", "type")} if isinstance(call, dict) else {}
    )
    if set(given) != {"name", "arguments"}:
        raise ValueError("a call is an object of name and arguments")
    if isinstance(given["arguments"], str):
        given["arguments"] = json.loads(given["arguments"])
    name, arguments = given["name"], given["arguments"]
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("a call's name is a text, its arguments an object")
    return {"name": name, "arguments": arguments}
