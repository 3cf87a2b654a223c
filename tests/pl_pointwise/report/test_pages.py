"""The pages that `fit`, `test` and `compare` write: what they show is what was measured."""

from __future__ import annotations

import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch

from pl_pointwise.cli import main
from pl_pointwise.report.of_run import hardest_samples, in_turn, page_of_fit
from pl_pointwise.report.of_test import page_of_test
from tests.pl_pointwise.report.test_page import samples_of
from tests.pl_pointwise.toy import Toy, ToyData, ToyRows, trainer

LINE = ["--model", "tests.pl_pointwise.line_task.LineModule"]
LINE += [
    "--data",
    "tests.pl_pointwise.line_task.LineData",
    "--trainer.accelerator",
    "cpu",
]
LINE += ["--trainer.enable_progress_bar", "false", "--trainer.logger", "false"]
METHODS = """
plain: null
pointwise: {model: {init_args: {formulation: {class_path: pl_pointwise.Pointwise}}}}
"""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_each_requirement_brings_its_hardest_in_turn() -> None:
    ranked = {"a": [4, 2, 0], "b": [], "c": [1]}
    assert in_turn(ranked) == [("a", 4), ("c", 1), ("a", 2), ("a", 0)]


def test_a_fit_shows_its_hardest_samples_as_the_last_step_saw_them() -> None:
    module, data = Toy(), ToyData(ToyRows(9), batch_size=4)
    runner = trainer(max_epochs=2)
    runner.fit(module, data)
    page = page_of_fit(module, runner)
    assert page.closing is module.closing
    by_name: dict[str, list[Any]] = {}
    for sample in page.samples:
        by_name.setdefault(sample.constraint, []).append(sample)
    assert {row.name: row.of for row in module.closing.rows if row.of} == {
        name: len(samples) for name, samples in by_name.items()
    }
    for name, samples in by_name.items():
        found = [sample.violation for sample in samples]
        assert found == sorted(found, reverse=True)
        constraint = module.constraints[name]
        for sample in samples:
            assert sample.value == pytest.approx(constraint.value_at(sample.violation))
    assert len(hardest_samples(module, runner, count=3)) == 3


def test_a_test_shows_the_hardest_samples_of_every_data_set(capsys: Any) -> None:
    main(["test", *LINE])
    assert "open report.html" in capsys.readouterr().out
    text = Path("report.html").read_text("utf-8")
    assert "no --ckpt_path was given" in unescape(text)
    found = samples_of(text)
    assert {row["dataset"] for row in found} == {"held-out", "training"}
    for dataset in ("held-out", "training"):
        violations = [row["violation"] for row in found if row["dataset"] == dataset]
        assert violations == sorted(violations, reverse=True)
    main(["test", *LINE])
    assert Path("report-1.html").is_file()  # The earlier one is another model's.


def test_a_violation_is_that_of_the_evaluation() -> None:
    module, data = Toy(), ToyData(ToyRows(9), batch_size=4)
    runner = trainer(max_epochs=1)
    runner.fit(module, data)
    runner.test(module, data, verbose=False)
    page = page_of_test(module, runner, {}, "last.ckpt")
    assert page.samples
    of_stage = {"training": "train", "held-out": "test"}
    for sample in page.samples:
        evaluated = module.evaluated[of_stage[sample.dataset]][sample.constraint]
        [row] = (evaluated.index == sample.index).nonzero()[:, 0]
        assert sample.violation == pytest.approx(float(evaluated.worst()[row]))
    for name, by_stage in page.metrics.items():
        for stage, value in by_stage.items():
            measured = float(runner.callback_metrics[f"{stage}/{name}"])
            assert float(value) == pytest.approx(measured, rel=1e-3, abs=1e-9)


def test_a_comparison_has_a_drawer_for_each_run_also_of_finished_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    pytest.importorskip("pandas")
    from pl_pointwise.compare import command

    monkeypatch.setattr(command, "draw_plots", lambda *_: None)
    Path("methods.yaml").write_text(METHODS)
    Path("base.yaml").write_text(
        "model: {class_path: tests.pl_pointwise.line_task.LineModule, init_args: {}}\n"
        "data: {class_path: tests.pl_pointwise.line_task.LineData}\n"
        "trainer: {max_epochs: 2, accelerator: cpu, logger: false, enable_progress_bar: false,\n"
        "  enable_checkpointing: false, enable_model_summary: false}\n"
    )
    words = [
        "compare",
        "--config",
        "base.yaml",
        "--methods",
        "methods.yaml",
        "--output",
        "out",
    ]
    main(words)
    assert "open out/report.html" in capsys.readouterr().out
    first = Path("out/report.html").read_text("utf-8")
    assert first.count("<details>") == 2
    for method in ("plain", "pointwise"):
        link = f"runs/{method}/seed-0/report.html"
        assert f'href="{link}"' in first
        assert Path("out", link).is_file()
    drawer = first.split("<summary>pointwise · seed 0")[1]
    assert drawer.count("<svg") >= 3
    assert "in 2 epochs" in Path("out/runs/pointwise/seed-0/report.html").read_text(
        "utf-8"
    )
    main(words)  # Nothing is run again.
    second = Path("out/report.html").read_text("utf-8")
    assert second.split("<h2>Runs")[1] == first.split("<h2>Runs")[1]
    Path("out/runs/plain/seed-0/closing.json").unlink()  # As of an earlier version.
    main(words)
    assert Path("out/report.html").read_text("utf-8").count("<details>") == 2


def test_a_fit_ends_well_without_what_the_page_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    main(["fit", *LINE, "--trainer.max_epochs", "1"])
    assert "Written to" in capsys.readouterr().out
    assert "report.html needs jinja2" in caplog.text
    assert not [*Path().rglob("report*.html")]


def test_reading_samples_for_a_page_draws_no_random_number() -> None:
    class Drawing(ToyRows):
        def __getitem__(self, position: int) -> Any:
            return super().__getitem__(position) | {"noise": float(torch.rand(()))}

    module, data = Toy(), ToyData(Drawing(5), batch_size=5)
    runner = trainer(max_epochs=1)
    runner.fit(module, data)
    before = torch.get_rng_state()
    page_of_fit(module, runner)
    assert torch.equal(before, torch.get_rng_state())
