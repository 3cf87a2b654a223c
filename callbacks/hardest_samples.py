"""Writes ``hardest/samples.jsonl`` and ``.html``: the samples that resist most, with their text.

By the mean violation over the epochs of training, without the first. A line of the JSONL file::

    {"constraint": "relevance", "rank": 1, "index": 17, "column": 2,
     "value": {"number": 3, "of": 9, "bound": null}, "mean_violation": 1.1, "multiplier": 3.2,
     "violation": 0.9, "relaxation": 0.4, "epoch": 2,
     "text": {"query": "...", "negative 3": "..."}}

``column``, from 0, is that of the sample's hardest value in the table of λ; ``value`` says which it
is, from 1; ``violation`` is of the last epoch; ``relaxation`` is u*.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from html import escape
from itertools import groupby
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from pl_pointwise.module import PointwiseModule
from pl_pointwise.training.random_state import random_state, restore_random_state

from .outputs import RunFolder

log = logging.getLogger(__name__)


class HardestSamples(Callback):
    """At the end of training, the samples of every constraint with the largest mean violation.

    Listed is a sample whose mean violation is above 0, or whose λ or u* is not 0, of a constraint
    with one multiplier per sample. Texts are those of
    :meth:`~pl_pointwise.data.PointwiseDataModule.describe`, or of the sample itself.

    Args:
        count: samples per constraint.
        every_n_epochs: write them after so many epochs too; None only at the end.
    """

    def __init__(self, count: int = 50, every_n_epochs: int | None = None) -> None:
        self.count, self.every_n_epochs, self.folder = count, every_n_epochs, RunFolder("hardest")
        self._tables = Violations()
        self._epoch = 0
        self._store: Any = None  # The multipliers of the samples that the tables are of.

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.folder.claim(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if self._store is not None and self._store is not pl_module.multipliers:
            self._tables = Violations()  # Those there were are of an earlier fit.
        self._store = pl_module.multipliers
        self._tables.add(pl_module)
        self._epoch = trainer.current_epoch

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._write(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._write(trainer, pl_module)

    def _write(self, trainer: Trainer, module: PointwiseModule) -> None:
        if not trainer.is_global_zero:
            return
        before = random_state(module.device)  # Reading a row may draw from it.
        rows = self._hardest(trainer, module)
        restore_random_state(before, module.device)
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        for name, text in {"samples.jsonl": lines, "samples.html": page(rows)}.items():
            path = self.folder.path / name
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
        log.info("%d hardest samples written to %s", len(rows), self.folder.path)

    def _hardest(self, trainer: Trainer, module: PointwiseModule) -> list[dict[str, Any]]:
        rows = []
        for name, last in self._tables.last.items():
            multipliers, constraint = module.multipliers[name], module.constraints[name]
            relaxation = getattr(module._run.in_force(name), "relaxation", None)
            unknown = torch.full_like(last, math.nan)
            relaxed = unknown if relaxation is None else relaxation(last, multipliers)
            means = self._tables.mean[name]
            numbers = {
                "mean_violation": means,
                "multiplier": multipliers,
                "violation": constraint.reported(last),
                "relaxation": relaxed,
            }
            width = multipliers.shape[1] // constraint.sides
            listed = hardest(means, multipliers, relaxed, self.count)
            for rank, (index, column) in enumerate(listed, start=1):
                bound = ("at_most", "at_least")[column // width] if constraint.sides > 1 else None
                found = {key: float(table[index, column]) for key, table in numbers.items()}
                rows.append(
                    {
                        "constraint": name,
                        "rank": rank,
                        "index": index,
                        "column": column,
                        "value": {"number": column % width + 1, "of": width, "bound": bound},
                        **{key: None if math.isnan(n) else n for key, n in found.items()},
                        "epoch": self._epoch,
                        "text": texts_of(trainer, index),
                    }
                )
        return rows

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self._tables), "epoch": self._epoch, "folder": self.folder.name}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._tables, self._epoch, self._store = Violations(), state_dict["epoch"], None
        for name in vars(self._tables):
            setattr(self._tables, name, state_dict[name])
        self.folder.restored = state_dict["folder"]


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


def texts_of(trainer: Trainer, index: int) -> dict[str, str]:
    """Training sample ``index`` by field: of the data module's ``describe``, else of its row."""
    data: Any = getattr(trainer, "datamodule", None)
    if hasattr(data, "describe"):
        return plain_fields(data.describe(index))
    return plain_fields(trainer.train_dataloader.dataset[index])  # type: ignore[union-attr]


def plain_fields(row: Any) -> dict[str, str]:
    """The fields of a row that :func:`text_of` has words for; "0", "1", … without names."""
    if hasattr(row, "_asdict"):
        row = row._asdict()
    if not isinstance(row, Mapping):
        row = dict(enumerate(row)) if isinstance(row, (list, tuple)) else {0: row}
    texts = {str(name): text_of(value) for name, value in row.items()}
    return {name: text for name, text in texts.items() if text is not None}


def text_of(value: Any) -> str | None:
    """A text, a number, a short vector, or what an array is; None of anything else."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.item() if not value.ndim else value
    if isinstance(value, np.ndarray):
        if value.ndim == 1 and len(value) <= 16:
            written = "{:.4g}" if value.dtype.kind == "f" else "{}"
            return ", ".join(map(written.format, value.tolist()))
        return f"{value.dtype} array, {' × '.join(map(str, value.shape))}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value) if isinstance(value, (str, int)) else None


class Violations:
    """By constraint with a multiplier per sample, tables (N, sides·K) on the CPU.

    ``last``, float32: each violation with the weights of its step; NaN where a sample was not seen,
    has no such column, or had a value that is not finite. ``mean``: over the ``visits``, int32, as
    reported, without the first if there is another: it is of weights that have hardly been trained.
    """

    def __init__(self) -> None:
        self.last: dict[str, Tensor] = {}
        self.mean: dict[str, Tensor] = {}
        self.visits: dict[str, Tensor] = {}

    def add(self, module: PointwiseModule) -> None:
        """Adds what the module's last training step found."""
        measured, samples = module.measured, module.multipliers.samples
        if measured is None or not samples:  # Rows of a stream belong to no known sample.
            return
        for name, formulation in module.formulations.items():
            mask = measured.masks[name]
            rows = mask.any(1)  # Padding is of no sample, and has no index of its own.
            if formulation.scope != "sample" or not rows.any():
                continue
            found = measured.judged[name][rows].float().masked_fill(~mask[rows], math.nan)
            if name not in self.last:
                unseen = torch.full((samples, found.shape[1]), math.nan)
                self.last[name], self.mean[name] = unseen, unseen.clone()
                self.visits[name] = torch.zeros(unseen.shape, dtype=torch.int32)
            index, mean, counts = measured.index[rows], self.mean[name], self.visits[name]
            self.last[name][index] = found
            found = module.constraints[name].reported(found)
            counted = found.isfinite()
            visits, before = counts[index] + counted.int(), mean[index]
            # Values 1 and 2 replace what is there; value n ≥ 3 is the (n − 1)th of the mean.
            after = torch.where(visits <= 2, found, before + (found - before) / (visits - 1))
            mean[index] = torch.where(counted, after, before)
            counts[index] = visits


# The page ---------------------------------------------------------------------------------------

# Whatever a record says: no script runs, nothing is loaded.
HEAD = """<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Hardest samples</title><style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem }
table { border-collapse: collapse } td { border-bottom: 1px solid; padding: .5rem }
dt { font-size: .85em } dd { margin: 0 0 .5rem; unicode-bidi: isolate; white-space: pre-wrap }
</style></head><body><h1>Hardest samples</h1><p>The largest mean violations v̄ over the epochs of
training, without the first. v is the last violation (≤ 0 is satisfied), λ the
multiplier, u* the relaxation.</p>"""
COLUMNS = {"v̄": "mean_violation", "λ": "multiplier", "v": "violation", "u*": "relaxation"}


def page(rows: list[dict[str, Any]]) -> str:
    """One HTML page of the rows of the JSONL file, without scripts; texts are escaped."""
    parts = [HEAD]
    if not rows:
        parts.append("<p>No constraint with a multiplier per sample is violated.</p>")
    for name, listed in groupby(rows, lambda row: row["constraint"]):
        heads = "".join(f"<th>{head}</th>" for head in ("", *COLUMNS, "sample"))
        parts += [f"<h2>{escape(name)}</h2><table><tr>{heads}</tr>", *map(_line, listed)]
        parts.append("</table>")
    return "\n".join([*parts, "</body></html>", ""])


def _line(row: dict[str, Any]) -> str:
    numbers = [row[name] for name in COLUMNS.values()]
    shown = [row["rank"], *("–" if number is None else f"{number:.3g}" for number in numbers)]
    value, sample = row["value"], str(row["index"])
    if value["of"] > 1:
        sample += f", value {value['number']} of {value['of']}"
    if value["bound"] is not None:
        sample += f", {value['bound']}"
    fields = {"training sample": sample, **row["text"]}
    texts = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in fields.items())
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in (*shown, f'<dl>{texts}</dl>'))}</tr>"
