"""Predictions arrive in the inputs' order, whichever batch or rank made them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from pl_pointwise.callbacks import PredictionWriter
from pl_pointwise.data import IndexedDataset
from pl_pointwise.errors import TrainingError


class Doubler(LightningModule):
    def predict_step(self, batch: Any, batch_idx: int) -> list[dict[str, Any]]:
        pairs = zip(batch["index"].tolist(), batch["x"].tolist(), strict=True)
        return [{"index": index, "twice": 2 * x, "text": "ä"} for index, x in pairs]


def predict(path: Path | None, **options: Any) -> None:
    rows = [{"x": torch.tensor(float(i))} for i in range(7)]
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[PredictionWriter(path and str(path))],
        **{"logger": False, "devices": 1, **options},
        enable_progress_bar=False,
    )
    trainer.predict(
        Doubler(),
        DataLoader(IndexedDataset(rows), batch_size=2),
        return_predictions=False,
    )


def check(path: Path) -> None:
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert found == [{"index": i, "twice": 2.0 * i, "text": "ä"} for i in range(7)]


def test_written_to_the_folder_of_the_run_or_where_the_path_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that was given led to the run's folder too: the next command did not find the file."""
    predict(None, default_root_dir=tmp_path)
    check(tmp_path / "predictions.jsonl")
    predict(None, logger=CSVLogger(tmp_path, name="logs"))
    check(tmp_path / "logs/version_0/predictions.jsonl")
    monkeypatch.chdir(tmp_path)
    predict(Path("here/found.jsonl"), logger=CSVLogger(tmp_path, name="logs"))
    check(tmp_path / "here/found.jsonl")
    monkeypatch.setattr(
        Doubler, "predict_step", lambda *_: [{"index": 0, "text": "\ud800"}]
    )
    with pytest.raises(UnicodeEncodeError):  # As where the disk is full.
        predict(Path("here/found.jsonl"))
    check(tmp_path / "here/found.jsonl")


def test_predictions_of_conversations_are_records(tmp_path: Path) -> None:
    """They had the prompt as one text, so that several turns could not be read again."""
    turns = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "q1"},
    ]
    tools = [{"name": "add"}]
    asked = [
        SimpleNamespace(messages=[{"role": "user", "content": "q0"}], tools=[]),
        SimpleNamespace(messages=turns, tools=tools),
    ]

    class Asked:
        def record(self, index: int) -> Any:
            return asked[index]

    trainer: Any = SimpleNamespace(
        world_size=1,
        logger=None,
        log_dir=tmp_path,
        is_global_zero=True,
        datamodule=SimpleNamespace(datasets={"predict": Asked()}),
    )
    rows = [[{"index": 1, "answer": "b"}], [{"index": 0, "answer": "a"}]]
    PredictionWriter().write_on_epoch_end(trainer, Doubler(), rows, [])
    found = [
        json.loads(x) for x in (tmp_path / "predictions.jsonl").read_text().splitlines()
    ]
    assert found == [
        {"prompt": "q0", "index": 0, "answer": "a"},
        {"prompt": turns, "tools": tools, "index": 1, "answer": "b"},
    ]
    with pytest.raises(
        TrainingError, match=r"predict_step\(\) of Doubler must return a list"
    ):
        PredictionWriter().write_on_epoch_end(trainer, Doubler(), [torch.zeros(3)], [])
