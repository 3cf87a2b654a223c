"""Prompts that are too long, shortened by their earliest turns.

The system's turns and the tools stay; what is left begins with a turn of the user, so that no
result of a tool stands without its call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .records import Record


def shortened(
    record: Record, fits: Callable[[Record], bool]
) -> tuple[Record, int] | None:
    """The longest end of the conversation that fits, and how many turns went; None if none does.

    fits: of a record with fewer turns; of two ends the shorter fits if the longer one does.
    """
    turns = record.messages
    of_user = [place for place, turn in enumerate(turns) if turn["role"] == "user"]
    starts = of_user[1:]  # At the first nothing would be cut off.

    def end(start: int) -> Record:
        kept = [
            turn for turn in turns[:start] if turn["role"] in ("system", "developer")
        ]
        # Its unit stays that of the whole conversation, by which the splits were made.
        return replace(record, messages=[*kept, *turns[start:]], given_unit=record.unit)

    low = 0  # The first of ``starts`` that fits is here in the end.
    high = len(starts)
    while low < high:
        middle = (low + high) // 2
        if fits(end(starts[middle])):
            high = middle
        else:
            low = middle + 1
    if low == len(starts):
        return None
    longest = end(starts[low])
    return longest, len(turns) - len(longest.messages)
