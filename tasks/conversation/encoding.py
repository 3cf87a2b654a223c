"""Conversations as samples of token ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.records import digest
from pl_pointwise.tasks.language_model.encoded import EncodedResponses

from .records import CONSTRAINED, ROLES, Record


class ConversationDataset(EncodedResponses[Record]):
    """Prompts and responses as token ids, with what is asked of each response.

    Sample i is {"prompt": (P,), "responses": R arrays (T,), "columns": the most responses of a
    sample, "record": the record, "widths": the most responses of each role,
    "rank": its place among the samples of its kind in an order that has nothing to do with the
    file's}.

    Arguments and errors are those of
    :class:`~pl_pointwise.tasks.language_model.encoded.EncodedResponses`.
    """

    def check(self, record: Record, rendered: Sequence[str]) -> None:
        """Refuses a response that would have to be likely and unlikely at once."""
        avoided = {
            text
            for response, text in zip(record.responses, rendered, strict=True)
            if response.role == "avoid"
        }
        for response, text in zip(record.responses, rendered, strict=True):
            if response.role != "avoid" and text in avoided:
                raise DataError(
                    f"{record.where}: the chat template renders a response to avoid and one of "
                    f"role {response.role} alike, so it would have to be likely and unlikely at "
                    "once. Change one, or take out the record."
                )

    @cached_property
    def widths(self) -> dict[str, int]:
        """By role that is a constraint the most responses of a sample; 1 where there are none."""
        return {
            role: max(1, *(record.roles.count(role) for record in self.records))
            for role in CONSTRAINED
        }

    @cached_property
    def kinds(self) -> list[str]:
        """Which requirements each sample has."""
        return [record.kind for record in self.records]

    @cached_property
    def strata(self) -> list[int]:
        """The same as numbers, so that batches are mixed."""
        names = sorted(set(self.kinds))
        return [names.index(kind) for kind in self.kinds]

    @cached_property
    def categories(self) -> list[str]:
        """Each record's category, its kind where it has none."""
        return [record.category for record in self.records]

    @cached_property
    def ranks(self) -> list[int]:
        """Of each sample its place among those of its category, in an order by prompt digests."""
        order = sorted(range(len(self)), key=lambda i: digest("rank", self.records[i].prompt))
        seen: Counter[str] = Counter()
        places = [0] * len(self)
        for position in order:
            category = self.categories[position]
            places[position] = seen[category]
            seen[category] += 1
        return places

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the tokens, their order, and what is asked of each response."""
        asked = [
            [record.objective, [[r.role, r.tolerance, r.relative] for r in record.responses]]
            for record in self.records
        ]
        return digest(super().fingerprint, asked)

    def __getitem__(self, position: int) -> dict[str, Any]:
        return super().__getitem__(position) | {
            "widths": self.widths,
            "rank": self.ranks[position],
        }


def role_number(role: str) -> int:
    """The number that stands for a role in a batch."""
    return ROLES.index(role)
