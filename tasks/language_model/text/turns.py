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
    split: list[Record] = []
    for record in records:
        # A pair's earlier turns are of both answers.
        if len(record.responses) == 1 and record.responses[0].answer is not None:
            split += _records_of_turns(record)
        else:
            split.append(record)
    return split


def _records_of_turns(record: Record) -> list[Record]:
    """The earlier turns of the assistant that are trained on, then the last one."""
    places = _answers_in(record.messages)
    asked = record.asked
    if len(asked) != len(places) + 1:  # The file says nothing of them.
        asked = (None,) * (len(places) + 1)
    records = []
    for place, wanted in zip(places, asked, strict=False):
        # None, where a file says nothing, is trained on: turns: all asks for it.
        if wanted is not False:
            answer = answer_of(record.messages[place])
            earlier = replace(
                record,
                messages=record.messages[:place],
                responses=(replace(record.responses[0], answer=answer),),
                where=f"{record.where}, messages[{place}]",
                given_unit=record.unit,
            )
            records.append(earlier)
    if asked[-1] is not False:
        records.append(
            replace(record, given_unit=record.unit if places else record.given_unit)
        )
    return [split for split in records if split.messages]


def _answers_in(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The places of the assistant's turns that have something in front of them."""
    return [i for i, turn in enumerate(messages) if i and turn["role"] == "assistant"]


def answer_of(turn: Mapping[str, Any]) -> Answer:
    """A turn of the assistant as an answer."""
    parts = {
        key: turn[key] for key in ("content", "reasoning_content") if turn.get(key)
    }
    calls = turn.get("tool_calls")
    if calls:
        parts["tool_calls"] = [call["function"] for call in calls]
    return parts if len(parts) > 1 else next(iter(parts.values()))


def only_read(records: Iterable[Record]) -> tuple[int, int]:
    """(answers of the assistant that are only read, all of them), of records of one response."""
    earlier = 0
    trained = 0
    for record in records:
        if len(record.responses) == 1:
            earlier += len(_answers_in(record.messages))
            trained += 1
    return earlier, earlier + trained
