"""Writes ``hardest/samples.jsonl``: the samples that resist most, with their text.

By the mean violation over the epochs of training, without the first. A line of the JSONL file::

    {"constraint": "relevance", "rank": 1, "index": 17, "column": 2,
     "value": {"number": 3, "of": 9, "bound": null}, "mean_violation": 1.1, "multiplier": 3.2,
     "price": 2.8, "violation": 0.9, "relaxation": 0.4, "epoch": 2,
     "text": {"query": "...", "negative 3": "..."}}

``column``, from 0, is that of the sample's hardest value in the table of λ; ``value`` says which it
is, from 1; ``violation`` is of the last epoch; ``relaxation`` is u*.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from pl_pointwise.files import free_path, run_root
from pl_pointwise.module import PointwiseModule
from pl_pointwise.report.samples import text_of

log = logging.getLogger(__name__)


class HardestSamples(Callback):
    """At the end of training, the samples of every constraint with the largest mean violation.

    Listed is a sample whose mean violation is above 0, or whose λ or u* is not 0, of a constraint
    with one multiplier per sample or group. Texts are those of
    :meth:`~pl_pointwise.data.PointwiseDataModule.describe`, or of the sample itself.

    Args:
        count: samples per constraint.

    >>> from lightning.pytorch import Trainer
    >>> from pl_pointwise.callbacks import HardestSamples
    >>> callback = HardestSamples(count=10)
    >>> trainer = Trainer(accelerator="cpu", logger=False, callbacks=[callback])
    """

    def __init__(self, count: int = 50) -> None:
        self.count = count
        self._restored = False
        self._start()

    def _start(self) -> None:
        # By constraint with a multiplier per sample, (N, sides·K) on the CPU. "last", float32: each
        # violation with the weights of its step; NaN where a sample was not seen, has no such
        # column, or had a value that is not finite. "mean": over the "visits", int32, as reported,
        # without the first if there is another: it is of weights that have hardly been trained.
        self._found: dict[str, Any] = {"last": {}, "mean": {}, "visits": {}, "epoch": 0}

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        if not self._restored:
            self._start()  # What there was is of an earlier fit.
        self._restored = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        self._found["epoch"] = trainer.current_epoch
        measured = pl_module.measured
        # A step that was left out as not finite, or data without a length.
        if measured is None or not pl_module.multipliers.samples:
            return  # Rows of a stream belong to no known sample.
        for name, formulation in pl_module.formulations.items():
            mask = measured.masks[name]
            rows = mask.any(1)  # Padding is of no sample, and has no index of its own.
            # A statistic has one λ for all, and no sample is harder than another by it.
            if formulation.scope != "sample" or not rows.any():
                continue
            violation = (
                measured.judged[name][rows].float().masked_fill(~mask[rows], math.nan)
            )
            # Begun at the first visit, as only values tell how many columns there are.
            if name not in self._found["last"]:
                samples = len(trainer.train_dataloader.dataset)  # type: ignore[union-attr]
                self._begin(name, (samples, violation.shape[1]))
            index = measured.index[rows]
            self._found["last"][name][index] = violation
            self._add_to_mean(
                name, index, pl_module.constraints[name].reported(violation)
            )

    def _begin(self, name: str, shape: tuple[int, int]) -> None:
        """The tables of a constraint, of no visit yet."""
        self._found["last"][name] = torch.full(shape, math.nan)
        self._found["mean"][name] = torch.full(shape, math.nan)
        self._found["visits"][name] = torch.zeros(shape, dtype=torch.int32)

    def _add_to_mean(self, name: str, index: Tensor, values: Tensor) -> None:
        """Adds a visit of samples, (R,), to their means."""
        mean = self._found["mean"][name]
        counts = self._found["visits"][name]
        counted = values.isfinite()
        visits = counts[index] + counted.int()
        before = mean[index]
        # Values 1 and 2 replace what is there; value n ≥ 3 is the (n − 1)th of the mean.
        after = torch.where(
            visits <= 2, values, before + (values - before) / (visits - 1)
        )
        mean[index] = torch.where(counted, after, before)
        counts[index] = visits

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        root = run_root(trainer)  # Asks all ranks.
        if not trainer.is_global_zero:
            return
        with isolate_rng():  # Reading a row may draw.
            rows = self._hardest(trainer, pl_module)
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        path = free_path(root, "hardest") / "samples.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(lines, encoding="utf-8", errors="backslashreplace")
        log.info("%d hardest samples written to %s", len(rows), path)

    def _hardest(
        self, trainer: Trainer, module: PointwiseModule
    ) -> list[dict[str, Any]]:
        rows = []
        for name, last in self._found["last"].items():
            constraint = module.constraints[name]
            multipliers = module.multipliers.of(name, torch.arange(len(last)))
            relaxation = getattr(module.in_force(name), "relaxation", None)
            unknown = torch.full_like(last, math.nan)
            relaxed = unknown if relaxation is None else relaxation(last, multipliers)
            price = module.prices.get(name)
            if price is None or price.shape != last.shape:
                price = unknown
            numbers = {
                "mean_violation": self._found["mean"][name],
                "multiplier": multipliers,
                "price": price,
                "violation": constraint.reported(last),
                "relaxation": relaxed,
            }
            width = multipliers.shape[1] // constraint.sides
            listed = hardest(
                self._found["mean"][name], multipliers, relaxed, self.count
            )
            for rank, (index, column) in enumerate(listed, start=1):
                # Of an interval the values at the upper bound stand first, then those at the lower.
                side = (
                    ("at_most", "at_least")[column // width]
                    if constraint.sides > 1
                    else None
                )
                row: dict[str, Any] = {
                    "constraint": name,
                    "rank": rank,
                    "index": index,
                    "column": column,
                    "value": {"number": column % width + 1, "of": width, "bound": side},
                }
                for key, table in numbers.items():
                    number = float(table[index, column])
                    row[key] = None if math.isnan(number) else number
                row["epoch"] = self._found["epoch"]
                row["text"] = _texts_of(trainer, index)
                rows.append(row)
        return rows

    def state_dict(self) -> dict[str, Any]:
        return {**self._found}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._found = {**state_dict}
        self._restored = True


def _texts_of(trainer: Trainer, index: int) -> dict[str, str]:
    """What a training sample is, by field: as its data module describes it, else its row."""
    data: Any = getattr(trainer, "datamodule", None)
    # A plain loader's data set has rows alone.
    if hasattr(data, "describe"):
        row = data.describe(index)
    else:
        row = trainer.train_dataloader.dataset[index]  # type: ignore[union-attr]
    texts = {}
    for field, value in row.items() if isinstance(row, Mapping) else [("row", row)]:
        text = text_of(value)
        if text is not None:
            texts[str(field)] = text
    return texts


def hardest(
    means: Tensor, multipliers: Tensor, relaxed: Tensor, count: int
) -> list[tuple[int, int]]:
    """(sample, column) of the largest mean violations, those of the same mean by |λ|.

    means, multipliers, relaxed: (N, K); v̄, λ and u*, NaN where unknown.
    """
    price = multipliers.abs()
    resists = ((price > 0) | (relaxed.abs() > 0) | (means > 0)).any(1)
    means = means.nan_to_num(nan=-math.inf)
    most = means.amax(1)
    columns = price.masked_fill(means < most[:, None], -1).argmax(1)
    order = np.lexsort((-price.gather(1, columns[:, None])[:, 0], -most))
    return [(i, int(columns[i])) for i in order.tolist() if resists[i]][:count]
