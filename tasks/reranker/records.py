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
from pl_pointwise.tasks.common.harmless import is_harmless, texts_in
from pl_pointwise.tasks.common.models import check_known
from pl_pointwise.tasks.common.records import (
    Row,
    bad_field,
    digest,
    field,
    folded,
    from_json,
    json_object,
    kind,
    refused,
    report_skipped,
    shown,
    text_field,
)

from .template import Template, kept_tokens

LISTED = ("passages", "docs", "documents", "candidates")
"""All passages in one list, and which of them is right in another."""
ONE_PASSAGE = ("passage", "document", "doc", "candidate", "answer", "response")
"""One passage a row, or the same lists as of :data:`LISTED`; an "answer" also beside negatives."""
POSITIVE = (
    "pos",
    "positive",
    "positives",
    "positive_passages",
    "positive_ctxs",
    "answer",
)
"""The right ones in a field of their own, the others in fields of :data:`NEGATIVE`."""
NEGATIVE = re.compile(r"(hard_)?neg(ative)?s?(_\d+)?|(hard_)?negative_(passages|ctxs)")
MARKS = ("labels", "label", "relevance", "score", "scores")
"""What says which passages are answers: 0 and 1, or grades; the first that is filled."""
QUERIES = ("query", "anchor", "question")
_TEXTS = ("text", "contents", "content", "passage")
"""Where a passage that is an object has its text; a "title" stands in front of it."""
_SCORES = ("pos_scores", "neg_scores"), ("scores", "score", "teacher_scores")
_UNREAD = ("answer", "answers", "wellFormedAnswers")
"""Texts that may be left unread: MS MARCO's and DPR's answers in words."""
"""What a teacher says of the passages, by kind or in the order in which they are read."""


@dataclass(frozen=True)
class Record:
    """A query and its candidate passages, the positive first; ``category`` is the "query_type".

    instruction: what a template has for it; "" takes the module's.
    """

    query: str
    passages: tuple[str, ...]
    query_id: Any
    where: str
    category: str = ""
    instruction: str = ""

    @property
    def unit(self) -> str:
        """What records of one query have in common, and no others."""
        return str(folded(self.query))

    prompt = unit  # as a split by prompts takes it


def parse_labelled(
    row: Any,
    where: str,
    *,
    negatives: int,
    least: int,
    seed: int = 0,
    relevant_from: float | None = None,
) -> Record:
    """The record of a row, the marked passage first; the others are negatives.

    Of more than ``negatives`` so many are drawn by ``seed`` and the row's own text, whatever the
    rest of the file. A row with fewer than ``least`` is refused, as is one with a text that is not
    read. Labels that are grades mark an answer from ``relevant_from`` on.
    """
    row = json_object(row, where)
    record = parse_candidates(row, where)
    named, grades, marks = _passages(row, where)
    labels = None
    if isinstance(grades, list):
        labels = [relevance(grade, relevant_from) for grade in grades]
    # Grades of 0 to 3, or similarities: from where on one is an answer has to be said.
    if labels is None or None in labels:
        remedy = "Mark the answer with 1 and others with 0"
        if labels is not None:
            remedy += ", or set data.relevant_from to the least grade of an answer"
        raise bad_field(where, marks, "is not a list of 0 and 1", remedy)
    # Two lists side by side that do not belong together.
    if len(labels) != len(named):
        problem = f"has {len(labels)} entries for {len(named)} passages"
        raise bad_field(where, marks, problem, "Give one entry for each passage")
    marked = labels.count(1)
    if marked != 1:
        problem = f"marks {marked or 'no'} passages"
        raise bad_field(
            where, marks, problem, "Mark one; of several answers give a row each"
        )
    texts = record.passages
    right = labels.index(1)
    wrong = [place for place in range(len(texts)) if place != right]
    _check_once(texts, right, [name for name, _ in named], where)
    _check_teacher(row, where, labels)
    # Batches have one shape; a query of few negatives has fewer constraints too.
    if len(wrong) < least:
        problem = (
            f"has {len(wrong)} passages besides the marked one, and {least} are needed"
        )
        unread = sorted(row.unread())
        if unread:
            problem += f" (not read: {', '.join(map(shown, unread))})"
        raise bad_field(where, marks, problem, "Add some, or lower min_negatives")
    _check_unread(row, record, where)
    # By the row's own text, so that other rows do not change the draw.
    if len(wrong) > negatives:
        key = digest(seed, record.query, *texts)
        wrong = sorted(random.Random(key).sample(wrong, negatives))
    return replace(record, passages=tuple(texts[place] for place in (right, *wrong)))


def _check_once(
    texts: Sequence[str], right: int, names: Sequence[str], where: str
) -> None:
    """Refuses a negative that is the right passage again; names: the field of each."""
    for place, text in enumerate(texts):
        # A passage above itself by a margin: no model can do it.
        if place != right and folded(text) == folded(texts[right]):
            problem = f"is {names[right]} again, but for case and spaces"
            raise bad_field(where, names[place], problem, "Take one out")


def parse_candidates(row: Any, where: str) -> Record:
    """A record for prediction: any number of passages in their order, labels ignored."""
    row = json_object(row, where)
    name = next((field_name for field_name in QUERIES if field_name in row), "query")
    query = text_field(field(row, name, where), name, where)
    category = str(row.get("query_type") or "").strip()
    instruction = row.get("instruction") or ""
    # A template has a place for it; "" takes the module's.
    if instruction:
        instruction = text_field(instruction, "instruction", where)
    texts = tuple(_text(text, name, where) for name, text in _passages(row, where)[0])
    return Record(query, texts, row.get("query_id"), where, category, instruction)


def rows_of_one_answer(raw: Any, relevant_from: float | None = None) -> list[Any]:
    """Of a row with several right passages in a field of their own, a row for each of them.

    Of graded labels in a list too. Any other row, a line of JSON among them, as it is.
    """
    try:
        row = from_json(raw) if isinstance(raw, bytes) else raw
    except (ValueError, RecursionError):
        return [raw]  # Whoever reads it says what is wrong.
    if not isinstance(row, dict):
        return [raw]
    form, is_listed = form_of(row)
    # BEIR-like grades in a list: each answer is a sample of its own.
    if is_listed and relevant_from is not None:
        return _rows_of_grades(row, form, relevant_from) or [raw]
    # One answer, marked in the list; or a row that the reader refuses by name.
    if is_listed or not form:
        return [raw]
    right = listed(row[form])
    scores = row.get("pos_scores")
    # A single answer is one sample already.
    if not isinstance(right, list) or len(right) < 2:
        return [raw]
    rows = [{**row, form: [passage]} for passage in right]
    if isinstance(scores, list) and len(scores) == len(right):
        for of_one, score in zip(rows, scores, strict=True):
            of_one["pos_scores"] = [score]
    return rows


def check_together(
    records: Sequence[Record], skip_invalid: bool | None
) -> list[Record]:
    """The records without those that contradict an earlier one of the same query.

    Raises:
        DataError: one does, and it is not to be skipped: it marks a passage that the other has as a
            negative, or the other way round, and both constraints cannot hold.
    """
    # By query and passage the place of the record.
    right = dict[tuple[str, str], str]()
    wrong = dict[tuple[str, str], str]()
    kept = list[Record]()
    problems = list[str]()
    for record in records:
        answer, *negatives = [
            (record.unit, str(folded(text))) for text in record.passages
        ]
        opposite = wrong.get(answer)
        for negative in negatives:
            opposite = opposite or right.get(negative)
        # Rows of two annotators: margins in both directions cannot hold.
        if opposite is not None:
            problem = DataError(
                f"{record.where}: of the same query {opposite} says the opposite: the right "
                "passage of one is a negative of the other. Take it out of one."
            )
            problems.append(refused(problem, skip_invalid))
            continue
        right.setdefault(answer, record.where)
        for negative in negatives:
            wrong.setdefault(negative, record.where)
        kept.append(record)
    if problems:
        report_skipped("rows of one query", problems, len(kept))
    return kept


def _rows_of_grades(
    row: dict[str, Any], form: str, relevant_from: float
) -> list[dict[str, Any]] | None:
    """Of a row with several answers by their grades, a row for each; None where it has not."""
    marks = _marks_of(row)
    texts = listed(row[form])
    grades = listed(row.get(marks))
    if (
        not isinstance(texts, list)
        or not isinstance(grades, list)
        or len(texts) != len(grades)
    ):
        return None
    labels = [relevance(grade, relevant_from) for grade in grades]
    if None in labels or labels.count(1) < 2:
        return None
    rest = {name: value for name, value in row.items() if name not in (form, marks)}
    pairs = list(zip(texts, labels, strict=True))
    wrong = [text for text, label in pairs if not label]
    return [{**rest, "pos": [text], "neg": wrong} for text, label in pairs if label]


def relevance(value: Any, relevant_from: float | None) -> int | None:
    """Whether a label says that a passage is an answer, 1 or 0; None if it does not say.

    0 and 1, also as a text of a CSV file, or true and false; with ``relevant_from`` any number.
    """
    known = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "false": 0, "true": 1}
    # 0 and 1 need no threshold; 2 would be a grade, and is refused.
    if relevant_from is None or isinstance(value, bool):
        return known.get(str(value).lower())
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return None if math.isnan(number) else int(number >= relevant_from)


def _check_unread(row: Row, record: Record, where: str) -> None:
    """Refuses a text, list or object that nobody reads: it may say what the query is about."""
    read = {str(folded(text)) for text in (record.query, *record.passages)}
    for name, value in row.unread().items():
        last = re.sub(r"\[\d+]", "", name).rpartition(".")[2]
        texts = [text for text in texts_in(value) if str(folded(text)) not in read]
        # MS MARCO's answers are written by people, and no passages.
        if last not in _UNREAD and texts and not is_harmless(last, value):
            problem = f"is {shown(value)}, and is not read"
            remedy = f'Write it into the query or passage, or let it pass: data.ignore: ["{last}"]'
            raise bad_field(where, name, problem, remedy)


def _check_teacher(row: Any, where: str, labels: Sequence[int | None]) -> None:
    """Refuses a row whose scores of a teacher put a negative above the right passage."""
    (of_right, of_wrong), together = _SCORES
    best: list[Any] = []
    others: list[Any] = []
    if row.get(of_right) is not None and row.get(of_wrong) is not None:
        name = of_wrong
        if isinstance(row[of_right], list) and isinstance(row[of_wrong], list):
            best = row[of_right]
            others = row[of_wrong]
    else:
        name = next(
            (field for field in together if isinstance(row.get(field), list)),
            together[0],
        )
        scores = row.get(name)
        if not isinstance(scores, list) or len(scores) != len(labels):
            return
        for score, label in zip(scores, labels, strict=True):
            (best if label else others).append(score)
    if not all(isinstance(score, (int, float)) for score in [*best, *others]):
        return
    # A teacher that ranks a negative first says that the mark is wrong.
    if best and others and max(others) > max(best):
        problem = f"has {max(others):g} for a negative, above {max(best):g} of the right passage"
        raise bad_field(where, name, problem, "Take the record or its scores out")


def is_filled(value: Any) -> bool:
    """Whether a field holds something; 0 and false are something."""
    return value is not None and value not in ("", [])


def listed(value: Any) -> Any:
    """A value, or the list that it is as a text of a CSV file."""
    if isinstance(value, str) and value.strip()[:1] == "[":
        try:
            content = from_json(value)
        except ValueError:
            return value
        return content if isinstance(content, list) else value
    return value


def _text(value: Any, name: str, where: str) -> str:
    """A passage's text, of an object behind its title."""
    if isinstance(value, dict):
        key = next((name for name in _TEXTS if name in value), _TEXTS[0])
        text = text_field(field(value, key, where, f"{name}."), f"{name}.{key}", where)
        title = str(value.get("title") or "").strip()
        return f"{title} {text}" if title else text
    return text_field(value, name, where)


def _passages(
    row: dict[str, Any], where: str
) -> tuple[list[tuple[str, Any]], Any, str]:
    """(field, text) of every passage, what is said of them, and in which field.

    docs/reranker.md lists the forms of rows.
    """
    form, is_listed = form_of(row)
    if not form:
        names = ", ".join(map(shown, row))
        raise DataError(
            f'{where}: field "passages" is missing or empty (found: {names}). Add it, or "docs" '
            'with "labels", "pos" with "neg", "positive" with "negative", or of each pair '
            '"passage" with "label"; to predict give all passages of a query in one list.'
        )
    # All passages in one list with marks beside it; else a field of answers and one of negatives.
    if is_listed:
        return _listed_passages(row, form, where)
    named = []
    labels = []
    for name in row:
        if not (name == form or NEGATIVE.fullmatch(name)) or not is_filled(row[name]):
            continue
        passages = listed(row[name])
        if isinstance(passages, str) and passages.strip()[:1] == "[" and form == "pos":
            raise bad_field(where, name, "is a text", "Give a list of texts")
        texts = [(name, passages)]
        if isinstance(passages, list) and passages:
            texts = [(f"{name}[{place}]", text) for place, text in enumerate(passages)]
        named += texts
        labels += [name == form] * len(texts)
    return named, labels, form


def form_of(row: dict[str, Any]) -> tuple[str, bool]:
    """The field with the passages by which a row's form is known, and whether its labels stand in
    another list; ("", False) of none.
    """
    filled = {name: value for name, value in row.items() if is_filled(value)}
    name = next((name for name in LISTED if name in filled), "")
    if name:
        return name, True
    if isinstance(listed(filled.get(_marks_of(row))), list) and not _has_negatives(row):
        for name in (*ONE_PASSAGE, *POSITIVE):
            if isinstance(listed(filled.get(name)), list):
                return name, True
    return next((name for name in POSITIVE if name in filled), ""), False


def _has_negatives(row: dict[str, Any]) -> bool:
    return any(
        NEGATIVE.fullmatch(name) and is_filled(value) for name, value in row.items()
    )


def _marks_of(row: dict[str, Any]) -> str:
    """The field that says which passages of a list are answers."""
    return next((name for name in MARKS if is_filled(dict.get(row, name))), MARKS[0])


def _listed_passages(
    row: dict[str, Any], form: str, where: str
) -> tuple[list[tuple[str, Any]], Any, str]:
    """As :func:`_passages`, of a list of passages with their labels in another one."""
    holder = row
    prefix = ""
    name = form
    marks = _marks_of(row)
    if isinstance(row[form], dict):  # MS MARCO's.
        holder = row[form]
        prefix = f"{form}."
        name = "passage_text"
        marks = "is_selected"
    texts = listed(field(holder, name, where, prefix))
    if not isinstance(texts, list) or not texts:
        problem = "is empty" if texts == [] else f"is {kind(texts)}"
        raise bad_field(where, prefix + name, problem, "Give a list of texts")
    named = [(f"{prefix}{name}[{place}]", text) for place, text in enumerate(texts)]
    return named, listed(holder.get(marks)), prefix + marks


# Tokens ------------------------------------------------------------------------------------------


def token_lengths(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> list[int]:
    """Tokens of each text by itself: no special tokens, never cut."""
    options = {
        "add_special_tokens": False,
        "return_attention_mask": False,
        "verbose": False,
    }
    return (
        [len(ids) for ids in tokenizer(list(texts), **options)["input_ids"]]
        if texts
        else []
    )


@dataclass(frozen=True)
class _Input:
    """The tokens of a pair, their types, and whether it was cut."""

    ids: Any  # (T,)
    types: Any  # (T,)
    cut: bool

    @classmethod
    def of(cls, pair: Any, kept: Sequence[int], cut: bool) -> _Input:
        """Those tokens of an encoding that are kept."""
        places = np.asarray(kept, np.int64)
        ids = np.asarray(pair.ids, np.int32)
        types = np.asarray(pair.type_ids, np.int8)
        return cls(ids[places], types[places], cut)


class NoTokenError(DataError):
    """A passage of which nothing stands in the input."""


class RerankerDataset:
    """Records tokenised once.

    Row i is {"input_ids": C arrays (T,), "passage_lengths": (C,)}, with "token_type_ids" if the
    tokenizer makes them, and with the record's "query_id" for prediction. Of pairs beyond
    ``max_length``, special tokens included, the longer text is cut first; of what a ``template``
    makes of a pair the passage is cut at its end.

    Args:
        instruction: what the template has for a record without one of its own.
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
        instruction: str | None = None,
        rows: float = math.inf,
        name: str = "data",
        skip_invalid: bool | None = None,
    ) -> None:
        self.records: list[Record] = []
        self._rows: list[dict[str, Any]] = []
        self._tokenizer = tokenizer
        self._max_length = max_length
        form = None if template is None else Template.parse(template)
        skipped = list[str]()
        cut = 0
        for record in records:
            lengths = token_lengths(tokenizer, record.passages)
            try:
                inputs = self._inputs(record, form, instruction, lengths)
            except NoTokenError as error:
                skipped.append(refused(error, skip_invalid))
                continue
            check_known(max(int(pair.ids.max()) for pair in inputs), rows, record.where)
            cut += sum(pair.cut for pair in inputs)
            row: dict[str, Any] = {
                "input_ids": [pair.ids for pair in inputs],
                "passage_lengths": np.asarray(lengths, np.float32),
            }
            if "token_type_ids" in tokenizer.model_input_names:
                row["token_type_ids"] = [pair.types for pair in inputs]
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
            rank_zero_info(
                f"{name}: {cut:,} pairs of more than {max_length} tokens were cut."
            )

    def _inputs(
        self,
        record: Record,
        form: Template | None,
        instruction: str | None,
        lengths: Sequence[int],
    ) -> list[_Input]:
        """The input of each passage; NoTokenError where one has no token in it."""
        if record.instruction and not (form and form.instructed):
            raise DataError(
                f'{record.where}: field "instruction" has no place in the input. Put '
                "{instruction} into model.template, or take it out."
            )
        if form is None:
            pairs = self._pairs(record)
        else:
            pairs = self._texts(record, form.filled(record.instruction or instruction))
        inputs = []
        for text, pair, length in zip(record.passages, pairs, lengths, strict=True):
            if length == 0 or pair is None:
                raise NoTokenError(
                    f'{record.where}: field "passages": {shown(text)} gives no token within '
                    f"max_length={self._max_length}. Raise max_length, or take out the record."
                )
            inputs.append(pair)
        return inputs

    def _pairs(self, record: Record) -> list[_Input | None]:
        """Pairs as CrossEncoder.predict feeds them, unpadded; None where no passage is left."""
        limit: dict[str, Any] = {
            "truncation": "longest_first",
            "max_length": self._max_length,
        }
        queries = [record.query] * len(record.passages)
        passages = list(record.passages)
        encoded = self._tokenizer(
            queries, passages, **limit, return_attention_mask=False
        )
        inputs = list[_Input | None]()
        for pair in encoded.encodings or []:
            whole = _Input.of(pair, range(len(pair.ids)), bool(pair.overflowing))
            inputs.append(None if all(end <= 0 for _, end in pair.offsets) else whole)
        return inputs

    def _texts(self, record: Record, template: Template) -> list[_Input | None]:
        """What a template makes of the pairs; None where no passage is left."""
        rendered = [template.render(record.query, text) for text in record.passages]
        texts = [text.text for text in rendered]
        encoded = self._tokenizer(texts, return_attention_mask=False, verbose=False)
        inputs = list[_Input | None]()
        for text, pair in zip(rendered, encoded.encodings or [], strict=True):
            kept = kept_tokens(pair.offsets, text, self._max_length)
            cut = kept is not None and len(kept) < len(pair.ids)
            inputs.append(None if kept is None else _Input.of(pair, kept, cut))
        return inputs

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: int) -> dict[str, Any]:
        return dict(self._rows[position])
