"""A comparison keeps finished runs, runs changed ones again, and says why a run failed.

Runs are independent: one after another or side by side, the results are the same.
"""

from __future__ import annotations

import csv
import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pl_pointwise.cli import PointwiseCLI, main
from pl_pointwise.compare import command as compare
from pl_pointwise.compare import execution
from pl_pointwise.compare.plots import PLOTS
from pl_pointwise.compare.runs import Run, alone_in
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
POINTWISE = METHODS.splitlines()[-1] + "\n"
ROOT = Path(__file__).resolve().parents[3]


def write_files(folder: Path, methods: str = METHODS, base: str = BASE) -> list[str]:
    """The words of a comparison that name the two files."""
    (folder / "base.yaml").write_text(base)
    (folder / "methods.yaml").write_text(methods)
    return [
        "--config",
        str(folder / "base.yaml"),
        "--methods",
        str(folder / "methods.yaml"),
    ]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes import the tests' modules from there. Plots take longer than these runs."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(compare, "draw_plots", lambda *_: None)


@pytest.fixture
def files(tmp_path) -> list[str]:
    return write_files(tmp_path)


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
    real = execution.execute

    def execute(run: Run, **more: Any) -> Any:
        executed.append(run.method)
        return real(run, **more)

    monkeypatch.setattr(execution, "execute", execute)
    return executed


def test_a_line_per_run_with_every_metric_and_std_over_seeds(compared) -> None:
    lines = read(compared)
    methods = ("plain", "plain", "pointwise", "pointwise")
    assert [(r["method"], r["seed"]) for r in lines] == [
        *zip(methods, "0101", strict=True)
    ]
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
    files, tmp_path, monkeypatch
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


def test_a_failed_run_is_a_line_that_says_why(files, tmp_path) -> None:
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
        (
            MODEL % "Pointwise, init_args: {alpha: -1}",
            "alpha must be a finite number > 0",
        ),
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


def longer(folder: Path, methods: str) -> list[str]:
    return [*write_files(folder, methods), "--trainer.max_epochs", "3"]


def lines(output: Path) -> dict[str, dict[str, str]]:
    return {line["method"]: line for line in read(output)}


def metrics(line: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in line.items() if "/" in name}


def test_runs_side_by_side_give_the_same_results(tmp_path, capsys) -> None:
    """As docs/compare.md has it: ``--only`` by xargs, then the tables."""
    common = longer(tmp_path, POINTWISE + "plain: null\n")
    main(["compare", *common, "--output", str(tmp_path / "here")])
    apart = ["compare", *common, "--output", str(tmp_path / "apart")]
    command = [
        "xargs",
        "-P",
        "2",
        "-I",
        "N",
        sys.executable,
        "-m",
        "pl_pointwise",
        *apart,
    ]
    subprocess.run(
        [*command, "--only", "N"], input="1\n2\n", text=True, check=True, timeout=200
    )
    assert not (tmp_path / "apart/comparison.csv").exists()
    capsys.readouterr()
    main(apart)
    assert capsys.readouterr().out.count("(finished before)") == 2
    here, there = lines(tmp_path / "here"), lines(tmp_path / "apart")
    for method in ("pointwise", "plain"):
        assert metrics(there[method]) == metrics(here[method])


def test_a_second_comparison_in_a_folder_is_refused_and_changes_nothing(
    tmp_path, capsys
) -> None:
    common = [*longer(tmp_path, POINTWISE), "--output", str(tmp_path / "out")]
    main(["compare", *common])
    result = tmp_path / "out/runs/pointwise/seed-0/result.json"
    before = result.read_text()
    with alone_in(tmp_path / "out"), pytest.raises(SystemExit):
        main(["compare", *common, "--model.tolerance", "0.4"])
    assert "out: another comparison runs there" in capsys.readouterr().err
    with alone_in(result.parent), pytest.raises(SystemExit):
        main(["compare", *common, "--model.tolerance", "0.4", "--only", "1"])
    assert "seed-0: another comparison runs there" in capsys.readouterr().err
    assert result.read_text() == before


def test_what_cannot_be_written_is_said_with_its_path_and_the_others_run(
    tmp_path, monkeypatch, capsys
) -> None:
    common = longer(tmp_path, POINTWISE.replace("pointwise", "full", 1) + POINTWISE)
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        main(["compare", *common, "--output", str(tmp_path / "file")])
    said = capsys.readouterr().err
    assert f"error: {tmp_path / 'file'}: File exists" in said
    assert "Traceback" not in said
    write = execution.write_whole

    def full(path: Path, text: str) -> None:
        if "full" in path.parts:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, text)

    monkeypatch.setattr(execution, "write_whole", full)
    with pytest.raises(SystemExit, match=r"1 run failed: full \(seed 0\)"):
        main(["compare", *common, "--output", str(tmp_path / "out")])
    found = lines(tmp_path / "out")
    assert "No space left on device" in found["full"]["error"]
    assert found["pointwise"]["error"] == ""


LOGGED = POINTWISE + POINTWISE.replace("pointwise", "other", 1)


def logged(folder: Path, logger: str) -> list[str]:
    watched = f"logger: {logger}, callbacks: [{{class_path: DualMonitor}}]"
    files = write_files(folder, LOGGED, BASE.replace("logger: false", watched))
    return ["compare", *files, "--seeds", "3", "--output", str(folder / "out")]


def test_tensorboard_has_method_and_seed_of_every_run(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    init = f"{{save_dir: {tmp_path / 'board'}}}"
    main(logged(tmp_path, f"{{class_path: TensorBoardLogger, init_args: {init}}}"))
    for number, method in enumerate(("pointwise", "other")):
        folder = tmp_path / f"board/lightning_logs/version_{number}"
        events = accumulator.EventAccumulator(str(folder), {"scalars": 0})
        events.Reload()
        assert len(events.Scalars("dual/fit/multiplier_max")) == 2
        plugin = events.summary_metadata[
            "_hparams_/session_start_info"
        ].plugin_data.content
        assert method.encode() in plugin
        assert b"seed" in plugin
        assert b"tolerance" in plugin  # The module's own are there as well.


def test_a_log_in_the_runs_own_folder_stays_there(tmp_path: Path) -> None:
    main(logged(tmp_path, "true"))
    for method in ("pointwise", "other"):
        folder = tmp_path / f"out/runs/{method}/seed-3/lightning_logs/version_0"
        assert f"method: {method}" in (folder / "hparams.yaml").read_text()


def test_offline_wandb_has_a_run_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "w").mkdir()
    init = f"{{save_dir: {tmp_path / 'w'}, offline: true, project: p}}"
    main(logged(tmp_path, f"{{class_path: WandbLogger, init_args: {init}}}"))
    assert len([*(tmp_path / "w").rglob("run-*.wandb")]) == 2


def test_the_note_reaches_what_is_printed_written_and_drawn(
    files, tmp_path, capsys, monkeypatch
) -> None:
    notes = []
    monkeypatch.setattr(
        compare, "draw_plots", lambda done, output, note: notes.append(note)
    )
    main(["compare", *files, "--output", str(tmp_path / "out"), "--note", "A trial."])
    assert notes == ["A trial."]
    assert "**A trial.**" in capsys.readouterr().out
    assert "**A trial.**" in (tmp_path / "out/comparison.md").read_text()
