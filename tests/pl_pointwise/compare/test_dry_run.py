"""--dry-run: what is to be run and what it would take, with nothing run and nothing written."""

from __future__ import annotations

import doctest
import math
import time
from pathlib import Path
from typing import Any

import pytest

from pl_pointwise.cli import main
from pl_pointwise.compare import dry_run as module
from pl_pointwise.compare.dry_run import dry_run, measure
from pl_pointwise.compare.runs import Comparison
from tests.pl_pointwise.line_task import LineData, LineModule

SECONDS = 0.05
"""What a batch of the slow task takes at least, in training and in evaluation."""

BASE = f"""
model: {{class_path: {__name__}.SlowModule, init_args: {{tolerance: 0.5}}}}
data: {{class_path: {__name__}.SmallBatches}}
trainer: {{max_epochs: 7, limit_val_batches: 0, accelerator: cpu}}
"""
METHODS = """
pointwise: {model: {init_args: {formulation: {class_path: pl_pointwise.Pointwise}}}}
untrained: {trainer: {max_epochs: 0}}
"""


class SmallBatches(LineData):
    """Five training samples, two by two: three batches; and as many of test and train each."""

    def __init__(self) -> None:
        super().__init__(batch_size=2)


class SlowModule(LineModule):
    """Every forward pass takes a while, the first of all a long one."""

    passes = 0

    def forward(self, batch: Any) -> Any:
        time.sleep(20 * SECONDS if SlowModule.passes == 0 else SECONDS)
        SlowModule.passes += 1
        return super().forward(batch)


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    SlowModule.passes = 0
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "methods.yaml").write_text(METHODS)
    return Comparison(
        [str(tmp_path / "base.yaml")], tmp_path / "out", str(tmp_path / "methods.yaml"), (0, 1)
    )


def files_below(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_doctests_pass() -> None:
    assert doctest.testmod(module).failed == 0


def test_a_batch_is_measured_once_it_is_warm_and_counted_in_full(comparison) -> None:
    before = files_below(comparison.output.parent)
    found = measure(comparison.runs[0])
    assert found.batches == 7 * 3 - 1  # The first is part of the start.
    assert found.evaluation_batches == 3 + 3
    assert found.start > 20 * SECONDS
    for measured in (found.batch, found.evaluation_batch):
        assert SECONDS < measured < 20 * SECONDS
    # Four training batches, two more passes for the unit of λ in three of them, two evaluations.
    assert 2 + 2 * 2 + 2 < SlowModule.passes <= 4 + 3 * 2 + 2
    expected = found.start + 20 * found.batch + 6 * found.evaluation_batch
    assert found.seconds == pytest.approx(expected)
    assert files_below(comparison.output.parent) == before


def test_steps_end_a_fit_and_validation_during_it_counts(comparison, tmp_path) -> None:
    more = ["--trainer.max_steps=10", "--trainer.limit_val_batches=1.0"]
    limited = Comparison([*comparison.configs], tmp_path / "out", None, (0,), (), more)
    found = measure(limited.runs[0])
    assert found.batches == 10 - 1
    assert found.evaluation_batches == 3 + 3 + 3 * 3  # Three whole epochs.


def test_a_fit_without_end_is_said_to_be_one(comparison, tmp_path) -> None:
    more = ["--trainer.max_epochs=-1"]
    endless = Comparison([*comparison.configs], tmp_path / "out", None, (0,), (), more)
    assert math.isinf(measure(endless.runs[0]).batches)


def test_runs_are_listed_and_each_method_is_measured_once(
    comparison, tmp_path, monkeypatch, capsys
) -> None:
    measured = []
    real = module.measure
    monkeypatch.setattr(module, "measure", lambda run: (measured.append(run.title), real(run))[1])
    run = comparison.runs[1]
    finished = {run.folder}
    monkeypatch.setattr(type(run), "finished", property(lambda self: self.folder in finished))
    before = files_below(tmp_path)
    main(["compare", *comparison.arguments(), "--dry-run"])
    text = capsys.readouterr().out
    assert measured == ["pointwise · seed 0", "untrained · seed 0"]
    for line in (
        "4 runs, 3 of them to do:",
        "  [1/4] pointwise · seed 0: to do",
        "  [2/4] pointwise · seed 1: finished",
        "  [4/4] untrained · seed 1: to do",
        "All runs to do, one after the other: about ",
    ):
        assert line in text
    cells = {line.split(":")[0].strip(): line for line in text.splitlines() if " × " in line}
    assert "20 × " in cells["pointwise"]
    assert cells["untrained"].count(" × ") == 1
    assert files_below(tmp_path) == before


def test_nothing_is_measured_where_all_is_finished(comparison, monkeypatch) -> None:
    monkeypatch.setattr(type(comparison.runs[0]), "finished", True)
    monkeypatch.setattr(module, "measure", lambda run: pytest.fail("is finished"))
    text = dry_run(comparison)
    assert text.splitlines()[0] == "4 runs, 0 of them to do:"
    assert len(text.splitlines()) == 5


def test_what_fails_in_the_first_step_is_said_of_its_method(comparison, capsys) -> None:
    path = Path(str(comparison.methods))
    path.write_text(METHODS + "broken: {model: {init_args: {fail: true}}}\n")
    with pytest.raises(SystemExit) as ended:
        main(["compare", *comparison.arguments(), "--dry-run"])
    assert ended.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "broken: asked to fail" in error
    assert "line_task.py, line " in error
    assert not comparison.output.exists()
