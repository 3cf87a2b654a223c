"""Writes ``hardest/samples.jsonl`` and ``.html``: the samples that resist most, with their text.

By the mean violation over their visits in training, the first left out. As a finder of label errors
a mean loss does as well as λ, or better (docs/callbacks.md has the figures): at a linear cost λ is
β for errors and hard samples alike, and the last violation, like u*, forgets a sample that the
model has learned by heart. A sample that fights its constraint is usually a labelling error or an
outlier, so the list is a place to look for either. A line of the JSONL file::

    {"constraint": "relevance", "rank": 1, "index": 17, "column": 2,
     "value": {"number": 3, "of": 9, "bound": null}, "mean_violation": 1.1, "multiplier": 3.2,
     "violation": 0.9, "relaxation": 0.4, "epoch": 2, "culprit": "negative 3",
     "text": {"query": "...", "negative 3": "..."}}

``index`` is the position in the training set; ``column``, from 0, that of the sample's hardest
value in the table of λ, whose ``mean_violation``, ``multiplier``, ``violation`` and ``relaxation``
u* these are (the last null where the formulation has none); ``value`` says which value it is, from
1, of how many, and of an interval which bound; ``culprit`` the field of ``text`` that the value is
about, null if no name says so (``data.described_as``); ``epoch`` is the one that the list was made
in, from 0; ``violation`` is of the last visit (it and the mean are null if there was none since a
resume in which the callback was new).
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
from pl_pointwise.module import PointwiseModule

from .hardest_fields import culprit, fields_of
from .hardest_page import page
from .last_violations import LastViolations, MeanViolations
from .run_folder import RunFolder

log = logging.getLogger(__name__)


class HardestSamples(Callback):
    """When the fit ends, the samples of every constraint with the largest mean violation.

    Listed is a sample whose mean violation is above 0, or whose λ or u* is not 0, of a constraint
    with one multiplier per sample. Texts and images are those of
    :meth:`~pl_pointwise.data.PointwiseDataModule.describe`, or of the sample itself.

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
        self._last, self._mean = LastViolations(), MeanViolations()
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
            self._mean.add(pl_module)
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
            for row in rows:
                written = {name: value for name, value in row.items() if name != "images"}
                f.write(json.dumps(written, ensure_ascii=False) + "\n")
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
            formulation, constraint = module.in_force(name), module.constraints[name]
            relaxation = getattr(formulation, "relaxation", None)
            # NaN where not seen, as before a resume that the callback is new in.
            relaxed = None if relaxation is None else relaxation(violations, multipliers)
            means = self._mean.tables.get(name, torch.full_like(violations, math.nan))
            order, columns = hardest(means, multipliers, relaxed, self.count)
            for rank, (index, column) in enumerate(
                zip(order.tolist(), columns.tolist(), strict=True), start=1
            ):
                violation = float(constraint.reported(violations[index, column]))
                mean = float(means[index, column])
                seen = not math.isnan(violation)
                value = _value(column, multipliers.shape[1], constraint.sides)
                texts, images = fields_of(trainer, index)
                rows.append(
                    {
                        "constraint": name,
                        "rank": rank,
                        "index": index,
                        "column": column,
                        "value": value,
                        "mean_violation": None if math.isnan(mean) else mean,
                        "multiplier": float(multipliers[index, column]),
                        "violation": violation if seen else None,
                        "relaxation": float(relaxed[index, column])
                        if relaxed is not None and seen
                        else None,
                        "epoch": self._epoch,
                        "culprit": culprit(texts, _described_as(trainer, name), value),
                        "text": texts,
                        "images": images,
                    }
                )
        return rows

    def state_dict(self) -> dict[str, Any]:
        return {
            "last": self._last.tables,
            "mean": self._mean.tables,
            "visits": self._mean.visits,
            "epoch": self._epoch,
            "folder": self.folder.state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._last.tables, self._epoch = state_dict["last"], state_dict["epoch"]
        # A checkpoint of 0.1.0 has no means: they start at the resume.
        self._mean.tables = state_dict.get("mean", {})
        self._mean.visits = state_dict.get("visits", {})
        self.folder.restore(state_dict.get("folder"))


def hardest(
    means: Tensor, multipliers: Tensor, relaxed: Tensor | None, count: int
) -> tuple[Tensor, Tensor]:
    """The samples with the largest mean violation, and the column that it is of; both (n,).

    Those of the same mean rank by |λ|, and so do those without any, which come last. Only samples
    whose mean is above 0, or λ or u* other than 0.

    means: (N, K), NaN where not visited.
    multipliers: alike.
    relaxed: u* alike, NaN where unknown; None where the formulation has none.
    """
    price = multipliers.abs()
    bought = torch.zeros_like(price) if relaxed is None else relaxed.abs().nan_to_num(0.0)
    listed = ((price > 0) | (bought > 0) | (means > 0)).any(1)
    means = means.nan_to_num(nan=-math.inf)
    most = means.amax(1)
    columns = price.masked_fill(means < most[:, None], -1).argmax(1)
    order = price.gather(1, columns[:, None])[:, 0].argsort(descending=True, stable=True)
    order = order[most[order].argsort(descending=True, stable=True)]
    order = order[listed[order]][:count]
    return order, columns[order]


def _value(column: int, columns: int, sides: int) -> dict[str, Any]:
    """Which value of the constraint a column is: its number from 1, of how many; and the bound."""
    width = columns // sides
    bound = None if sides == 1 else ("at_most", "at_least")[column // width]
    return {"number": column % width + 1, "of": width, "bound": bound}


def _described_as(trainer: Trainer, constraint: str) -> str:
    """What the data module calls the fields that a constraint is about; else as the constraint."""
    names = getattr(getattr(trainer, "datamodule", None), "described_as", {})
    return str(names.get(constraint, constraint))
