"""A comparison keeps finished runs, runs changed ones again, and says why a run failed."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml

from pl_pointwise.cli import PointwiseCLI, main
from pl_pointwise.compare import command as compare
from pl_pointwise.compare.plots import PLOTS
from pl_pointwise.compare.runs import Run
from tests.pl_pointwise.line_task import LineData

BASE = """
model: {class_path: tests.pl_pointwise.line_task.LineModule, init_args: {tolerance: 0.5}}
data: {class_path: tests.pl_pointwise.line_task.LineData}
trainer: {max_epochs: 2, accelerator: cpu, logger: false, enable_checkpointing: false,
  enable_progress_bar: false, enable_model_summary: false}
"""
METHODS = """
plain: null
pointwise: {model: {init_args: {formulation: {class_path: pl_pointwise.Pointwise}}}}
"""


def write_files(folder: Path, methods: str = METHODS, base: str = BASE) -> list[str]:
    """The words of a comparison that name the two files."""
    (folder / "base.yaml").write_text(base)
    (folder / "methods.yaml").write_text(methods)
    return ["--config", str(folder / "base.yaml"), "--methods", str(folder / "methods.yaml")]


@pytest.fixture
def files(tmp_path) -> list[str]:
    return write_files(tmp_path)


@pytest.fixture
def unpainted(monkeypatch) -> None:
    """Plots take longer than these runs."""
    monkeypatch.setattr(compare, "draw_plots", lambda *_: None)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison of two methods at two seeds."""
    folder = tmp_path_factory.mktemp("compared")
    run(write_files(folder), folder / "out", "--seeds", "0", "1")
    return folder / "out"


def run(files: list[str], output: Path, *more: str) -> list[dict[str, str]]:
    main(["compare", *files, "--output", str(output), *more])
    return read(output)


def read(output: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((output / "comparison.csv").open()))


def methods_executed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    executed: list[str] = []
    real = compare.execute

    def execute(run: Run, **more: Any) -> Any:
        executed.append(run.method)
        return real(run, **more)

    monkeypatch.setattr(compare, "execute", execute)
    return executed


def test_a_line_per_run_with_every_metric_and_std_over_seeds(compared) -> None:
    lines = read(compared)
    methods = ("plain", "plain", "pointwise", "pointwise")
    assert [(r["method"], r["seed"]) for r in lines] == [*zip(methods, "0101", strict=True)]
    for stage in ("test", "train"):
        for statistic in ("mean", "max", "violated", "cvar95"):
            assert all(r[f"{stage}/fit/{statistic}"] for r in lines)
    assert float(lines[2]["train/fit/cvar95"]) < float(lines[0]["train/fit/cvar95"])
    assert all(float(line["fit_seconds"]) > 0 for line in lines)
    table = (compared / "comparison.md").read_text()
    assert "±" in table
    for title in ("Results", "All metrics"):
        assert f"## {title}" in table
    assert {path.name for path in compared.glob("*.p*")} == set(PLOTS)


def test_the_configuration_left_behind_is_that_of_the_run(compared) -> None:
    path = compared / "runs/pointwise/seed-1/config.yaml"
    config = yaml.safe_load(path.read_text())
    assert config["seed_everything"] == 1
    assert config["trainer"]["max_epochs"] == 2
    cli = PointwiseCLI(["--config", str(path)], run=False)
    assert repr(cli.model.formulations["fit"]).startswith("Pointwise(alpha='adaptive'")
    assert cli.model.constraints["fit"].at_most == 0.5


def test_finished_runs_are_not_run_again_and_changed_ones_are(
    files, tmp_path, monkeypatch, unpainted
) -> None:
    first = run(files, tmp_path / "out")
    executed = methods_executed(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(compare, "_check_data", lambda *_: pytest.fail("was finished"))
        assert run(files, tmp_path / "out") == first
    assert executed == []
    changed = METHODS.replace("Pointwise}", "Pointwise, init_args: {alpha: 3.0}}")
    (tmp_path / "methods.yaml").write_text(changed)
    again = run(files, tmp_path / "out")
    assert executed == ["pointwise"]
    assert again[1]["train/fit/mean"] != first[1]["train/fit/mean"]


def test_a_failed_run_is_a_line_that_says_why(files, tmp_path, unpainted) -> None:
    broken = METHODS + "broken: {model: {init_args: {fail: true}}}\n"
    (tmp_path / "methods.yaml").write_text(broken)
    with pytest.raises(SystemExit, match=r"1 run failed: broken \(seed 0\)"):
        run(files, tmp_path / "out")
    rows = read(tmp_path / "out")
    assert [r["error"] for r in rows] == ["", "", "RuntimeError: asked to fail"]
    assert (
        "Failed: broken · seed 0: RuntimeError: asked to fail"
        in (tmp_path / "out/comparison.md").read_text()
    )


class FileData(LineData):
    """Data of a file."""

    def __init__(self, train_file: str) -> None:
        super().__init__()
        self.train_file = train_file


MODEL = "{model: {init_args: {formulation: {class_path: %s}}}}"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("[reranker/pointwize]", "No configuration 'reranker/pointwize'"),
        (MODEL % "Pointwize", "Pointwize"),
        (MODEL % "Pointwise, init_args: {alpha: -1}", "alpha must be a finite number > 0"),
        ("{trainer: {max_epoks: 3}}", "Did you mean 'trainer.max_epochs'?"),
        ("{model: {class_path: nowhere.Module}}", "No module named 'nowhere'"),
        ("3", "3 is no configuration"),
        ("[./nofile.yaml]", "No configuration './nofile.yaml'"),
        (
            f"{{data: {{class_path: {__name__}.FileData, init_args: {{train_file: ./no.csv}}}}}}",
            "data.train_file: there is no file ./no.csv.",
        ),
    ],
)
def test_a_method_that_is_wrong_is_named_before_the_first_run(
    tmp_path, capsys, monkeypatch, wrong, said
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run(write_files(tmp_path, f"fine: null\nwrong: {wrong}\n"), tmp_path / "out")
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "error: nothing was run; wrong: " in line
    assert said in line
    assert not (tmp_path / "out").exists()
