"""A re-ranking record: a query, the passage that answers it, and passages that do not."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from pl_pointwise.errors import DataError
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
"""The fields that say in which form a row holds its passages."""
_NEGATIVE = re.compile(r"neg|negatives?|negative_\d+")
UNREAD = ("prompt", "scores", "pos_scores", "neg_scores")


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
    """The one record of a row with one positive, see :func:`parse_positives`."""
    records = parse_positives(row, where, negatives=negatives, least=least, seed=seed)
    if len(records) > 1:
        name = _passages(row, where)[2]
        problem = f"marks {len(records)} passages"
        raise bad_field(where, name, problem, "Mark exactly one passage with 1, or read it as file")
    return records[0]


def parse_positives(
    row: Any, where: str, *, negatives: int, least: int, seed: int = 0
) -> list[Record]:
    """A record for each passage of a higher grade than others, put first; the others are negatives.

    Of more than ``negatives`` so many are drawn by ``seed`` and the row's own text, whatever the
    rest of the file. A passage with fewer than ``least`` is no positive; a row without one is
    refused.
    """
    record = parse_candidates(row, where)
    named, grades, marks = _passages(row, where)
    if not isinstance(grades, list) or not all(map(_is_grade, grades)):
        remedy = "Mark the answer with 1 and others with 0, or give grades"
        raise bad_field(where, marks, "is not a list of 0 and 1, or of grades", remedy)
    texts = dict(enumerate(record.passages))
    if len(grades) != len(texts):
        problem = f"has {len(grades)} entries for {len(texts)} passages"
        raise bad_field(where, marks, problem, "Give one entry for each passage")
    if not any(grades):
        raise bad_field(where, marks, "marks no passages", "Mark the answer with 1")
    lower = {i: [j for j in texts if grades[j] < grades[i]] for i in texts}
    twins = {i: folded(text) for i, text in texts.items()}
    for first, second in [(i, j) for i in texts for j in lower[i] if twins[i] == twins[j]]:
        problem = f"is {named[first][0]} again, but for case and spaces, with another mark"
        raise bad_field(where, named[second][0], problem, "Take one out")
    if (most := max(map(len, lower.values()))) < least:
        problem = f"has {most} passages besides the marked one, and {least} are needed"
        raise bad_field(where, marks, problem, "Add some, or lower min_negatives")
    key, records = digest(seed, record.query, *record.passages), []
    for i, wrong in lower.items():
        if len(wrong) > negatives:
            wrong = sorted(random.Random(key).sample(wrong, negatives))
        if len(wrong) >= least:
            records.append(replace(record, passages=tuple(texts[j] for j in (i, *wrong))))
    return records


def parse_candidates(row: Any, where: str) -> Record:
    """A record for prediction: any number of passages in their order, labels ignored."""
    row = json_object(row, where)
    name = "anchor" if "query" not in row and "anchor" in row else "query"
    query = _text(field(row, name, where), name, where)
    query_id, category = row.get("query_id"), row.get("query_type") or ""
    if isinstance(query_id, bool) or not isinstance(query_id, (str, int, type(None))):
        raise bad_field(where, "query_id", f"is {kind(query_id)}", "Give an integer or a text")
    if not isinstance(category, str):
        raise bad_field(where, "query_type", f"is {kind(category)}", "Give a text, or leave it out")
    named = _passages(row, where)[0]
    if not named:
        raise bad_field(where, _form(row, where), "is empty", "Give at least one passage")
    texts = tuple(_text(text, name, where) for name, text in named)
    if unread := [name for name in UNREAD if row.get(name)]:  # Said once.
        rank_zero_warn(f"The re-ranker does not read the records' {', '.join(unread)}.")
    return Record(query, texts, query_id, where, category.strip())


def without_contradictions(
    records: Sequence[Record], source: str, skip_invalid: bool
) -> list[Record]:
    """Those that do not ask for two passages of a query in the order reverse to an earlier one."""
    units = [record.unit for record in records]
    count, asked = Counter(units), dict[str, str]()
    kept, problems = list[Record](), list[str]()
    for record, unit in zip(records, units, strict=True):
        first, *others = map(folded, record.passages) if count[unit] > 1 else ("",)
        reverse = [key for other in others if (key := digest(unit, other, first)) in asked]
        if reverse:
            error = DataError(
                f"{record.where}: {shown(record.passages[0])} is above a passage that is above it "
                f"for the same query in {asked[reverse[0]]}. Take one of the two out."
            )
            problems.append(refused(error, skip_invalid))
            continue
        asked.update((digest(unit, first, other), record.where) for other in others)
        kept.append(record)
    report_skipped(source, problems, len(kept))
    return kept


def _form(row: dict[str, Any], where: str) -> str:
    """The field by which a row's form is known; docs/reranker.md lists them."""
    found = [name for name in FORMS if row.get(name) is not None]
    if not found:
        names = ", ".join(map(shown, row))
        raise DataError(
            f'{where}: field "passages" is missing (found: {names}). Add it, or "docs" with '
            '"labels", "pos" with "neg", or "positive" with "negative".'
        )
    if len(found) > 1:
        raise bad_field(where, found[1], f'stands beside "{found[0]}"', "Leave one of the two")
    return found[0]


def _passages(row: dict[str, Any], where: str) -> tuple[list[tuple[str, Any]], Any, str]:
    """(field, text) of every passage, what is said of them, and in which field."""
    form = _form(row, where)
    held = row[form]
    if form in ("passages", "docs"):
        name, marks, said = form, row.get("labels"), "labels"
        if isinstance(held, dict):
            name, marks, said = (
                f"{form}.passage_text",
                held.get("is_selected"),
                f"{form}.is_selected",
            )
            held = field(held, "passage_text", where, f"{form}.")
        if not isinstance(held, list):
            raise bad_field(where, name, f"is {kind(held)}", "Give a list of texts")
        return [(f"{name}[{i}]", text) for i, text in enumerate(held)], marks, said
    named, grades = [], []
    for name, value in row.items():
        if (name == form or _NEGATIVE.fullmatch(name)) and value not in (None, ""):
            listed = isinstance(value, list)
            texts = value if listed else [value]
            named += [(f"{name}[{i}]" if listed else name, text) for i, text in enumerate(texts)]
            grades += [int(name == form)] * len(texts)
    return named, grades, form


def _is_grade(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value >= 0


def _text(value: Any, name: str, where: str) -> str:
    try:
        text_field(value, name, where).encode()
    except UnicodeEncodeError as error:
        problem = f"holds half of a character, {value[error.start : error.end]!r}"
        raise bad_field(where, name, problem, "Write it whole, in UTF-8") from error
    return str(value)
