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
    if turn.get("function_call") is not None:
        problem = "is the older form of a tool call"
        raise bad_field(where, f"{name}.function_call", problem, "Give tool_calls instead")
    calls = turn.get("tool_calls")
    if calls and role != "assistant":
        problem = f"stands in a turn of role {role}"
        raise bad_field(where, f"{name}.tool_calls", problem, "Only the assistant calls tools")
    found: dict[str, Any] = {"role": role, "content": _content(turn, name, where, role)}
    if calls:
        found["tool_calls"] = _listed_calls(calls, where, f"{name}.tool_calls")
    if role == "assistant" and (thought := _reasoning(turn, name, where)):
        found["reasoning_content"] = thought
    if role == "tool":
        for key in ("tool_call_id", "name"):
            if turn.get(key) is not None:
                found[key] = text_field(turn[key], f"{name}.{key}", where)
    return found


def _content(turn: dict[str, Any], name: str, where: str, role: str) -> str:
    """The text of a turn; "" of an assistant who only calls, or of a tool that says nothing."""
    name = f"{name}.content"
    if turn.get("tool_calls") and turn.get("content") is None:
        return ""
    content = field(turn, "content", where, name.removesuffix("content"))
    if role == "tool" and isinstance(content, (dict, list)) and not _is_parts(content):
        return json.dumps(content, ensure_ascii=False)
    if isinstance(content, list):
        if not _is_parts(content):
            problem = "holds what is no text"
            raise bad_field(where, name, problem, 'Give a text, or [{"type": "text", "text": …}]')
        content = "".join(part["text"] for part in content)
    may_be_empty = role == "tool" or turn.get("tool_calls")
    if may_be_empty and isinstance(content, str) and not content.strip():
        return ""
    return text_field(content, name, where)


def _is_parts(content: Any) -> bool:
    """Whether it is a list of texts as OpenAI writes them."""
    return isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    )


def _reasoning(turn: dict[str, Any], name: str, where: str) -> str:
    """The thought of an assistant's turn, under any of its names; "" if none."""
    for key in _THOUGHTS:
        value = turn.get(key)
        if value is not None and not (isinstance(value, str) and not value.strip()):
            return text_field(value, f"{name}.{key}", where)
    return ""


# Tools --------------------------------------------------------------------------------------------


def parse_tools(value: Any, where: str, prefix: str = "") -> list[dict[str, Any]]:
    """Descriptions of tools as objects; each, or the list, may be JSON. null is none.

    Raises:
        DataError: something else; names the record, the tool and the remedy.
    """
    name = f"{prefix}tools"
    value = [] if value is None else value
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _from_json(value, name, where, "Give a list of tools, or []")
    if not isinstance(value, list):
        raise bad_field(where, name, f"is {kind(value)}", "Give a list of tools, or []")
    found = []
    for place, tool in enumerate(value):
        each = f"{name}[{place}]"
        tool = _from_json(tool, each, where, "Give one JSON object a tool")
        if not isinstance(tool, dict):
            raise bad_field(where, each, f"is {kind(tool)}", "Give one JSON object a tool")
        described = tool.get("function", tool)
        if not isinstance(described, dict) or not isinstance(described.get("name"), str):
            raise bad_field(where, each, "has no name", "Give {name, description, parameters}")
        found.append(tool)
    return found


def _from_json(value: Any, name: str, where: str, remedy: str) -> Any:
    """What a JSON text holds; any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise bad_field(where, name, f"is not readable JSON ({error})", remedy) from error


# Answers ------------------------------------------------------------------------------------------


def parse_answer(value: Any, where: str, name: str, *, bare_calls: bool = False) -> Answer:
    """An answer: a text, tool calls, or an assistant's turn with either or both.

    A text ``<TOOLCALL>[{"name", "arguments"}]</TOOLCALL>`` is tool calls. A list of one turn, as
    conversational preference data have it, is that turn.

    Args:
        value: the answer.
        where: the record's place, for errors.
        name: the field's name, for errors.
        bare_calls: a text that is JSON of a call, or of a list of calls, is tool calls too.

    Raises:
        DataError: something else; names the record, the field and the remedy.
    """
    if isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]:
        if len(value) > 1:
            problem = f"has {len(value)} turns"
            raise bad_field(where, name, problem, "Give the assistant's one turn")
        value, name = value[0], f"{name}[0]"
    if isinstance(value, dict) and not {"role", "content", "tool_calls"}.isdisjoint(value):
        return _answering_turn(value, where, name, bare_calls)
    if isinstance(value, (dict, list)):
        return [call["function"] for call in _listed_calls(_as_list(value), where, name)]
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
    content = turn.get("content")
    if isinstance(content, (dict, list)) and not turn.get("tool_calls") and not _is_parts(content):
        turn = {**turn, "content": None, "tool_calls": _as_list(content)}
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
    if len(given) > 1:
        return given
    return calls or text


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


# Tool calls ---------------------------------------------------------------------------------------


def _listed_calls(value: Any, where: str, name: str) -> list[dict[str, Any]]:
    """[{"type": "function", "function": {"name", "arguments"}}], with "id" where it is given."""
    if not isinstance(value, list) or not value:
        problem = "is empty" if value == [] else f"is {kind(value)}"
        raise bad_field(where, name, problem, _CALLS_REMEDY)
    found = []
    for place, call in enumerate(value):
        each = f"{name}[{place}]" if len(value) > 1 else name
        if not isinstance(call, dict):
            raise bad_field(where, each, f"is {kind(call)}", _CALLS_REMEDY)
        function = call.get("function", call)
        if not isinstance(function, dict):
            raise bad_field(where, f"{each}.function", f"is {kind(function)}", _CALLS_REMEDY)
        try:
            read = _call({key: function[key] for key in function if key not in ("id", "type")})
        except ValueError as error:
            raise bad_field(where, each, f"is malformed ({error})", _CALLS_REMEDY) from None
        listed: dict[str, Any] = {"type": "function", "function": read}
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
    marked = text.startswith(_OPEN)
    if not marked and _OPEN in text:
        raise ValueError("mixes text and a tool call")
    if marked:
        if not text.endswith(_CLOSE):
            raise ValueError(f"opens {_OPEN} and does not end in {_CLOSE}")
        text = text.removeprefix(_OPEN).removesuffix(_CLOSE)
    elif not bare or text[:1] not in ("{", "["):
        return None
    try:
        calls = json.loads(text)
        calls = calls if isinstance(calls, list) else [calls]
        found = [_call(call) for call in calls]
        if not found:
            raise ValueError("no call in it")
    except ValueError as error:
        if not marked:
            return None
        raise ValueError(f"is a malformed tool call ({error})") from None
    return found


def _call(call: Any) -> dict[str, Any]:
    if not isinstance(call, dict) or not {"name", "arguments"} == set(call):
        raise ValueError("a call is an object of name and arguments")
    arguments = call["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(call["name"], str) or not call["name"] or not isinstance(arguments, dict):
        raise ValueError("a call's name is a text, its arguments an object")
    return {"name": call["name"], "arguments": arguments}
