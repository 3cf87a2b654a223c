"""What a step does where a value or a gradient is not finite: without samples, or not at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn

from ..lagrangian.terms import (
    OBJECTIVE,
    PADDING,
    Measured,
    MicroBatch,
    finite_samples,
    non_finite_values,
)
from ..task import Task, warn


class Repairs:
    """Leaves samples out of a step, or skips it, and counts both."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.left_out = 0  # Samples left out so far because a value was not finite.
        # Because of a gradient that was not, or as no sample was left.
        self.skipped_steps = 0
        self.start_epoch()

    def start_epoch(self) -> None:
        """Counts from 0, and looks for changing buffers again."""
        self.taken_now = 0
        self.skipped_now = 0
        self.buffers = Buffers()

    def without_non_finite(
        self,
        measured: Measured,
        micro_batches: list[MicroBatch],
        measure: Callable[[list[MicroBatch], int], Measured],
    ) -> Measured:
        """The step computed once more without the samples that have a value that is not finite.

        Masking it in the loss is not enough: inf · 0 in the backward pass is NaN. If that does not
        help, the gradient's norm is not finite. The whole batch's counts stay denominators.

        measure: the step with these micro-batches, of so many rows where none is left.
        """
        task = self.task
        ranks = task.trainer.world_size
        bad = ~finite_samples(measured.objective, measured.followed, measured.judged)
        # A sample the batch has twice.
        bad |= torch.isin(measured.index, measured.index[bad])
        self.left_out += int(bad.sum())
        for value in non_finite_values(measured, bad):
            warn(
                task,
                f"{value} ({self._when()}). Left out of this step; {self.left_out} so far. "
                "Inspect that record or lower the learning rate.",
            )
        if bad.any() or not math.isfinite(measured.gradient_norm):
            # A copy spoils the gradient as its sample does.
            bad |= measured.index == PADDING
        if not bad.any():
            return measured
        self.buffers.restore(task)
        a_rank_is_empty = not (~bad).view(ranks, -1).any(1).all()
        if a_rank_is_empty and self._needs_every_rank():
            warn(
                task,
                "A rank has no sample left, and its forward pass needs one on every rank.",
            )
            again = replace(measured, gradient_norm=math.nan)
        else:
            kept = without_samples(task, micro_batches, measured.index[bad])
            again = measure(kept, len(measured.index) // ranks)
        left = again.keep(~bad)
        if not finite_samples(left.objective, left.followed, left.judged).all():
            left.gradient_norm = math.nan
        return replace(left, counts=measured.counts)

    def _needs_every_rank(self) -> bool:
        """Whether a forward pass is a collective."""
        # Sharded weights are put together in every forward pass; SyncBatchNorm sums over ranks.
        if isinstance(self.task.trainer.strategy, ModelParallelStrategy):
            return True
        syncs = any(isinstance(part, nn.SyncBatchNorm) for part in self.task.modules())
        return syncs and self.task.trainer.world_size > 1

    def skip(self, measured: Measured, left: bool) -> None:
        """Warns of a step that is not taken; the same on every rank. left: any sample of it."""
        expected = False
        if not left:
            reason = "no sample of the batch is left"
        else:
            reason = (
                f"the norm of the gradient is {measured.gradient_norm}, of finite values (perhaps "
                "a root, logarithm or division at 0, also of what membership() masks)"
            )
            expected = self.lower_scale()
            if expected:
                reason = "the gradient overflows float16; its scale is lowered"
        self.task.optimizers().zero_grad()  # type: ignore[union-attr]
        self.buffers.restore(self.task)
        self.skipped_steps += 1
        self.skipped_now += not expected
        warn(
            self.task,
            f"Step skipped ({self._when()}): {reason}. Neither weights nor multipliers moved; "
            f"{self.skipped_steps} so far.",
        )

    def lower_scale(self) -> bool:
        """Under float16, whose factor starts too large, lowers it; False where that cannot help."""
        scaler = getattr(self.task.trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        if scaler is not None:
            scaler.update(scale * scaler.get_backoff_factor())
        return scale > 1

    def _when(self) -> str:
        return f"train, epoch {self.task.current_epoch}, step {self.task.global_step}"


def without_samples(
    task: Task, micro_batches: list[MicroBatch], left_out: Tensor
) -> list[MicroBatch]:
    """The micro-batches with a kept sample, as padding, for each of ``left_out``; [] if none is."""
    keeps = [~torch.isin(micro.index, left_out) for micro in micro_batches]
    spare = next((position for position, keep in enumerate(keeps) if keep.any()), None)
    if spare is None:
        return []
    repaired = []
    for position, (micro, keep) in enumerate(zip(micro_batches, keeps, strict=True)):
        if keep.all():
            repaired.append(micro)
            continue
        # Of a micro-batch without any left, one of another stands in.
        source = position if keep.any() else spare
        rows = torch.where(
            keep, torch.arange(len(keep)), int(keeps[source].nonzero()[0])
        )
        kept = keep.to(micro.masks[OBJECTIVE].device)
        masks = {}
        for name, mask in micro.masks.items():
            masks[name] = mask & (kept if mask.dim() == 1 else kept[:, None])
        index = micro.index.masked_fill(~keep, PADDING)
        batch = task.select(micro_batches[source].batch, rows)
        repaired.append(MicroBatch(batch, index, masks, whole=False))
    return repaired


class Buffers:
    """Buffers that forward passes change, such as a BatchNorm's, as they were before a step."""

    def __init__(self) -> None:
        self.may_change = True  # Until an epoch's first step has changed none.
        self._changing: set[str] | None = None  # Their names, known after it.
        self._kept: dict[str, Tensor] = {}

    def keep(self, module: nn.Module) -> None:
        """Before the first forward pass of a step."""
        for name, buffer in module.named_buffers():
            if self._changing is None or name in self._changing:
                self._kept[name] = buffer.detach().clone()

    def settle(self, module: nn.Module) -> None:
        """After it: from now on only those that it changed."""
        if self._changing is None:
            now = dict(module.named_buffers())
            changed = [
                name
                for name, old in self._kept.items()
                if not torch.equal(old, now[name])
            ]
            self._kept = {name: self._kept[name] for name in changed}
            self._changing = {*changed}
            self.may_change = bool(changed)

    def restore(self, module: nn.Module) -> None:
        """Puts those that are kept back, before another forward pass of the step."""
        if not self._kept:
            return
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in self._kept:
                    buffer.copy_(self._kept[name])
