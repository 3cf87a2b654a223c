"""Re-ranking records: a query, the passage that answers it, others that do not; their tokens."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from transformers import PreTrainedTokenizerBase

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.models import check_known
from pl_pointwise.tasks.common.records import (
    bad_field,
    digest,
    field,
    folded,
    json_object,
    kind,
    refused,
    report_skipped,
    shown,
    text_field,
)

FORMS = ("passages", "docs", "pos", "positive")
"""The fields by which the form of a row is known."""
_NEGATIVE = re.compile(r"neg|negatives?|negative_\d+")


@dataclass(frozen=True)
class Record:
    """A query and its candidate passages, the positive first; ``category`` is the "query_type"."""

    query: str
    passages: tuple[str, ...]
    query_id: Any
    where: str
    category: str = ""

    @property
    def unit(self) -> str:
        """What records of one query have in common, and no others."""
        return str(folded(self.query))

    prompt = unit  # as a split by prompts takes it


def parse_labelled(row: Any, where: str, *, negatives: int, least: int, seed: int = 0) -> Record:
    """The record of a row, the marked passage first; the others are negatives.

    Of more than ``negatives`` so many are drawn by ``seed`` and the row's own text, whatever the
    rest of the file. A row with fewer than ``least`` is refused.
    """
    record = parse_candidates(row, where)
    named, labels, marks = _passages(row, where)
    if not isinstance(labels, list) or any(label not in (0, 1) for label in labels):
        remedy = "Mark the answer with 1 and others with 0"
        raise bad_field(where, marks, "is not a list of 0 and 1", remedy)
    if len(labels) != len(named):
        problem = f"has {len(labels)} entries for {len(named)} passages"
        raise bad_field(where, marks, problem, "Give one entry for each passage")
    if sum(labels) != 1:
        problem = f"marks {sum(labels) or 'no'} passages"
        raise bad_field(where, marks, problem, "Mark one; of several answers give a row each")
    texts, right = record.passages, labels.index(1)
    wrong = [place for place in range(len(texts)) if place != right]
    for place in wrong:
        if folded(texts[place]) == folded(texts[right]):
            problem = f"is {named[right][0]} again, but for case and spaces"
            raise bad_field(where, named[place][0], problem, "Take one out")
    if len(wrong) < least:
        problem = f"has {len(wrong)} passages besides the marked one, and {least} are needed"
        raise bad_field(where, marks, problem, "Add some, or lower min_negatives")
    if len(wrong) > negatives:
        key = digest(seed, record.query, *texts)
        wrong = sorted(random.Random(key).sample(wrong, negatives))
    return replace(record, passages=tuple(texts[place] for place in (right, *wrong)))


def parse_candidates(row: Any, where: str) -> Record:
    """A record for prediction: any number of passages in their order, labels ignored."""
    row = json_object(row, where)
    name = "anchor" if "query" not in row and "anchor" in row else "query"
    query = text_field(field(row, name, where), name, where)
    category = str(row.get("query_type") or "").strip()
    texts = tuple(text_field(text, name, where) for name, text in _passages(row, where)[0])
    return Record(query, texts, row.get("query_id"), where, category)


def _passages(row: dict[str, Any], where: str) -> tuple[list[tuple[str, Any]], Any, str]:
    """(field, text) of every passage, what is said of them, and in which field.

    By the first of FORMS that the row has; docs/reranker.md lists them.
    """
    form = next((name for name in FORMS if row.get(name) not in (None, "", [])), None)
    if form is None:
        names = ", ".join(map(shown, row))
        raise DataError(
            f'{where}: field "passages" is missing or empty (found: {names}). Add it, or "docs" '
            'with "labels", "pos" with "neg", or "positive" with "negative".'
        )
    if form in ("passages", "docs"):
        inside = isinstance(row[form], dict)
        holder, prefix = (row[form], f"{form}.") if inside else (row, "")
        name, marks = ("passage_text", "is_selected") if inside else (form, "labels")
        texts = field(holder, name, where, prefix)
        if not isinstance(texts, list) or not texts:
            problem = "is empty" if texts == [] else f"is {kind(texts)}"
            raise bad_field(where, prefix + name, problem, "Give a list of texts")
        named = [(f"{prefix}{name}[{i}]", text) for i, text in enumerate(texts)]
        return named, holder.get(marks), prefix + marks
    named, labels = [], []
    for name in row:
        if (name == form or _NEGATIVE.fullmatch(name)) and row[name] not in (None, "", []):
            several = enumerate(row[name]) if isinstance(row[name], list) else ()
            texts = [(f"{name}[{i}]", text) for i, text in several] or [(name, row[name])]
            named += texts
            if form == "pos" and str(row[name])[:1] == "[" and isinstance(row[name], str):
                raise bad_field(where, name, "is a text", "Give a list of texts")
            labels += [int(name == form)] * len(texts)
    return named, labels, form


# Tokens ------------------------------------------------------------------------------------------


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


def token_lengths(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[int]:
    """Tokens of each text by itself: no special tokens, never cut."""
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    return [len(ids) for ids in tokenizer(list(texts), **options)["input_ids"]] if texts else []


class RerankerDataset:
    """Records tokenised once.

    Row i is {"input_ids": C arrays (T,), "passage_lengths": (C,)}, with "token_type_ids" if the
    tokenizer makes them, and with the record's "query_id" for prediction. Of pairs beyond
    ``max_length``, special tokens included, the longer text is cut first; what a ``template`` makes
    of a pair is cut at its end.

    Args:
        rows: of the model's embeddings, one a token.
        skip_invalid: leave out a record of which a passage has no token in the input, else a
            DataError; see ``refused``.
    """

    units_are_content = True  # Not names that somebody gave.

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
            inputs: tuple[list[str], ...] = ([query] * len(passages), list(passages))
            if template is not None:
                inputs = ([template.format(query=query, passage=text) for text in passages],)
            # What CrossEncoder.predict feeds, unpadded.
            limit: dict[str, Any] = {"truncation": "longest_first", "max_length": max_length}
            found = tokenizer(*inputs, **limit, return_attention_mask=False)
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
