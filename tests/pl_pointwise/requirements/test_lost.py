"""What a new model lost, of results as evaluation harnesses write them, as records to train on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binom

from pl_pointwise.cli import main
from pl_pointwise.errors import DataError
from pl_pointwise.requirements.lost import _at_least, read_items

PROMPTS = ["When do you open?", "What is 2 + 2?", "Name a colour.", "Who wrote it?"]
OLD = [True, True, True, False]
NEW = [True, False, True, True]


def generic(right: list[bool]) -> list[dict[str, Any]]:
    return [
        {
            "id": n,
            "prompt": prompt,
            "answer": f"answer {n}",
            "target": f"target {n}",
            "correct": ok,
        }
        for n, (prompt, ok) in enumerate(zip(PROMPTS, right, strict=True))
    ]


def harness(right: list[bool]) -> list[dict[str, Any]]:
    """lm-evaluation-harness, ``--log_samples``."""
    return [
        {
            "doc_id": n,
            "doc": {"question": prompt},
            "target": f"target {n}",
            "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": {"until": ["\n"]}}},
            "resps": [[f"answer {n}"]],
            "filtered_resps": [f"answer {n}"],
            "filter": "none",
            "metrics": ["exact_match"],
            "exact_match": float(ok),
        }
        for n, (prompt, ok) in enumerate(zip(PROMPTS, right, strict=True))
    ]


def inspect(right: list[bool]) -> dict[str, Any]:
    """The .json log of Inspect."""
    samples = [
        {
            "id": n,
            "epoch": 1,
            "input": [{"role": "user", "content": prompt, "source": "input"}],
            "target": f"target {n}",
            "output": {
                "choices": [
                    {"message": {"role": "assistant", "content": f"answer {n}"}}
                ]
            },
            "scores": {"match": {"value": "C" if ok else "I", "answer": f"answer {n}"}},
        }
        for n, (prompt, ok) in enumerate(zip(PROMPTS, right, strict=True))
    ]
    return {"version": 2, "status": "success", "samples": samples}


def written(path: Path, rows: Any) -> Path:
    lines = [json.dumps(rows)] if isinstance(rows, dict) else map(json.dumps, rows)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


FORMS = {
    "generic": (generic, "jsonl"),
    "harness": (harness, "jsonl"),
    "inspect": (inspect, "json"),
}


@pytest.mark.parametrize("form", FORMS)
def test_lost_items_become_records_to_learn_and_others_records_to_keep(
    form: str, tmp_path: Path, capsys: Any
) -> None:
    make, ending = FORMS[form]
    old = written(tmp_path / f"old.{ending}", make(OLD))
    new = written(tmp_path / f"new.{ending}", make(NEW))
    folder = tmp_path / "out"
    main(["lost", str(old), str(new), "--output", str(folder)])
    shown = capsys.readouterr().out
    assert (
        "4 items: 2 right with both models, 1 lost, 1 gained, 0 wrong with both."
        in shown
    )
    assert "1 or more of 2 changes would be losses with probability 0.75" in shown
    read = {
        name: [
            json.loads(line)
            for line in (folder / f"{name}.jsonl").read_text().splitlines()
        ]
        for name in ("learn", "keep")
    }
    if form == "inspect":
        expected = [{"role": "user", "content": PROMPTS[1]}]
        expected += [{"role": "assistant", "content": "answer 1"}]
        assert read["learn"] == [{"messages": expected}]
        assert [each["messages"][0]["content"] for each in read["keep"]] == PROMPTS[
            0:3:2
        ]
    else:
        assert read["learn"] == [{"prompt": PROMPTS[1], "answer": "answer 1"}]
        assert [each["prompt"] for each in read["keep"]] == PROMPTS[0:3:2]


def test_where_nothing_is_right_with_both_nothing_is_to_be_kept(
    tmp_path: Path, capsys: Any
) -> None:
    """No file, none of an earlier comparison either, and a command that names none."""
    paths = [tmp_path / "old.jsonl", tmp_path / "new.jsonl"]
    for path, right in zip(paths, [[True, False] * 2, [False, True] * 2], strict=True):
        path.write_text("\n".join(json.dumps(row) for row in generic(right)))
    (tmp_path / "keep.jsonl").write_text("of an earlier comparison")
    main(["lost", *map(str, paths), "--output", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "No item is right with both" in shown
    assert "keep_file " not in shown.split("Repair")[1]
    assert (tmp_path / "learn.jsonl").exists()
    assert not (tmp_path / "keep.jsonl").exists()


def test_targets_may_be_what_is_learnt(tmp_path: Path) -> None:
    old = written(tmp_path / "old.jsonl", generic(OLD))
    new = written(tmp_path / "new.jsonl", generic(NEW))
    main(["lost", str(old), str(new), "--output", str(tmp_path), "--answers", "target"])
    (line,) = (tmp_path / "learn.jsonl").read_text().splitlines()
    assert json.loads(line) == {"prompt": PROMPTS[1], "answer": "target 1"}


@pytest.mark.parametrize(("allow", "status"), [("0", 1), ("1", 0)])
def test_more_lost_than_allowed_fails(allow: str, status: int, tmp_path: Path) -> None:
    old = written(tmp_path / "old.jsonl", generic(OLD))
    new = written(tmp_path / "new.jsonl", generic(NEW))
    args = ["lost", str(old), str(new), "--output", str(tmp_path), "--allow", allow]
    if not status:
        main(args)
        return
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == status


def test_the_probability_is_that_of_a_fair_coin() -> None:
    for trials in (1, 5, 40):
        for successes in (0, 1, trials):
            assert _at_least(successes, trials) == pytest.approx(
                binom.sf(successes - 1, trials, 0.5)
            )


def test_an_item_that_was_sampled_several_times_is_right_if_it_always_was(
    tmp_path: Path,
) -> None:
    rows = generic(OLD) + generic([True, False, True, True])
    items = read_items(written(tmp_path / "rows.jsonl", rows))
    assert [item.right for item in items.values()] == [True, False, True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": None}, 'line 2: there is no "id"'),
        ({"correct": None}, "neither right nor wrong"),
        ({"correct": 0.7}, "correct is 0.7, which is neither"),
        ({"passed": True, "correct": False}, "correct, passed disagree"),
        ({"id": 0}, "the id '0' is that of another prompt before"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    rows = generic(OLD)
    rows[1].update(change)
    with pytest.raises(DataError, match=message):
        read_items(written(tmp_path / "rows.jsonl", rows))


def test_an_outcome_that_nobody_gives_is_asked_for(tmp_path: Path) -> None:
    rows = [
        {key: value for key, value in row.items() if key != "correct"}
        for row in generic(OLD)
    ]
    path = written(tmp_path / "rows.jsonl", [{**row, "f1": 1} for row in rows])
    with pytest.raises(DataError, match="nothing says whether"):
        read_items(path)
    assert all(item.right for item in read_items(path, "f1").values())
    with pytest.raises(DataError, match="there is no 'bleu'"):
        read_items(path, "bleu")


def test_other_items_are_refused(tmp_path: Path) -> None:
    old = written(tmp_path / "old.jsonl", generic(OLD))
    new = written(tmp_path / "new.jsonl", generic(NEW)[:3])
    with pytest.raises(SystemExit):
        main(["lost", str(old), str(new), "--output", str(tmp_path)])


def test_broken_lines_and_binary_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1\n')
    with pytest.raises(DataError, match="line 1 is no JSON"):
        read_items(path)
    path = tmp_path / "log.eval"
    path.write_bytes(b"PK\x03\x04\xff\xfe")
    with pytest.raises(DataError, match="inspect log convert"):
        read_items(path)


def test_a_model_that_wrote_no_text_is_named(tmp_path: Path, capsys: Any) -> None:
    rows = generic(NEW)
    del rows[0]["answer"]
    old = written(tmp_path / "old.jsonl", generic(OLD))
    new = written(tmp_path / "new.jsonl", rows)
    with pytest.raises(SystemExit):
        main(["lost", str(old), str(new), "--output", str(tmp_path)])
    assert f"{new}: the item '0' lacks a text as answer" in capsys.readouterr().err
