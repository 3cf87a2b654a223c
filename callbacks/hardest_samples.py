"""Writes ``hardest/samples.jsonl`` and ``.html``: the samples that resist most, with their text.

By the relaxation u* that they take, where the formulation relaxes, then by the size of λ. A sample
that fights its constraint is usually a labelling error or an outlier, so the list is a place to
look for either. A line of the JSONL file::

    {"constraint": "relevance", "rank": 1, "index": 17, "column": 2,
     "value": {"number": 3, "of": 9, "bound": null}, "multiplier": 3.2, "violation": 0.9,
     "relaxation": 0.4, "epoch": 2, "text": {"query": "..."}}

``index`` is the position in the training set; ``column``, from 0, that of the sample's hardest
value in the table of λ, whose ``multiplier`` and ``relaxation`` u* these are (null where the
formulation has none); ``value`` says which value it is, from 1, of how many, and of an interval
which bound; ``epoch`` is the one that the list was made in, from 0; ``violation`` is of the last
visit (null if there was none since a resume).
"""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from pl_pointwise.checkpoints import random_state, restore_random_state
from pl_pointwise.data import PointwiseDataModule, plain_fields
from pl_pointwise.module import PointwiseModule

from .hardest_page import page
from .last_violations import LastViolations
from .run_folder import RunFolder

log = logging.getLogger(__name__)


class HardestSamples(Callback):
    """When the fit ends, the samples of every constraint with the largest u*, then the largest λ.

    Only a λ other than 0 is listed, so a constraint without one multiplier per sample is not. The
    texts are those of :meth:`~pl_pointwise.data.PointwiseDataModule.describe`.

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
            multipliers, violations = module.multipliers.get(name), self._last.tables[name]
            if multipliers is None:  # Reset since.
                continue
            formulation, constraint = declared.at_epoch(self._epoch), module.constraints[name]
            relaxation = getattr(formulation, "relaxation", None)
            # NaN where not seen, as before a resume that the callback is new in.
            relaxed = None if relaxation is None else relaxation(violations, multipliers)
            order, columns = hardest(multipliers, relaxed, self.count)
            for rank, (index, column) in enumerate(
                zip(order.tolist(), columns.tolist(), strict=True), start=1
            ):
                violation = float(constraint.reported(violations[index, column]))
                seen = not math.isnan(violation)
                rows.append(
                    {
                        "constraint": name,
                        "rank": rank,
                        "index": index,
                        "column": column,
                        "value": _value(column, multipliers.shape[1], constraint.sides),
                        "multiplier": float(multipliers[index, column]),
                        "violation": violation if seen else None,
                        "relaxation": float(relaxed[index, column])
                        if relaxed is not None and seen
                        else None,
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


def hardest(multipliers: Tensor, relaxed: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """The samples with the largest |u*|, those of the same by |λ|, and the column of each, (n,).

    Only those with λ or u* other than 0. By u* first: at a linear cost λ is β for every sample that
    relaxes, however much.

    multipliers: (N, K).
    relaxed: u* alike, NaN where unknown; None where the formulation has none.
    """
    price = multipliers.abs()
    bought = torch.zeros_like(price) if relaxed is None else relaxed.abs().nan_to_num(0.0)
    most = bought.amax(1)
    columns = price.masked_fill(bought < most[:, None], -1).argmax(1)
    largest = price.gather(1, columns[:, None])[:, 0]
    order = largest.argsort(descending=True, stable=True)
    order = order[most[order].argsort(descending=True, stable=True)][:count]
    order = order[(largest[order] > 0) | (most[order] > 0)]
    return order, columns[order]


def _value(column: int, columns: int, sides: int) -> dict[str, Any]:
    """Which value of the constraint a column is: its number from 1, of how many; and the bound."""
    width = columns // sides
    bound = None if sides == 1 else ("at_most", "at_least")[column // width]
    return {"number": column % width + 1, "of": width, "bound": bound}


def _text(trainer: Trainer, index: int) -> dict[str, str]:
    data: Any = getattr(trainer, "datamodule", None)
    if isinstance(data, PointwiseDataModule):
        return data.describe(index)
    return plain_fields(trainer.train_dataloader.dataset[index])  # type: ignore[union-attr]
