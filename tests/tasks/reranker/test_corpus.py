"""The embedded corpus: distinct records, nothing leaks in it, and the script that collected it."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import docstrings
from pl_pointwise.tasks.reranker.data import DOCSTRINGS, docstring_records


def plain(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    return docstring_records(negatives=4)


def test_enough_for_the_demo_and_of_the_schema(records: list[dict[str, Any]]) -> None:
    assert len(records) == 1194  # 600 are needed
    for record in records:
        assert (
            record["query_id"].partition(":")[0].split(".")[0] == record["query_type"]
        )
        assert record["passages"]["is_selected"] == [1, 0, 0, 0, 0]
        assert len(set(record["passages"]["passage_text"])) == 5


def test_queries_and_answers_are_distinct(records: list[dict[str, Any]]) -> None:
    queries = [plain(record["query"]) for record in records]
    answers = [plain(record["passages"]["passage_text"][0]) for record in records]
    ids = [record["query_id"] for record in records]
    assert len(set(queries)) == len(set(answers)) == len(set(ids)) == len(records)
    assert not any(
        query in answer for query, answer in zip(queries, answers, strict=True)
    )


def test_no_text_stands_in_two_groups(records: list[dict[str, Any]]) -> None:
    groups = defaultdict(set)
    for record in records:
        for text in (record["query"], *record["passages"]["passage_text"]):
            groups[plain(text)].add(record["query_type"])
    assert all(len(group) == 1 for group in groups.values())


def test_seed_changes_the_negatives_alone(records: list[dict[str, Any]]) -> None:
    assert docstring_records(negatives=4) == records
    other = docstring_records(negatives=4, seed=1)
    assert other != records
    for a, b in zip(records, other, strict=True):
        assert a["query"] == b["query"]
        assert a["passages"]["passage_text"][0] == b["passages"]["passage_text"][0]


def test_license_and_source_stand_beside_the_file() -> None:
    folder = DOCSTRINGS.parent
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in (folder / "LICENSE").read_text(
        encoding="utf-8"
    )
    assert "CPython 3.11.7" in (folder / "README.md").read_text(encoding="utf-8")


# The script ------------------------------------------------------------------------------------


@pytest.mark.skipif(
    sys.version_info[:3] != (3, 11, 7) or sys.implementation.name != "cpython",
    reason="the shipped file is of CPython 3.11.7",
)
def test_the_script_makes_the_shipped_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever order a file system lists its files."""
    rglob = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda *args: reversed(list(rglob(*args))))
    docstrings.main()
    assert capsys.readouterr().out == DOCSTRINGS.read_text(encoding="utf-8")
