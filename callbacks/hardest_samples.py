"""Writes ``hardest/samples.jsonl`` and ``.html``: the samples that resist most, with their text.

By the mean violation over their visits in training, the first left out. A sample that fights its
constraint is usually a labelling error or an outlier. A line of the JSONL file::

    {"constraint": "relevance", "rank": 1, "index": 17, "column": 2,
     "value": {"number": 3, "of": 9, "bound": null}, "mean_violation": 1.1, "multiplier": 3.2,
     "violation": 0.9, "relaxation": 0.4, "epoch": 2,
     "text": {"query": "...", "negative 3": "..."}}

``column``, from 0, is that of the sample's hardest value in the table of λ, and ``value`` says
which it is, from 1, of how many, and of an interval which bound; ``violation`` is of the last
visit; ``relaxation``, u*, is null where the formulation has none; ``epoch`` is the list's, from 0.
"""

from __future__ import annotations

import json
import logging
import math
from html import escape
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from pl_pointwise.data import plain_fields, text_of
from pl_pointwise.module import PointwiseModule
from pl_pointwise.random_state import random_state, restore_random_state

from .last_violations import LastViolations, MeanViolations
from .run_folder import RunFolder

log = logging.getLogger(__name__)


class HardestSamples(Callback):
    """When the fit ends, the samples of every constraint with the largest mean violation.

    Listed is a sample whose mean violation is above 0, or whose λ or u* is not 0, of a constraint
    with one multiplier per sample. Texts are those of
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
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        for name, text in {"samples.jsonl": lines, "samples.html": page(rows)}.items():
            (folder / name).write_text(text, encoding="utf-8", errors="backslashreplace")
        log.info("%d hardest samples written to %s", len(rows), folder)

    def _hardest(self, trainer: Trainer, module: PointwiseModule) -> list[dict[str, Any]]:
        rows = []
        for name, declared in module.formulations.items():
            violations, multipliers = self._last.tables.get(name), module.multipliers.get(name)
            if declared.scope != "sample" or violations is None or multipliers is None:
                continue
            constraint = module.constraints[name]
            relaxation = getattr(module._run.in_force(name), "relaxation", None)
            # NaN where not seen, as before a resume that the callback is new in.
            relaxed = None if relaxation is None else relaxation(violations, multipliers)
            means = self._mean.tables.get(name, torch.full_like(violations, math.nan))
            order, columns = hardest(means, multipliers, relaxed, self.count)
            places = zip(order.tolist(), columns.tolist(), strict=True)
            for rank, (index, column) in enumerate(places, start=1):
                at = index, column
                rows.append(
                    {
                        "constraint": name,
                        "rank": rank,
                        "index": index,
                        "column": column,
                        "value": _value(column, multipliers.shape[1], constraint.sides),
                        "mean_violation": _number(means[at]),
                        "multiplier": float(multipliers[at]),
                        "violation": _number(constraint.reported(violations[at])),
                        "relaxation": None if relaxed is None else _number(relaxed[at]),
                        "epoch": self._epoch,
                        "text": texts_of(trainer, index),
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
        self._mean.tables, self._mean.visits = state_dict["mean"], state_dict["visits"]
        self.folder.restore(state_dict["folder"])


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


def _number(value: Tensor) -> float | None:
    return None if value.isnan() else float(value)


def texts_of(trainer: Trainer, index: int) -> dict[str, str]:
    """Training sample ``index`` by field: of the data module's ``describe``, else of its row."""
    data: Any = getattr(trainer, "datamodule", None)
    if hasattr(data, "describe"):
        return {name: text_of(value) or str(value) for name, value in data.describe(index).items()}
    return plain_fields(trainer.train_dataloader.dataset[index])  # type: ignore[union-attr]


# The page ---------------------------------------------------------------------------------------

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem }
table { border-collapse: collapse } td { border-bottom: 1px solid; padding: .5rem }
dt { font-size: .85em } dd { margin: 0 0 .5rem; unicode-bidi: isolate; white-space: pre-wrap }
"""

COLUMNS = {"v̄": "mean_violation", "λ": "multiplier", "v": "violation", "u*": "relaxation"}


def page(rows: list[dict[str, Any]]) -> str:
    """One HTML page without anything from elsewhere, and without scripts; texts are escaped.

    rows: as they are in the JSONL file.
    """
    parts = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
        # Whatever a record says: no script runs, nothing is loaded.
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>Hardest samples</title><style>{STYLE}</style></head><body>",
        "<h1>Hardest samples</h1><p>The largest mean violations v̄ over the visits in training, "
        "the first left out. v is the violation at the last visit (≤ 0 is satisfied), λ the "
        "multiplier, u* the relaxation.</p>",
    ]
    if not rows:
        parts.append("<p>No constraint with a multiplier per sample is violated.</p>")
    for name in dict.fromkeys(row["constraint"] for row in rows):
        heads = "".join(f"<th>{head}</th>" for head in ("", *COLUMNS, "sample"))
        parts.append(f"<h2>{escape(name)}</h2><table><tr>{heads}</tr>")
        parts += [_line(row) for row in rows if row["constraint"] == name]
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
    cells = "".join(f"<td>{cell}</td>" for cell in (*shown, f"<dl>{texts}</dl>"))
    return f"<tr>{cells}</tr>"
