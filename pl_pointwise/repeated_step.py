"""A step computed once more without the samples that have a value that is not finite.

Masking such a value in the loss is not enough: inf · 0 in the backward pass is NaN. And the first
pass may have spoilt running statistics, such as a BatchNorm's.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .data import PADDING
from .step import Measured, MicroBatch, non_finite_values, without_samples

if TYPE_CHECKING:
    from .module import PointwiseModule


class RunningStatistics:
    """Buffers that forward passes change, as they were before a step; a copy of these alone.

    Which ones these are is found out in the first step of an epoch.
    """

    def __init__(self) -> None:
        self._places: list[tuple[nn.Module, str]] | None = None
        self._kept: list[tuple[Tensor, Tensor]] = []

    def refresh(self) -> None:
        """Looks at all buffers again in the next step."""
        self._places, self._kept = None, []

    def keep(self, module: nn.Module) -> None:
        """Before the first forward pass of a step."""
        if self._places is None:
            self._places = [
                (part, name)
                for part in module.modules()
                for name, buffer in part._buffers.items()
                if buffer is not None and not buffer.is_inference()
            ]
        self._kept = []
        for part, name in self._places:
            buffer = part._buffers[name]
            assert buffer is not None
            self._kept.append((buffer, buffer.detach().clone()))

    def forget_unchanged(self) -> None:
        """After it: from now on only those that it changed."""
        changed = [
            (place, kept)
            for place, kept in zip(self._places or [], self._kept, strict=True)
            if place[0]._buffers[place[1]] is not kept[0] or not torch.equal(*kept)
        ]
        self._places = [place for place, _ in changed]
        self._kept = [kept for _, kept in changed]

    def restore(self) -> None:
        with torch.no_grad():
            for (part, name), (buffer, before) in zip(self._places or [], self._kept, strict=True):
                part._buffers[name] = buffer.copy_(before)


def without_non_finite(
    module: PointwiseModule,
    measured: Measured,
    micro_batches: list[MicroBatch],
    counts: dict[str, Tensor],
) -> Measured:
    """The step computed once more without the samples that have a value that is not finite.

    The norm of the gradient is not finite where that does not help, so that the step is skipped.

    counts: of the whole batch, which remain the denominators.
    """
    if measured.finite and math.isfinite(measured.gradient_norm):
        return measured
    bad = measured.non_finite()
    bad |= torch.isin(measured.index, measured.index[bad])  # A sample that the batch has twice.
    module.left_out += int(bad.sum())
    for value in non_finite_values(measured, bad):
        module._warn(
            f"{value} ({module._when()}). Left out of this step; {module.left_out} so far. "
            "Inspect that record or lower the learning rate."
        )
    if bad.any() or not math.isfinite(measured.gradient_norm):
        bad |= measured.index == PADDING  # A copy spoils the gradient as its sample does.
    if not bad.any():
        return measured
    module._statistics.restore()
    found = _measured_without(module, measured, micro_batches, counts, bad)
    if found.non_finite()[~bad].any():
        found.gradient_norm = math.nan
    return replace(found.keep(~bad), counts=measured.counts)


def _measured_without(
    module: PointwiseModule,
    measured: Measured,
    micro_batches: list[MicroBatch],
    counts: dict[str, Tensor],
    left_out: Tensor,
) -> Measured:
    """What the step without some samples, bool (R,), measures; of these it means nothing.

    The norm of the gradient is NaN where a rank has no sample left and the forward pass, which is
    one of all ranks, needs one.
    """
    ranks = module.trainer.world_size
    some_left = (~left_out).view(ranks, -1).any(1)
    if not some_left.all() and _forwards_together(module):
        module._warn("A rank has no sample left, and its forward pass needs one on every rank.")
        return replace(measured, gradient_norm=math.nan)
    kept = without_samples(micro_batches, measured.index[left_out], module.select)
    return module._measure(kept, counts, rows=len(measured.index) // ranks)


def _forwards_together(module: PointwiseModule) -> bool:
    """Sharded weights are put together in every forward pass, and SyncBatchNorm sums over ranks."""
    synced = any(isinstance(part, nn.SyncBatchNorm) for part in module.modules())
    return module._weights_are_sharded() or (synced and module.trainer.world_size > 1)
