"""Pairs, triples and grades, as sentence-transformers' data sets, MS MARCO and TREC have them."""

from __future__ import annotations

from typing import Any

import pytest

from pl_pointwise.errors import DataError
from tests.tasks.conftest import write_rows
from tests.tasks.reranker.test_forms import passages_of, written

PAIRS = [
    ("how", "river", 1),
    ("wide", "ship", 1),
    ("how", "sea", 0),
    ("How ", "ice", 0),
]
PAIRS += [
    ("wide", "snow", 0),
    ("how", "rain", 0),
    ("wide", "rain", 0),
    ("wide", "sea", 0),
]
EXPECTED = [
    ("how", "river", "sea", "ice", "rain"),
    ("wide", "ship", "snow", "rain", "sea"),
]
NAMES = [
    *(("query", "passage", "label"), ("query", "document", "relevance")),
    *(("sentence1", "sentence2", "score"), ("anchor", "positive", "label")),
    ("question", "answer", "label"),
]


def pairs(query: str, passage: str, label: str) -> list[dict[str, Any]]:
    return [{query: a, passage: b, label: c} for a, b, c in PAIRS]


@pytest.mark.parametrize("names", NAMES)
def test_pairs_of_a_query_are_one_record(names, of_files, tmp_path) -> None:
    assert passages_of(of_files({"train": pairs(*names)})) == EXPECTED
    lines = [",".join(names), *(",".join(map(str, row)) for row in PAIRS)]
    table = written(tmp_path / "pairs.csv", *lines)
    data = of_files({}, train_file=table)
    assert passages_of(data) == EXPECTED
    places = [record.where for record in data.datasets["train"].records]
    assert places == [f"{table}, record {n} and 3 more of its query" for n in (1, 2)]


def test_scores_and_grades_need_the_least_of_an_answer(of_files) -> None:
    graded = [
        row | {"label": 0.2 + row["label"] / 2}
        for row in pairs("query", "passage", "label")
    ]
    with pytest.raises(
        DataError, match=r'line 1: field "label" is 0.7, .* data.relevant_from'
    ):
        of_files({"train": graded}).setup("fit")
    assert passages_of(of_files({"train": graded}, relevant_from=0.5)) == EXPECTED
    row = {
        "query": "how",
        "docs": ["sea", "river", "lake", "ice", "ship"],
        "labels": [0, 3, 2, 1, 0],
    }
    with pytest.raises(
        DataError, match=r'"labels" is not a list of 0 and 1.* data.relevant_from'
    ):
        of_files({"train": [row]}).setup("fit")
    both = [("how", right, "sea", "ice", "ship") for right in ("river", "lake")]
    assert passages_of(of_files({"train": [row]}, relevant_from=2)) == both
    one = ("how", "river", "sea", "lake", "ice", "ship")
    assert passages_of(of_files({"train": [row]}, relevant_from=3, negatives=4)) == [
        one
    ]
    for name in ("document", "answer", "positive"):  # mine_hard_negatives' labeled-list
        listed = {"query": "how", name: row["docs"], "labels": row["labels"]}
        assert passages_of(of_files({"train": [listed]}, relevant_from=2)) == both


def test_judgements_are_answers_from_a_grade_on(of_files, tmp_path) -> None:
    passages = [{"_id": f"d{i}", "text": f"text {i}"} for i in range(5)]
    options = {
        "corpus_file": str(write_rows(tmp_path / "corpus.jsonl", passages)),
        "queries_file": str(
            write_rows(tmp_path / "queries.jsonl", [{"_id": "q", "text": "how"}])
        ),
        "train_file": written(
            tmp_path / "qrels", *(f"q 0 d{i} {i % 4}" for i in range(5))
        ),
        "min_negatives": 1,
    }
    found = passages_of(of_files({}, **options, relevant_from=2))
    assert [(right, sorted(rest)) for _, right, *rest in found] == [
        ("text 2", ["text 0", "text 1", "text 4"]),
        ("text 3", ["text 0", "text 1", "text 4"]),
    ]
    assert len(passages_of(of_files({}, **options))) == 3


def test_triples_of_a_query_and_an_answer_are_one_record(of_files, tmp_path) -> None:
    triples = [("how", "river", each) for each in ("sea", "ice", "ship")]
    lines = ["\t".join(each) for each in [("query", "positive", "negative"), *triples]]
    table = written(tmp_path / "triples.tsv", *lines)
    expected = [("how", "river", "sea", "ice", "ship")]
    assert passages_of(of_files({}, train_file=table)) == expected
    # With one negative a record each row is one.
    assert passages_of(of_files({}, train_file=table, negatives=1)) == triples
    headerless = written(tmp_path / "triples.train.tsv", *lines[1:])
    with pytest.raises(
        DataError, match=r"line 1: 'how', 'river', 'sea' name no query.* Put one in"
    ):
        of_files({}, train_file=headerless).setup("fit")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [("how", "river", 1), ("how", "River ", 0)],
            r"line 2: of the same query .*line 1 says the",
        ),
        (
            [("how", "river", 0), ("how", "ice", 0)],
            r"and 1 more .* \"label\" marks none of the query",
        ),
        ([("how", "river", None)], r'line 1: field "label" is None, .* Give 0 or 1'),
        ([("how", "river", "yes")], r"line 1: field \"label\" is 'yes'"),
        ([("how", "river", [1])], r"line 1: field \"label\" is a list for one passage"),
        ([("", "river", 1)], r'line 1: field "query" is empty. Fill it in'),
        (
            [("deep", "river", 1), ("deep", "ice", 0)],
            r"has 1 passages besides .* lower min_negatives",
        ),
    ],
)
def test_pairs_that_make_no_record_are_named_or_left_out(rows, said, of_files) -> None:
    given = [dict(zip(("query", "passage", "label"), row, strict=True)) for row in rows]
    with pytest.raises(DataError, match=said):
        of_files({"train": given}).setup("fit")
    data = of_files(
        {"train": [*given, *pairs("query", "passage", "label")[1:]]}, invalid="skip"
    )
    with pytest.warns(UserWarning, match="left out"):
        found = passages_of(data)
    assert EXPECTED[1] in found


@pytest.mark.parametrize(
    "row",
    [
        {"query": "how", "pos": ["river"], "neg": ["sea", "ice", "ship"]},
        {"query": "how", "passage": "river", "label": 1},
        {
            "query": "how",
            "passages": ["river", "sea", "ice", "ship"],
            "labels": [1, 0, 0, 0],
        },
    ],
)
def test_a_text_that_nobody_reads_is_refused_or_ignored(row, of_files) -> None:
    """What a query is about was dropped with a warning, and data.ignore had no effect."""
    others = [
        {"query": "how", "passage": each, "label": 0} for each in ("sea", "ice", "ship")
    ]
    rows = [row | {"context": "In the north"}, *(others if "passage" in row else [])]
    with pytest.raises(
        DataError, match=r'"context" is .* is not read.* data.ignore: \["context"\]'
    ):
        of_files({"train": rows}).setup("fit")
    expected = [("how", "river", "sea", "ice", "ship")]
    assert passages_of(of_files({"train": rows}, ignore=["context"])) == expected
    rows[0] = row | {
        "id": "a",
        "lang": "en",
        "answers": ["at nine"],
        "copy": "River",
        "fold": "3",
    }
    assert passages_of(of_files({"train": rows})) == expected


def test_the_title_of_a_passage_stands_in_front_of_it(of_files) -> None:
    rows = [row | {"title": "Of"} for row in pairs("query", "text", "label")]
    assert passages_of(of_files({"train": rows}))[0] == (
        "how",
        *("Of river", "Of sea", "Of ice", "Of rain"),
    )
