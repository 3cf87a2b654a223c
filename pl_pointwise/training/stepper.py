"""One training step, read from top to bottom: forward, backward, weights, multipliers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import DataError, explain_gradient_errors
from ..lagrangian.scopes import Slope
from ..lagrangian.terms import (
    OBJECTIVE,
    PADDING,
    Measured,
    Terms,
    build_terms,
    finite_samples,
    is_index,
    masks_from,
    non_finite_values,
    one_per_sample,
    over_ranks,
    strict_values_from,
    widest,
)
from ..loss import PointwiseLoss, norm_of
from ..metrics import share_violated
from ..task import Task, judges_strictly, replayed_random_state, warn
from .watch import Watch


class Stepper:
    """Steps the weights of a task and the multipliers of its constraints."""

    def __init__(self, task: Task, loss: PointwiseLoss) -> None:
        self.task, self.loss = task, loss
        self.strict = judges_strictly(task)
        self.left_out = 0  # Samples left out so far because a value was not finite.
        self.skipped_steps = 0  # Because of a gradient that was not, or as no sample was left.
        self.taken_now = self.skipped_now = 0  # In this epoch.
        self.watch = Watch(task)
        self.buffers = Buffers()
        self.due: list[str] = []  # Constraints whose unit this step has yet to measure.
        self.monitored = False  # Whether a scheduler needs what is logged of every step.
        self.shares_graph = True  # Until a graph could not be differentiated more than once.

    def take(self, batch: Any) -> Measured:
        """One step of the weights and one of the batch's multipliers."""
        task, loss, trainer = self.task, self.loss, self.task.trainer
        micro_batches = micro_batches_of(task, batch, task.training_settings.micro_batch_size)
        # How many samples each term applies to, over all ranks, before any forward pass.
        masks = [micro.masks for micro in micro_batches]
        counts = loss.counts(masks, all(micro.whole for micro in micro_batches))
        self.buffers.keep(task)
        self.due = loss.duals.units.due(task.formulations, task.global_step)
        measured = self._measure(micro_batches, counts)
        self.buffers.settle(task)
        if not (measured.finite and math.isfinite(measured.gradient_norm)):
            measured = self._without_non_finite(measured, micro_batches, counts)
        loss.measured, loss.dual_steps = measured, {}
        self.watch.add(measured)
        if self._may_step(measured):
            task.optimizers().step()  # type: ignore[union-attr]
            self.taken_now += 1
            loss.take(measured, trainer.num_training_batches)
        else:
            self.buffers.restore(task)
        return measured

    def log(self) -> None:
        """Logs ``running/…``, of the step's batch, and at every step for a progress bar."""
        task, trainer, measured = self.task, self.task.trainer, self.loss.measured
        bar = getattr(trainer.progress_bar_callback, "is_enabled", False)
        logged = trainer.is_last_batch or trainer._logger_connector.should_update_logs
        logged = logged or self.monitored
        if measured is None or not (bar or logged):
            return
        shown: dict[str, Any] = {
            "lagrangian": measured.lagrangian,
            "gradient_norm": measured.gradient_norm,
            "left_out": float(self.left_out),
            "skipped_steps": float(self.skipped_steps),
        }
        on_bar: dict[str, Any] = {}
        objective = measured.objective[measured.masks[OBJECTIVE]]
        if len(objective):
            shown["objective"] = on_bar["objective"] = objective.mean()
        violated = []
        for name, violation in measured.judged.items():
            violation, mask = task.constraints[name].outside(violation, measured.masks[name])
            values = task.constraints[name].reported(violation[mask])
            if len(values):
                violated.append(values > 0)
                shown |= {f"{name}/mean": values.mean(), f"{name}/violated": share_violated(values)}
        if violated:
            on_bar["violated"] = torch.cat(violated).float().mean()
        if bar:
            task.log_dict(on_bar, prog_bar=True, logger=False)
        if logged:
            task.log_dict({f"running/{key}": value for key, value in shown.items()})

    def start_fit(self) -> None:
        """Notes what stays the same in all steps of a fit."""
        trainer = self.task.trainer
        self.watch.start_fit()
        monitors = [getattr(c.scheduler, "monitor", None) for c in trainer.lr_scheduler_configs]
        self.monitored = any(str(name).startswith("running/") for name in monitors)

    def start_epoch(self) -> None:
        """Counts from 0, and looks for changing buffers again."""
        self.taken_now = self.skipped_now = 0
        self.buffers = Buffers()
        self.watch.start_epoch()

    # Forward and backward -----------------------------------------------------------------------

    def _measure(
        self, micro_batches: list[MicroBatch], counts: dict[str, Tensor], rows: int = 0
    ) -> Measured:
        """Accumulates the step's gradient, clipped; ``rows``: of a rank without any left."""
        task, loss, ranks = self.task, self.loss, self.task.trainer.world_size
        parallel = isinstance(task.trainer.strategy, ParallelStrategy)
        shared = self.shares_graph and len(micro_batches) == 1 and not parallel
        slopes = None if shared else self._slopes(micro_batches, counts)
        task.optimizers().zero_grad()  # type: ignore[union-attr]
        tables = []
        for micro in self._each_with_its_backward_pass(micro_batches):
            terms = terms_of(task, micro, task(micro.batch), self.strict)
            if self.watch.unproven:
                self.watch.require_gradients(terms)
            if shared:
                if self.due and not self._measure_units(micro_batches, counts, terms):
                    del terms  # And with them the graph.
                    self.buffers.restore(task)
                    return self._measure(micro_batches, counts, rows)
                loss.duals.put_in_force(task.trainer.num_training_batches)
            share, table = loss.share(terms, micro.index, counts, slopes, self.strict)
            tables.append(table)
            # The ranks' gradients are averaged, and the counts are those of all ranks.
            task.manual_backward(share * ranks if ranks > 1 else share)
        tables = tables or [loss.empty_rows(rows, task.device)]
        return loss.gather(tables, self._gradient_norm(task.training_settings.gradient_clip_val))

    def _each_with_its_backward_pass(self, micro_batches: list[MicroBatch]) -> Iterator[MicroBatch]:
        """The ranks add up their gradients in the last backward pass, and each rank has one."""
        block = getattr(self.task.trainer.strategy, "block_backward_sync", nullcontext)
        for position, micro in enumerate(micro_batches):
            with nullcontext() if position == len(micro_batches) - 1 else block():
                yield micro
        if not micro_batches:  # All samples of this rank were left out; the others wait for it.
            self.task.manual_backward(connected_zero(self.task))

    def _slopes(
        self, micro_batches: list[MicroBatch], counts: dict[str, Tensor]
    ) -> dict[str, Slope] | None:
        """∂ψ/∂mean of every statistic of the batch; None: known, or the one micro-batch tells.

        Measures units first, which α is in. With micro-batches or ranks a pass without gradients
        finds the mean; both passes see the same dropout.
        """
        task, duals = self.task, self.loss.duals
        if self.due:
            self._measure_units(micro_batches, counts)
        duals.put_in_force(task.trainer.num_training_batches)
        if duals.knows_slopes or (len(micro_batches) == 1 and task.trainer.world_size == 1):
            return None
        strict = self.strict and duals.dual_first
        with torch.no_grad(), explain_gradient_errors(), replayed_random_state(task.device):
            found = [terms_of(task, micro, task(micro.batch), strict) for micro in micro_batches]
        self.buffers.restore(task)
        return duals.slopes(found, counts)

    def _gradient_norm(self, largest: float | None = None) -> Tensor:
        """The norm of the whole gradient, which is scaled down to ``largest`` if that is given."""
        parameters = [*self.task.parameters()]
        gradients = (p.grad for p in parameters)
        norm = torch.nn.utils.get_total_norm([g for g in gradients if g is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        scaler = getattr(self.task.trainer.precision_plugin, "scaler", None)
        # Under float16 the gradients have the scaler's factor until its step.
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        if largest is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, largest * scale, norm)
        return norm / scale

    # Whether to step ----------------------------------------------------------------------------

    def _may_step(self, measured: Measured) -> bool:
        """Whether the gradient is finite and some sample is left; the same answer on every rank."""
        expected = False
        if not (measured.whole or any(bool(mask.any()) for mask in measured.masks.values())):
            reason = "no sample of the batch is left"
        elif math.isfinite(measured.gradient_norm):
            return True
        else:
            reason = (
                f"the norm of the gradient is {measured.gradient_norm}, of finite values (perhaps "
                "a root, logarithm or division at 0, also of what membership() masks)"
            )
            expected = self._lower_scale()
            reason = "the gradient overflows float16; its scale is lowered" if expected else reason
        self.task.optimizers().zero_grad()  # type: ignore[union-attr]
        self.skipped_steps += 1
        self.skipped_now += not expected
        warn(
            self.task,
            f"Step skipped ({self._when()}): {reason}. Neither weights nor multipliers moved; "
            f"{self.skipped_steps} so far.",
        )
        return False

    def _lower_scale(self) -> bool:
        """Under float16, whose factor starts too large, lowers it; False where that cannot help."""
        scaler = getattr(self.task.trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        if scaler is not None:
            scaler.update(scale * scaler.get_backoff_factor())
        return scale > 1

    def _without_non_finite(
        self,
        measured: Measured,
        micro_batches: list[MicroBatch],
        counts: dict[str, Tensor],
    ) -> Measured:
        """The step computed once more without the samples that have a value that is not finite.

        Masking it in the loss is not enough: inf · 0 in the backward pass is NaN. If that does not
        help, the gradient's norm is not finite. The whole batch's ``counts`` stay denominators.
        """
        task, ranks = self.task, self.task.trainer.world_size
        bad = ~finite_samples(measured.objective, measured.followed, measured.judged)
        bad |= torch.isin(measured.index, measured.index[bad])  # A sample the batch has twice.
        self.left_out += int(bad.sum())
        for value in non_finite_values(measured, bad):
            warn(
                task,
                f"{value} ({self._when()}). Left out of this step; {self.left_out} so far. "
                "Inspect that record or lower the learning rate.",
            )
        if bad.any() or not math.isfinite(measured.gradient_norm):
            bad |= measured.index == PADDING  # A copy spoils the gradient as its sample does.
        if not bad.any():
            return measured
        self.buffers.restore(task)
        # Sharded weights are put together in every forward pass; SyncBatchNorm sums over ranks.
        together = isinstance(task.trainer.strategy, ModelParallelStrategy) or (
            ranks > 1 and any(isinstance(part, nn.SyncBatchNorm) for part in task.modules())
        )
        if together and not (~bad).view(ranks, -1).any(1).all():
            warn(task, "A rank has no sample left, and its forward pass needs one on every rank.")
            found = replace(measured, gradient_norm=math.nan)
        else:
            kept = without_samples(task, micro_batches, measured.index[bad])
            found = self._measure(kept, counts, rows=len(measured.index) // ranks)
        left = found.keep(~bad)
        if not finite_samples(left.objective, left.followed, left.judged).all():
            left.gradient_norm = math.nan
        return replace(left, counts=measured.counts)

    def _when(self) -> str:
        return f"train, epoch {self.task.current_epoch}, step {self.task.global_step}"

    # The unit of the multipliers (gradient_units.py) --------------------------------------------

    def _measure_units(
        self,
        micro_batches: list[MicroBatch],
        counts: dict[str, Tensor],
        terms: Terms | None = None,
    ) -> bool:
        """Λ of the constraints that are due; those of which a norm is not finite stay so.

        terms: of the one micro-batch, in whose graph it is then done; False where that cannot be.
        """
        loss = self.loss
        try:
            self.due = loss.measure_units(
                self.due, counts, lambda name: self._gradient_of(name, micro_batches, counts, terms)
            )
        except (RuntimeError, TypeError):  # A compiled graph, too little memory, backward(loss).
            if terms is None:
                raise
            self.shares_graph = False
            return False
        return True

    def _gradient_of(
        self,
        name: str,
        micro_batches: list[MicroBatch],
        counts: dict[str, Tensor],
        known: Terms | None,
    ) -> tuple[float, float, float]:
        """‖∇ Σ ℓ₀ / count‖ or ‖∇ Σ (v)₊ / count‖, how many values are above 0, and their sum."""
        task, device = self.task, self.task.device
        beside = torch.zeros(3, dtype=widest(device), device=device)
        with replayed_random_state(device):
            task.optimizers().zero_grad()  # type: ignore[union-attr]
            for micro in self._each_with_its_backward_pass(micro_batches):
                terms = known or terms_of(task, micro, task(micro.batch), strict=False)
                finite = finite_samples(terms.objective, terms.followed)
                values = self.loss.pushed(name, terms)
                values = torch.where(finite if values.dim() == 1 else finite[:, None], values, 0)
                found = values.detach().to(beside)
                beside += torch.stack([(found > 0).sum(), found.sum(), (~finite).sum()])
                # The ranks' gradients are averaged.
                mean = values.sum() * (task.trainer.world_size / counts[name])
                if known is None:
                    task.manual_backward(mean + connected_zero(task))
                elif mean.requires_grad and (name == OBJECTIVE or beside[0]):
                    task.manual_backward(mean, retain_graph=True)
        norm = norm_of(p.grad for p in task.parameters() if p.grad is not None)
        scaler = getattr(task.trainer.precision_plugin, "scaler", None)
        norm /= 1.0 if scaler is None else float(scaler.get_scale())
        task.optimizers().zero_grad()  # type: ignore[union-attr]
        if known is None:
            self.buffers.restore(task)
        number, total, left_out = over_ranks(beside, "sum").tolist()
        if not math.isfinite(norm) and not left_out and self._lower_scale():
            return self._gradient_of(name, micro_batches, counts, known)
        return norm, number, total


class Buffers:
    """Buffers that forward passes change, such as a BatchNorm's, as they were before a step."""

    def __init__(self) -> None:
        self.changing: set[str] | None = None  # Their names, known after an epoch's first step.
        self._kept: dict[str, Tensor] = {}

    def keep(self, module: nn.Module) -> None:
        """Before the first forward pass of a step."""
        for name, buffer in module.named_buffers() if self.changing != set() else ():
            if self.changing is None or name in self.changing:
                self._kept[name] = buffer.detach().clone()

    def settle(self, module: nn.Module) -> None:
        """After it: from now on only those that it changed."""
        if self.changing is None:
            now = dict(module.named_buffers())
            self._kept = {n: old for n, old in self._kept.items() if not torch.equal(old, now[n])}
            self.changing = {*self._kept}

    def restore(self, module: nn.Module) -> None:
        with torch.no_grad():
            for name, buffer in module.named_buffers() if self._kept else ():
                if name in self._kept:
                    buffer.copy_(self._kept[name])


def connected_zero(module: nn.Module) -> Tensor:
    """Zero, with a zero gradient for every trainable parameter."""
    return sum(((p * 0).sum() for p in module.parameters() if p.requires_grad), torch.zeros(()))


# Micro-batches, and their terms as the task gives them -------------------------------------------


@dataclass
class MicroBatch:
    """A piece of the step's batch: b samples, forwarded and differentiated together."""

    batch: Any
    index: Tensor  # (b,) on the CPU, −1 for padding
    masks: dict[str, Tensor]  # bool (b,) or (b, K) per term, padding excluded
    whole: bool  # whether they are known to be True everywhere


def micro_batches_of(task: Task, batch: Any, size: int | None = None) -> list[MicroBatch]:
    """The batch, or the pieces that the collate function made of it, cut to ``size`` samples.

    No term applies to a row of padding.
    """
    micro_batches, names = [], [OBJECTIVE, *task.constraints]
    for piece in batch if isinstance(batch, (list, tuple)) else [batch]:
        index = piece.get("index") if isinstance(piece, Mapping) else None
        if index is None or not is_index(index):
            found = index.dtype if isinstance(index, Tensor) else type(index).__name__
            raise DataError(
                f'A batch, here a {type(piece).__name__}, needs "index", the position of each '
                f"sample, a tensor (B,) of whole numbers, got {found}: use PointwiseDataModule, or "
                "wrap the data set in IndexedDataset(rows), of tuples in IndexedDataset(rows, "
                'fields=["x", "y"]).'
            )
        index = index.long().cpu()
        masks, whole = masks_from(task.membership(piece), index, names, task.device)
        if not size or size >= len(index):
            micro_batches.append(MicroBatch(piece, index, masks, whole))
            continue
        for rows in torch.arange(len(index)).split(size):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            cut = {name: mask[part] for name, mask in masks.items()}
            micro_batches.append(MicroBatch(task.select(piece, rows), index[part], cut, whole))
    return micro_batches


def terms_of(
    task: Task, micro: MicroBatch, outputs: Any, strict: bool, evaluating: bool = False
) -> Terms:
    """A micro-batch's terms, ``strict`` ones too; ``evaluating``: by its bounds, with |ℓ − c|."""
    objective = task.objective(outputs, micro.batch)
    given = task.constraint_values(outputs, micro.batch)
    objective, values = one_per_sample(objective, given, task.constraints, len(micro.index))
    judged = judged_values(task, outputs, micro.batch, values) if strict else None
    measured = micro.masks, objective, values, judged, micro.whole
    if evaluating:
        return build_terms(task.evaluation_constraints, {}, *measured)
    return build_terms(task.constraints, task.formulations, *measured)


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
        batch = task.select(micro_batches[source].batch, rows)
        found.append(MicroBatch(batch, index, masks, whole=False))
    return found
