"""The model is exported when the fit ends, where the callback says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from lightning.pytorch import Callback

from pl_pointwise import Pointwise
from pl_pointwise.callbacks import FeasibleCheckpoint, ModelExport
from pl_pointwise.errors import TrainingError
from pl_pointwise.model_card import write_card
from tests.pl_pointwise.line_task import LineData, LineModule
from tests.tasks.conftest import quiet_trainer


class Exporting(LineModule):
    def export(self, path: str | Path) -> Path:
        Path(path).mkdir(parents=True)
        (Path(path) / "weight.txt").write_text(str(self.weight.tolist()))
        write_card(
            self,
            Path(path),
            library_name="none",
            pipeline_tag="other",
            base_model="a",
            usage="",
        )
        return Path(path)


def run(module: LineModule, root: Path, callback: ModelExport) -> None:
    quiet_trainer(root, max_epochs=1, callbacks=[callback]).fit(module, LineData())


def test_export_holds_the_trained_weights_and_what_only_the_user_knows(
    tmp_path: Path,
) -> None:
    module = Exporting(Pointwise())
    facts: dict[str, Any] = {
        "license": "mit",
        "language": ["en"],
        "datasets": ["owner/data"],
    }
    run(module, tmp_path, ModelExport("model", **facts))
    assert (tmp_path / "model/weight.txt").read_text() == str(module.weight.tolist())
    assert module.weight.abs().sum() > 0
    assert (
        ModelCard.load(tmp_path / "model/README.md").data.to_dict().items()
        >= facts.items()
    )


def run_with_choice(root: Path) -> tuple[Exporting, FeasibleCheckpoint]:
    """Three epochs, of whose checkpoints the first is chosen: the smallest |w| of none feasible."""
    chooser = FeasibleCheckpoint("mean", at_most=100.0, dirpath=str(root))
    callbacks: list[Callback] = [ModelExport("model"), chooser]
    module = Exporting(Pointwise())
    trainer = quiet_trainer(
        root, max_epochs=3, enable_checkpointing=True, callbacks=callbacks
    )
    trainer.fit(module, LineData())
    return module, chooser


def test_the_exported_weights_are_those_of_the_chosen_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    monkeypatch.setattr("pl_pointwise.callbacks.export.rank_zero_info", said.append)
    module, chooser = run_with_choice(tmp_path)
    chosen = torch.load(chooser.best_model_path, weights_only=True)
    assert chosen["epoch"] == 0
    written = (tmp_path / "model/weight.txt").read_text()
    assert written == str(chosen["state_dict"]["weight"].tolist())
    assert written != str(module.weight.tolist())  # The fit's own stay as they are.
    name = Path(chooser.best_model_path).name
    assert f"with the weights of the checkpoint {name}" in said[0]
    card = (tmp_path / "model/README.md").read_text()
    assert f"weights of the checkpoint: {name}" in card


def test_a_task_without_export_says_so(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"LineModule has no export\(\)"):
        run(LineModule(Pointwise()), tmp_path, ModelExport())


def test_an_export_that_fails_leaves_the_earlier_one_and_others_files_stay(
    tmp_path: Path,
) -> None:
    class Failing(Exporting):
        def export(self, path: str | Path) -> Path:
            super().export(path)
            raise OSError("No space left on device")

    run(Exporting(Pointwise()), tmp_path, ModelExport("model"))
    (tmp_path / "model/NOTES.txt").write_text("mine")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    for folder in ("model", "new"):
        with pytest.raises(OSError, match="No space left"):
            run(Failing(Pointwise()), tmp_path, ModelExport(folder))
    assert {
        path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()
    } == before
    assert not (tmp_path / "new").exists()
    (tmp_path / "model/model-00001-of-00002.safetensors").write_bytes(
        b"of an earlier export"
    )
    run(Exporting(Pointwise()), tmp_path, ModelExport("model"))
    assert {path.name for path in (tmp_path / "model").iterdir()} == before.keys()


def test_what_cannot_work_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "mine/certificate").mkdir(parents=True)
    for folder, said in (
        ("mine/..", "not of an earlier export"),
        ("mine", "certified model"),
    ):
        module = Exporting(Pointwise())
        with pytest.raises(TrainingError, match=said):
            run(module, tmp_path, ModelExport(folder))
        assert not module.weight.any()
