"""Prompts that are too long, shortened by their earliest turns.

The system's turns and the tools stay; what is left begins with a turn of the user, so that no
result of a tool stands without its call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .records import Record


def shortened(record: Record, fits: Callable[[Record], bool]) -> tuple[Record, int] | None:
    """The longest end of the conversation that fits, and how many turns went; None if none does.

    fits: of a record with fewer turns; of two ends the shorter fits if the longer one does.
    """
    turns = record.messages
    starts = [i for i, turn in enumerate(turns) if turn["role"] == "user"][1:]

    def end(start: int) -> Record:
        kept = [turn for turn in turns[:start] if turn["role"] in ("system", "developer")]
        # Its unit stays that of the whole conversation, by which the splits were made.
        return replace(record, messages=[*kept, *turns[start:]], given_unit=record.unit)

    low, high = 0, len(starts)  # The first of ``starts`` that fits is at ``low`` in the end.
    while low < high:
        middle = (low + high) // 2
        if fits(end(starts[middle])):
            high = middle
        else:
            low = middle + 1
    if low == len(starts):
        return None
    found = end(starts[low])
    return found, len(turns) - len(found.messages)
