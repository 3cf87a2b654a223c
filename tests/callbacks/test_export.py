"""The model is exported when the fit ends, where the callback says."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch import Trainer

from pl_pointwise import Pointwise
from pl_pointwise.callbacks import ModelExport
from tests.pl_pointwise.line_task import LineData, LineModule


class Exporting(LineModule):
    def export(self, path: str | Path) -> Path:
        Path(path).mkdir(parents=True)
        (Path(path) / "weight.txt").write_text(str(self.weight.tolist()))
        return Path(path)


def fit(module: LineModule, root: Path) -> None:
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=root,
        callbacks=[ModelExport("model")],
    )
    trainer.fit(module, LineData())


def test_export_holds_the_trained_weights(tmp_path: Path) -> None:
    module = Exporting(Pointwise())
    fit(module, tmp_path)
    assert (tmp_path / "model/weight.txt").read_text() == str(module.weight.tolist())
    assert module.weight.abs().sum() > 0


def test_a_task_without_export_says_so(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"LineModule has no export\(\)"):
        fit(LineModule(Pointwise()), tmp_path)
