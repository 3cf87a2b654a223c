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


class SafetyDataset(EncodedResponses[Record]):
    """Prompts and responses as token ids, with what each is.

    Sample i is {"prompt": (P,), "responses": R arrays (T,), "roles": what each response is,
    "columns": the most responses of a sample, "unsafe": bool, "text": what the user says,
    "preceding": how many samples of the same kind stand before, "holds": which kinds the data set
    has}.

    Arguments and errors are those of
    :class:`~pl_pointwise.tasks.language_model.encoded.EncodedResponses`.
    """

    @cached_property
    def preceding(self) -> list[int]:
        """Of each sample, how many of its kind come before it, its categories in turn."""
        return stratified_ranks(self.strata, self.categories)

    @cached_property
    def holds(self) -> dict[str, bool]:
        """Which kinds there are: unsafe and benign prompts, helpful answers."""
        return {
            "unsafe": 1 in self.strata,
            "benign": 0 in self.strata,
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
        """1 for an unsafe prompt, 0 for a benign one, of each sample."""
        return [int(record.unsafe) for record in self.records]

    @cached_property
    def categories(self) -> list[str]:
        """Of each sample the category of BeaverTails, else "unsafe" or "benign"."""
        return [
            record.category or ("unsafe" if record.unsafe else "benign") for record in self.records
        ]

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
            "text": record.text,
            "preceding": self.preceding[position],
            "holds": self.holds,
        }
