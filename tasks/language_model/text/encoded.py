"""Records tokenised once; one that does not fit is refused, as nothing of it is cut."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.models import check_known
from pl_pointwise.tasks.common.records import CHUNK, digest, refused, report_skipped

from .conversations import ConversationEncoder
from .records import Record


class EncodedResponses:
    """Prompts and responses as token ids.

    Row i is {"prompt": (P,), "responses": R arrays (T,), "columns": the most responses of a row,
    "record": the record, "characters": R counts, "widths": the most responses of each role, "rank":
    its place among the samples of its category}.

    Args:
        records: in the order of the data set.
        encoder: renders and tokenises.
        max_prompt_length, max_length: see :class:`~.data.Preparation`.
        name: of the data set, for messages.
        rows: of the model's embeddings, one a token.
        skip_invalid: leave out a record that cannot be rendered or does not fit, and say how many.
            None is False where the user has no choice.

    Attributes:
        records: those that were kept.
    """

    def __init__(
        self,
        records: Sequence[Record],
        encoder: ConversationEncoder,
        *,
        max_prompt_length: int,
        max_length: int,
        name: str = "data",
        rows: float = math.inf,
        skip_invalid: bool | None = None,
    ) -> None:
        self.records: list[Record] = []
        self._rows: list[dict[str, Any]] = []
        self._limits = max_prompt_length, max_length, rows
        self._skip_invalid = skip_invalid
        skipped: list[str] = []
        for start in range(0, len(records), CHUNK):
            self._encode(records[start : start + CHUNK], encoder, skipped)
        report_skipped(name, skipped, len(self.records))
        self.columns = max(len(record.responses) for record in self.records)

    def _encode(
        self, records: Sequence[Record], encoder: ConversationEncoder, skipped: list[str]
    ) -> None:
        """Adds the records as rows; ``skipped`` takes why others are left out."""
        rendered = []
        for record in records:
            try:
                rendered.append((record, *render(record, encoder)))
            except DataError as error:
                skipped.append(refused(error, self._skip_invalid))
        encoded = encoder.encode([prompt for _, prompt, _ in rendered], [r for *_, r in rendered])
        for (record, _, texts), (ids, tokens) in zip(rendered, encoded, strict=True):
            try:
                self._check_lengths(record.where, ids, tokens)
            except DataError as error:
                skipped.append(refused(error, self._skip_invalid))
                continue
            self.records.append(record)
            row: dict[str, Any] = {"prompt": np.asarray(ids, np.int32)}
            row["responses"] = [np.asarray(each, np.int32) for each in tokens]
            self._rows.append(row | {"characters": [*map(encoder.characters, texts)]})

    def _check_lengths(self, where: str, ids: list[int], tokens: list[list[int]]) -> None:
        prompt_limit, limit, rows = self._limits
        check_known(max(map(max, filter(None, [ids, *tokens]))), rows, where)
        if len(ids) > prompt_limit:
            raise DataError(
                f"{where}: the prompt has {len(ids):,} tokens and does not fit in "
                f"max_prompt_length={prompt_limit:,}. Raise it, or shorten the record."
            )
        longest = max(map(len, tokens), default=1)
        if len(ids) + longest > limit:
            raise DataError(
                f"{where}: a response of {longest:,} tokens does not fit behind a prompt of "
                f"{len(ids):,}: max_length, or the model's positions, are {limit:,}. Raise "
                "max_length as far as these, or shorten the record."
            )

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, position: int) -> dict[str, Any]:
        return {
            **self._rows[position],
            "columns": self.columns,
            "record": self.records[position],
            "widths": self.widths,
            "rank": self.ranks[position],
        }

    def record(self, position: int) -> Record:
        """The texts of a row, for reports."""
        return self.records[position]

    @cached_property
    def units(self) -> list[str]:
        """The prompt of each sample: samples of one prompt depend on each other."""
        return [record.unit for record in self.records]

    @cached_property
    def widths(self) -> dict[str, int]:
        """By role the most responses of a sample."""
        counts = [Counter(record.roles) for record in self.records]
        return {role: max(each[role] for each in counts) for role in set().union(*counts)}

    @cached_property
    def categories(self) -> list[str] | None:
        """Each record's category; None where none has one."""
        found = [record.category for record in self.records]
        return found if any(found) else None

    @cached_property
    def strata(self) -> list[int] | None:
        """Each record's kind as a number, so that batches are mixed; None where none has one."""
        kinds = [record.kind for record in self.records]
        names = sorted(set(kinds))
        return [names.index(kind) for kind in kinds] if any(kinds) else None

    @cached_property
    def ranks(self) -> list[int]:
        """The place of each sample among those of its category, in an order by prompt digests."""
        seen: Counter[str] = Counter()
        places = [0] * len(self)
        for i in sorted(range(len(self)), key=lambda i: digest("rank", self.records[i].prompt)):
            category = self.records[i].category
            places[i] = seen[category]
            seen[category] += 1
        return places

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the tokens, their order, and what is asked of each response."""
        found = hashlib.sha256()
        for row in self._rows:
            for ids in (row["prompt"], *row["responses"]):
                found.update(len(ids).to_bytes(8, "little") + ids.tobytes())
        asked = [
            [each.kind, [[r.role, r.tolerance, r.relative] for r in each.responses]]
            for each in self.records
        ]
        return digest(found.hexdigest(), asked)


def render(record: Record, encoder: ConversationEncoder) -> tuple[str, list[str]]:
    """The prompt and each response as the model reads them."""
    prompt, rendered = encoder.texts(record)
    unlikely = {text for text, opposed in zip(rendered, record.opposed, strict=True) if opposed}
    if unlikely.intersection(t for t, o in zip(rendered, record.opposed, strict=True) if not o):
        raise DataError(
            f"{record.where}: the chat template renders two responses alike, so one would have "
            "to be likely and unlikely at once. Change one, or take out the record."
        )
    return prompt, rendered
