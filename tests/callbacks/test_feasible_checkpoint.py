"""The best checkpoint is feasible if any is, and of the feasible ones has the best objective."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from pl_pointwise import Pointwise
from pl_pointwise.callbacks import FeasibleCheckpoint
from pl_pointwise.errors import TrainingError
from tests.pl_pointwise.line_task import LineData, LineModule
from tests.pl_pointwise.toy import trainer, weights_of

NAN = math.nan


class Scripted(LineModule):
    """Validation logs what the script says for the epoch: a statistic and an objective."""

    def __init__(self, script: list[tuple[float, float]]) -> None:
        super().__init__(Pointwise())
        self.script = script

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        statistic, objective = self.script[self.current_epoch]
        self.log("val/fit/scripted", statistic)
        self.log("val/score", objective)


def best_epoch(script: list[tuple[float, float]], folder: Path, mode: Any) -> int:
    callback = FeasibleCheckpoint(
        "scripted", at_most=0.05, objective="val/score", mode=mode, dirpath=str(folder)
    )
    runner = trainer(
        max_epochs=len(script), callbacks=[callback], enable_checkpointing=True
    )
    runner.fit(Scripted(script), LineData(batch_size=5))
    (kept,) = folder.glob("*.ckpt")
    assert Path(callback.best_model_path) == kept
    return int(torch.load(kept, weights_only=True)["epoch"])


@pytest.mark.parametrize(
    ("script", "mode", "best"),
    [
        # Feasible beats any objective.
        ([(0.3, 1.0), (0.04, 9.0), (0.2, 0.0)], "min", 1),
        # At the bound is feasible, in float32 too.
        ([(0.05, 2.0), (0.0, 3.0)], "min", 0),
        ([(0.04, 2.0), (0.0, 3.0), (0.01, 1.5), (0.01, 1.7)], "min", 2),
        # None feasible: the smallest excess.
        ([(0.3, 1.0), (0.2, 5.0), (0.4, 0.0)], "min", 1),
        ([(NAN, 0.0), (0.9, 1.0)], "min", 1),
        ([(0.0, NAN), (0.0, 1e9), (0.5, 0.0)], "min", 1),
        ([(0.0, 0.6), (0.0, 0.8), (0.3, 0.9)], "max", 1),
    ],
)
def test_the_rule(
    script: list[tuple[float, float]], mode: str, best: int, tmp_path: Path
) -> None:
    assert best_epoch(script, tmp_path, mode) == best


def test_statistics_of_a_real_validation_are_compared(tmp_path: Path) -> None:
    """All constraints count, by the module's own keys; the checkpoint loads with its weights."""
    callback = FeasibleCheckpoint(at_most=1e9, dirpath=str(tmp_path))
    seen = []

    class Reporting(LineModule):
        def on_train_epoch_end(self) -> None:
            super().on_train_epoch_end()
            objective = float(self.trainer.callback_metrics["val/objective"])
            seen.append((objective, weights_of(self)))

    runner = trainer(max_epochs=4, callbacks=[callback], enable_checkpointing=True)
    runner.fit(Reporting(Pointwise(alpha=1.0, dual_lr=1.0)), LineData(batch_size=2))
    _, weights = min(seen, key=lambda each: each[0])
    stored = torch.load(callback.best_model_path, weights_only=True)["state_dict"]
    assert torch.equal(stored["weight"].double(), weights)
    assert not torch.equal(weights, seen[-1][1])


def test_resume_keeps_the_best(tmp_path: Path) -> None:
    script = [(0.3, 1.0), (0.0, 2.0), (0.0, 3.0), (0.4, 0.0), (0.0, 2.5)]

    def run(epochs: int, path: Any = None) -> FeasibleCheckpoint:
        best = FeasibleCheckpoint(
            "scripted", 0.05, objective="val/score", dirpath=str(tmp_path / "best")
        )
        last = ModelCheckpoint(dirpath=tmp_path, filename="last")
        runner = trainer(
            max_epochs=epochs, callbacks=[best, last], enable_checkpointing=True
        )
        runner.fit(Scripted(script), LineData(batch_size=5), ckpt_path=path)
        return best

    first = run(3)
    second = run(5, tmp_path / "last.ckpt")
    assert second.best_model_path == first.best_model_path
    assert torch.load(second.best_model_path, weights_only=True)["epoch"] == 1


def test_a_key_that_is_not_logged_is_named(tmp_path: Path) -> None:
    callback = FeasibleCheckpoint("cvar99", dirpath=str(tmp_path))
    runner = trainer(callbacks=[callback], enable_checkpointing=True)
    with pytest.raises(
        TrainingError, match=r"val/fit/cvar99, which is not logged.*val/fit/cvar95"
    ):
        runner.fit(LineModule(Pointwise()), LineData(batch_size=5))
