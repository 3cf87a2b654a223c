"""Tasks that define the least: no held-out data, no data module, no export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningDataModule

from pl_pointwise.cli import main
from pl_pointwise.compare import command
from tests.pl_pointwise.line_task import LineData
from tests.pl_pointwise.requirements.plane_task import PlaneData, PlaneModule

TRAINER = """
trainer: {max_epochs: 1, accelerator: cpu, logger: false, enable_checkpointing: false,
  enable_progress_bar: false, enable_model_summary: false}
"""


class TrainingData(LineData):
    """As README's example has them."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.datasets = {"train": self.datasets["train"]}


class TrainingLoader(LightningDataModule):
    """Lightning's own kind, with nothing but a loader."""

    def train_dataloader(self) -> Any:
        raise AssertionError("before that")


class WithLoaders(PlaneModule):
    """Brings its data, and no export."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.data = PlaneData(seed=seed)
        self.data.setup("fit")

    def train_dataloader(self) -> Any:
        return self.data.train_dataloader()

    def val_dataloader(self) -> Any:
        return self.data.val_dataloader()

    def test_dataloader(self) -> Any:
        return self.data.test_dataloader()


def compare(folder: Path, model: str, data: str | None, *more: str) -> Path:
    text = f"model: {{class_path: {model}}}\n{TRAINER}"
    text += "" if data is None else f"data: {{class_path: {data}}}\n"
    (folder / "bare.yaml").write_text(text)
    output = folder / "out"
    main(
        [
            "compare",
            "--config",
            str(folder / "bare.yaml"),
            "--output",
            str(output),
            *more,
        ]
    )
    return output


LINE = "tests.pl_pointwise.line_task.LineModule"


def test_without_held_out_data_the_training_data_are_shown(tmp_path) -> None:
    out = compare(tmp_path, LINE, f"{__name__}.TrainingData")
    results = (out / "comparison.md").read_text()
    assert "Training data, as there are no test data" in results
    assert "| method | objective | violation rate | CVaR95 |" in results
    assert (out / "pareto.png").is_file()


@pytest.mark.parametrize(
    ("data", "requirement", "said"),
    [
        ("TrainingData", "fit: violated <= 0.5", "'val' is not among ['train']"),
        (
            "TrainingLoader",
            "fit: violated <= 0.5",
            "TrainingLoader has no test_dataloader()",
        ),
        ("TrainingLoader", None, "TrainingLoader has no test_dataloader()"),
    ],
)
def test_what_is_missing_is_said_before_training(
    tmp_path, capsys, data, requirement, said
) -> None:
    with pytest.raises(SystemExit):
        compare(
            tmp_path,
            LINE,
            f"{__name__}.{data}",
            *(["--require", requirement] * bool(requirement)),
        )
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out/runs").exists()


def test_a_module_with_its_own_loaders_is_certified(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.delattr(PlaneModule, "export")
    monkeypatch.setattr(command, "draw_plots", lambda *_: None)
    out = compare(
        tmp_path, f"{__name__}.WithLoaders", None, "--require", "near: violated <= 0.99"
    )
    assert json.loads((out / "answer.json").read_text())["certified"]
    assert "WithLoaders has no export()" in capsys.readouterr().out
    assert (out / "model/certificate/model.ckpt").is_file()
    # Its samples have been used; those of another task, by the same positions, have not.
    again = [
        tmp_path,
        f"{__name__}.WithLoaders",
        None,
        "--require",
        "near: violated <= 0.98",
    ]
    with pytest.raises(SystemExit):
        compare(*again)
    shutil.rmtree(out)
    compare(*again, "--model.seed", "1")
    assert json.loads((out / "answer.json").read_text())["certified"]
