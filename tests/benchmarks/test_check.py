"""The guard of the published ratios: what it reads, what it compares, and that the page agrees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import check

README = (check.HERE / "README.md").read_text(encoding="utf-8")
PUBLISHED = json.loads(check.PUBLISHED.read_text(encoding="utf-8"))


def test_the_pages_table_of_ratios_is_that_of_the_file() -> None:
    lines = README.split("| what | against | ratio |")[1].splitlines()[2:]
    table = lines[: lines.index("")]
    rows = [
        f"| {row['what']} | {row['against']} | {row['ratio']} |"
        for row in PUBLISHED["table"]
    ]
    assert table == rows


def test_the_pages_steps_of_a_small_model_are_those_of_the_file() -> None:
    section = README.split("## A step of a small model")[1].split("\n## ")[0]
    page = check.small_step(section)
    assert len(page) == 3
    for name, speed in page.items():
        assert PUBLISHED["speeds"][name] == pytest.approx(speed, abs=5e-4)


def test_a_fall_by_more_than_a_fifth_is_named_and_nothing_else() -> None:
    published = {"kept": 2.0, "fell": 2.0, "rose": 2.0, "unknown": None}
    measured = {"kept": 1.61, "fell": 1.59, "rose": 9.0, "unknown": 0.1, "new": 0.1}
    fallen = list(check.falls(measured, published))
    assert len(fallen) == 1
    assert fallen[0].startswith("fell: 1.59 × ")
    assert "published 2" in fallen[0]


@pytest.mark.parametrize(
    ("read", "output", "speeds"),
    [
        (
            check.small_step,
            "| plain manual step | 2 (1–3) | 1.00 (1–1) |\n| 1 constraint | 3 (2–4) | 1.60 (1–2) |",
            {"step of a small model, 1 constraint": 1 / 1.6},
        ),
        (
            check.when2call_step,
            '{"method": "plain", "cpu_seconds_per_step": 3}\nnoise\n'
            '{"method": "chunked", "cpu_seconds_per_step": 2}',
            {"When2Call step, chunked": 1.5},
        ),
        (
            check.safety_step,
            "round 1, plain: {'cpu_seconds': 4.0}\nround 1, ours-cached: {'cpu_seconds': 2.0}\n"
            "round 2, plain: {'cpu_seconds': 9.0}\nround 2, ours-cached: {'cpu_seconds': 1.9}\n"
            "round 3, plain: {'cpu_seconds': 3.0}\nround 3, ours-cached: {'cpu_seconds': 6.0}\n",
            {"safety step, ours-cached": 2.0},  # medians of the rounds
        ),
        (
            check.reranker,
            "round 1, st-lambda: {'cpu_seconds': 5.0}\nround 1, ours-pointwise: "
            "{'cpu_seconds': 2.0}\nround 1, st-predict: {'cpu_seconds': 3.0}\n",
            {"re-ranking, training beside sentence-transformers": 2.5},
        ),
    ],
)
def test_a_scripts_output_is_read(
    read: object, output: str, speeds: dict[str, float]
) -> None:
    assert read(output) == pytest.approx(speeds)  # type: ignore[operator]


def test_a_fall_ends_with_status_1_and_a_missing_package_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('| 1 constraint | 3 | 4.0 (1–2) |')")
    file = tmp_path / "published.json"
    monkeypatch.setattr(check, "HERE", tmp_path)
    monkeypatch.setattr(check, "PUBLISHED", file)
    row = check.Row("script.py", (), check.small_step)
    absent = check.Row("other.py", (), check.small_step, ("no_such_package",))
    monkeypatch.setattr(check, "ROWS", (row, absent))
    monkeypatch.setattr("sys.argv", ["check.py"])
    for before, status in ((1.0, 1), (0.3, 0)):
        file.write_text(
            json.dumps({"speeds": {"step of a small model, 1 constraint": before}})
        )
        assert check.main() == status
        shown = capsys.readouterr().out
        assert "other.py: left out, no_such_package is not installed" in shown
        assert ("less." in shown) == bool(status)
    monkeypatch.setattr("sys.argv", ["check.py", "--publish"])
    check.main()
    assert json.loads(file.read_text())["speeds"] == {
        "step of a small model, 1 constraint": 0.25
    }


def test_a_script_that_fails_ends_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit('no such model')")
    monkeypatch.setattr(check, "HERE", tmp_path)
    monkeypatch.setattr(check, "ROWS", (check.Row("script.py", (), check.small_step),))
    monkeypatch.setattr("sys.argv", ["check.py"])
    assert check.main() == 1
    assert "script.py failed:\nno such model" in capsys.readouterr().out
    (tmp_path / "script.py").write_text("print('| another table |')")
    assert check.main() == 1
    assert "script.py: nothing of what it prints is read" in capsys.readouterr().out
