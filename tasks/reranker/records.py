"""A re-ranking record: a query, the passage that answers it, and passages that do not."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from typing import Any

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.records import (
    bad_field,
    digest,
    field,
    folded,
    json_object,
    kind,
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
