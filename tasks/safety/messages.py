"""A conversation of several turns, as a record gives it."""

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
