"""Prompts that are too long, made shorter so that they keep their meaning.

Tools and system turns are never cut. Whole turns go first, oldest first: an exchange at a time, a
user's turn and all that answers it, and then, behind the last user's turn, a tool call with its
results at a time. So no result stands without its call, and turns keep the order that templates ask
for.
"""

from __future__ import annotations

from collections.abc import Sequence

from pl_pointwise.errors import DataError

from .conversations import ConversationEncoder
from .messages import Message
from .records import Record

_KEPT = ("system", "developer")


def fit_prompt(
    encoder: ConversationEncoder, record: Record, limit: int
) -> Sequence[Message] | None:
    """A record's conversation, shortened to a prompt of ``limit`` tokens; None if it cannot."""

    def fits(turns: Sequence[Message]) -> bool:
        try:
            prompt = encoder.prompt(turns, record.tools, record.where, record.answers)
        except DataError:  # the template does not take it without those turns
            return False
        return len(encoder.encode([prompt], [[]])[0][0]) <= limit

    gone: set[int] = set()
    for unit in [[], *_units(record.messages)]:
        gone.update(unit)
        kept = [turn for place, turn in enumerate(record.messages) if place not in gone]
        if fits(kept):
            return kept
    return None


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
