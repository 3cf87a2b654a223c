"""Rows that hold a part of what is known of a query, collected by it.

    query, passage, label        a pair a row, as sentence-transformers' data sets have it
    query, positive, negative    a triple a row, as MS MARCO's

The pairs of a query become one row {query, pos, neg}; so do the triples of a query and an answer
where a record may have several negatives. Any other row passes as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.records import (
    bad_field,
    folded,
    from_json,
    kind,
    refused,
    report_skipped,
    shown,
    text_field,
)

from .records import (
    LISTED,
    MARKS,
    NEGATIVE,
    ONE_PASSAGE,
    POSITIVE,
    QUERIES,
    is_filled,
    listed,
    relevance,
)

_PAIR_QUERIES = (*QUERIES, "sentence1")
_PAIR_PASSAGES = (*ONE_PASSAGE, "text", "sentence2", *POSITIVE)
_BESIDE = ("query_id", "query_type", "instruction")
"""What a row says of its query."""
_TABLES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")


@dataclass
class _Collected:
    """What rows say of one query.

    Attributes:
        where: of each row.
        right, wrong: by a passage's folded text, the passage and its row's place.
    """

    row: dict[str, Any]
    marks: str
    where: list[str] = field(default_factory=list)
    right: dict[str, tuple[Any, str]] = field(default_factory=dict)
    wrong: dict[str, tuple[Any, str]] = field(default_factory=dict)

    def add(self, passage: Any, right: bool, where: str) -> None:
        """One more passage; DataError if another row says the opposite of it."""
        key = str(folded(passage))
        same = self.right if right else self.wrong
        opposite = self.wrong if right else self.right
        # Of one query a passage is an answer or it is not.
        if key in opposite:
            raise DataError(
                f"{where}: of the same query {opposite[key][1]} says the opposite of the passage "
                f"{shown(passage)}. Take one of the two out."
            )
        # A passage that stands twice says nothing new: the first one is kept.
        same.setdefault(key, (passage, where))

    @property
    def place(self) -> str:
        """Where its rows stand, for messages."""
        more = len(self.where) - 1
        return self.where[0] + (f" and {more:,} more of its query" if more else "")

    def as_row(self) -> tuple[str, dict[str, Any]]:
        """Its place and the row; DataError where no passage is an answer."""
        # Negatives alone ask nothing of the order.
        if not self.right:
            problem = "marks none of the query's passages as an answer"
            remedy = (
                "Add one, take the query out, or lower data.relevant_from if it is set"
            )
            raise bad_field(self.place, self.marks, problem, remedy)
        right = [passage for passage, _ in self.right.values()]
        wrong = [passage for passage, _ in self.wrong.values()]
        return self.place, {**self.row, "pos": right, "neg": wrong}


def collected(
    rows: Iterable[tuple[str, Any]],
    source: str,
    *,
    negatives: int,
    relevant_from: float | None,
    skip_invalid: bool | None,
) -> Iterator[tuple[str, Any]]:
    """(where, raw row), those of a query that are pairs or triples as one, behind the others.

    Args:
        source: of the rows, for messages.
        negatives: how many a record may have; triples are collected where it is more than one.
        relevant_from: the least label of an answer.
        skip_invalid: leave out pairs that cannot be used, see ``refused``.
    """
    groups: dict[tuple[str, ...], _Collected] = {}
    problems = list[str]()
    for number, (where, raw) in enumerate(rows):
        row = _row(raw)
        # A table's header is read with its first row.
        if number == 0:
            check_header(source, row)
        passage = "" if row is None else _passage_of_pair(row)
        try:
            # A pair: one passage with a mark.
            if row is not None and passage:
                _add_pair(groups, row, passage, where, relevant_from)
            # MS MARCO's triples have one negative a row; K of a query make one sample.
            elif row is not None and negatives > 1 and _is_triple(row):
                _add_triple(groups, row, where)
            else:
                yield where, raw
        except DataError as error:
            problems.append(refused(error, skip_invalid))
    kept = 0
    for group in groups.values():
        try:
            placed = group.as_row()
        except DataError as error:
            problems.append(refused(error, skip_invalid))
            continue
        kept += 1
        yield placed
    if problems:
        report_skipped(source, problems, kept)


def check_header(path: str, row: Mapping[str, Any] | None) -> None:
    """Refuses a table whose first line names no query: MS MARCO's triples have no header."""
    if (
        row is None
        or not path.lower().endswith(_TABLES)
        or any(n in row for n in _PAIR_QUERIES)
    ):
        return
    names = ", ".join(shown(name) for name in list(row)[:4])
    raise DataError(
        f"{path}, line 1: {names} name no query, so this is no header that is known. Put one in "
        "front, as query, positive, negative of triples or query, passage, label of pairs, or "
        "rename the columns."
    )


def _row(raw: Any) -> dict[str, Any] | None:
    """A row that is an object; what is wrong with any other is said where it is read."""
    try:
        row = from_json(raw) if isinstance(raw, bytes) else raw
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _passage_of_pair(row: Mapping[str, Any]) -> str:
    """The field with the passage of a row that is a pair; "" of any other row."""
    filled = {name for name, value in row.items() if is_filled(value)}
    name = next((name for name in _PAIR_PASSAGES if name in filled), "")
    several = not filled.isdisjoint(LISTED) or any(map(NEGATIVE.fullmatch, filled))
    # A list of passages, or negatives beside it: the row is a whole query.
    if not name or several or set(row).isdisjoint(MARKS):
        return ""
    return "" if isinstance(listed(row[name]), list) else name


def _is_triple(row: Mapping[str, Any]) -> bool:
    """Whether a row has one answer and one negative, both texts."""
    passages = [
        n for n in row if (n in POSITIVE or NEGATIVE.fullmatch(n)) and is_filled(row[n])
    ]
    right = [name for name in passages if name in POSITIVE]
    texts = all(isinstance(listed(row[name]), str) for name in passages)
    return len(passages) == 2 and len(right) == 1 and texts


def _add_pair(
    groups: dict[tuple[str, ...], _Collected],
    row: dict[str, Any],
    passage: str,
    where: str,
    relevant_from: float | None,
) -> None:
    marks = next((name for name in MARKS if is_filled(row.get(name))), "")
    marks = marks or next(name for name in MARKS if name in row)
    value = row[marks]
    # A list of labels for one passage.
    if isinstance(value, list):
        raise bad_field(
            where, marks, f"is {kind(value)} for one passage", "Give one label"
        )
    label = relevance(value, relevant_from)
    if label is None:
        problem = (
            f"is {shown(value)}, which does not say whether the passage is an answer"
        )
        remedy = (
            "Give 0 or 1, or set data.relevant_from to the least value of an answer"
        )
        raise bad_field(where, marks, problem, remedy)
    text = row[passage]
    read = {passage, marks}
    # BEIR's passages are read behind their title, in every form.
    if isinstance(text, str) and is_filled(row.get("title")):
        text = {"title": row["title"], "text": text}
        read.add("title")
    group = _group(groups, row, read, where, marks)
    group.add(text, label == 1, where)


def _add_triple(
    groups: dict[tuple[str, ...], _Collected], row: dict[str, Any], where: str
) -> None:
    right = next(name for name in POSITIVE if is_filled(row.get(name)))
    wrong = next(
        name for name in row if NEGATIVE.fullmatch(name) and is_filled(row[name])
    )
    group = _group(groups, row, {right, wrong}, where, right, row[right])
    group.add(row[right], right=True, where=where)
    group.add(row[wrong], right=False, where=where)


def _group(
    groups: dict[tuple[str, ...], _Collected],
    row: dict[str, Any],
    read: set[str],
    where: str,
    marks: str,
    answer: str = "",
) -> _Collected:
    """What is known of the row's query, of triples of the query and answer; the row counted in.

    What nobody reads stands in the row, so that it is named as that of any other.
    """
    name = next((key for key in _PAIR_QUERIES if is_filled(row.get(key))), "query")
    query = text_field(row.get(name), name, where)
    beside = {name: row[name] for name in _BESIDE if is_filled(row.get(name))}
    # Another instruction asks something else of the same query.
    key = (str(folded(query)), str(folded(answer)), str(beside.get("instruction", "")))
    others = {}
    for other, value in row.items():
        if other not in {name, *read} and is_filled(value):
            others[other] = value
    group = groups.setdefault(key, _Collected({"query": query, **beside}, marks))
    # What the first row says of the query stands, as its id.
    group.row = {**others, **group.row}
    group.where.append(where)
    return group
