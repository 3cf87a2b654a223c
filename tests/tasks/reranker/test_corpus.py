"""The embedded corpus is the same everywhere, runs no foreign code, and nothing leaks in it."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pl_pointwise.tasks.reranker import corpus
from pl_pointwise.tasks.reranker.corpus import docstring_rows, documents, split


@pytest.fixture(scope="module")
def rows() -> list[tuple[str, dict[str, Any]]]:
    return docstring_rows(negatives=4, enough=1500)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty package `madeup`, the only source of docstrings."""
    folder = tmp_path / "madeup"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(corpus, "PACKAGES", ("madeup",))
    corpus._package.cache_clear()
    yield folder
    corpus._package.cache_clear()


def function(name: str, summary: str, body: str) -> str:
    return f'def {name}():\n    """{summary}\n\n    {body}\n    """\n\n'


def words(text: str) -> str:
    return " ".join(corpus._words(text))


def test_enough_for_the_demo(rows: list[tuple[str, dict[str, Any]]]) -> None:
    assert len(rows) >= 1500
    assert all(len(row["passages"]["passage_text"]) == 5 for _, row in rows)


def test_standard_library_comes_first(rows: list[tuple[str, dict[str, Any]]]) -> None:
    groups = [group for group, _ in rows]
    assert groups[0] in sys.stdlib_module_names
    assert sum(group in sys.stdlib_module_names for group in groups) > len(groups) / 2


def test_no_further_package_is_read_once_there_are_enough() -> None:
    few, all_rows = docstring_rows(negatives=4, enough=100), docstring_rows(negatives=4)
    assert 100 <= len(few) < len(all_rows)
    assert {group for group, _ in few} <= sys.stdlib_module_names
    assert few == all_rows[: len(few)]


def test_queries_and_answers_are_unique(rows: list[tuple[str, dict[str, Any]]]) -> None:
    queries = [words(row["query"]) for _, row in rows]
    answers = [words(row["passages"]["passage_text"][0]) for _, row in rows]
    ids = [row["query_id"] for _, row in rows]
    assert len(set(queries)) == len(set(answers)) == len(set(ids)) == len(rows)


def test_no_text_stands_in_two_groups(rows: list[tuple[str, dict[str, Any]]]) -> None:
    groups = defaultdict(set)
    for group, row in rows:
        for text in (row["query"], *row["passages"]["passage_text"]):
            groups[words(text)].add(group)
    assert all(len(found) == 1 for found in groups.values())


def test_answer_does_not_repeat_the_question(rows: list[tuple[str, dict[str, Any]]]) -> None:
    assert not any(
        words(row["query"]) in words(row["passages"]["passage_text"][0]) for _, row in rows
    )


def test_negatives_are_other_bodies_of_the_same_module(
    rows: list[tuple[str, dict[str, Any]]],
) -> None:
    bodies = defaultdict(set)
    for entry in documents():
        bodies[entry.module].add(entry.body)
    for _, row in rows:
        positive, *negatives = row["passages"]["passage_text"]
        module = row["query_id"].partition(":")[0]
        assert len({positive, *negatives}) == 5
        assert {positive, *negatives} <= bodies[module]


def test_texts_are_clean_and_neither_too_short_nor_too_long(
    rows: list[tuple[str, dict[str, Any]]],
) -> None:
    for _, row in rows:
        for text in (row["query"], *row["passages"]["passage_text"]):
            assert text == " ".join(text.split())
            assert "`" not in text
            assert ">>>" not in text
            assert "deprecated" not in corpus._words(text)
        assert 4 <= len(corpus._words(row["query"])) <= 30
        assert all(len(text.split()) <= 100 for text in row["passages"]["passage_text"])
        assert all(len(corpus._words(text)) >= 8 for text in row["passages"]["passage_text"])


def test_no_tests_and_nothing_that_an_installation_may_lack(
    rows: list[tuple[str, dict[str, Any]]],
) -> None:
    for _, row in rows:
        parts = row["query_id"].partition(":")[0].split(".")
        assert corpus.EXCLUDED.isdisjoint(parts)


def test_same_rows_in_whatever_order_files_are_listed(
    rows: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rglob = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda *args: reversed(list(rglob(*args))))
    corpus._package.cache_clear()
    assert docstring_rows(negatives=4, enough=1500) == rows


def test_same_rows_in_another_process_and_no_package_imported() -> None:
    """Hash randomisation and the modules already imported differ from process to process."""
    code = (
        "import hashlib, json, runpy, sys; c = runpy.run_path(sys.argv[1]);"
        "rows = c['docstring_rows'](4, 1400);"
        "print(hashlib.sha256(json.dumps(rows).encode()).hexdigest(), len(rows),"
        " {'torch', 'lightning', 'asyncio', 'antigravity'} & {*sys.modules})"
    )
    # By its path: importing it as part of the package would import torch.
    command = [sys.executable, "-c", code, corpus.__file__]
    runs = [
        subprocess.run(
            command, check=True, capture_output=True, text=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert runs[0].endswith("set()\n")


def test_seed_changes_the_negatives_alone(rows: list[tuple[str, dict[str, Any]]]) -> None:
    other = docstring_rows(negatives=4, enough=1500, seed=1)
    assert other != rows
    for (_, a), (_, b) in zip(rows, other, strict=True):
        assert a["query"] == b["query"]
        assert a["passages"]["passage_text"][0] == b["passages"]["passage_text"][0]


def test_source_is_read_and_never_run(package: Path) -> None:
    bodies = [f"It counts {animal} of the {place} and then gives their number back." for animal,
              place in [("fish", "sea"), ("birds", "sky"), ("moles", "soil")]]  # fmt: skip
    source = "raise SystemExit('imported')\n" + "".join(
        function(f"f{i}", f"Number of {body.split()[2]} that there are.", body)
        for i, body in enumerate(bodies)
    )
    (package / "animals.py").write_text(source)
    found = docstring_rows(negatives=2)
    assert [row["query_id"] for _, row in found] == [f"madeup.animals:f{i}" for i in range(3)]
    assert "madeup" not in sys.modules


def test_files_that_do_not_parse_are_passed_over(package: Path) -> None:
    (package / "broken.py").write_text("def f(:")
    (package / "binary.py").write_bytes(b"\x00\xff\xfe")
    (package / "deep.py").write_text("(" * 500 + ")" * 500)
    body = "Whoever calls this gets the list of rivers back."
    (package / "good.py").write_text(function("f", "List of all rivers.", body))
    assert [entry.body for entry in documents(["madeup"])] == [body]


def test_summaries_of_many_functions_and_repeated_bodies_are_left_out(package: Path) -> None:
    body = "Rivers are counted from {} to the mouth of each, and lakes between them too."
    pairs = [
        ("Length of a river, in miles.", "It is the way that water of a river takes to the sea."),
        ("Depth of a certain lake.", "Measured at the deepest place of that lake in a dry year."),
        ("Depth of a certain lake.", "The lake is taken as found, whatever the season may be."),
        ("Number of all the rivers.", body.format("the source")),
        ("Count of rivers and lakes.", body.format("the spring")),
    ]
    source = "".join(function(f"f{i}", *pair) for i, pair in enumerate(pairs))
    (package / "water.py").write_text(source)
    assert [entry.name for entry in documents(["madeup"])] == ["f0", "f3"]


@pytest.mark.parametrize(
    ("summary", "body"),
    [
        (
            "Return self.",
            "The very same river is returned, so that calls to rivers can be chained.",
        ),
        ("f(river) -> length of it", "The river is measured from its source down to the sea."),
        ("Length of the river here.", "Length of the river here, measured from source to sea."),
        (
            "Length of the river here.",
            "Deprecated: another function measures the river better now.",
        ),
        ("Length of the river here.", "See the docs of that."),
        ("Length of the river here.", "Adapted from an old book about trees and how they grow."),
        ("", "The river is measured from its source down to the sea."),
    ],
    ids=["short", "signature", "repetition", "deprecated", "stub", "other subject", "no summary"],
)
def test_poor_docstrings_are_left_out(summary: str, body: str) -> None:
    assert not corpus._usable(summary, body)
    assert corpus._usable("Length of a given river.", "The river is measured from source to sea.")


def test_split_takes_the_first_sentence_or_paragraph() -> None:
    assert split("One line.\nAnd more\n\nthan that.") == ("One line.", "And more than that.")
    assert split("A summary\nof two lines\n\nBody.") == ("A summary of two lines", "Body.")
    assert split("Only this") == ("Only this", "")
    assert split("") == ("", "")


def test_split_drops_examples_rules_and_mark_up() -> None:
    text = (
        "Use :class:`~a.B` or ``c``.\n\nSee :func:`this <a.f>`.\n\n>>> 1 + 1\n2\n\n"
        "Notes\n-----\nMore.\n.. versionadded:: 3\n"
    )
    assert split(text) == ("Use a.B or c.", "See this. Notes More.")


def test_split_cuts_at_a_paragraph_where_it_can() -> None:
    first, second = " ".join(["word"] * 60), " ".join(["other"] * 60)
    assert split(f"Summary.\n\n{first}\n\n{second}")[1] == first
    assert split(f"Summary.\n\n{first} {second}")[1].split() == (first + " " + second).split()[:100]
