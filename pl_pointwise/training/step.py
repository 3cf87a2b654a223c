"""The micro-batches of a step, and their terms as the task's methods give them (terms.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from ..lagrangian.terms import (
    OBJECTIVE,
    PADDING,
    Terms,
    build_terms,
    is_index,
    masks_from,
    one_per_sample,
    strict_values_from,
)
from ..task import Task, judges_strictly
from .random_state import replayed_random_state


@dataclass
class MicroBatch:
    """A piece of the step's batch: b samples, forwarded and differentiated together."""

    batch: Any
    index: Tensor  # (b,) on the CPU, −1 for padding
    masks: dict[str, Tensor]  # bool (b,) or (b, K) per term, padding excluded


def micro_batches_of(task: Task, batch: Any, size: int | None = None) -> list[MicroBatch]:
    """The batch, or the pieces that the collate function made of it, cut to ``size`` samples."""
    micro_batches = []
    for piece in batch if isinstance(batch, (list, tuple)) else [batch]:
        whole = micro_batch_of(task, piece)
        if not size or size >= len(whole.index):
            micro_batches.append(whole)
            continue
        for rows in torch.arange(len(whole.index)).split(size):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            masks = {name: mask[part] for name, mask in whole.masks.items()}
            micro = MicroBatch(task.select(piece, rows), whole.index[part], masks)
            micro_batches.append(micro)
    return micro_batches


def micro_batch_of(task: Task, batch: Any) -> MicroBatch:
    """A piece with the masks of its terms; no term applies to a row of padding."""
    index = batch.get("index") if isinstance(batch, Mapping) else None
    if index is None or not is_index(index):
        found = index.dtype if isinstance(index, Tensor) else type(index).__name__
        raise DataError(
            f'A batch, here a {type(batch).__name__}, needs "index", the position of each sample, '
            f"a tensor (B,) of whole numbers, got {found}: use PointwiseDataModule, or wrap the "
            'data set in IndexedDataset(rows), of tuples in IndexedDataset(rows, fields=["x", '
            '"y"]).'
        )
    index, names = index.long().cpu(), [OBJECTIVE, *task.constraints]
    masks = masks_from(task.membership(batch), index, names, task.device)
    return MicroBatch(batch, index, masks)


def terms_of(
    task: Task, micro: MicroBatch, outputs: Any, strict: bool, evaluating: bool = False
) -> Terms:
    """A micro-batch's terms, ``strict`` ones too; ``evaluating``: by its bounds, with |ℓ − c|."""
    objective = task.objective(outputs, micro.batch)
    given = task.constraint_values(outputs, micro.batch)
    objective, values = one_per_sample(objective, given, task.constraints, len(micro.index))
    judged = judged_values(task, outputs, micro.batch, values) if strict else None
    if evaluating:
        return build_terms(task.evaluation_constraints, {}, micro.masks, objective, values, judged)
    return build_terms(task.constraints, task.formulations, micro.masks, objective, values, judged)


def judged_values(
    task: Task, outputs: Any, batch: Any, values: dict[str, Tensor]
) -> dict[str, Tensor]:
    """By constraint the values that multipliers and reports follow: strict, else ``values``."""
    if not judges_strictly(task):
        return values
    with torch.no_grad(), replayed_random_state(task.device):
        given = task.strict_values(outputs, batch)
    return strict_values_from(given, values, task.formulations)


# A step without some samples ---------------------------------------------------------------------


def without_samples(
    task: Task, micro_batches: list[MicroBatch], left_out: Tensor
) -> list[MicroBatch]:
    """The micro-batches with a kept sample, as padding, for each of ``left_out``; [] if none is."""
    keeps = [~torch.isin(micro.index, left_out) for micro in micro_batches]
    spare = next((position for position, keep in enumerate(keeps) if keep.any()), None)
    if spare is None:
        return []
    found = []
    for position, (micro, keep) in enumerate(zip(micro_batches, keeps, strict=True)):
        if keep.all():
            found.append(micro)
            continue
        source = position if keep.any() else spare
        rows = torch.where(keep, torch.arange(len(keep)), int(keeps[source].nonzero()[0]))
        kept = keep.to(micro.masks[OBJECTIVE].device)
        masks = {n: m & (kept if m.dim() == 1 else kept[:, None]) for n, m in micro.masks.items()}
        index = micro.index.masked_fill(~keep, PADDING)
        found.append(MicroBatch(task.select(micro_batches[source].batch, rows), index, masks))
    return found
