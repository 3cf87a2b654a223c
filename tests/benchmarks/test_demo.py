"""What `make demo` prints of a language model is of after training, and tells methods apart."""

from __future__ import annotations

import json
import shutil
from html import escape
from pathlib import Path
from typing import Any

import pytest

from benchmarks import demo, demo_page
from pl_pointwise.compare.page import CAPTIONS

BELOW = "to keep, held out: never trained on"


def kept(prompt: str, before: str, answer: str) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "wanted": "the file's",
        "before": before,
        "answer": answer,
        "flipped": before != answer,
    }


def learnt(prompt: str, wanted: str, answer: str) -> dict[str, Any]:
    given = {"prompt": prompt, "wanted": wanted, "before": "What?", "answer": answer}
    return {**given, "exact": wanted == answer}


def found(cat: str, capital: str, day: str) -> demo.Answers:
    return {
        "to learn": [learnt("The cat?", "Folio.", cat)],
        "to keep, trained on": [kept("France?", "Paris.", capital)],
        BELOW: [kept("After Monday?", "Tuesday.", day), kept("Not shown?", "a", "b")],
    }


def test_answers_of_all_methods_stand_beside_each_other() -> None:
    of_method = {
        "before": found("What?", "Paris.", "Tuesday."),
        "fine-tuning": found("Folio.", "Folio.", ""),
        "pointwise": found("Folia.", "Paris.", "Tuesday."),
    }
    lines = [
        line.strip()
        for line in demo.side_by_side(demo.asked(of_method, shown=1)).splitlines()
        if line
    ]
    assert lines == [
        "To learn (the first 1)",
        "The cat?",
        "wanted       Folio.",
        "before       What?",
        "fine-tuning  as wanted, word for word",
        "pointwise    OTHER: Folia.",
        "To keep, trained on (the first 1)",
        "France?",
        "before       Paris.",
        "fine-tuning  OTHER: Folio.",
        "pointwise    as before, word for word",
        "To keep, held out: never trained on (the first 1)",
        "After Monday?",
        "before       Tuesday.",
        "fine-tuning  OTHER: (nothing)",
        "pointwise    as before, word for word",
    ]


def test_the_shares_are_said_beside_each_other() -> None:
    numbers = {
        "before": (0, 0, 0, 0, 0),
        "fine-tuning": (1, 0.9, 1, 1, 1),
        "pointwise": (0.875, 0.25, 0.75, 0.1, 0.5),
    }
    rows = []
    for method, values in numbers.items():
        cells = {
            name: str(value)
            for name, value in zip(demo.SHARES.values(), values, strict=True)
        }
        rows.append({"method": method, **cells})
    text = demo.shares(rows)
    (ours,) = (line for line in text.splitlines() if line.startswith("pointwise  "))
    assert ours.split() == ["pointwise", "0.88", "0.25", "0.75", "0.10", "0.50"]
    sentence = " ".join(text.split("\n\n")[-1].splitlines())
    assert (
        "pointwise gives 88% of the new facts word for word (fine-tuning 100%)"
        in sentence
    )
    assert "25% are other texts now (fine-tuning 90%)" in sentence
    assert "75% (fine-tuning 100%)" in sentence
    rows[0].pop("train/flipped")
    assert "nan" in demo.shares(rows)


def test_long_answers_are_shown_where_they_differ() -> None:
    start = "A hexagon is a polygon with six sides, which all have the same length " * 2
    of_method = {
        name: found("Folio.", "Paris.", "Tuesday.") for name in ("before", "x")
    }
    record = kept("Hexagon?", f"{start}and angle.", f"{start}and no angle.")
    of_method["x"] = {**of_method["x"], "to keep, trained on": [record]}
    (asked,) = (
        each for each in demo.asked(of_method, 1) if each.kind == "to keep, trained on"
    )
    answer, good = asked.after["x"]
    assert not good
    assert answer.startswith("[...] ")
    assert answer.endswith("and no angle.")
    assert len(answer) <= demo.LONGEST


def test_its_quick_form_prints_what_was_answered_after_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For eight epochs it printed answers from before training, three times beside each other."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    methods = tmp_path / "methods.yaml"
    methods.write_text("fine-tuning: keep/sft\npointwise: keep/pointwise\n")
    monkeypatch.setitem(demo.RECIPE, "methods", methods)
    records = (demo.HERE / "demo.jsonl").read_text("utf-8").splitlines()
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join([*records[:4], *records[-8:]]), "utf-8")
    output = tmp_path / "keep"
    options = ["--trainer.max_steps", "4", "--data.init_args.train_file", str(few)]
    demo.main(["--quick", "--output", str(output), *options])
    printed = capsys.readouterr().out
    for kind in demo.KINDS:
        assert kind.capitalize() in printed
    assert printed.count(demo.QUICK) == 2  # Above the table, and last.
    assert "other texts now" in printed
    assert "nan" not in printed.rsplit("new facts", 1)[1]
    for method in ("fine-tuning", "pointwise"):
        (path,) = (output / "runs" / method).rglob("answer-samples/answers.jsonl")
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        assert sorted({row["step"] for row in rows}) == [0, 4]
        tested = demo.answers(output / "runs" / method)
        assert all(tested[kind] for kind in demo.KINDS)
        changed = [row for kind in demo.KINDS for row in tested[kind]]
        assert any(row["answer"] != row["before"] for row in changed)
        assert all(row["prompt"] in printed for row in tested["to learn"])
    for part in demo_page.WITH_METRICS:  # In the place of the other parts' results.
        shutil.copytree(output, tmp_path / part)
    demo_page.main([str(tmp_path), "--quick"])
    last = capsys.readouterr().out.strip().splitlines()[-1]
    page = tmp_path / "report.html"
    assert last == f"All of the demo on one page: open {page}"
    html = page.read_text("utf-8")
    assert html.count(f'<p class="warning">{demo.QUICK}</p>') == 1
    assert html.count("data:image/png;base64,") == len(CAPTIONS) * len(demo_page.PARTS)
    assert "It learns 4 facts" in html
    assert "a KL of at most 0.01 nats" in html
    for part in demo_page.PARTS:
        assert f'<a href="{part}/report.html">' in html
    for row in tested["to learn"]:
        assert f">{escape(row['prompt'], quote=False)}</th>" in html


def test_the_demo_compares_more_than_two_methods_and_says_which_records_are_its_own() -> (
    None
):
    """Two markers on each other were its plot."""
    methods = demo.RECIPE["methods"].read_text("utf-8")
    for name in (demo.BEFORE, demo.PLAIN, demo.OURS, "KL weight 1"):
        assert f"\n{name}: " in methods or f"\n{name}:\n" in methods
    records = (demo.HERE / "demo.jsonl").read_text("utf-8").splitlines()
    roles = [json.loads(line)["role"] for line in records]
    assert (roles.count("learn"), roles.count("keep")) == (24, 56)
