"""What a record asks: a text, or a conversation of several turns."""

from __future__ import annotations

from typing import Any

from pl_pointwise.tasks.common.records import bad_field, field, text_field
from pl_pointwise.tasks.language_model.messages import parse_messages, turn_text

Turns = tuple[dict[str, Any], ...]
"""Messages."""


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
    return "\n\n".join(map(turn_text, messages)), tuple(messages)
