"""Results of tools in the order of their calls.

Most templates write neither id nor name beside a result, so that one in another place would stand
under another call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pl_pointwise.errors import DataError

Turns = list[dict[str, Any]]


def in_order_of_calls(messages: Sequence[dict[str, Any]], where: str) -> Turns:
    """The messages, each run of results ordered by the calls that they name."""
    ordered: Turns = []
    calls: list[Any] = []
    run: Turns = []
    for turn in messages:
        if turn["role"] == "tool":
            run.append(turn)
            continue
        ordered += _sorted(run, calls, where)
        run = []
        ordered.append(turn)
        calls = [call.get("id") for call in turn.get("tool_calls") or ()]
    return ordered + _sorted(run, calls, where)


def _sorted(run: Turns, calls: Sequence[Any], where: str) -> Turns:
    """One run of results; where one of them names no call of the turn before, as it is."""
    named = [turn.get("tool_call_id") for turn in run]
    # Without ids their order is all there is, as in most data sets.
    if None in named or None in calls or not calls:
        return run
    unknown = [call for call in named if call not in calls]
    # Else it would stand under a call that it does not answer.
    if unknown:
        raise DataError(
            f"{where}: a result of a tool names the call {unknown[0]!r}, and the turn before has "
            f"{calls!r}. Correct its tool_call_id."
        )
    if len(set(named)) < len(named):
        raise DataError(
            f"{where}: two results of tools name the same call {named!r}. Give each call's own "
            "tool_call_id."
        )
    return sorted(run, key=lambda turn: calls.index(turn["tool_call_id"]))


def with_made_ids(messages: Sequence[dict[str, Any]]) -> Turns:
    """The messages with the ids of calls under another name, so that new ones are made for them."""
    renamed: Turns = []
    for turn in messages:
        calls = [_without_id(call) for call in turn.get("tool_calls") or ()]
        renamed.append({**turn, "tool_calls": calls} if calls else turn)
    return renamed


def _without_id(call: dict[str, Any]) -> dict[str, Any]:
    """A call with its id as "named", in the same place."""
    return {"named" if key == "id" else key: value for key, value in call.items()}
