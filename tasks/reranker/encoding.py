"""Re-ranking records as token ids: pairs or templates, tokenised once, kept in flat arrays."""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from tokenizers import Encoding
from transformers import BatchEncoding, PreTrainedTokenizerBase

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.records import CHUNK, report_skipped

from .records import Record


def split_template(template: str) -> tuple[str, str]:
    """What stands before the query and between query and passage.

    A template names {query}, then ends in {passage}: long inputs are cut at their end, and nothing
    but passage may be lost there. A brace that is text is doubled.

    Raises:
        DataError: any other template.
    """
    texts, fields = [""], []
    try:
        for text, *field in string.Formatter().parse(template):
            texts[-1] += text
            if field[0] is not None:
                fields.append(field)
                texts.append("")
    except ValueError:
        fields = []
    if fields != [["query", "", None], ["passage", "", None]] or texts[2]:
        raise DataError(
            f"template {template!r}: needs {{query}} once, then {{passage}} once and at its end. "
            f'For example "Query: {{query}}\\nPassage: {{passage}}".'
        )
    return texts[0], texts[1]


def encode(
    tokenizer: PreTrainedTokenizerBase,
    queries: Sequence[str],
    passages: Sequence[str],
    *,
    max_length: int,
    template: str | None = None,
) -> BatchEncoding:
    """Token ids of (query, passage) pairs, unpadded: what ``CrossEncoder.predict`` feeds its model.

    Args:
        tokenizer: a fast tokenizer.
        queries: (P,) texts.
        passages: (P,) texts.
        max_length: the most tokens of a pair, special ones included; of longer pairs the longer
            text is cut first.
        template: one text for both, cut at its end, instead of a pair; see ``split_template``.

    Returns:
        The tokenizer's BatchEncoding of P inputs.
    """
    inputs: tuple[list[str], ...] = (list(queries), list(passages))
    if template is not None:
        before, between = split_template(template)
        inputs = ([f"{before}{q}{between}{p}" for q, p in zip(queries, passages, strict=True)],)
    return tokenizer(
        *inputs, truncation="longest_first", max_length=max_length, return_attention_mask=False
    )


def token_lengths(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[int]:
    """Tokens of each text by itself: no special tokens, never cut."""
    if not texts:
        return []
    encoding = tokenizer(
        list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
    )
    return [len(ids) for ids in encoding["input_ids"]]


class RerankerDataset:
    """Records tokenised once, their token ids in flat arrays.

    Row i is {"input_ids": C arrays (T,), "passage_lengths": (C,)}, with "token_type_ids" if the
    tokenizer makes them, and with query_id, query and passages if ``with_text``.

    Args:
        records: in the order of the data set.
        tokenizer: a fast tokenizer.
        max_length: see ``encode``.
        template: see ``encode``.
        name: of the data set, for messages.
        with_text: keep the texts in the rows.
        skip_invalid: leave out records of which a passage has no token in the input, and say how
            many, instead of stopping there.

    Raises:
        DataError: a passage of which no token is left, or no record.
    """

    def __init__(
        self,
        records: Sequence[Record],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        template: str | None = None,
        name: str = "data",
        with_text: bool = False,
        skip_invalid: bool = False,
    ) -> None:
        self.with_text = with_text
        self.records: list[Record] = []
        self._settings = (max_length, template, with_text)
        ids: list[Any] = []
        types: list[Any] = []
        lengths: list[int] = []
        skipped: list[str] = []
        pairs = truncated = 0
        if len(records) > 20 * CHUNK:
            rank_zero_info(f"{name}: tokenising the passages of {len(records):,} queries.")
        for start in range(0, len(records), CHUNK):
            part = records[start : start + CHUNK]
            passages = [passage for record in part for passage in record.passages]
            queries = [record.query for record in part for _ in record.passages]
            own = token_lengths(tokenizer, passages)
            encoding = encode(
                tokenizer, queries, passages, max_length=max_length, template=template
            )
            first = 0
            for record in part:
                mine = range(first, first := first + len(record.passages))
                problem = _lost(encoding, mine, own, record, max_length, template, not with_text)
                if problem is not None:
                    if not skip_invalid:
                        raise DataError(problem)
                    skipped.append(problem)
                    continue
                self.records.append(record)
                pairs += len(mine)
                truncated += sum(bool(encoding.encodings[i].overflowing) for i in mine)
                lengths += own[mine.start : mine.stop]
                ids += [np.asarray(encoding["input_ids"][i], np.int32) for i in mine]
                if "token_type_ids" in encoding:
                    types += [np.asarray(encoding["token_type_ids"][i], np.int8) for i in mine]
        report_skipped(name, skipped, len(self.records))
        if not self.records:
            raise DataError(f"{name}: no usable record. Give at least one.")
        if truncated:
            rank_zero_info(
                f"{name}: {truncated:,} of {pairs:,} pairs are longer than max_length={max_length} "
                f"tokens and were cut."
            )
        self._ids = np.concatenate(ids)
        self._types = np.concatenate(types) if types else None
        self._ends = np.cumsum([0, *map(len, ids)])  # of pairs in the flat arrays
        self._lengths = np.asarray(lengths, np.float32)
        self._pairs = np.cumsum([0, *(len(record.passages) for record in self.records)])

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, position: int) -> dict[str, Any]:
        if not 0 <= position < len(self):
            raise IndexError(f"{position} of {len(self)} records")
        first, last = self._pairs[position : position + 2]
        row: dict[str, Any] = {
            "input_ids": self._cut(self._ids, first, last),
            "passage_lengths": self._lengths[first:last],
        }
        if self._types is not None:
            row["token_type_ids"] = self._cut(self._types, first, last)
        if self.with_text:
            record = self.records[position]
            row["query_id"], row["query"] = record.query_id, record.query
            row["passages"] = list(record.passages)
        return row

    def _cut(self, values: Any, first: int, last: int) -> list[Any]:
        ends = self._ends[first : last + 1]
        return [values[a:b] for a, b in pairwise(ends)]

    def record(self, position: int) -> Record:
        """The texts of a row, for reports."""
        return self.records[position]

    @cached_property
    def units(self) -> list[str]:
        """The query of each sample: samples of one query depend on each other."""
        return [record.unit for record in self.records]

    @cached_property
    def categories(self) -> list[str] | None:
        """The kind of each query, "" where it has none; None where no record tells."""
        known = [record.category for record in self.records]
        return known if any(known) else None

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the texts, their tokens and their order; not of where they were read."""
        digest = hashlib.sha256(json.dumps(self._settings).encode())
        for record in self.records:
            digest.update(json.dumps([record.query_id, record.query, record.passages]).encode())
        for values in (self._ids, self._types, self._ends, self._lengths):
            if values is not None:
                digest.update(np.ascontiguousarray(values).tobytes())
        return digest.hexdigest()


def _lost(
    encoding: BatchEncoding,
    pairs: range,
    lengths: Sequence[int],
    record: Record,
    max_length: int,
    template: str | None,
    labelled: bool,
) -> str | None:
    """What to say if a passage of the record has no token in the input; None if each has one."""
    start = None
    if template is not None:
        before, between = split_template(template)
        start = len(before) + len(record.query) + len(between)
    for number, pair in enumerate(pairs):
        if lengths[pair] == 0:
            problem = "gives no token. Put words in it"
        elif not _keeps_passage(encoding.encodings[pair], start):
            problem = f"is cut away: the query fills max_length={max_length}. Raise max_length"
        else:
            continue
        which = f"number {number + 1}"
        if labelled:
            which = f"negative {number}" if number else "the positive"
        return f'{record.where}: field "passages": {which} {problem}, or take out the record.'
    return None


def _keeps_passage(tokens: Encoding, start: int | None) -> bool:
    """Whether a pair's second text, or a single text from character ``start`` on, has a token."""
    if not tokens.overflowing:
        return True
    if start is None:
        return 1 in tokens.sequence_ids
    return any(end > start for _, end in tokens.offsets)
