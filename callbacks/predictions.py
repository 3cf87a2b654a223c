"""Writes what ``predict`` found to ``predictions.jsonl``, one JSON object per input, in order."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from .run_folder import run_root

log = logging.getLogger(__name__)


class PredictionWriter(BasePredictionWriter):
    """For modules whose ``predict_step`` returns a list of dicts with ``index``, one per input.

    The file holds the inputs in their own order, from all ranks.

    Args:
        path: the file to write; a relative one is below the logger's folder of the run, or without
            a logger the trainer's ``default_root_dir``. One that is there is replaced as a whole.
    """

    def __init__(self, path: str = "predictions.jsonl") -> None:
        super().__init__(write_interval="epoch")
        self.path = Path(path)

    def write_on_epoch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        rows = [row for batch in predictions for row in batch]
        if trainer.world_size > 1:
            gathered: list[Any] = [None] * trainer.world_size
            torch.distributed.all_gather_object(gathered, rows)
            rows = [row for of_rank in gathered for row in of_rank]
        path = run_root(trainer) / self.path
        if trainer.is_global_zero:
            rows.sort(key=lambda row: row["index"])
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(path.name + ".part")
            with part.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            part.replace(path)
            log.info("%d predictions written to %s", len(rows), path)
