"""Writes every violation and a picture of their CDFs, each epoch:
``violations/values/epoch_0000.parquet`` and ``violations/pictures/epoch_0000.png``.

A row of the table is a value: ``epoch``, from 0; ``stage``, "running" for training samples, each
when it was seen, or the name of a validated data set; ``constraint``; the sample's ``index``;
``column`` of the violation, an interval has the upper side's first; ``violation``, for "running"
against the tolerance of training; ``multiplier``, λ at the end of the epoch, null if there is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from pl_pointwise.evaluation import SampleViolations
from pl_pointwise.extras import needs
from pl_pointwise.module import PointwiseModule

from .hardest_samples import LastViolations
from .outputs import RunFolder, log_picture

with needs("compare", "ViolationCurves"):
    import pandas as pd
    from pandas import DataFrame

    from pl_pointwise.compare.plots import cdfs_by_epoch

SHOWN = 6
"""Epochs in one picture: this one and some before it."""


class ViolationCurves(Callback):
    """The picture has a panel per constraint and stage, the newest epoch darkest.

    TensorBoard and W&B get it too, as ``violations/cdf``.

    Args:
        folder: below that of the run (outputs.py). A second run there takes "violations-1".
    """

    def __init__(self, folder: str = "violations") -> None:
        self.folder = RunFolder(folder)
        self._last = LastViolations()
        self._held_out: dict[str, dict[str, SampleViolations]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.folder.claim(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._last, self._held_out = LastViolations(), {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        self._last.add(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._held_out = dict(pl_module.evaluated)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        parts = [*self._running(pl_module), *self._evaluated()]
        if trainer.is_global_zero and parts:
            picture = self._write(trainer.current_epoch, parts)
            if picture is not None:
                log_picture(trainer, "violations/cdf", picture)

    def _running(self, module: PointwiseModule) -> Iterator[DataFrame]:
        for name, table in self._last.tables.items():
            constraint, multipliers = module.constraints[name], module.multipliers.get(name)
            table = constraint.reported(table)
            if multipliers is None:
                multipliers = torch.full_like(table, math.nan)
            elif multipliers.dim() < 2:  # One per side.
                width = table.shape[1] // constraint.sides
                by_side = multipliers.reshape(constraint.sides).repeat_interleave(width)
                multipliers = by_side.expand_as(table)
            at = (~table.isnan()).nonzero(as_tuple=True)
            yield _part("running", name, *at, table[at], multipliers[at])

    def _evaluated(self) -> Iterator[DataFrame]:
        for stage, by_name in self._held_out.items():
            for name, found in by_name.items():
                rows, column = found.mask.nonzero(as_tuple=True)
                violation = found.violation[rows, column]
                nothing = torch.full(violation.shape, math.nan)
                yield _part(stage, name, found.index[rows], column, violation, nothing)

    def _write(self, epoch: int, parts: list[DataFrame]) -> Path | None:
        """Writes the epoch's table, and its picture if there is anything in it."""
        values, pictures = (self.folder.path / kind for kind in ("values", "pictures"))
        values.mkdir(exist_ok=True)
        pictures.mkdir(exist_ok=True)
        table = pd.concat(parts, ignore_index=True)
        table.insert(0, "epoch", np.full(len(table), epoch, np.int32))
        table.to_parquet(values / f"epoch_{epoch:04d}.parquet", compression="zstd", index=False)
        curves: dict[str, dict[int, np.ndarray]] = {}
        for number in np.unique(np.linspace(0, epoch, SHOWN).round().astype(int)).tolist():
            file = values / f"epoch_{number:04d}.parquet"
            if not file.is_file():  # The folder is of a resume.
                continue
            table = pd.read_parquet(file, columns=["stage", "constraint", "violation"])
            by_panel = table.groupby(["stage", "constraint"], sort=False)["violation"]
            for (stage, constraint), found in by_panel:
                curves.setdefault(f"{stage}/{constraint}", {})[number] = found.to_numpy()
        if not curves:  # Perhaps no constraint applied to a sample.
            return None
        picture = pictures / f"epoch_{epoch:04d}.png"
        cdfs_by_epoch(curves, picture)
        return picture

    def state_dict(self) -> dict[str, Any]:
        return {"last": self._last.tables, "folder": self.folder.name}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._last.tables = state_dict["last"]
        self.folder.restored = state_dict["folder"]


def _part(stage: str, constraint: str, *columns: Tensor) -> DataFrame:
    """Rows (n,) of one stage and constraint: index, column, violation, multiplier; NaN is null."""
    names = ("index", "column", "violation", "multiplier")
    kinds = (torch.int64, torch.int32, torch.float32, torch.float32)
    values = zip(names, columns, kinds, strict=True)
    cells = {name: column.to(kind).numpy() for name, column, kind in values}
    return DataFrame({"stage": stage, "constraint": constraint, **cells})
