"""The files that people keep re-ranking data in, and what contradicts itself in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pl_pointwise.errors import DataError
from tests.tasks.conftest import write_rows
from tests.tasks.reranker.conftest import ms_marco_rows


def passages_of(data: Any, name: str = "train") -> list[tuple[str, ...]]:
    data.setup("fit")
    return [(record.query, *record.passages) for record in data.datasets[name].records]


def titled(*texts: str) -> list[dict[str, str]]:
    return [
        {"docid": str(i), "title": "Of", "text": text} for i, text in enumerate(texts)
    ]


FORMS: dict[str, dict[str, Any]] = {
    "tevatron": {
        "query_id": "7",
        "query": "how long",
        "positive_passages": titled("river"),
        "negative_passages": titled("sea", "ice", "ship"),
    },
    "dpr": {
        "question": "how long",
        "answers": [],
        "positive_ctxs": titled("river"),
        "negative_ctxs": [],
        "hard_negative_ctxs": titled("sea", "ice", "ship"),
    },
    "hard negatives": {
        "anchor": "how long",
        "positive": "Of river",
        "hard_negatives": ["Of sea", "Of ice", "Of ship"],
    },
    "numbered hard negatives": {
        "query": "how long",
        "positives": ["Of river"],
        "hard_negative_1": "Of sea",
        "hard_negative_2": "Of ice",
        "hard_negative_3": "Of ship",
    },
    "documents": {
        "query": "how long",
        "documents": ["Of river", "Of sea", "Of ice", "Of ship"],
        "labels": ["1", "0", "0.0", "false"],
    },
    "candidates, as a table has them": {
        "query": "how long",
        "candidates": '["Of river", "Of sea", "Of ice", "Of ship"]',
        "labels": "[1, 0, 0, 0]",
    },
    "lists as JSON text": {
        "query": "how long",
        "positive": '["Of river"]',
        "negatives": '["Of sea", "Of ice", "Of ship"]',
    },
}


@pytest.mark.parametrize("name", list(FORMS))
def test_each_form_gives_the_same_record(name, of_files) -> None:
    expected = ("how long", "Of river", "Of sea", "Of ice", "Of ship")
    assert passages_of(of_files({"train": [FORMS[name]]})) == [expected]


def test_a_text_in_brackets_is_a_text(of_files) -> None:
    row = {
        "query": "how",
        "positive": "[sic] river",
        "negative": ["[1]", "ice", "ship"],
    }
    expected = [("how", "[sic] river", "[1]", "ice", "ship")]
    assert passages_of(of_files({"train": [row]})) == expected


def test_several_answers_are_a_record_each(of_files) -> None:
    row = {"query": "how", "pos": ["a river", "a lake"], "neg": ["sea", "ice", "ship"]}
    row |= {"pos_scores": [0.9, 0.4], "neg_scores": [0.3, 0.2, 0.1]}
    negatives = ("sea", "ice", "ship")
    expected = [("how", "a river", *negatives), ("how", "a lake", *negatives)]
    assert passages_of(of_files({"train": [row]})) == expected


def test_rows_of_one_query_that_contradict_each_other_are_refused(of_files) -> None:
    first = {"query": "How long?", "pos": ["river"], "neg": ["sea", "ice", "ship"]}
    second = {"query": "how  long?", "pos": ["Sea"], "neg": ["river", "snow", "lake"]}
    other = {"query": "how wide?", "pos": ["sea"], "neg": ["river", "snow", "lake"]}
    said = r"line 2: of the same query .*line 1 says the opposite"
    for contradicting in (second, second | {"neg": ["wind", "snow", "lake"]}):
        with pytest.raises(DataError, match=said):
            of_files({"train": [first, contradicting, other]}).setup("fit")
        data = of_files({"train": [first, contradicting, other]}, invalid="skip")
        with pytest.warns(UserWarning, match="left out 1 of 3 records"):
            found = passages_of(data)
        assert [each[0] for each in found] == ["How long?", "how wide?"]
    contradicting = second | {"pos": ["wind"], "neg": ["river", "a", "b"]}
    with pytest.raises(DataError, match="says the opposite"):
        of_files({"train": [first, contradicting]}).setup("fit")


@pytest.mark.parametrize(
    "scores",
    [
        {"pos_scores": [0.9], "neg_scores": [0.1, 0.95, 0.2]},
        {"score": [9.0, 1.0, 9.5, 2.0]},
        {"teacher_scores": [1, 1, 1, 1.5]},
    ],
)
def test_a_teacher_that_says_the_opposite_is_refused(scores, of_files) -> None:
    row = {"query": "how", "pos": ["river"], "neg": ["sea", "ice", "ship"]}
    with pytest.raises(
        DataError, match=r"line 1: field .* for a negative, above .* Take"
    ):
        of_files({"train": [row | scores]}).setup("fit")
    right = {
        name: [9.6, *values[1:]] if name != "neg_scores" else values
        for name, values in scores.items()
    }
    assert len(passages_of(of_files({"train": [row | right]}))) == 1


def test_a_field_that_is_near_and_not_read_is_named(of_files) -> None:
    row = {"query": "how", "positive": "river", "distractors": ["sea", "ice", "ship"]}
    with pytest.raises(
        DataError, match=r"has 0 passages besides .*not read: 'distractors'"
    ):
        of_files({"train": [row]}).setup("fit")


# Collections --------------------------------------------------------------------------------------


@pytest.fixture
def collection(tmp_path: Path) -> dict[str, str]:
    """Passages and queries as BEIR keeps them."""
    passages = [
        {"_id": f"d{i}", "title": "Of" * (i == 0), "text": f"text {i}"}
        for i in range(9)
    ]
    queries = [{"_id": "q1", "text": "how long"}, {"_id": "q2", "text": "how deep"}]
    return {
        "corpus_file": str(write_rows(tmp_path / "corpus.jsonl", passages)),
        "queries_file": str(write_rows(tmp_path / "queries.jsonl", queries)),
    }


def written(path: Path, *lines: str) -> str:
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


RUN = [
    "q1 Q0 d4 3 0.1 bm25",
    "q1 Q0 d5 1 0.9 bm25",
    "q1 Q0 d0 2 0.5 bm25",
    "q2 Q0 d6 1 0.5 bm25",
]
EXPECTED = [
    ("how long", "Of text 0", "text 2", "text 3", "text 5", "text 4"),
    ("how deep", "text 7", "text 6", "text 8"),
    ("how deep", "text 1", "text 6", "text 8"),
]


@pytest.mark.parametrize("kind", ["beir", "trec", "tables"])
def test_judgements_and_candidates_become_records(
    kind, collection, tmp_path, of_files
) -> None:
    judged = [
        "q1 d0 1",
        "q1 d2 0",
        "q1 d3 0",
        "q2 d7 2",
        "q2 d1 1",
        "q2 d8 0",
        "q2 d6 0",
    ]
    if kind == "beir":
        lines = [
            "query-id\tcorpus-id\tscore",
            *(line.replace(" ", "\t") for line in judged),
        ]
    elif kind == "trec":
        lines = [line.replace(" ", " 0 ", 1) for line in judged]
    else:
        lines = [line.replace(" ", "\t0\t", 1).replace(" ", "\t") for line in judged]
        for option in ("corpus_file", "queries_file"):
            rows = [
                json.loads(line)
                for line in Path(collection[option]).read_text().splitlines()
            ]
            texts = [
                f"{each.get('title') or ''} {each['text']}".strip() for each in rows
            ]
            pairs = zip(rows, texts, strict=True)
            table = [f"{each['_id']}\t{text}" for each, text in pairs]
            collection[option] = written(tmp_path / f"{option}.tsv", *table)
    qrels = written(tmp_path / "train.tsv", *lines)
    run = written(tmp_path / "run.trec", *RUN)
    options = {**collection, "run_file": run, "train_file": qrels, "negatives": 4}
    found = passages_of(of_files({}, **options, min_negatives=1))
    assert [(query, right, *sorted(rest)) for query, right, *rest in found] == [
        (query, right, *sorted(rest)) for query, right, *rest in EXPECTED
    ]


def test_what_a_collection_lacks_is_named(collection, tmp_path, of_files) -> None:
    qrels = written(tmp_path / "train.tsv", "q1 0 d0 1")
    with pytest.raises(
        DataError, match=r"line 1: .*0 passages besides .* 1 are needed"
    ):
        of_files({}, **collection, train_file=qrels, min_negatives=1).setup("fit")
    for lines, said in (
        (["q1 0 d0 1", "q1 0 d99 0"], r"query q1: passage d99 is not in .*corpus"),
        (["q9 0 d0 1"], r"query q9: query q9 is not in .*queries"),
        (["q1 0 d0 1", "q1 d0"], r"line 2: 'q1 d0' is no judgement"),
    ):
        with pytest.raises(DataError, match=said):
            of_files(
                {}, **collection, train_file=written(tmp_path / "b.tsv", *lines)
            ).setup("fit")
    with pytest.raises(DataError, match="a collection needs both"):
        of_files({"train": ms_marco_rows(2)}, corpus_file=collection["corpus_file"])
    options = {
        **collection,
        "train_file": qrels,
        "run_file": written(tmp_path / "r", "q1 d0"),
    }
    with pytest.raises(DataError, match="line 1: 'q1 d0' is no candidate"):
        of_files({}, **options).setup("fit")
