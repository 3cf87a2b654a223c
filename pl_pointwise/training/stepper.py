"""One training step, read from top to bottom: forward, backward, weights, multipliers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from time import monotonic
from typing import Any

import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import explain_gradient_errors
from ..lagrangian.batch_scope import Slope
from ..lagrangian.gradient_units import norm_of
from ..lagrangian.lagrangian import Gradient, Lagrangian
from ..lagrangian.terms import (
    OBJECTIVE,
    Measured,
    MicroBatch,
    Terms,
    over_ranks,
    unpack,
    widest,
)
from ..metrics import share_violated
from ..task import Task, judges_strictly, replayed_random_state
from .micro_batches import micro_batches_of, terms_of
from .repairs import Repairs
from .watch import Watch

BAR_SECONDS = 0.5
"""How often the progress bar's numbers are renewed: they are sums over the training set."""


class Stepper:
    """Steps the weights of a task and the multipliers of its constraints."""

    def __init__(self, task: Task, lagrangian: Lagrangian) -> None:
        self.task = task
        self._lagrangian = lagrangian
        self.strict = judges_strictly(task)
        self.watch = Watch(task)
        self.repairs = Repairs(task)
        self.due: list[str] = []  # Constraints whose unit this step has yet to measure.
        # Whether a scheduler needs what is logged of every step.
        self.monitored = False
        self._on_bar = -math.inf  # When the progress bar's numbers were renewed.
        # Until a graph could not be differentiated more than once.
        self.shares_graph = True

    def take(self, batch: Any) -> Measured:
        """One step of the weights and one of the batch's multipliers."""
        task = self.task
        lagrangian = self._lagrangian
        micro_batches = micro_batches_of(
            task, batch, task.training_settings.micro_batch_size
        )
        # How many samples each term applies to, over all ranks, before any forward pass.
        masks = [micro.masks for micro in micro_batches]
        counts = lagrangian.counts(masks, all(micro.whole for micro in micro_batches))
        buffers = self.repairs.buffers
        # A step may take several forward passes, and a BatchNorm counts one.
        if buffers.may_change:
            buffers.keep(task)
        self.due = lagrangian.units.due(task.formulations, task.global_step)
        measured = self._measure(micro_batches, counts)
        if buffers.may_change:
            buffers.settle(task)
        if not (measured.finite and math.isfinite(measured.gradient_norm)):
            # A value, or the gradient of finite ones: once more, without what spoils it.
            measured = self.repairs.without_non_finite(
                measured,
                micro_batches,
                lambda kept, rows: self._measure(kept, counts, rows),
            )
        lagrangian.measured = measured
        lagrangian.dual_steps = {}
        if not self.watch.is_over:
            self.watch.add(measured)
        left = measured.whole or any(
            bool(mask.any()) for mask in measured.masks.values()
        )
        if left and math.isfinite(measured.gradient_norm):
            task.optimizers().step()  # type: ignore[union-attr]
            self.repairs.taken_now += 1
            lagrangian.take(measured, task.trainer.num_training_batches)
        else:
            self.repairs.skip(measured, left)
        return measured

    def log(self) -> None:
        """Logs ``running/…``, of the step's batch, and for a progress bar the run's totals."""
        task = self.task
        trainer = task.trainer
        measured = self._lagrangian.measured
        if measured is None:
            return
        bar = getattr(trainer.progress_bar_callback, "is_enabled", False)
        if bar and (trainer.is_last_batch or monotonic() - self._on_bar > BAR_SECONDS):
            self._log_totals()
        logged = trainer.is_last_batch or trainer._logger_connector.should_update_logs
        # Sums over a step take longer than the step of a small model.
        if not (logged or self.monitored):
            return
        shown = self._shown(measured)
        task.log_dict({f"running/{key}": value for key, value in shown.items()})

    def _shown(self, measured: Measured) -> dict[str, Any]:
        """The numbers of a step, of all ranks."""
        shown: dict[str, Any] = {
            "lagrangian": measured.lagrangian,
            "gradient_norm": measured.gradient_norm,
            "left_out": float(self.repairs.left_out),
            "skipped_steps": float(self.repairs.skipped_steps),
        }
        objective = measured.objective[measured.masks[OBJECTIVE]]
        if len(objective):
            shown["objective"] = objective.mean()
        measured = self._lagrangian.by_requirement(measured)
        for name, violation in measured.judged.items():
            constraint = self.task.constraints[name]
            violation, mask = constraint.outside(violation, measured.masks[name])
            values = constraint.reported(violation[mask])
            if len(values):  # The batch has a sample that it applies to.
                shown[f"{name}/mean"] = values.mean()
                shown[f"{name}/violated"] = share_violated(values)
        return shown

    def _log_totals(self) -> None:
        """Puts the objective and the share of requirements violated on the bar: of all samples."""
        lagrangian = self._lagrangian
        self._on_bar = monotonic()
        lagrangian.history.read()
        totals = lagrangian.history.totals()
        on_bar = {"objective": totals["objective"]}
        if totals["of"]:
            on_bar["violated"] = totals["violated"] / totals["of"]
        self.task.log_dict(on_bar, prog_bar=True, logger=False)

    def start_fit(self) -> None:
        """Notes what stays the same in all steps of a fit."""
        trainer = self.task.trainer
        self.watch.start_fit()
        whole = (
            trainer.limit_train_batches in (None, 1.0) and not trainer.overfit_batches
        )
        self._lagrangian.checks.expects_all = bool(whole)
        monitors = [
            getattr(c.scheduler, "monitor", None) for c in trainer.lr_scheduler_configs
        ]
        self.monitored = any(str(name).startswith("running/") for name in monitors)

    def start_epoch(self) -> None:
        self.repairs.start_epoch()
        self.watch.start_epoch()

    # Forward and backward -----------------------------------------------------------------------

    def _measure(
        self, micro_batches: list[MicroBatch], counts: dict[str, Tensor], rows: int = 0
    ) -> Measured:
        """Accumulates the step's gradient, clipped; ``rows``: of a rank without any left."""
        task = self.task
        lagrangian = self._lagrangian
        ranks = task.trainer.world_size
        parallel = isinstance(task.trainer.strategy, ParallelStrategy)
        shared = self.shares_graph and len(micro_batches) == 1 and not parallel
        if lagrangian.on_means:
            lagrangian.forget()
        slopes = None if shared else self._slopes(micro_batches, counts)
        task.optimizers().zero_grad()  # type: ignore[union-attr]
        tables = []
        for micro in self._each_with_its_backward_pass(micro_batches):
            terms = terms_of(task, micro, task(micro.batch), self.strict)
            if lagrangian.checks.unproven and torch.is_grad_enabled():
                lagrangian.checks.of_terms(terms, lagrangian.warn)
            if shared:
                if lagrangian.needs_others:
                    lagrangian.see([terms], [micro.index], task.device)
                if self.due and not self._measure_units(micro_batches, counts, terms):
                    del terms  # And with them the graph.
                    self.repairs.buffers.restore(task)
                    return self._measure(micro_batches, counts, rows)
                lagrangian.put_in_force(task.trainer.num_training_batches)
            else:
                lagrangian.give_means(terms, micro.index)
            share, table = lagrangian.share(
                terms, micro.index, counts, slopes, self.strict
            )
            tables.append(table)
            # The ranks' gradients are averaged, and the counts are those of all ranks.
            task.manual_backward(share * ranks if ranks > 1 else share)
        # All samples of this rank were left out, and the others gather rows of all ranks.
        if not tables:
            width = sum(lagrangian.layout.values())
            dtype = widest(task.device)
            tables = [torch.zeros(rows, width, dtype=dtype, device=task.device)]
        norm = self._gradient_norm(task.training_settings.gradient_clip_val)
        return unpack(tables, lagrangian.layout, norm)

    def _each_with_its_backward_pass(
        self, micro_batches: list[MicroBatch]
    ) -> Iterator[MicroBatch]:
        """The ranks add up their gradients in the last backward pass, and each rank has one."""
        block = getattr(self.task.trainer.strategy, "block_backward_sync", nullcontext)
        for position, micro in enumerate(micro_batches):
            with nullcontext() if position == len(micro_batches) - 1 else block():
                yield micro
        # All samples of this rank were left out; the others wait for it.
        if not micro_batches:
            self.task.manual_backward(connected_zero(self.task))

    def _slopes(
        self, micro_batches: list[MicroBatch], counts: dict[str, Tensor]
    ) -> dict[str, Slope] | None:
        """∂ψ/∂mean of every statistic of the batch; None: known, or the one micro-batch tells.

        Measures units first, which α is in. With micro-batches or ranks a pass without gradients
        finds the mean, of groups before anything; all passes see the same dropout.
        """
        task = self.task
        lagrangian = self._lagrangian
        terms: list[Terms] = []
        if lagrangian.on_means:
            terms = self._terms_without_gradients(micro_batches)
            lagrangian.see(terms, [micro.index for micro in micro_batches], task.device)
        if self.due:
            self._measure_units(micro_batches, counts)
        lagrangian.put_in_force(task.trainer.num_training_batches)
        if lagrangian.knows_slopes or (
            len(micro_batches) == 1 and task.trainer.world_size == 1
        ):
            return None
        return lagrangian.slopes(
            terms or self._terms_without_gradients(micro_batches), counts
        )

    def _terms_without_gradients(self, micro_batches: list[MicroBatch]) -> list[Terms]:
        task = self.task
        strict = self.strict and self._lagrangian.dual_first
        with (
            torch.no_grad(),
            explain_gradient_errors(),
            replayed_random_state(task.device),
        ):
            terms = [
                terms_of(task, micro, task(micro.batch), strict)
                for micro in micro_batches
            ]
        self.repairs.buffers.restore(task)
        return terms

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
        lagrangian = self._lagrangian
        try:
            self.due = lagrangian.measure_units(
                self.due,
                counts,
                lambda name: self._gradient_of(name, micro_batches, counts, terms),
            )
        except (RuntimeError, TypeError):
            # A compiled graph, too little memory, backward(loss).
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
    ) -> Gradient:
        """Of a term of all micro-batches, by a forward pass of each unless its terms are known."""
        task = self.task
        ranks = task.trainer.world_size
        numbers = torch.zeros(3, dtype=widest(task.device), device=task.device)
        with replayed_random_state(task.device):
            task.optimizers().zero_grad()  # type: ignore[union-attr]
            for micro in self._each_with_its_backward_pass(micro_batches):
                terms = known or terms_of(task, micro, task(micro.batch), strict=False)
                if known is None:
                    self._lagrangian.give_means(terms, micro.index)
                # The ranks' gradients are averaged.
                push = self._lagrangian.push(name, terms, counts[name], ranks)
                numbers += push.numbers
                if known is None:
                    task.manual_backward(push.mean + connected_zero(task))
                elif push.mean.requires_grad and (name == OBJECTIVE or numbers[0]):
                    task.manual_backward(push.mean, retain_graph=True)
        norm = norm_of(p.grad for p in task.parameters() if p.grad is not None)
        scaler = getattr(task.trainer.precision_plugin, "scaler", None)
        norm /= 1.0 if scaler is None else float(scaler.get_scale())
        task.optimizers().zero_grad()  # type: ignore[union-attr]
        if known is None:
            self.repairs.buffers.restore(task)
        number, total, left_out = over_ranks(numbers, "sum").tolist()
        # Of finite values: under float16 the scale may be too large for this term alone.
        if not math.isfinite(norm) and not left_out and self.repairs.lower_scale():
            return self._gradient_of(name, micro_batches, counts, known)
        return Gradient(norm, number, total)


def connected_zero(module: nn.Module) -> Tensor:
    """Zero, with a zero gradient for every trainable parameter."""
    return sum(
        ((p * 0).sum() for p in module.parameters() if p.requires_grad), torch.zeros(())
    )
