"""A comparison keeps what it has: finished runs stay, changed ones run again, failures are rows."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from pl_pointwise import compare
from pl_pointwise.cli import main

HERE = Path(__file__).parent
BASE = """
model: {class_path: tests.pl_pointwise.line_task.LineModule, init_args: {tolerance: 0.5}}
data: {class_path: tests.pl_pointwise.line_task.LineData}
trainer: {max_epochs: 2, accelerator: cpu, logger: false, enable_checkpointing: false,
  enable_progress_bar: false, enable_model_summary: false}
"""
ROWS = """
plain: null
pointwise: {model: {init_args: {formulation: {class_path: pl_pointwise.Pointwise}}}}
"""


@pytest.fixture
def files(tmp_path) -> list[str]:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "rows.yaml").write_text(ROWS)
    return ["--config", str(tmp_path / "base.yaml"), "--rows", str(tmp_path / "rows.yaml")]


def run(files: list[str], output: Path, *more: str) -> list[dict[str, str]]:
    main(["compare", *files, "--output", str(output), *more])
    return list(csv.DictReader((output / "comparison.csv").open()))


def test_a_row_per_run_with_every_metric_and_std_over_seeds(files, tmp_path) -> None:
    rows = run(files, tmp_path / "out", "--seeds", "0", "1")
    assert [(r["row"], r["seed"]) for r in rows] == [
        ("plain", "0"),
        ("plain", "1"),
        ("pointwise", "0"),
        ("pointwise", "1"),
    ]
    for stage in ("test", "train"):
        for statistic in ("mean", "max", "violated", "cvar95"):
            assert all(r[f"{stage}/fit/{statistic}"] for r in rows)
    assert float(rows[2]["train/fit/cvar95"]) < float(rows[0]["train/fit/cvar95"])
    table = (tmp_path / "out/comparison.md").read_text()
    assert "±" in table
    assert (tmp_path / "out/cdf.png").read_bytes()[:4] == b"\x89PNG"


def test_finished_runs_are_not_run_again_and_changed_ones_are(files, tmp_path, monkeypatch) -> None:
    first = run(files, tmp_path / "out")
    executed = []
    real = compare.execute
    monkeypatch.setattr(compare, "execute", lambda r: (executed.append(r.row), real(r))[1])
    assert run(files, tmp_path / "out") == first
    assert executed == []
    changed = ROWS.replace("Pointwise}", "Pointwise, init_args: {alpha: 3.0}}")
    (tmp_path / "rows.yaml").write_text(changed)
    again = run(files, tmp_path / "out")
    assert executed == ["pointwise"]
    assert again[1]["train/fit/mean"] != first[1]["train/fit/mean"]


def test_a_failed_run_is_a_row_that_says_why(files, tmp_path) -> None:
    broken = ROWS + "broken: {model: {init_args: {fail: true}}}\n"
    (tmp_path / "rows.yaml").write_text(broken)
    with pytest.raises(SystemExit, match=r"1 runs failed: broken \(seed 0\)"):
        run(files, tmp_path / "out")
    rows = list(csv.DictReader((tmp_path / "out/comparison.csv").open()))
    assert [r["error"] for r in rows] == ["", "", "RuntimeError: asked to fail"]
    assert "failed: RuntimeError: asked to fail" in (tmp_path / "out/comparison.md").read_text()


def test_a_misspelt_option_is_named_in_its_row(files, tmp_path) -> None:
    (tmp_path / "rows.yaml").write_text(ROWS + "odd: {model: {init_args: {tolerence: 1}}}\n")
    with pytest.raises(SystemExit):
        run(files, tmp_path / "out")
    assert "tolerence" in list(csv.DictReader((tmp_path / "out/comparison.csv").open()))[2]["error"]


def test_an_interrupted_run_is_run_again(files, tmp_path) -> None:
    run(files, tmp_path / "out")
    (result,) = (tmp_path / "out/runs/plain").rglob("result.json")
    kept = json.loads(result.read_text())
    result.unlink()
    run(files, tmp_path / "out")
    assert json.loads(result.read_text())["metrics"] == kept["metrics"]


def test_rows_that_are_no_mapping_are_refused(files, tmp_path) -> None:
    (tmp_path / "rows.yaml").write_text("[a, b]")
    with pytest.raises(ValueError, match="mapping of row names"):
        run(files, tmp_path / "out")
