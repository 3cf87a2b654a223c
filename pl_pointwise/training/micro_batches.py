"""A batch as micro-batches with masks, and their terms as the task gives them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from ..formulations import Formulation, Pointwise
from ..lagrangian.terms import (
    OBJECTIVE,
    MicroBatch,
    Terms,
    build_terms,
    is_index,
    masks_from,
    strict_values_from,
)
from ..task import Task, judges_strictly, replayed_random_state


def micro_batches_of(
    task: Task, batch: Any, size: int | None = None
) -> list[MicroBatch]:
    """The batch, or the pieces that the collate function made of it, cut to ``size`` samples.

    No term applies to a row of padding.
    """
    names = [OBJECTIVE, *task.constraints]
    micro_batches = []
    for piece in batch if isinstance(batch, (list, tuple)) else [batch]:
        index = _index_of(piece)
        # A task that defines no membership() is not asked.
        asked = getattr(task.membership, "__func__", None) is not Task.membership
        membership = task.membership(piece) if asked else {}
        masks, whole = masks_from(membership, index, names, task.device)
        # Whole: no task has to know how to cut its batches as long as nothing is cut.
        if not size or size >= len(index):
            micro_batches.append(MicroBatch(piece, index, masks, whole))
            continue
        for rows in torch.arange(len(index)).split(size):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            cut = {name: mask[part] for name, mask in masks.items()}
            micro_batches.append(
                MicroBatch(task.select(piece, rows), index[part], cut, whole)
            )
    return micro_batches


def _index_of(piece: Any) -> Tensor:
    """The position of each of its samples, (B,) on the CPU."""
    index = piece.get("index") if isinstance(piece, Mapping) else None
    if index is None or not is_index(index):
        kind = index.dtype if isinstance(index, Tensor) else type(index).__name__
        raise DataError(
            f'A batch, here a {type(piece).__name__}, needs "index", the position of each '
            f"sample, a tensor (B,) of whole numbers, got {kind}: use PointwiseDataModule, or "
            "wrap the data set in IndexedDataset(rows), of tuples in IndexedDataset(rows, "
            'fields=["x", "y"]). A collate of your own puts it on the batch: '
            '"index": torch.tensor([row["index"] for row in rows]).'
        )
    return index.long().cpu()


def terms_of(
    task: Task,
    micro: MicroBatch,
    outputs: Any,
    strict: bool,
    evaluating: bool = False,
    signed: Collection[str] = (),
) -> Terms:
    """A micro-batch's terms, ``strict`` ones too; ``evaluating``: by its bounds, with |ℓ − c|.

    signed: the equalities of an evaluation that are to be ℓ − c.
    """
    formulations: Mapping[str, Formulation] = task.formulations
    if evaluating:
        # A signed formulation leaves ℓ − c its sign, which the mean of a group needs.
        signs = Pointwise(alpha=None).for_equality()
        formulations = dict.fromkeys(signed, signs)

    def judge(values: dict[str, Tensor]) -> dict[str, Tensor]:
        return judged_values(task, outputs, micro.batch, values)

    return build_terms(
        task.evaluation_constraints if evaluating else task.constraints,
        formulations,
        micro.masks,
        task.objective(outputs, micro.batch),
        task.constraint_values(outputs, micro.batch),
        judge if strict else None,
        micro.whole,
    )


def judged_values(
    task: Task, outputs: Any, batch: Any, values: dict[str, Tensor]
) -> dict[str, Tensor]:
    """By constraint the values that multipliers and reports follow: strict, else ``values``."""
    if not judges_strictly(task):
        return values
    with torch.no_grad(), replayed_random_state(task.device):
        strict = task.strict_values(outputs, batch)
    return strict_values_from(strict, values, task.formulations)
