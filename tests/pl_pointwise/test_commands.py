"""fit, validate, test, predict and export, where runs are not as the examples are."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from safetensors.torch import save_file

from pl_pointwise.cli import main
from tests.pl_pointwise.line_task import LineData, LineModule
from tests.programs.launch import run_on_ranks

HERE = "tests.pl_pointwise.test_commands"
QUIET = "--trainer.accelerator cpu --trainer.enable_progress_bar false --trainer.max_epochs 2"
QUIET += " --trainer.enable_model_summary false"
STAGES = ("validate", "test", "predict")


class Exported(LineModule):
    def predict_step(self, batch: Any, batch_idx: int) -> list[dict[str, Any]]:
        rows = zip(batch["index"].tolist(), self(batch).tolist(), strict=True)
        return [{"index": index, "y": y} for index, y in rows]

    def export(self, path: str | Path) -> Path:
        folder = Path(path)
        folder.mkdir(parents=True)
        save_file({"weight": self.weight.detach()}, folder / "model.safetensors")
        return folder


class WithPrediction(LineData):
    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.datasets["predict"] = self.datasets["val"]


class TrainingAlone(LineData):
    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.datasets = {"train": self.datasets["train"]}


class Terminated(Callback):
    """Once, in the middle of the second epoch."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 4:
            signal.raise_signal(signal.SIGTERM)


def words(command: str, model: str, data: str, *more: str) -> list[str]:
    options = f"--model {HERE}.{model} --data {HERE}.{data} --data.batch_size 2 {QUIET}"
    given = "--model.formulation Pointwise --model.formulation.alpha 1"
    return [command, *shlex.split(f"{options} {given}"), *more]


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit status, and the output followed by the errors."""
    status = 0
    try:
        main(arguments)
    except SystemExit as end:
        status = int(end.code or 0)
    shown = capsys.readouterr()
    return status, shown.out + shown.err


def export(checkpoint: Path, model: str, folder: Path) -> list[str]:
    config = folder / "model.yaml"
    config.write_text(f"model: {HERE}.{model}\ndata: {HERE}.LineData\n")
    return ["export", "--config", str(config), "--ckpt_path", str(checkpoint)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_two_ranks_end_with_status_0(folder, capsys) -> None:
    """Rank 0 asked all ranks for the folder of the log, alone."""
    ranks = ["--trainer.devices", "2", "--trainer.default_root_dir", str(folder)]
    ranks += ["--trainer.strategy", "ddp"]
    writer = ["--trainer.callbacks+", "PredictionWriter"]
    checkpoint: list[str] = []
    for command in ("fit", *STAGES):
        more = [*ranks, *checkpoint, *(writer if command == "predict" else [])]
        arguments = words(command, "Exported", "WithPrediction", *more)
        run_on_ranks(2, "pl_pointwise", arguments, folder, timeout=120)
        if command == "fit":
            assert "Written to" in (folder / "rank0.log").read_text()
            (path,) = folder.rglob("*.ckpt")
            checkpoint = ["--ckpt_path", str(path)]
    (written,) = folder.rglob("predictions.jsonl")
    assert len(written.read_text().splitlines()) == 5
    assert run(export(path, "Exported", folder), capsys)[0] == 0


def test_a_data_module_with_training_data_alone(folder, capsys) -> None:
    status, text = run(words("fit", "Exported", "TrainingAlone"), capsys)
    assert (status, "Next:" in text) == (0, True)
    (path,) = folder.rglob("*.ckpt")
    (log,) = folder.rglob("metrics.csv")
    # Lightning's 50 steps would have given none.
    assert len(log.read_text().splitlines()) > 2
    of_it = ["--ckpt_path", str(path)]
    for command, name in (("validate", "val"), ("predict", "predict")):
        status, text = run(words(command, "Exported", "TrainingAlone", *of_it), capsys)
        assert status == 2
        assert text.splitlines()[-1] == (
            f"pl-pointwise {command}: error: TrainingAlone: the data set '{name}' is not among "
            f"['train']. Fill self.datasets['{name}'] in setup() with rows that have positions."
        )
    status, text = run(words("test", "Exported", "TrainingAlone", *of_it), capsys)
    assert (status, text.splitlines()[0].split()) == (0, ["train"])
    assert run(export(path, "Exported", folder), capsys)[0] == 0


def test_a_module_without_export(folder, capsys) -> None:
    status, text = run(words("fit", "LineModule", "WithPrediction"), capsys)
    assert status == 0
    assert "pl-pointwise test" in text
    (path,) = folder.rglob("*.ckpt")
    for command in STAGES:
        more = ["--ckpt_path", str(path)]
        status, text = run(
            words(command, "LineModule", "WithPrediction", *more), capsys
        )
        assert status == 0
        assert "export" not in text
    assert "Nothing was written: give --trainer.callbacks+ PredictionWriter." in text
    status, text = run(export(path, "LineModule", folder), capsys)
    assert status == 2
    assert "LineModule has no export()" in text


def test_a_run_that_was_stopped(folder, capsys) -> None:
    saver = ["--trainer.callbacks+", "SaveOnTermination"]
    stop = ["--trainer.callbacks+", f"{HERE}.Terminated"]
    fit = words("fit", "Exported", "WithPrediction", *saver)
    assert run([*fit, *stop], capsys)[0] == 143
    (path,) = folder.rglob("terminated-*.ckpt")
    for command in STAGES:
        more = ["--ckpt_path", str(path)]
        assert run(words(command, "Exported", "WithPrediction", *more), capsys)[0] == 0
    assert run(export(path, "Exported", folder), capsys)[0] == 0
    status, text = run(fit, capsys)  # Goes on where it was stopped, to its end.
    assert status == 0
    assert "log, configuration and checkpoint. Next:" in text
    assert not path.exists()
    (last,) = folder.glob("lightning_logs/*/checkpoints/*step=6.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == 6


def test_a_fit_without_a_checkpoint_says_so(capsys) -> None:
    none = ["--trainer.enable_checkpointing", "false"]
    status, text = run(words("fit", "Exported", "LineData", *none), capsys)
    assert status == 0
    assert "without a checkpoint" in text


def test_lightnings_advice_that_does_not_fit_is_not_shown(
    folder, capsys, recwarn
) -> None:
    """Of a folder for checkpoints, in every `test`."""
    assert run(words("fit", "Exported", "TrainingAlone"), capsys)[0] == 0
    (path,) = folder.rglob("*.ckpt")
    test = words("test", "Exported", "TrainingAlone", "--ckpt_path", str(path))
    assert (
        run([*test, "--trainer.default_root_dir", str(folder / "other")], capsys)[0]
        == 0
    )
    assert not [each for each in recwarn if "dirpath has changed" in str(each.message)]
