"""Prompts that are too long, made shorter so that they keep their meaning.

Tools and system turns are never cut. What goes first are whole turns, oldest first: an exchange at
a time, which is a user's turn and all that answers it, and then, behind the last user's turn, a
tool call with its results at a time. So no result stands without its call, and a template that asks
for turns in their order still gets them. Only if that does not fit, and only if it is asked for,
texts lose their beginning: the results of tools first, oldest first, then the other turns.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from pl_pointwise.errors import DataError

from .conversations import ConversationEncoder
from .messages import Message
from .records import Record

TooLong = Literal["error", "skip", "cut"]

_KEPT = ("system", "developer")


def fit_prompt(
    encoder: ConversationEncoder, record: Record, limit: int, *, cut: bool = True
) -> list[Message] | None:
    """A record's conversation, shortened until its prompt has at most ``limit`` tokens.

    cut: whether texts may lose their beginning.
    Returns: the messages, or None if they do not fit.
    """

    def fits(turns: Sequence[Message]) -> bool:
        try:
            prompt = encoder.prompt(turns, record.tools, record.where, record.answers)
        except DataError:  # the template does not take it without those turns
            return False
        return len(encoder.encode([prompt], [[]])[0][0]) <= limit

    kept: list[Message] = list(record.messages)
    if fits(kept):
        return kept
    for kept in _with_fewer_turns(record.messages):
        if fits(kept):
            return kept
    return _with_shorter_texts(kept, fits) if cut else None


def _with_fewer_turns(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """The conversation with one unit less each time, oldest first; see the head of this module."""
    gone: set[int] = set()
    for unit in _units(messages):
        gone.update(unit)
        yield [message for place, message in enumerate(messages) if place not in gone]


def _units(messages: Sequence[Message]) -> list[list[int]]:
    """Positions of the turns that can go, those that go together in one list."""
    roles = [message["role"] for message in messages]
    last_user = max((place for place, role in enumerate(roles) if role == "user"), default=-1)
    units: list[list[int]] = []
    for place, role in enumerate(roles):
        if role in _KEPT or place == last_user:
            continue
        # Before the last user's turn an exchange begins with its user, behind it with a call.
        begins = role == ("user" if place < last_user else "assistant")
        if begins or not units or (units[-1][-1] < last_user < place):
            units.append([])
        units[-1].append(place)
    # What is answered stays: the last call and its results where the last turn is a tool's.
    if units and units[-1][-1] > last_user:
        units.pop()
    return units


def _with_shorter_texts(
    messages: Sequence[Message], fits: Callable[[Sequence[Message]], bool]
) -> list[Message] | None:
    """The conversation without the beginnings of texts, None if that is not enough."""
    turns = list(messages)
    places = [place for place, turn in enumerate(turns) if turn["role"] not in _KEPT]
    for place in sorted(places, key=lambda place: (turns[place]["role"] != "tool", place)):
        text = turns[place]["content"]
        if len(text) < 2:
            continue
        most = len(text) - 1
        if fits(_without(turns, place, most)):
            counts = range(1, most)

            def enough(count: int, turns: list[Message] = turns, place: int = place) -> bool:
                return fits(_without(turns, place, count))

            return _without(turns, place, bisect_left(counts, True, key=enough) + 1)
        turns = _without(turns, place, most)
    return None


def _without(turns: Sequence[Message], place: int, count: int) -> list[Message]:
    """The turns, that at ``place`` without its first ``count`` characters."""
    shorter = {**turns[place], "content": turns[place]["content"][count:]}
    return [*turns[:place], shorter, *turns[place + 1 :]]
