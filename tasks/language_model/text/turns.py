"""Every answer of a conversation as a record of its own, with a multiplier of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .messages import Answer
from .records import Record


def every_turn(records: Iterable[Record]) -> list[Record]:
    """A record for each turn of the assistant, in place of the conversation's last one alone.

    Records of several responses stay, as nobody says what their earlier turns are to them. Those of
    one conversation are of one unit, so that no split divides it.
    """
    found: list[Record] = []
    for record in records:
        if len(record.responses) == 1 and record.responses[0].answer is not None:
            found += _each(record)
        else:
            found.append(record)
    return found


def _each(record: Record) -> list[Record]:
    places = _answers_in(record.messages)
    asked = record.asked if len(record.asked) == len(places) + 1 else (None,) * (len(places) + 1)
    unit, response = record.unit, record.responses[0]
    found = []
    for place, wanted in zip(places, asked, strict=False):
        if wanted is not False:
            own = replace(response, answer=answer_of(record.messages[place]))
            at = f"{record.where}, messages[{place}]"
            earlier = record.messages[:place]
            found.append(
                replace(record, messages=earlier, responses=(own,), where=at, given_unit=unit)
            )
    if asked[-1] is not False:
        found.append(replace(record, given_unit=unit if places else record.given_unit))
    return [each for each in found if each.messages]


def _answers_in(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The places of the assistant's turns that have something in front of them."""
    return [i for i, turn in enumerate(messages) if i and turn["role"] == "assistant"]


def answer_of(turn: Mapping[str, Any]) -> Answer:
    """A turn of the assistant as an answer."""
    given = {key: turn[key] for key in ("content", "reasoning_content") if turn.get(key)}
    if calls := turn.get("tool_calls"):
        given["tool_calls"] = [call["function"] for call in calls]
    return given if len(given) > 1 else next(iter(given.values()))


def only_read(records: Iterable[Record]) -> tuple[int, int]:
    """(answers of the assistant that are only read, all of them), of records of one response."""
    earlier = trained = 0
    for record in records:
        if len(record.responses) == 1:
            earlier += len(_answers_in(record.messages))
            trained += 1
    return earlier, earlier + trained
