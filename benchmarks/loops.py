"""The plain loop, and the file of rows, of the scripts that measure one small problem."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from pl_pointwise import PointwiseLoss

Row = dict[str, object]


def minimise(
    constrained: PointwiseLoss,
    terms: Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]],
    parameters: Iterable[Tensor],
    batches: Iterable[Tensor],
    rate: float,
) -> None:
    """Trains by Adam and a rate that falls to 0.

    Args:
        constrained: with the steps of the whole run.
        terms: objective and values of a batch, from its index.
        batches: the index of each step.
    """
    optimizer = torch.optim.Adam(parameters, rate)
    assert constrained.total_steps is not None
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, constrained.total_steps
    )
    for index in batches:
        loss = constrained(*terms(index), index)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        constrained.step()
        schedule.step()


def write(rows: Iterable[Row], path: Path) -> None:
    """Prints each row as it comes, and writes all of them as CSV."""
    kept = []
    for row in rows:
        print(row, flush=True)
        kept.append(row)
    pd.DataFrame(kept).to_csv(path, index=False, float_format="%.6g")
