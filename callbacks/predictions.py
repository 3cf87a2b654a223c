"""Writes what ``predict`` found to ``predictions.jsonl``, one JSON object per input, in order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import rank_zero_info

from pl_pointwise.errors import TrainingError
from pl_pointwise.files import run_root, write_whole
from pl_pointwise.task import objects_of_all_ranks


class PredictionWriter(BasePredictionWriter):
    """For modules whose ``predict_step`` returns a list of dicts with ``index``, one per input.

    The file holds the inputs in their own order, from all ranks; of a data set of conversations
    ``prompt`` and ``tools`` with each, so that answers can be records to train on.

    Args:
        path: the file to write; None is ``predictions.jsonl`` in the folder of the run.

    >>> from lightning.pytorch import Trainer
    >>> from pl_pointwise.callbacks import PredictionWriter
    >>> callback = PredictionWriter("answers.jsonl")
    >>> trainer = Trainer(accelerator="cpu", logger=False, callbacks=[callback])
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__(write_interval="epoch")
        self.path = path

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: Any, predictions: Sequence[Any], *_: Any
    ) -> None:
        rows = list(chain.from_iterable(predictions))
        if not all(isinstance(row, dict) and "index" in row for row in rows):
            raise TrainingError(
                f"PredictionWriter: predict_step() of {type(pl_module).__name__} must return a "
                'list of dicts with "index", one for each input.'
            )
        data: Any = getattr(getattr(trainer, "datamodule", None), "datasets", {}).get(
            "predict"
        )
        if hasattr(data, "record"):
            rows = [{**_asked(data.record(row["index"])), **row} for row in rows]
        rows = list(chain.from_iterable(objects_of_all_ranks(rows)))
        path = Path(self.path or run_root(trainer) / "predictions.jsonl")
        if trainer.is_global_zero:
            rows.sort(key=lambda row: row["index"])
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
            write_whole(path, "".join(lines))
            rank_zero_info(f"{len(rows):,} predictions written to {path}")


def _asked(record: Any) -> dict[str, Any]:
    """The prompt of a conversation, and its tools, as a file of records has them."""
    turns = record.messages
    prompt = {"prompt": turns[0]["content"] if len(turns) == 1 else turns}
    return prompt | ({"tools": record.tools} if record.tools else {})
