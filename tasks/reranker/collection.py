"""A collection with judgements, as BEIR, TREC and MS MARCO keep them, as rows of queries.

    corpus    passages, BEIR's {"_id", "title", "text"} a line, or a table "id <tab> text"
    queries   {"_id", "text"} a line, or a table "id <tab> text"
    qrels     which passage is relevant to which query: BEIR's table "query-id, corpus-id, score",
              or TREC's "query 0 passage relevance"
    run       candidates of each query, best first: TREC's "query Q0 passage rank score name", or
              MS MARCO's "query passage rank"

A relevant passage (a judgement above 0, or from ``relevant_from`` on) is an answer, a row for each.
Its negatives are what was judged to be none, then the run's candidates without a judgement.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.records import from_json, kind, shown

DEPTH = 100  # candidates of a query that are read from a run


@dataclass(frozen=True)
class Collection:
    """The files that judgements are read with."""

    corpus: str
    queries: str
    run: str | None = None
    relevant_from: float | None = None

    def _is_answer(self, score: float) -> bool:
        return score > 0 if self.relevant_from is None else score >= self.relevant_from

    def rows(self, qrels: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """(where, {query_id, query, pos, neg}) of each judgement that is an answer."""
        judged = _judgements(qrels)
        candidates = _candidates(self.run) if self.run else {}
        wanted = set[str]()
        for query, judgements in judged.items():
            wanted.update(judgements)
            wanted.update(candidates.get(query, ()))
        queries = _texts(self.queries, set(judged))
        passages = _texts(self.corpus, wanted)
        for query, judgements in judged.items():
            where = f"{qrels}, query {query}"
            negatives = []
            for passage, (score, _) in judgements.items():
                if not self._is_answer(score):
                    negatives.append(passage)
            # A candidate without a judgement counts as none, as in MS MARCO's triples.
            negatives += [p for p in candidates.get(query, ()) if p not in judgements]
            missing = [p for p in (*judgements, *negatives) if p not in passages]
            # Files of two versions of a collection: ids do not meet.
            if query not in queries or missing:
                place = self.corpus if query in queries else self.queries
                name = f"passage {missing[0]}" if query in queries else f"query {query}"
                raise DataError(
                    f"{where}: {name} is not in {place}. Give the files of one set."
                )
            for passage, (score, line) in judgements.items():
                if self._is_answer(score):
                    row = {
                        "query_id": query,
                        "query": queries[query],
                        "pos": [passages[passage]],
                        "neg": [passages[negative] for negative in negatives],
                    }
                    yield f"{qrels}, line {line}", row


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """(number, line) of the lines of a file that are not blank."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line.rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}). Check the path.") from error


def _texts(path: str, wanted: set[str]) -> dict[str, str]:
    """The texts of those that are wanted, by their id; of a passage behind its title."""
    texts = dict[str, str]()
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        # BEIR's corpus.jsonl; MS MARCO's collection.tsv is a table.
        if line.lstrip().startswith("{"):
            name, text = _of_json(line, where)
        else:
            name, tab, text = line.partition("\t")
            if not tab:
                raise DataError(
                    f'{where}: is no table. Give "id <tab> text", or JSON lines.'
                )
        # A corpus has millions of passages, of which judgements and runs name some.
        if name in wanted:
            texts[name] = text
    return texts


def _of_json(line: str, where: str) -> tuple[str, str]:
    try:
        row = from_json(line)
    except ValueError as error:
        raise DataError(f"{where}: not readable JSON ({error}).") from error
    name = next(
        (row[key] for key in ("_id", "id", "docid", "query_id") if key in row), None
    )
    text = next((row[key] for key in ("text", "contents", "query") if key in row), None)
    if name is None or not isinstance(text, str):
        problem = f"its text is {kind(text)}" if name is not None else "it has no _id"
        raise DataError(
            f'{where}: {problem} (found: {shown(sorted(row))}). Give "_id" and "text".'
        )
    title = str(row.get("title") or "").strip()
    return str(name), f"{title} {text}" if title else text


def _judgements(path: str) -> Mapping[str, dict[str, tuple[float, int]]]:
    """By query and passage the judgement, and the line in which it stands."""
    judgements = defaultdict[str, dict[str, tuple[float, int]]](dict)
    for number, line in _lines(path):
        cells = line.split("\t") if "\t" in line else line.split()
        if len(cells) == 4:  # TREC's second column says nothing.
            del cells[1]
        score = _number(cells[2]) if len(cells) == 3 else None
        if score is None:
            if number == 1:  # BEIR's header
                continue
            raise DataError(
                f'{path}, line {number}: {shown(line)} is no judgement. Give "query, passage, '
                'score", or TREC\'s "query 0 passage relevance".'
            )
        judgements[cells[0]][cells[1]] = score, number
    return judgements


def _candidates(path: str) -> Mapping[str, list[str]]:
    """By query its candidates, best first."""
    candidates = defaultdict[str, list[tuple[float, str]]](list)
    for number, line in _lines(path):
        cells = line.split()
        rank = (
            _number(cells[3 if len(cells) == 6 else 2])
            if len(cells) in (3, 6)
            else None
        )
        if rank is None:
            raise DataError(
                f"{path}, line {number}: {shown(line)} is no candidate. Give TREC's \"query Q0 "
                'passage rank score name", or "query passage rank".'
            )
        candidates[cells[0]].append((rank, cells[2 if len(cells) == 6 else 1]))
    best = {}
    for query, ranked in candidates.items():
        best[query] = [passage for _, passage in sorted(ranked)[:DEPTH]]
    return best


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
