"""The door for any loop: objective, constraints and multipliers of a batch as one loss.

What moves λ is the engine behind it, lagrangian/lagrangian.py, which a PointwiseModule and the
mix-in for a Trainer drive too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from .constraint import Constraint
from .errors import DataError, TrainingError, one_of
from .formulations import Formulation
from .lagrangian.checks import Door
from .lagrangian.declared import declared_constraints, formulations_from
from .lagrangian.gradient_units import norm_of
from .lagrangian.group_means import worst_mean
from .lagrangian.lagrangian import Gradient, Lagrangian
from .lagrangian.loop_state import load_state_of_loop, state_of_loop
from .lagrangian.loop_watch import LoopWatch
from .lagrangian.loop_weights import LoopWeights
from .lagrangian.prices import Prices
from .lagrangian.shares import refuse_stream
from .lagrangian.terms import (
    OBJECTIVE,
    PADDING,
    DualStep,
    Measured,
    Terms,
    build_terms,
    group_numbers,
    is_index,
    masks_from,
    number_of_ranks,
    over_ranks,
    require_finite,
    require_names,
    shape_of,
    strict_values_from,
    unpack,
)
from .lagrangian.trained import Weights, require_equal_over_ranks
from .multipliers import Multipliers
from .report.closing_table import Closing, Conditions, HeldOut
from .report.history import History

log = logging.getLogger(__name__)


def _check_count(name: str, count: object) -> None:
    if not isinstance(count, Integral) or isinstance(count, bool) or count < 1:
        raise DataError(f"{name}={count!r}: give a whole number from 1.")


@dataclass
class _OpenStep:
    """What the losses since the last step left for :meth:`PointwiseLoss.step`."""

    # The units before this step measured them; None where it measured none.
    units_before: dict[str, Any] | None
    tables: list[Tensor] = field(default_factory=list)  # The rows of each loss.


class PointwiseLoss:
    """Mean ℓ₀ + Σ mean ψ(v, λ) of a batch, with a multiplier for every sample.

    .. versionadded:: 0.3.0

    >>> from pl_pointwise import Constraint, Pointwise, PointwiseLoss
    >>> x, y, index = torch.ones(2), torch.tensor([0.0, 1.0]), torch.arange(2)
    >>> weight = torch.zeros(1, requires_grad=True)
    >>> optimizer = torch.optim.SGD([weight], lr=0.1)
    >>> constrained = PointwiseLoss({"fit": Constraint(at_most=0.3)}, Pointwise(), samples=2)
    >>> for _ in range(50):  # index (B,): each sample's position in the training set
    ...     outputs = weight * x
    ...     loss = constrained(outputs.square(), {"fit": (outputs - y).square()}, index)
    ...     optimizer.zero_grad()
    ...     loss.backward()
    ...     optimizer.step()
    ...     steps = constrained.step()  # λ of the batch
    >>> constrained.multipliers["fit"][:, 0] > 0  # the second sample has a price
    tensor([False,  True])

    Where torch.distributed runs, every rank calls both, and gradients are averaged as DDP does it.
    Several calls before one ``step()`` are micro-batches: divide each loss by their number.

    Args:
        constraints: by name.
        formulation: one for all constraints, one for each by name, or None: the objective alone.
        samples: N, of the training set; None for a stream, of which nothing keeps a λ.
        groups: (N,), the number of each sample's group, from 0: a bound is then on the mean of
            each group, which has one multiplier; with ``Constraint(…, each_sample=True)`` it is on
            each sample, and λ is shared.
        parameters: the model, or its parameters; needed with several ranks only. Which of them are
            trained is asked for at each measurement.
        primal_steps: steps of the weights per dual step.
        order: "simultaneous": a loss uses λ before its batch's dual step; "dual_first": after it.
        total_steps: of the weights in the whole run, where it is known. In more than ten epochs few
            violating samples push less hard; while most samples violate λ waits for the weights, a
            part of the run (docs/formulations.md).

    Raises:
        DataError: ``groups`` that are not one number from 0 for each sample; numbers below 1.
        ValueError: constraints and formulations whose names differ, an unknown order.
        TrainingError: groups with "dual_first", or with a ``Penalty`` on the mean of an equality;
            a ``share`` with groups, or with another formulation than Pointwise and Relaxed.

    Attributes:
        multipliers: λ by constraint, (N, K) float32, of groups (G, K); () for a batch's statistic.
        thresholds: t by constraint of :class:`~pl_pointwise.formulations.CVaR`, () or (2,).
        prices: what each requirement costs, by constraint, as ``multipliers``: the force on it,
            averaged over the later part of the run.
        measured: what the last step measured, of all ranks; None before the first.
        dual_steps: the dual step it ended in, by constraint; empty where it took none.
        history: what all steps measured, for :meth:`report`.
        steps_an_epoch: N over the samples of a step; set it where an epoch is not all of N.
        total_steps: as given; it may be set later.
        steps: that the weights have taken.
        fingerprint: a text of yours that says which rows the training set has, in which order; a
            state of another one is refused. None compares the number of samples and the groups.
    """

    _door = Door()
    """How errors call the parts of a loop; a trainer's mix-in has other parts."""

    def __init__(
        self,
        constraints: Mapping[str, Constraint],
        formulation: Formulation | Mapping[str, Formulation] | None,
        *,
        samples: int | None,
        groups: Sequence[int] | Tensor | None = None,
        parameters: Weights | None = None,
        primal_steps: int = 1,
        order: str = "simultaneous",
        total_steps: int | None = None,
    ) -> None:
        declared, _ = declared_constraints(constraints, None)
        formulations = formulations_from(formulation, declared)
        _check_count("samples", 1 if samples is None else samples)
        _check_count("primal_steps", primal_steps)
        _check_count("total_steps", 1 if total_steps is None else total_steps)
        one_of("order", order, ("simultaneous", "dual_first"))
        number = samples or 0
        self._lagrangian = Lagrangian(
            declared,
            formulations,
            samples=number,
            groups=None if groups is None else group_numbers(groups, number),
            primal_steps=primal_steps,
            dual_first=order == "dual_first",
            total_steps=total_steps,
            warn=log.warning,
            door=self._door,
        )
        self.steps_an_epoch: float | None = None
        self._weights = LoopWeights(parameters)
        self._watch = LoopWatch(number)
        self._open: _OpenStep | None = None  # None until the first loss of a step.
        self._rows = 0  # Samples of the largest step so far.

    @property
    def multipliers(self) -> Multipliers:
        return self._lagrangian.multipliers

    @property
    def thresholds(self) -> dict[str, Tensor]:
        return self._lagrangian.thresholds

    @property
    def prices(self) -> Prices:
        self.history.read()
        return self.history.prices

    @property
    def measured(self) -> Measured | None:
        return self._lagrangian.measured

    @property
    def dual_steps(self) -> dict[str, DualStep]:
        return self._lagrangian.dual_steps

    @property
    def history(self) -> History:
        return self._lagrangian.history

    @property
    def steps(self) -> int:
        return self._lagrangian.steps

    @property
    def total_steps(self) -> int | None:
        return self._lagrangian.total_steps

    @total_steps.setter
    def total_steps(self, steps: int | None) -> None:
        self._lagrangian.total_steps = steps

    @property
    def fingerprint(self) -> str | None:
        return self._lagrangian.fingerprint

    @fingerprint.setter
    def fingerprint(self, text: str | None) -> None:
        self._lagrangian.fingerprint = text

    # The loss of a batch ------------------------------------------------------------------------

    def __call__(
        self,
        objective: Tensor,
        values: Mapping[str, Tensor],
        index: Tensor,
        *,
        masks: Mapping[str, Tensor] | None = None,
        strict: Mapping[str, Tensor] | None = None,
        counts: Mapping[str, int] | None = None,
        keep: bool = True,
    ) -> Tensor:
        """The loss of a batch, a scalar to differentiate.

        Args:
            objective: ℓ₀ of each sample, (B,).
            values: ℓ_k of each sample by constraint, (B,) or (B, K): not yet violations.
            index: (B,), each sample's position in the training set; −1 for padding.
            masks: which samples a term applies to, bool (B,) by "objective" or constraint, or
                (B, K); a term left out applies to all.
            strict: values that the multipliers follow where they are others: see
                :meth:`~pl_pointwise.PointwiseModule.strict_values`.
            counts: of micro-batches whose masks differ, how many samples each term applies to in
                all of the step's on this rank, by "objective" and constraint: the loss is then a
                part of one batch's; add the parts, and do not divide them.
            keep: False for a loss of which λ takes no step: all that a closure computes (LBFGS,
                SAM), before the one that counts.

        Raises:
            DataError: a tensor of another shape, an index that is no position.
            TrainingError: a value that is not finite, with its sample, before anything moves; a
                call without gradients; calls for more than the training set without a step().
        """
        lagrangian = self._lagrangian
        index = self._required_index(index)
        masks = {} if masks is None else masks
        terms = self._terms(objective, values, index, masks, strict)
        of_loss = of_step = lagrangian.counts([terms.masks], terms.whole)
        if lagrangian.needs_others:
            lagrangian.see([terms], [index], terms.objective.device, keep)
        opened = self._open or self._begin(terms, of_loss, index)
        slopes = None
        if counts is not None:
            of_step = self._counts_of_step(counts, terms.objective.device)
            # Of this loss alone: nobody knows the micro-batches that are to come.
            slopes = lagrangian.slopes([terms], of_loss)
        loss, table = lagrangian.share(
            terms, index, of_step, slopes, strict=strict is not None
        )
        if number_of_ranks() > 1:
            loss = self._weights.connected(loss)
        if keep:
            opened.tables.append(table)
            self._watch.add(index, loss, lagrangian.warn)
        return loss

    def _required_index(self, index: Any) -> Tensor:
        """The samples of a training step as positions in the training set, on the CPU."""
        samples = self._lagrangian.samples
        if not torch.is_grad_enabled():
            raise TrainingError(
                "PointwiseLoss is called without gradients. An evaluation has no multipliers: take "
                "the objective, and Constraint.violation(values)."
            )
        if not is_index(index):
            raise DataError(
                "index: each sample's position in the training set, a tensor (B,) of whole "
                f"numbers, got {getattr(index, 'dtype', 'no tensor')}, {shape_of(index)}."
            )
        if not samples:
            refuse_stream(self._lagrangian.constraints)
        positions: Tensor = index.long().cpu()
        # A rank may get no sample of a batch that is cut unevenly.
        highest = int(positions.max()) if len(positions) else PADDING
        if samples and highest >= samples:
            raise TrainingError(
                f"Sample index {highest} is outside the training set of {samples} samples: "
                "index is each sample's position in it, from 0. After a split number the rows of "
                "the training part anew, or let samples= count those of the whole set."
            )
        return positions

    def _terms(
        self,
        objective: Tensor,
        values: Mapping[str, Tensor],
        index: Tensor,
        masks: Mapping[str, Tensor],
        strict: Mapping[str, Tensor] | None,
    ) -> Terms:
        """What a loss is called with, looked at before anything moves."""
        lagrangian, words = self._lagrangian, self._door.words
        device = getattr(objective, "device", index.device)
        names = [OBJECTIVE, *lagrangian.constraints]
        by_term, whole = masks_from(masks, index, names, device, words)

        def judge(followed: dict[str, Tensor]) -> dict[str, Tensor]:
            formulations = lagrangian.formulations
            return strict_values_from(strict, followed, formulations, words)

        terms = build_terms(
            lagrangian.constraints,
            lagrangian.formulations,
            by_term,
            objective,
            values,
            None if strict is None else judge,
            whole,
            words,
        )
        require_finite(terms, index)
        if lagrangian.checks.unproven:
            together = number_of_ranks() > 1
            lagrangian.checks.of_terms(terms, lagrangian.warn, together=together)
        return terms

    def _begin(
        self, terms: Terms, counts: Mapping[str, Tensor], index: Tensor
    ) -> _OpenStep:
        """With the first loss of a step: what is due in it."""
        lagrangian, weights = self._lagrangian, self._weights
        # Before anything that may fail: the next loss is then of the same step.
        opened = self._open = _OpenStep(units_before=None)
        if not lagrangian.steps:
            lagrangian.fit_tables()  # To what was set before.
            lagrangian.history.norm = norm_of(weights.now())
        if weights.saved_norm is not None:
            weights.compare_with_saved(lagrangian.warn)
        units = lagrangian.units
        next_step = units.next_step
        due = units.due(lagrangian.formulations, lagrangian.steps)
        if due or not lagrangian.steps:
            values = [terms.objective, *terms.followed.values()]
            self._watch.watch(weights.behind(values))
        if due:
            # A state of now is that of before this step, which a resume takes again.
            opened.units_before = {**units.state_dict(), "next": next_step}
            lagrangian.measure_units(
                due, counts, lambda name: self._gradient_of(name, terms, counts)
            )
        rows = 0
        # Later steps know it from the step before, without a word between the ranks.
        if not self._rows:
            real = (index >= 0).sum().to(terms.objective.device)
            rows = int(over_ranks(real, "sum"))
        lagrangian.put_in_force(self._epoch(rows))
        self._watch.begin(lagrangian.steps)
        return opened

    def _gradient_of(
        self, name: str, terms: Terms, counts: Mapping[str, Tensor]
    ) -> Gradient:
        """Of a term, in the graph of a loss that is yet to be differentiated."""
        push = self._lagrangian.push(name, terms, counts[name])
        number, total, _ = over_ranks(push.numbers, "sum").tolist()
        # Where no rank has a violated value there is nothing to differentiate.
        if not number and name != OBJECTIVE:
            return Gradient(0.0, number, total)
        return Gradient(self._weights.norm_of_gradient(push.mean), number, total)

    def _counts_of_step(
        self, counts: Mapping[str, int], device: torch.device
    ) -> dict[str, Tensor]:
        """Those that a caller knows, over all ranks, 1 at least."""
        names = [OBJECTIVE, *self._lagrangian.constraints]
        require_names("counts", counts, names)
        for name in names:
            count = counts[name]
            if not isinstance(count, Integral) or count < 0:
                raise DataError(
                    f'counts["{name}"]={count!r}: give how many samples it applies to in all of '
                    "the step's micro-batches on this rank, a whole number from 0."
                )
        numbers = torch.tensor([float(counts[name]) for name in names], device=device)
        numbers = over_ranks(numbers, "sum").clamp(min=1)
        return dict(zip(names, numbers.unbind(), strict=True))

    # The step of λ ------------------------------------------------------------------------------

    def step(self) -> dict[str, DualStep]:
        """λ ← (λ + η ∂ψ/∂λ)₊ of the samples of the last loss; after the optimizer's step.

        Raises:
            TrainingError: no loss since the last step.
        """
        opened, lagrangian = self._open, self._lagrangian
        if opened is None or not opened.tables:
            raise TrainingError(
                "PointwiseLoss.step() without a loss since the last step."
            )
        self._watch.end(lagrangian.warn)
        tables = [torch.cat(opened.tables)]
        self.skip()
        if number_of_ranks() > 1:
            tables.append(_filling(tables[0]))
        measured = unpack(tables, lagrangian.layout, tables[0].new_zeros(()))
        lagrangian.measured = measured
        steps = lagrangian.take(measured, self._epoch(int((measured.index >= 0).sum())))
        # Gradients that nobody averages part the ranks in the first step, some only later.
        if lagrangian.steps in (1, 8):
            require_equal_over_ranks(self._weights.now())
        return steps

    def skip(self) -> None:
        """Instead of :meth:`step` where the weights did not move: an overflow in float16, a batch
        that was dropped or failed, a loss that was only looked at."""
        self._open = None
        self._watch.forget()
        if self._lagrangian.on_means:
            self._lagrangian.forget()

    def _epoch(self, rows: int) -> float:
        """Steps an epoch, from the samples of this step over all ranks; the last ones are fewer."""
        self._rows = max(self._rows, rows)
        # Where an epoch is not all of N the samples do not tell it.
        if self.steps_an_epoch is not None:
            return self.steps_an_epoch
        # A stream has no epoch.
        return math.ceil(self._lagrangian.samples / max(1, self._rows)) or math.inf

    # How it stands ------------------------------------------------------------------------------

    def report(
        self,
        held_out: Mapping[str, Tensor] | None = None,
        groups: Sequence[int] | Tensor | None = None,
    ) -> Closing:
        """How training stands: ``print(constrained.report())`` after the last step.

        A table of the objective and of every requirement, of each training sample at its last
        visit, or of each group's mean over these, and up to three sentences on what is likely
        wrong, and what to do.

        Args:
            held_out: by constraint the values of samples that were not trained on, (n,) or (n, K),
                as they are given to a loss: shown beside training's.
            groups: (n,), the group of each of these, where a bound is on means of groups.

        Raises:
            DataError: held-out values of a bound on means of groups, without ``groups``.
        """
        evaluated = None
        if held_out is not None:
            worst = {
                name: self._worst_held_out(name, values.detach().cpu(), groups)
                for name, values in held_out.items()
            }
            evaluated = HeldOut(self._lagrangian.constraints, worst)
        norm = norm_of(self._weights.now())
        # Without ``parameters`` the weights are not known here, and their norm is 0.
        growth = norm / self.history.norm if norm and self.history.norm else None
        return self._lagrangian.closing(evaluated, Conditions(growth=growth))

    def _worst_held_out(
        self, name: str, values: Tensor, groups: Sequence[int] | Tensor | None
    ) -> Tensor:
        """The largest violation of each sample, or of each group's means."""
        constraint, size = self._lagrangian.constraints[name], len(values)
        if name not in self._lagrangian.bounds_on_means:
            return constraint.violation(values).reshape(size, -1).amax(1)
        if groups is None:
            raise DataError(
                f'held_out["{name}"]: its bound is on the mean of each group. Say which group each '
                f"of the {size:,} samples is of: report(held_out, groups=…)."
            )
        numbers = group_numbers(groups, size)
        residual = constraint.residual(values).reshape(size, -1)
        return worst_mean(constraint, residual, numbers)

    # In a checkpoint ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """λ and all that moves it, tensors and plain values; between two steps."""
        units = None if self._open is None else self._open.units_before
        return state_of_loop(self._lagrangian, self._weights, self._rows, units)

    def load_state_dict(
        self, state: Mapping[str, Any], steps: int | None = None
    ) -> None:
        """Goes on from :meth:`state_dict`, to the bit. What is refused changes nothing.

        steps: of the weights, as the rest of the checkpoint counts them; None compares nothing.

        Raises:
            TrainingError: of another number of samples, other data or groups, of another version or
                step, or damaged.
        """
        self._rows = load_state_of_loop(self._lagrangian, self._weights, state, steps)
        self.skip()


def _filling(rows: Tensor) -> Tensor:
    """Rows of padding, with which every rank has as many as the one that has most."""
    most = over_ranks(torch.tensor(len(rows), device=rows.device), "max")
    filling = rows.new_zeros(int(most) - len(rows), rows.shape[1])
    filling[:, 0] = PADDING  # The first column is the index.
    return filling
