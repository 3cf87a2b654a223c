"""A re-ranking record: a query, the passage that answers it, and passages that do not."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from pl_pointwise.tasks.common.records import (
    bad_field,
    digest,
    field,
    folded,
    json_object,
    kind,
    text_field,
)


@dataclass(frozen=True)
class Record:
    """A query and its candidate passages, the positive first; ``category`` is the "query_type"."""

    query: str
    passages: tuple[str, ...]
    query_id: str | int | None
    where: str
    category: str = ""

    @property
    def unit(self) -> str:
        """What records of one query have in common, and no others."""
        return str(folded(self.query))

    prompt = unit  # as a split by prompts takes it


def parse_labelled(row: Any, where: str, *, negatives: int, least: int, seed: int = 0) -> Record:
    """A record of the schema of ``microsoft/ms_marco``, the positive put first.

    Of more than ``negatives`` so many are drawn by ``seed`` and the row's own text, whatever the
    rest of the file; fewer than ``least`` are refused.
    """
    record = parse_candidates(row, where)
    texts, name = record.passages, "passages.is_selected"
    if not isinstance(row["passages"], dict):
        raise bad_field(where, "passages", "is a list", "Give {is_selected, passage_text}")
    selected = field(row["passages"], "is_selected", where, "passages.")
    if not isinstance(selected, list) or any(value not in (0, 1) for value in selected):
        raise bad_field(where, name, "is not a list of 0 and 1", "Mark the answer with 1")
    if len(selected) != len(texts):
        problem = f"has {len(selected)} entries for {len(texts)} passages"
        raise bad_field(where, name, problem, "Give one entry for each passage")
    if sum(selected) != 1:
        problem = f"marks {sum(selected) or 'no'} passages"
        raise bad_field(where, name, problem, "Mark exactly one passage with 1")
    wrong = [text for text, mark in zip(texts, selected, strict=True) if not mark]
    if len(wrong) < least:
        problem = f"has {len(wrong)} passages besides the marked one, and {least} are needed"
        raise bad_field(where, "passages.passage_text", problem, "Add some, or lower min_negatives")
    if len(wrong) > negatives:
        key = digest(seed, record.query, *texts)
        wrong = [wrong[i] for i in sorted(random.Random(key).sample(range(len(wrong)), negatives))]
    return replace(record, passages=(texts[selected.index(1)], *wrong))


def parse_candidates(row: Any, where: str) -> Record:
    """A record for prediction: {"query", "passages"}, any number in their order, labels ignored."""
    row = json_object(row, where)
    query = text_field(field(row, "query", where), "query", where)
    query_id, category = row.get("query_id"), row.get("query_type") or ""
    if isinstance(query_id, bool) or not isinstance(query_id, (str, int, type(None))):
        raise bad_field(where, "query_id", f"is {kind(query_id)}", "Give an integer or a text")
    if not isinstance(category, str):
        raise bad_field(where, "query_type", f"is {kind(category)}", "Give a text, or leave it out")
    passages, name = field(row, "passages", where), "passages"
    if isinstance(passages, dict):
        passages, name = field(passages, "passage_text", where, "passages."), f"{name}.passage_text"
    if not isinstance(passages, list):
        raise bad_field(where, name, f"is {kind(passages)}", "Give a list of texts")
    if not passages:
        raise bad_field(where, name, "is empty", "Give at least one passage")
    texts = [text_field(text, f"{name}[{i}]", where) for i, text in enumerate(passages)]
    return Record(query, tuple(texts), query_id, where, category.strip())
