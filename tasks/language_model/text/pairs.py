"""Records of preference: a chosen answer, then one or several that were rejected."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pl_pointwise.tasks.common.records import digest

from .records import Record, read_preference, reads_whole

ROLES = ("prefer", "avoid")
"""Of the chosen answer and of the others, in the order that a batch numbers them."""


def grouped(records: Iterable[Record]) -> list[Record]:
    """Records of one prompt and chosen answer as one, where the first stood, rejected ones once."""
    groups: dict[str, Record] = {}
    for record in records:
        key = digest(record.prompt, record.answers[0])
        known = groups.setdefault(key, record)
        new = [
            response
            for response in record.responses[1:]
            if response.answer not in known.answers
        ]
        groups[key] = replace(known, responses=(*known.responses, *new))
    return list(groups.values())


@reads_whole
def parse_pair(row: Any, where: str) -> Record:
    """A row of {"chosen", "rejected"} behind a prompt: the chosen answer, then the rejected one."""
    return of_no_kind(read_preference(row, where))


def of_no_kind(record: Record) -> Record:
    """The record without a category and kind: pairs are all alike, and are not told apart by them.

    Its roles would make "avoid + prefer" of every one.
    """
    return replace(record, given_category="", given_kind="")
