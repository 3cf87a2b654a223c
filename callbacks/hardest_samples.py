"""Writes ``hardest/samples.jsonl`` and ``.html``: the largest multipliers, with their text.

A sample that fights its constraint is usually a labelling error or an outlier, so the list is a
place to look for either. A line of the JSONL file::

    {"constraint": "fit", "rank": 1, "index": 17, "column": 0, "multiplier": 3.2,
     "violation": 0.9, "relaxation": 0.4, "epoch": 2, "text": {"query": "..."}}

``index`` is the position in the training set; ``column`` that of the sample's largest multiplier,
which is ``multiplier``; ``epoch`` is the one that the list was made in, from 0;
``violation`` is of the last visit (null if there was none since a resume); ``relaxation`` is u*,
null where the formulation has none.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from pl_pointwise.checkpoints import random_state, restore_random_state
from pl_pointwise.data import PointwiseDataModule, plain_fields
from pl_pointwise.module import PointwiseModule

from .hardest_page import page
from .last_violations import LastViolations
from .run_folder import RunFolder

log = logging.getLogger(__name__)


class HardestSamples(Callback):
    """When the fit ends, the samples with the largest multipliers of every constraint.

    Only λ > 0 is listed, so a constraint without one multiplier per sample is not. The texts are
    those of :meth:`~pl_pointwise.data.PointwiseDataModule.describe`.

    Args:
        count: samples per constraint.
        every_n_epochs: write them after so many epochs too; None only at the end.
        folder: where; a relative one is below the logger's folder of the run, or without a logger
            the trainer's ``default_root_dir``. Where an earlier run has written there, a new one
            takes "hardest-1"; a resumed one goes on.
    """

    def __init__(
        self, count: int = 50, every_n_epochs: int | None = None, folder: str = "hardest"
    ) -> None:
        if count < 1 or (every_n_epochs is not None and every_n_epochs < 1):
            raise ValueError(
                f"HardestSamples(count={count}, every_n_epochs={every_n_epochs}): both must be at "
                "least 1."
            )
        self.count, self.every_n_epochs, self.folder = count, every_n_epochs, RunFolder(folder)
        self._last = LastViolations()
        self._epoch = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.folder.claim(trainer)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if isinstance(pl_module, PointwiseModule):
            self._last.add(pl_module)
            self._epoch = trainer.current_epoch

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._write(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, pl_module)

    def _write(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or not isinstance(pl_module, PointwiseModule):
            return
        before = random_state(pl_module.device)  # Reading a row may draw from it.
        rows = self._hardest(trainer, pl_module)
        restore_random_state(before, pl_module.device)
        folder = self.folder.path
        assert folder is not None  # Since the fit started.
        # Half a surrogate pair is no UTF-8; its escape is what JSON writes for it.
        with (folder / "samples.jsonl").open("w", encoding="utf-8", errors="backslashreplace") as f:
            f.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        with (folder / "samples.html").open("w", encoding="utf-8", errors="backslashreplace") as f:
            f.write(page(rows))
        log.info("%d hardest samples written to %s", len(rows), folder)

    def _hardest(self, trainer: Trainer, module: PointwiseModule) -> list[dict[str, Any]]:
        rows = []
        for name, declared in module.formulations.items():
            if declared.scope != "sample" or name not in self._last.tables:
                continue
            formulation = declared.at_epoch(self._epoch)
            relaxation = getattr(formulation, "relaxation", None)
            largest, columns = module.multipliers[name].max(dim=1)
            order = largest.argsort(descending=True, stable=True)[: self.count]
            for rank, index in enumerate(order[largest[order] > 0].tolist(), start=1):
                column = int(columns[index])
                violation = self._last.tables[name][index, column]
                seen = not violation.isnan()  # Not before a resume that the callback is new in.
                relaxed = relaxation(violation, largest[index]) if relaxation and seen else None
                rows.append(
                    {
                        "constraint": name,
                        "rank": rank,
                        "index": index,
                        "column": column,
                        "multiplier": float(largest[index]),
                        "violation": float(violation) if seen else None,
                        "relaxation": None if relaxed is None else float(relaxed),
                        "epoch": self._epoch,
                        "text": _text(trainer, index),
                    }
                )
        return rows

    def state_dict(self) -> dict[str, Any]:
        return {
            "last": self._last.tables,
            "epoch": self._epoch,
            "folder": self.folder.state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._last.tables, self._epoch = state_dict["last"], state_dict["epoch"]
        self.folder.restore(state_dict.get("folder"))


def _text(trainer: Trainer, index: int) -> dict[str, str]:
    data: Any = getattr(trainer, "datamodule", None)
    if isinstance(data, PointwiseDataModule):
        return data.describe(index)
    return plain_fields(trainer.train_dataloader.dataset[index])  # type: ignore[union-attr]
