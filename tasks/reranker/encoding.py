"""Re-ranking records as token ids: pairs or templates, tokenised once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from transformers import BatchEncoding, PreTrainedTokenizerBase

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.models import check_known
from pl_pointwise.tasks.common.records import refused, report_skipped, shown

from .records import Record


def split_template(template: str) -> tuple[str, str]:
    """What stands before the query and between query and passage.

    Long inputs are cut at their end, so {passage} ends a template.
    """
    before, _, rest = template.partition("{query}")
    between = rest.removesuffix("{passage}")
    if between == rest or set("{}").intersection(before + between):
        raise DataError(
            f"template {template!r}: needs {{query}} once, then {{passage}} once and at its end, "
            "and no other brace."
        )
    return before, between


def encode(
    tokenizer: PreTrainedTokenizerBase,
    query: str,
    passages: Sequence[str],
    *,
    max_length: int,
    template: str | None = None,
) -> BatchEncoding:
    """Token ids of the query with each passage, unpadded: what ``CrossEncoder.predict`` feeds.

    Of pairs beyond ``max_length``, special tokens included, the longer text is cut first; what a
    ``template`` makes of a pair is cut at its end.
    """
    inputs: tuple[list[str], ...] = ([query] * len(passages), list(passages))
    if template is not None:
        inputs = ([template.format(query=query, passage=passage) for passage in passages],)
    return tokenizer(
        *inputs, truncation="longest_first", max_length=max_length, return_attention_mask=False
    )


def token_lengths(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[int]:
    """Tokens of each text by itself: no special tokens, never cut."""
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    return [len(ids) for ids in tokenizer(list(texts), **options)["input_ids"]] if texts else []


class RerankerDataset:
    """Records tokenised once.

    Row i is {"input_ids": C arrays (T,), "passage_lengths": (C,)}, with "token_type_ids" if the
    tokenizer makes them, and with the record's "query_id" for prediction.

    Args:
        rows: of the model's embeddings, one a token.
        skip_invalid: leave out a record of which a passage has no token in the input, else a
            DataError; see ``refused``.
    """

    def __init__(
        self,
        records: Sequence[Record],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        template: str | None = None,
        rows: float = math.inf,
        name: str = "data",
        skip_invalid: bool | None = None,
    ) -> None:
        self.records: list[Record] = []
        self._rows: list[dict[str, Any]] = []
        skipped, cut = list[str](), 0
        for record in records:
            query, passages = record.query, record.passages
            found = encode(tokenizer, query, passages, max_length=max_length, template=template)
            pairs, lengths = found.encodings or [], token_lengths(tokenizer, passages)
            start = 0 if template is None else len(template.format(query=query, passage=""))
            lost = [
                text
                for text, pair, length in zip(passages, pairs, lengths, strict=True)
                if length == 0 or all(end <= start for _, end in pair.offsets)
            ]
            if lost:
                problem = DataError(
                    f'{record.where}: field "passages": {shown(lost[0])} gives no token within '
                    f"max_length={max_length}. Raise max_length, or take out the record."
                )
                skipped.append(refused(problem, skip_invalid))
                continue
            check_known(max(max(pair.ids) for pair in pairs), rows, record.where)
            cut += sum(bool(pair.overflowing) for pair in pairs)
            row: dict[str, Any] = {
                "input_ids": [np.asarray(pair.ids, np.int32) for pair in pairs],
                "passage_lengths": np.asarray(lengths, np.float32),
            }
            if "token_type_ids" in found:
                row["token_type_ids"] = [np.asarray(pair.type_ids, np.int8) for pair in pairs]
            if name == "predict":
                row["query_id"] = record.query_id
            self.records.append(record)
            self._rows.append(row)
        report_skipped(name, skipped, len(self.records))
        # Samples of one query depend on each other.
        self.units = [record.unit for record in self.records]
        kinds = [record.category for record in self.records]
        self.categories = kinds if any(kinds) else None
        if cut:
            rank_zero_info(f"{name}: {cut:,} pairs of more than {max_length} tokens were cut.")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: int) -> dict[str, Any]:
        return dict(self._rows[position])
