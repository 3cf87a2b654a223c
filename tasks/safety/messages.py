"""What a record asks: a text, or a conversation of several turns."""

from __future__ import annotations

from typing import Any

from pl_pointwise.tasks.common.records import bad_field, field, kind, shown, text_field

_ROLES = ("system", "user", "assistant")

Turns = tuple[dict[str, Any], ...]
"""{"role", "content"} of each turn."""


def asked(row: dict[str, Any], name: str, where: str) -> tuple[str, Turns]:
    """The text of a row's prompt, from the field ``name`` or "messages", and its turns if several.

    Raises:
        DataError: neither, both, or one that is not what it should be.
    """
    if row.get("messages") is None:
        return text_field(field(row, name, where), name, where), ()
    if row.get(name) is not None:
        problem = f'stands beside "{name}", so there are two prompts'
        raise bad_field(where, "messages", problem, "Give one of them")
    messages = parse_messages(row["messages"], where)
    last = messages[-1]["role"]
    if last != "user":
        remedy = "End with a turn of the user, and put an answer into a field of its own"
        raise bad_field(where, f"messages[{len(messages) - 1}].role", f"is {last}", remedy)
    if len(messages) == 1:
        return messages[0]["content"], ()
    return "\n\n".join(f"{each['role']}: {each['content']}" for each in messages), tuple(messages)


def parse_messages(value: Any, where: str, prefix: str = "") -> list[dict[str, Any]]:
    """The turns of a conversation: perhaps a system turn, then turns of user and assistant.

    Args:
        value: a list of {"role", "content"}.
        where: the record's place, for messages.
        prefix: stands before the field's name in them.

    Raises:
        DataError: something else.
    """
    name = f"{prefix}messages"
    if not isinstance(value, list) or not value:
        problem = "is empty" if value == [] else f"is {kind(value)}"
        raise bad_field(where, name, problem, "Give a list of {role, content}")
    return [_turn(turn, place, f"{name}[{place}]", where) for place, turn in enumerate(value)]


def _turn(turn: Any, place: int, name: str, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise bad_field(where, name, f"is {kind(turn)}", "Give {role, content}")
    role = field(turn, "role", where, f"{name}.")
    if role not in _ROLES:
        remedy = f"Give one of {', '.join(_ROLES)}"
        raise bad_field(where, f"{name}.role", f"is {shown(role)}", remedy)
    if role == "system" and place:
        raise bad_field(where, f"{name}.role", "is system", "Put the system turn first")
    content = text_field(field(turn, "content", where, f"{name}."), f"{name}.content", where)
    return {"role": role, "content": content}
