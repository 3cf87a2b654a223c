"""Calls of tools that the record itself offers, in every answer that a model is to give.

An answer to be made unlikely may call others: When2Call's rejected calls invent their tools, and so
do those of its multiple-choice records that no right answer is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pl_pointwise.tasks.common.records import bad_field, shown

from .messages import parts_of

MAY_INVENT = ("avoid", "forget")
"""Roles of answers that are not taught."""


def check_offered(record: Any, where: str, *, all_turns: bool) -> None:
    """Refuses a record whose answer calls a tool that is not among its tools.

    Where there are no tools nothing is said of them: a model may know some without.

    all_turns: whether the assistant's earlier turns are answers too.
    """
    if not record.tools:
        return
    offered = {tool.get("function", tool)["name"] for tool in record.tools}
    for response in record.responses:
        if response.answer is not None and response.role not in MAY_INVENT:
            calls = parts_of(response.answer).calls
            names = [call["name"] for call in calls]
            _check_names(names, offered, f"an answer of role {response.role}", where)
    # Only read, an earlier turn is the past as it was, with tools that may be gone.
    earlier = record.messages if all_turns else ()
    for turn in earlier:
        calls = turn.get("tool_calls") or ()
        names = [call["function"]["name"] for call in calls]
        _check_names(names, offered, "an earlier answer", where)


def _check_names(
    names: Iterable[str], offered: set[str], whose: str, where: str
) -> None:
    for name in names:
        if name not in offered:
            problem = f"does not offer {shown(name)}, which {whose} calls"
            remedy = "Add the tool, correct the call's name, or take the record out"
            raise bad_field(where, "tools", problem, remedy)
