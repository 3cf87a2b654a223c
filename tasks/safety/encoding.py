"""Safety records as rows of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.records import digest
from pl_pointwise.tasks.common.splits import stratified_ranks
from pl_pointwise.tasks.language_model.encoded import EncodedResponses

from .records import HELPFUL, Record

ALPACA_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}### Response:
{{ message.content }}{{ eos_token }}{% else %}Below is an instruction that describes a task. \
Write a response that appropriately completes the request.

### Instruction:
{{ message.content }}

{% endif %}{% endfor %}{% if add_generation_prompt %}### Response:
{% endif %}"""
"""Alpaca's prompt as a chat template, for a base model whose tokenizer brings none."""

KINDS = ("benign", "unsafe", "borderline")
"""The kinds of prompts."""


class SafetyDataset(EncodedResponses[Record]):
    """Prompts and responses as token ids, with what each is.

    Sample i is {"prompt": (P,), "responses": R arrays (T,), "roles": what each response is,
    "columns": the most responses of a sample, "unsafe" and "borderline": bool, "text": what the
    user says, "kind": one of :data:`KINDS`, "category": see ``categories``, "preceding": how many
    samples of the same kind stand before}.

    Arguments and errors are those of
    :class:`~pl_pointwise.tasks.language_model.encoded.EncodedResponses`.
    """

    @cached_property
    def preceding(self) -> list[int]:
        """Of each sample, how many of its kind come before it, its categories in turn."""
        return stratified_ranks(self.strata, self.categories)

    @cached_property
    def holds(self) -> dict[str, bool]:
        """Which kinds there are: unsafe, benign and borderline prompts, helpful answers."""
        return {
            **{kind: number in self.strata for number, kind in enumerate(KINDS)},
            "answers": any(HELPFUL in record.roles for record in self.records),
        }

    def check(self, record: Record, rendered: Sequence[str]) -> None:
        if len(set(rendered)) < len(rendered):
            raise DataError(
                f"{record.where}: two responses are rendered alike, so one would have to be likely "
                "and unlikely at once. Change the record or the refusal, or take the record out."
            )

    @cached_property
    def strata(self) -> list[int]:
        """Of each sample the position of its kind in :data:`KINDS`."""
        return [KINDS.index(record.kind) for record in self.records]

    @cached_property
    def categories(self) -> list[str]:
        """Of each sample BeaverTails' category or XSTest's type, else its kind."""
        return [record.category or record.kind for record in self.records]

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the tokens, their order, and what each response is."""
        return digest(super().fingerprint, self.strata, [record.roles for record in self.records])

    def __getitem__(self, position: int) -> dict[str, Any]:
        row = super().__getitem__(position)
        record = self.records[position]
        return row | {
            "roles": record.roles,
            "unsafe": record.unsafe,
            "borderline": record.borderline,
            "text": record.text,
            "kind": record.kind,
            "category": self.categories[position],
            "preceding": self.preceding[position],
        }
