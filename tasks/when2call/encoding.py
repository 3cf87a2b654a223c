"""When2Call records as rows of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.language_model.conversations import ConversationEncoder
from pl_pointwise.tasks.language_model.encoded import EncodedResponses

from .records import Record

Kind = Literal["preference", "choice", "question"]


class ResponseDataset(EncodedResponses[Record]):
    """Prompts and responses as token ids, with the behaviour of each response.

    Row i is {"prompt": (P,), "responses": R arrays (T,), "choices": R categories, "characters": R
    counts, "has_tools": bool, "columns": the most responses of a row}, with "gold", the category
    of response 0, in a data set of choices.

    The other arguments, and errors, are those of
    :class:`~pl_pointwise.tasks.language_model.encoded.EncodedResponses`.

    Args:
        kind: "preference": response 0 is chosen, the others rejected; "choice": response 0 is the
            right choice among categories; "question": there may be responses to choose from.
    """

    def __init__(
        self,
        records: Sequence[Record],
        encoder: ConversationEncoder,
        *,
        kind: Kind = "preference",
        **limits: Any,
    ) -> None:
        self.kind = kind
        super().__init__(records, encoder, **limits)

    @property
    def categories(self) -> list[str] | None:
        """The behaviour of each sample's right answer; None where no record tells."""
        known = [] if self.kind == "question" else [record.category for record in self.records]
        return known if any(known) else None

    def check(self, record: Record, rendered: Sequence[str]) -> None:
        if self.kind == "preference" and rendered[0] in rendered[1:]:
            raise DataError(
                f"{record.where}: the chat template renders the chosen answer and a rejected one "
                "alike. Change one, or take out the record."
            )

    def __getitem__(self, position: int) -> dict[str, Any]:
        row = super().__getitem__(position)
        first, last = self.span(position)
        record = self.records[position]
        row |= {
            "choices": record.choices,
            "characters": self.characters[first:last],
            "has_tools": bool(record.tools),
        }
        if self.kind == "choice":
            row["gold"] = record.choices[0]
        return row
