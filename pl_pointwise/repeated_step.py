"""A step computed again without the samples that have a value that is not finite.

Masking such a value in the loss is not enough: inf · 0 in the backward pass is NaN. And the first
pass may have spoilt running statistics, such as a BatchNorm's, and with them the other samples.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .checkpoints import replayed_random_state
from .data import PADDING
from .modes import evaluation_mode
from .step import Measured, MicroBatch, non_finite_values, pack, stand_in, without_samples

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
    """The step computed again without the samples that have a value that is not finite.

    counts: of the whole batch, which remain the denominators.
    """
    if measured.finite and math.isfinite(measured.gradient_norm):
        return measured
    index, found = measured.index, measured
    left_out = torch.zeros(len(index), dtype=torch.bool)
    for attempt in count():
        bad = found.non_finite() & ~left_out
        if attempt == 0 and bad.sum() > 1:
            bad = _culprits(module, bad, micro_batches)
        bad |= torch.isin(index, index[bad])  # Every copy of a sample that the batch has twice.
        module.left_out += int(bad.sum())
        for value in non_finite_values(found, bad):
            module._warn(
                f"{value} ({module._when()}). Left out of this step; {module.left_out} so far. "
                "Inspect that record or lower the learning rate."
            )
        if attempt == 0 and (bad.any() or not math.isfinite(measured.gradient_norm)):
            # A copy that only fills up a rank spoils the gradient as its sample does.
            bad |= index == PADDING
        if not bad.any():
            break
        left_out |= bad
        module._statistics.restore()
        found = _measured_without(module, measured, micro_batches, counts, left_out)
    return replace(found.keep(~left_out), counts=measured.counts)


def _culprits(module: PointwiseModule, bad: Tensor, micro_batches: list[MicroBatch]) -> Tensor:
    """Of the samples ``bad``, (R,), those that have such a value by themselves.

    One NaN is in every output of a BatchNorm in training mode. In evaluation mode no sample sees
    the others; where none has such a value there, all are taken.
    """
    module._statistics.restore()
    packed = []
    with evaluation_mode(module), torch.no_grad(), replayed_random_state(module.device):
        for micro in micro_batches:
            terms = module._terms(micro)
            multipliers = module._multiplier_rows(micro.index, terms)
            packed.append(pack(micro.index, terms, multipliers, terms.objective.new_zeros(())))
    alone = bad & module._gathered(packed, torch.zeros(())).non_finite()
    return alone if alone.any() else bad


def _measured_without(
    module: PointwiseModule,
    measured: Measured,
    micro_batches: list[MicroBatch],
    counts: dict[str, Tensor],
    left_out: Tensor,
) -> Measured:
    """What the step without some samples, bool (R,), measures; of these it is 0.

    Where the forward pass is one of all ranks, a rank needs as many micro-batches as before. The
    norm of the gradient is NaN where it has not one sample left to fill them.
    """
    by_rank = (~left_out).view(module.trainer.world_size, -1)
    kept = without_samples(micro_batches, measured.index[left_out], module.select)
    if not _forwards_together(module):
        kept = [micro for micro in kept if len(micro.index)]
    elif not by_rank.any(1).all():
        module._warn("A rank has no sample left, and its forward pass needs one on every rank.")
        return replace(measured, gradient_norm=math.nan)
    else:
        spare = next(micro for micro in kept if len(micro.index))
        kept = [m if len(m.index) else stand_in(spare, module.select) for m in kept]
    return module._measure(kept, counts, by_rank[module.global_rank])


def _forwards_together(module: PointwiseModule) -> bool:
    """Sharded weights are put together in every forward pass, and SyncBatchNorm sums over ranks."""
    synced = any(isinstance(part, nn.SyncBatchNorm) for part in module.modules())
    return module._weights_are_sharded() or (synced and module.trainer.world_size > 1)
