"""One training step, read from top to bottom: forward, backward, weights, multipliers."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer import call
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .batch_statistic import Slope
from .checks import FirstSteps
from .data import PADDING
from .duals import Duals
from .errors import explain_gradient_errors
from .optimizers import connected_zero
from .random_state import replayed_random_state
from .step import (
    OBJECTIVE,
    DualStep,
    Layout,
    Measured,
    MicroBatch,
    Terms,
    carries,
    micro_batches_of,
    non_finite_values,
    pack,
    terms_of,
    unpack,
    weights,
    widest_dtype,
    without_samples,
)
from .task import Task, judges_strictly, warn, when


class Stepper:
    """Steps the weights of a task and the multipliers of its constraints.

    Attributes:
        measured: what the last step measured, of all ranks; None before the first.
        dual_steps: the dual step it ended in, by constraint; empty where it took none.
        left_out: samples left out of a step so far because a value was not finite.
        skipped_steps: steps skipped so far because the gradient was not finite, or no sample was
            left; ``taken_now`` and ``skipped_now`` of this epoch.
        first_steps: what the fit has yet to show.
        buffers: those that a forward pass changes.
        columns: of the violations, by constraint.
    """

    def __init__(self, task: Task, duals: Duals) -> None:
        self.task, self.duals = task, duals
        self.strict = judges_strictly(task)
        self.measured: Measured | None = None
        self.dual_steps: dict[str, DualStep] = {}
        self.left_out = self.skipped_steps = 0
        self.taken_now = self.skipped_now = 0
        self.first_steps = FirstSteps()
        self.buffers = RunningStatistics()
        self.columns: dict[str, int] = {}
        self._layout: Layout = {}

    def take(self, batch: Any) -> Measured:
        """One step of the weights and one of the batch's multipliers."""
        task, duals = self.task, self.duals
        optimizer: Any = task.optimizers()  # One: see checks.check_module.
        micro_batches = micro_batches_of(task, batch)
        counts = self._counts(micro_batches)
        self._call_before_zero_grad()
        self.buffers.keep(task)
        due = duals.units.due(task.formulations, task.global_step)
        if due:
            self._measure_units(due, micro_batches, counts)
        duals.in_force = duals.units.in_force(task.formulations)
        measured = self._measure(micro_batches, counts)
        self.buffers.forget_unchanged()
        if not (measured.finite and math.isfinite(measured.gradient_norm)):
            measured = self._without_non_finite(measured, micro_batches, counts)
        self.measured, self.dual_steps = measured, {}
        if self._may_step(measured):
            optimizer.step()
            self.taken_now += 1
            duals.note(measured, task.current_epoch, task.trainer.num_training_batches)
            self.dual_steps = duals.step(task.current_epoch)
        else:
            self.buffers.restore()
        return measured

    def start_epoch(self) -> None:
        """Counts anew, and looks for changing buffers again."""
        self.taken_now = self.skipped_now = 0
        self.buffers.refresh()

    def _counts(self, micro_batches: list[MicroBatch]) -> dict[str, Tensor]:
        """How many samples of the step carry each term, over all ranks, before any forward."""
        names = [OBJECTIVE, *self.task.constraints]
        found = []
        for micro in micro_batches:  # Terms that every sample carries share one mask.
            sums = {id(mask): carries(mask).sum() for mask in micro.masks.values()}
            found.append(torch.stack([sums[id(micro.masks[name])] for name in names]))
        counts = self._over_ranks(torch.stack(found).sum(0).float(), "sum")
        return dict(zip(names, counts.clamp(min=1).unbind(), strict=True))

    # Forward and backward -----------------------------------------------------------------------

    def _measure(
        self, micro_batches: list[MicroBatch], counts: dict[str, Tensor], rows: int = 0
    ) -> Measured:
        """Accumulates the step's gradient, clipped; one gather and one copy bring what it measured.

        Only the last micro-batch synchronises the gradient. Every rank's batch has the same number
        of rows: samplers of several ranks pad.

        rows: how many, where no sample of this rank is left and it has no micro-batch.
        """
        task, duals, ranks = self.task, self.duals, self.task.trainer.world_size
        self.task.optimizers().zero_grad()  # type: ignore[union-attr]
        on_batch = bool(duals.on_batch)
        slopes = self._slopes(micro_batches, counts) if on_batch else None
        packed = []
        for position, micro in enumerate(micro_batches):
            with self._synchronised(position == len(micro_batches) - 1):
                terms = terms_of(task, micro, self.columns, self.strict)
                if self.first_steps.unproven:
                    self.first_steps.require_gradients(task, terms)
                multipliers = duals.rows(micro.index, terms)
                loss = self._lagrangian(terms, multipliers, counts)
                packed_rows, self._layout = pack(micro.index, terms, multipliers, loss, self.strict)
                packed.append(packed_rows)
                if on_batch:
                    slopes = slopes or duals.slopes([terms], counts, task.device)
                    loss = loss + duals.batch_loss(terms, slopes, counts)
                # The ranks' gradients are averaged, and the counts are those of all ranks.
                task.manual_backward(loss * ranks if ranks > 1 else loss)
        if not micro_batches:  # All samples of this rank were left out; the others wait for it.
            task.manual_backward(connected_zero(task))
        norm = self._clip_gradient()
        if not packed:
            width, wide = sum(self._layout.values()), widest_dtype(task.device)
            packed = [torch.zeros(rows, width, dtype=wide, device=task.device)]
        table = packed[0] if len(packed) == 1 else torch.cat(packed)
        if ranks > 1:
            table = task.all_gather(table).flatten(0, 1)  # type: ignore[union-attr]
        return unpack(table, self._layout, norm)

    def _lagrangian(
        self, terms: Terms, multipliers: dict[str, Tensor], counts: dict[str, Tensor]
    ) -> Tensor:
        """This micro-batch's share of mean ℓ₀ + Σ mean ψ(v, λ), of every ψ per sample."""
        loss = terms.objective.sum() / counts[OBJECTIVE]
        for name, formulation in self.duals.in_force.items():
            if formulation.scope == "batch":
                continue
            violation, mask = terms.followed[name], terms.masks[name]
            multiplier = multipliers.get(name, torch.zeros_like(violation))
            if self.duals.dual_first:
                multiplier = formulation.ascend(terms.judged[name], multiplier)
            psi = formulation.lagrangian(violation, multiplier)
            sides = self.task.constraints[name].sides
            normalised = weights(mask, sides, violation.dtype) / counts[name]
            loss = loss + (torch.where(mask, psi, 0) * normalised).sum()
        return loss

    def _slopes(
        self, micro_batches: list[MicroBatch], counts: dict[str, Tensor]
    ) -> dict[str, Slope] | None:
        """∂ψ/∂mean of every statistic of the batch; None: the one forward pass that follows tells.

        With several micro-batches or ranks a pass without gradients finds the mean, and its random
        state is replayed afterwards, so that both passes see the same dropout.
        """
        known = self.duals.known_slopes()
        if known is not None or (len(micro_batches) == 1 and self.task.trainer.world_size == 1):
            return known
        device = self.task.device
        with torch.no_grad(), explain_gradient_errors(), replayed_random_state(device):
            strict = self.strict and self.duals.dual_first
            found = [terms_of(self.task, micro, self.columns, strict) for micro in micro_batches]
        self.buffers.restore()
        return self.duals.slopes(found, counts, device, self._over_ranks)

    # The gradient and the step of the weights ---------------------------------------------------

    def _clip_gradient(self) -> Tensor:
        """The norm of the whole gradient, which is scaled down to ``gradient_clip_val``."""
        norm, scale = self._gradient_norm(), self._gradient_scale()
        largest = self.task.training_settings.gradient_clip_val
        if largest is not None:
            parameters = [p for p in self.task.parameters() if p.grad is not None]
            # Under float16 the gradients carry the scaler's factor until its step.
            torch.nn.utils.clip_grads_with_norm_(parameters, largest * scale, norm)
        return norm / scale

    def _gradient_norm(self) -> Tensor:
        """Of the whole gradient, with the scaler's factor in it."""
        gradients = [p.grad for p in self.task.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _gradient_scale(self) -> float:
        """What the gradients are multiplied by under float16."""
        scaler = getattr(self.task.trainer.precision_plugin, "scaler", None)
        return 1.0 if scaler is None else float(scaler.get_scale())

    def _may_step(self, measured: Measured) -> bool:
        """Whether the gradient is finite and some sample is left; the same answer on every rank."""
        if self.first_steps.watched:
            self.first_steps.check(self.task, measured)
        expected = False
        if not any(bool(mask.any()) for mask in measured.masks.values()):
            reason = "no sample of the batch is left"
        elif math.isfinite(measured.gradient_norm):
            return True
        else:
            reason = (
                f"the norm of the gradient is {measured.gradient_norm}, of finite values (perhaps "
                "a root, logarithm or division at 0, also where membership() masks the value)"
            )
            scaler = getattr(self.task.trainer.precision_plugin, "scaler", None)
            if scaler is not None:
                scale = scaler.get_scale()
                scaler.update(scale * scaler.get_backoff_factor())
                expected = scale > 1  # It starts from a factor too large for float16.
        self.task.optimizers().zero_grad()  # type: ignore[union-attr]
        self.skipped_steps += 1
        self.skipped_now += not expected
        warn(
            self.task,
            f"Step skipped ({when(self.task)}): {reason}. Neither weights nor multipliers moved; "
            f"{self.skipped_steps} so far.",
        )
        return False

    # A step without the samples that have a value that is not finite ----------------------------

    def _without_non_finite(
        self, measured: Measured, micro_batches: list[MicroBatch], counts: dict[str, Tensor]
    ) -> Measured:
        """The step computed once more without the samples that have a value that is not finite.

        Masking such a value in the loss is not enough: inf · 0 in the backward pass is NaN. The
        norm of the gradient is not finite where that does not help, so that the step is skipped.

        counts: of the whole batch, which remain the denominators.
        """
        task = self.task
        bad = measured.non_finite()
        bad |= torch.isin(measured.index, measured.index[bad])  # A sample the batch has twice.
        self.left_out += int(bad.sum())
        for value in non_finite_values(measured, bad):
            warn(
                task,
                f"{value} ({when(task)}). Left out of this step; {self.left_out} so far. "
                "Inspect that record or lower the learning rate.",
            )
        if bad.any() or not math.isfinite(measured.gradient_norm):
            bad |= measured.index == PADDING  # A copy spoils the gradient as its sample does.
        if not bad.any():
            return measured
        self.buffers.restore()
        ranks = task.trainer.world_size
        some_left = (~bad).view(ranks, -1).any(1)
        if not some_left.all() and forwards_together(task):
            warn(task, "A rank has no sample left, and its forward pass needs one on every rank.")
            found = replace(measured, gradient_norm=math.nan)
        else:
            kept = without_samples(task, micro_batches, measured.index[bad])
            found = self._measure(kept, counts, rows=len(measured.index) // ranks)
        if found.non_finite()[~bad].any():
            found.gradient_norm = math.nan
        return replace(found.keep(~bad), counts=measured.counts)

    # The unit of the multipliers (gradient_units.py) --------------------------------------------

    def _measure_units(
        self, names: list[str], micro_batches: list[MicroBatch], counts: dict[str, Tensor]
    ) -> None:
        """Of these constraints, the norms of ∇ mean ℓ₀ and of ∇ mean v over the violated values.

        One more pass over the batch for each. Plain passes, so that they run under every strategy
        and precision as the step does; their gradients are dropped.
        """
        formulations, units = self.task.formulations, self.duals.units
        objective: float | None = None
        for name in names:
            signed = formulations[name].signed

            def violated(
                terms: Terms, name: str = name, signed: bool = signed
            ) -> tuple[Tensor, Tensor]:
                violation = terms.followed[name]
                violation = violation.abs() if signed else violation.clamp(min=0)
                values = violation.detach().double()
                return violation.sum(), torch.stack([(values > 0).sum(), values.square().sum()])

            norm, sums = self._gradient_of(micro_batches, violated, counts[name])
            number, squares = self._over_ranks(sums, "sum").tolist()
            if not number:
                continue
            if objective is None:
                objective, _ = self._gradient_of(
                    micro_batches,
                    lambda terms: (terms.objective.sum(), terms.objective.new_zeros(2)),
                    counts[OBJECTIVE],
                )
            violations = norm * float(counts[name]) / number
            units.measure(name, objective, violations, (squares / number) ** 0.5)

    def _gradient_of(
        self,
        micro_batches: list[MicroBatch],
        term: Callable[[Terms], tuple[Tensor, Tensor]],
        count: Tensor,
    ) -> tuple[float, Tensor]:
        """The norm of ∇ Σ term / count over the batch of all ranks; the gradient is dropped.

        term: a micro-batch's sum, and what is to be added up beside it.
        Returns: the norm, and these sums of this rank.
        """
        task = self.task
        self.task.optimizers().zero_grad()  # type: ignore[union-attr]
        beside = []
        with replayed_random_state(task.device):
            for position, micro in enumerate(micro_batches):
                with self._synchronised(position == len(micro_batches) - 1):
                    total, sums = term(terms_of(task, micro, self.columns, strict=False))
                    beside.append(sums.to(widest_dtype(task.device)))
                    scale = task.trainer.world_size / count  # The ranks' gradients are averaged.
                    task.manual_backward(total * scale + connected_zero(task))
        norm = float(self._gradient_norm()) / self._gradient_scale()
        self.task.optimizers().zero_grad()  # type: ignore[union-attr]
        self.buffers.restore()
        return norm, torch.stack(beside).sum(0)

    # What Lightning and the ranks do ------------------------------------------------------------

    def _call_before_zero_grad(self) -> None:
        """The hook, which Lightning calls under automatic optimization only."""
        trainer = self.task.trainer
        call._call_callback_hooks(trainer, "on_before_zero_grad", trainer.optimizers[0])
        call._call_lightning_module_hook(trainer, "on_before_zero_grad", trainer.optimizers[0])

    def _synchronised(self, last: bool) -> Any:
        """Ranks add up their gradients in the last micro-batch's backward pass only."""
        block = getattr(self.task.trainer.strategy, "block_backward_sync", None)
        return nullcontext() if last or block is None else block()

    def _over_ranks(self, value: Tensor, operation: Literal["sum", "max"]) -> Tensor:
        trainer = self.task.trainer
        if trainer.world_size > 1 and dist.is_initialized():
            # Lightning's reduce puts a barrier first, at which the host waits for every GPU.
            value = value.clone()
            dist.all_reduce(value, dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX)
            return value
        reduced = trainer.strategy.reduce(value, reduce_op=operation)
        assert isinstance(reduced, Tensor)
        return reduced


class RunningStatistics:
    """Buffers that forward passes change, such as a BatchNorm's, as they were before a step.

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


def forwards_together(task: Task) -> bool:
    """Sharded weights are put together in every forward pass, and SyncBatchNorm sums over ranks."""
    if isinstance(task.trainer.strategy, ModelParallelStrategy):
        return True
    synced = any(isinstance(part, nn.SyncBatchNorm) for part in task.modules())
    return synced and task.trainer.world_size > 1
