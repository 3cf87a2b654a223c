"""Nulls that Arrow adds, in schemas of tools and arguments of calls.

In a column of objects every object has all fields, null where it had none; ``Dataset.to_json``
writes them out, so they are in files of every kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

R = TypeVar("R")

_MEANT = ("default", "const")  # of a schema, null is a value of these


def without_nulls(record: R) -> R:
    """A record whose schemas have no null fields, nor calls null arguments that no schema has."""
    whole: Any = record
    # Without a schema nobody knows which nulls of arguments are meant.
    if not getattr(whole, "tools", None):
        return record
    tools = [_schema(tool) for tool in whole.tools]
    known = dict(map(_properties, tools))
    messages = [_of_turn(turn, known) for turn in whole.messages]
    responses = tuple(
        replace(r, answer=_of_answer(r.answer, known)) for r in whole.responses
    )
    changed: R = replace(whole, tools=tools, messages=messages, responses=responses)
    return changed


def _schema(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _schema(v) for k, v in value.items() if v is not None or k in _MEANT}
    return [_schema(entry) for entry in value] if isinstance(value, list) else value


def _properties(tool: Mapping[str, Any]) -> tuple[str, Any]:
    """(name, schema of the arguments) of a tool; null if it does not say them."""
    described = tool.get("function", tool)
    return str(described.get("name")), described.get("parameters")


def _arguments(arguments: Any, schema: Any) -> Any:
    """Arguments without the null ones that are no property; unchanged where no schema says so."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    # A schema that says no properties allows any argument, null too.
    if not isinstance(arguments, dict) or not isinstance(properties, dict):
        return arguments
    kept = {}
    for name, value in arguments.items():
        if value is not None or name in properties:
            kept[name] = _arguments(value, properties.get(name))
    return kept


def _call(call: dict[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    return {**call, "arguments": _arguments(call["arguments"], known.get(call["name"]))}


def _of_turn(turn: dict[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    calls = turn.get("tool_calls")
    if not calls:
        return turn
    cleaned = [{**call, "function": _call(call["function"], known)} for call in calls]
    return {**turn, "tool_calls": cleaned}


def _of_answer(answer: Any, known: Mapping[str, Any]) -> Any:
    if isinstance(answer, list):
        return [_call(call, known) for call in answer]
    if isinstance(answer, dict) and answer.get("tool_calls"):
        return {
            **answer,
            "tool_calls": [_call(call, known) for call in answer["tool_calls"]],
        }
    return answer
