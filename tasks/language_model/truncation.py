"""Prompts that are too long, made shorter so that they keep their meaning.

Tools and system turns are never cut. Whole turns go first, oldest first: an exchange at a time, a
user's turn and all that answers it, and then, behind the last user's turn, a tool call with its
results at a time. So no result stands without its call, and turns keep the order that templates ask
for. If that is not enough, texts lose their beginning where that is asked for: the results of tools
first, oldest first, then the other turns.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
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

    gone: set[int] = set()
    kept: list[Message] = []
    for unit in [[], *_units(record.messages)]:
        gone.update(unit)
        kept = [turn for place, turn in enumerate(record.messages) if place not in gone]
        if fits(kept):
            return kept
    return _with_shorter_texts(kept, fits) if cut else None


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
    places.sort(key=lambda place: (turns[place]["role"] != "tool", place))
    for place in places:
        shortest = _without(turns, place, len(turns[place]["content"]) - 1)
        if fits(shortest):
            break
        turns = shortest
    else:
        return None
    counts = range(1, len(turns[place]["content"]) - 1)
    least = bisect_left(counts, True, key=lambda count: fits(_without(turns, place, count))) + 1
    return _without(turns, place, least)


def _without(turns: Sequence[Message], place: int, count: int) -> list[Message]:
    """The turns, that at ``place`` without its first ``count`` characters."""
    shorter = {**turns[place], "content": turns[place]["content"][max(count, 0) :]}
    return [*turns[:place], shorter, *turns[place + 1 :]]
