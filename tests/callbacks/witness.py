"""What a training step saw, found without the module's own records: a forward pass of one's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer

from tests.pl_pointwise.toy import PAIRS


@dataclass
class Visit:
    """One step: values are (B, columns) by constraint, λ whole tables."""

    epoch: int
    index: np.ndarray
    violation: dict[str, np.ndarray]
    mask: dict[str, np.ndarray]
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]


class Witness(Callback):
    """For the toy problem, one process and one batch a step.

    bounds: by constraint (upper, lower), either None.
    """

    def __init__(self, bounds: dict[str, tuple[float | None, float | None]]) -> None:
        self.bounds, self.visits = bounds, []  # type: ignore[var-annotated]

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        with torch.no_grad():
            z = pl_module(batch)
        values = {"fit": z[:, None], "pair": z[:, None] * batch["x"][:, :PAIRS]}
        violation, masks = {}, {}
        for name, (upper, lower) in self.bounds.items():
            sides = [] if upper is None else [values[name] - upper]
            sides += [] if lower is None else [lower - values[name]]
            violation[name] = torch.cat(sides, 1).numpy()
            mask = torch.ones_like(values[name], dtype=torch.bool)
            if pl_module.partial:
                mask &= batch[f"has_{name}"].reshape(len(mask), -1)
            masks[name] = torch.cat([mask] * len(sides), 1).numpy()
        index, before = batch["index"].numpy(), _tables(pl_module)
        self.visits.append(
            Visit(trainer.current_epoch, index, violation, masks, before, {})
        )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        visit = self.visits[-1]
        visit.after = _tables(pl_module)
        for name, table in visit.after.items():  # Not there before the first step.
            visit.before.setdefault(name, np.zeros_like(table))

    def of_epoch(self, epoch: int) -> list[Visit]:
        return [visit for visit in self.visits if visit.epoch == epoch]


class Reported(Callback):
    """The dual figures of every epoch."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        found = trainer.callback_metrics.items()
        self.epochs.append(
            {key: float(v) for key, v in found if key.startswith("dual/")}
        )


def _tables(module: Any) -> dict[str, np.ndarray]:
    return {
        name: table.double().numpy().copy()
        for name, table in module.multipliers.items()
    }
