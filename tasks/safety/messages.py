"""What a record asks: a text, or a conversation of several turns."""

from __future__ import annotations

from typing import Any

from pl_pointwise.tasks.common.records import bad_field, field, kind, shown, text_field

_ROLES = ("system", "user", "assistant")


def parse_messages(value: Any, where: str, prefix: str = "messages") -> list[dict[str, str]]:
    """[{"role", "content"}, …]: perhaps a system turn, then turns of user and assistant.

    Args:
        value: what the record has.
        where: the record's place, for messages.
        prefix: the field's name, for messages.

    Raises:
        DataError: no such list, or one that does not end with a turn of the user.
    """
    if not isinstance(value, list) or not value:
        problem = "is empty" if value == [] else f"is {kind(value)}"
        raise bad_field(where, prefix, problem, "Give a list of {role, content}")
    found = []
    for place, message in enumerate(value):
        name = f"{prefix}[{place}]"
        if not isinstance(message, dict):
            raise bad_field(where, name, f"is {kind(message)}", "Give {role, content}")
        role = field(message, "role", where, f"{name}.")
        if role not in _ROLES:
            known = ", ".join(_ROLES)
            raise bad_field(where, f"{name}.role", f"is {shown(role)}", f"Give one of {known}")
        if role == "system" and place:
            raise bad_field(where, f"{name}.role", "is system", "Put the system turn first")
        text = text_field(field(message, "content", where, f"{name}."), f"{name}.content", where)
        found.append({"role": role, "content": text})
    if found[-1]["role"] != "user":
        last = f"{prefix}[{len(found) - 1}].role"
        remedy = "End with a turn of the user, and put an answer into a field of its own"
        raise bad_field(where, last, f"is {found[-1]['role']}", remedy)
    return found


def asked(row: dict[str, Any], name: str, where: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The text of a row's prompt, from the field ``name`` or "messages", and its turns if several.

    Raises:
        DataError: neither, both, or one that is not what it should be.
    """
    if row.get("messages") is None:
        return text_field(field(row, name, where), name, where), ()
    if row.get(name) is not None:
        problem = f'stands beside "{name}", so there are two prompts'
        raise bad_field(where, "messages", problem, "Give one of them")
    messages = parse_messages(row["messages"], where, "messages")
    if len(messages) == 1:
        return messages[0]["content"], ()
    turns = tuple((message["role"], message["content"]) for message in messages)
    return "\n\n".join(f"{role}: {text}" for role, text in turns), turns
