"""A fit with every callback, on one process or as one of two ranks; then predictions.

``python -m tests.programs.callbacks_two_ranks FOLDER`` is one rank; test_ranks.py starts two of it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import CSVLogger

from pl_pointwise import Relaxed
from pl_pointwise.callbacks import (
    AnswerSamples,
    DualMonitor,
    FeasibleCheckpoint,
    HardestSamples,
)
from tests.callbacks.answering import Answering
from tests.callbacks.test_predictions import predict
from tests.callbacks.witness import Reported
from tests.pl_pointwise import toy
from tests.pl_pointwise.toy import ToyData, ToyRows
from tests.programs.launch import on_ranks


def run(folder: Path, ranks: int) -> dict[str, Any]:
    best = FeasibleCheckpoint(at_most=1.5, dirpath=str(folder / "best"))
    figures = Reported()
    trainer = toy.trainer(
        max_epochs=3,
        callbacks=[
            *(DualMonitor(), HardestSamples(), best, figures),
            AnswerSamples(["Hi"], every_n_epochs=2),
        ],
        enable_checkpointing=True,
        logger=CSVLogger(folder, version=0),
        default_root_dir=folder,
        **on_ranks(ranks),
    )
    module = Answering(Relaxed(alpha=0.8, beta=1.7, dual_lr=0.9), partial=True)
    rows = ToyRows(13, seed=2, partial=True), ToyRows(9, seed=4, partial=True)
    trainer.fit(module, ToyData(*rows, batch_size=6 // ranks))
    return {
        "figures": figures.epochs,
        "best": best.best_model_path,
        "score": float(best.best_model_score or 0.0),
        "weights": toy.weights_of(module),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    torch.save(run(folder / "all", ranks=2), folder / f"rank{os.environ['RANK']}.pt")
    predict(folder / "found.jsonl", **on_ranks(2))
