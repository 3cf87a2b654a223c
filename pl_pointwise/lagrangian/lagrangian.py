"""The engine: mean ℓ₀ + Σ mean ψ(v, λ) of a step, and the step of λ behind it.

A PointwiseLoss, the module's Stepper and the mix-in for a Trainer are doors to it. A step is, for
each of them: ``counts``; the units that are due, by ``measure_units``; ``put_in_force``; of each
micro-batch ``see`` and ``share``, which is differentiated; and, once the weights have taken their
step, ``take``. Shapes as in terms.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..formulations import Ascending, Formulation
from ..report.closing import closing_of
from ..report.closing_table import Closing, Conditions, HeldOut
from ..report.history import UNREAD_ROWS, UNREAD_STEPS
from .batch_scope import Slope
from .group_means import largest
from .prices import Step, forces_of
from .shares import without_exempt
from .state import LagrangianState
from .terms import (
    OBJECTIVE,
    DualStep,
    Measured,
    Terms,
    carries,
    finite_samples,
    number_of_ranks,
    over_ranks,
    pack,
    widest,
)


@dataclass(frozen=True)
class Push:
    """What Λ compares the gradients of: one term of some samples."""

    mean: Tensor  #: their part of the mean of ℓ₀ or of (v)₊, a scalar
    #: (3,): how many values are above 0, their sum, and the samples that are not finite
    numbers: Tensor


@dataclass(frozen=True)
class Gradient:
    """The gradient of one term of a step, over all micro-batches and ranks."""

    norm: float  #: ‖∇ mean ℓ₀‖, or ‖∇ mean (v)₊‖
    number: float  #: of its values above 0
    total: float  #: of these values


class Lagrangian(LagrangianState):
    """The steps of objective, constraints and multipliers of a training set.

    Arguments and attributes are those of :class:`~.state.LagrangianState`.
    """

    # Before the loss of a step ------------------------------------------------------------------

    def counts(
        self, masks: Sequence[Mapping[str, Tensor]], whole: bool
    ) -> dict[str, Tensor]:
        """How many samples each term applies to, 1 at least, over all micro-batches and ranks.

        whole: whether the masks are known to be True everywhere.
        """
        names = [OBJECTIVE, *self.constraints]
        if whole:
            # Without a look at the masks, for which the host would wait.
            samples = sum(len(of_micro_batch[OBJECTIVE]) for of_micro_batch in masks)
            device = masks[0][OBJECTIVE].device
            numbers = torch.full(
                (len(names),), float(samples), dtype=torch.float32, device=device
            )
        else:
            applying = []
            for of_micro_batch in masks:
                applying += [carries(of_micro_batch[name]).sum() for name in names]
            by_term = torch.stack(applying).view(len(masks), -1)
            numbers = by_term.sum(0, dtype=torch.float32)
        if number_of_ranks() > 1:
            numbers = over_ranks(numbers, "sum")
        return dict(zip(names, numbers.clamp(min=1).unbind(), strict=True))

    def put_in_force(self, steps_an_epoch: float = math.inf) -> None:
        """The formulations of this step; steps from one visit of a sample to the next."""
        self.in_force = self.units.in_force(
            self.formulations,
            self.constraints,
            steps_between=max(steps_an_epoch, self.primal_steps),
            total_steps=self.total_steps,
        )
        # A mean over all samples of a group is no noise that a margin would keep away.
        for name in self.on_means:
            self.in_force[name] = without_margin(self.in_force[name])
        for name, scope in self.scopes.items():
            scope.formulation = self.in_force[name]

    def formulation_of_now(self, name: str) -> Formulation:
        """A constraint's formulation with α a number: of the last step, or before any of now."""
        if self.in_force:
            return self.in_force[name]
        # Of a module that was loaded and has not been trained since.
        return self.units.in_force(self.formulations, self.constraints)[name]

    # The unit of the multipliers (gradient_units.py) --------------------------------------------

    def push(self, name: str, terms: Terms, count: Tensor, ranks: int = 1) -> Push:
        """Of a term of a micro-batch what Λ compares the gradients of: ℓ₀, or (v)₊.

        count: samples that the term applies to over all ranks. ranks: 1, or their number where a
            backward pass averages their gradients.
        """
        finite = finite_samples(terms.objective, terms.followed)
        values = self._pushed(name, terms)
        values = torch.where(
            finite if values.dim() == 1 else finite[:, None], values, 0
        )
        known = values.detach().to(widest(values.device))
        numbers = torch.stack([(known > 0).sum(), known.sum(), (~finite).sum()])
        return Push(values.sum() * (ranks / count), numbers)

    def _pushed(self, name: str, terms: Terms) -> Tensor:
        """ℓ₀, or (v)₊ of a constraint (|v| of an equality).

        Of groups the value is that of their mean, and the gradient that of each sample's share.
        """
        if name == OBJECTIVE:
            return terms.objective
        signed = self.formulations[name].signed
        violation = terms.followed[name]
        if name in self.shares:
            violation = torch.where(terms.exempt[name][:, None], 0, violation)
        if name in self.on_means:
            mean = terms.means[name]
            size = mean.abs() if signed else mean.clamp(min=0)
            side = mean.sign() if signed else (mean > 0).to(mean)
            return size + side * (violation - violation.detach())
        return violation.abs() if signed else violation.clamp(min=0)

    def measure_units(
        self,
        names: Sequence[str],
        counts: Mapping[str, Tensor],
        gradient_of: Callable[[str], Gradient],
    ) -> list[str]:
        """Measures Λ of constraints; returns the names of which a norm is not finite.

        gradient_of: of a term, as a door differentiates what :meth:`push` gives.
        """
        objective: float | None = None
        again = []
        for name in names:
            violated = gradient_of(name)
            # The objective's is needed where something is violated, and the same for all.
            if violated.number and objective is None:
                objective = gradient_of(OBJECTIVE).norm
            if violated.number and violated.norm == 0:
                self._warn_of_no_gradient(name)
            if violated.number and objective is not None:
                # Of the mean over the violated values alone.
                norm = violated.norm * float(counts[name]) / violated.number
                size = violated.total / violated.number
                self.units.measure(name, objective, norm, size)
            if not math.isfinite(violated.norm + (objective or 0.0)):
                again.append(name)
        return again

    def _warn_of_no_gradient(self, name: str) -> None:
        """Once, of a constraint that never had one."""
        if self.units.unit(name) is None and name not in self._flat:
            self._flat.add(name)
            self.warn(
                f'Constraint "{name}": the gradient of its violated values is 0 for every '
                f"trained weight, so nothing enforces it. In {self.door.values}, "
                "look for a clamp, a rounding, or a part that is frozen."
            )

    # The loss of a step -------------------------------------------------------------------------

    def see(
        self,
        terms: Sequence[Terms],
        indices: Sequence[Tensor],
        device: torch.device,
        keep: bool = True,
    ) -> None:
        """Gives micro-batches the means of their groups, with the values of all ranks.

        To be called where ``needs_others``. A collective where groups have a bound. keep: whether
        the next ones of this step are together with these.
        """
        for scope in self.on_means.values():
            scope.see(terms, indices, device, keep)
        for of_micro_batch, index in zip(terms, indices, strict=True):
            self.give_means(of_micro_batch, index)

    def give_means(self, terms: Terms, index: Tensor) -> None:
        """The means of the groups of a micro-batch that was seen, and who is exempt in it."""
        for name, share in self.shares.items():
            device = terms.followed[name].device
            terms.exempt[name] = share.exempt(index).to(device, non_blocking=True)
        for name, scope in self.on_means.items():
            terms.means[name] = scope.means_of(index, terms)

    def forget(self) -> None:
        """What was seen of a step that is over, or is taken once more."""
        for scope in self.on_means.values():
            scope.forget()

    def share(
        self,
        terms: Terms,
        index: Tensor,
        counts: Mapping[str, Tensor],
        slopes: Mapping[str, Slope] | None,
        strict: bool,
    ) -> tuple[Tensor, Tensor]:
        """A micro-batch's share of the loss, and its rows, of which a step is unpacked.

        slopes: of the batch's statistics; None where this micro-batch is the batch.
        """
        multipliers = dict[str, Tensor]()
        loss = terms.objective.sum() / counts[OBJECTIVE]
        for name, scope in self.scopes.items():
            if name in self.on_batch:
                continue
            multiplier = scope.rows(index, terms.followed[name])
            if multiplier is not None:
                multipliers[name] = multiplier
            loss = loss + scope.loss(terms, multiplier, counts[name])
        # Without the statistics: ψ of these is added when the whole step is known.
        table, self.layout = pack(index, terms, multipliers, loss, strict)
        if not self.on_batch:
            return loss, table
        shares = []
        for name, statistic in self.on_batch.items():
            if slopes is None:
                shares.append(statistic.loss(terms, None, counts[name]))
            else:
                shares.append(statistic.loss_at(slopes[name], terms, counts[name]))
        return loss + sum(shares), table

    @property
    def knows_slopes(self) -> bool:
        """Whether every ∂ψ/∂mean is λ, whatever the batch: those of :meth:`share`."""
        return all(scope.knows_slope for scope in self.on_batch.values())

    def slopes(
        self, terms: Sequence[Terms], counts: Mapping[str, Tensor]
    ) -> dict[str, Slope]:
        """∂ψ/∂mean by constraint, of all micro-batches of all ranks."""
        return {
            name: scope.slope(terms, counts[name])
            for name, scope in self.on_batch.items()
        }

    # After the step of the weights --------------------------------------------------------------

    def take(self, measured: Measured, steps_an_epoch: float) -> dict[str, DualStep]:
        """Learns from a step that the weights have taken; the dual step, where one is due.

        λ ← (λ + η ∂ψ/∂λ)₊ for the samples seen since the last dual step, and no others: each with
        its last violation; a statistic with its mean. Nothing while a window is open: what the
        dual step needs of this one is kept by constraint.
        """
        if self.means is not None:
            self.means.put(measured)
        exempt = {
            name: share.exempt(measured.index) for name, share in self.shares.items()
        }
        visits = dict[str, list[Tensor]]()
        for name, scope in self.scopes.items():
            visit = scope.visit(measured)
            if visit is not None:
                visits[name] = visit
        self._window.append(visits)
        # Units follow what ψ acts on, reports what is bounded: of groups not always the same.
        of_units = bounded = measured
        if self.means is not None:
            of_units = self.means.instead_of_samples(measured, self.on_means)
            bounded = self.by_requirement(measured)
        self._note(bounded, exempt)
        if exempt:
            of_units = without_exempt(of_units, exempt)
        self.units.add(of_units, self.formulations, self.in_force, steps_an_epoch)
        for name, share in self.shares.items():  # Who is exempt in the next step.
            share.put(measured.index, measured.judged[name], measured.masks[name])
        self.steps += 1
        self.dual_steps = self._dual_steps()
        # At the 8th, 16th, 32nd step and so on: they look at all samples.
        if self.steps >= 8 and self.steps & (self.steps - 1) == 0:
            self.checks.of_steps(self.history, self.warn)
        return self.dual_steps

    def _note(self, measured: Measured, exempt: Mapping[str, Tensor]) -> None:
        """Keeps a step for the history, which reads many at once."""
        statistics = {
            name: self.multipliers[name].clone()
            for name in self.on_batch
            if name in self.multipliers
        }
        self._last = Step(measured, self.in_force, statistics, self.dual_first, exempt)
        unread = self.history.unread
        unread.append(self._last)
        rows = len(unread) * len(measured.index)
        if len(unread) >= UNREAD_STEPS or rows >= UNREAD_ROWS:
            self.history.read()

    def _dual_steps(self) -> dict[str, DualStep]:
        """Those at the end of a window, by constraint; none while it is open."""
        taken = dict[str, DualStep]()
        if len(self._window) < self.primal_steps:
            return taken
        window, self._window = self._window, []
        for name, scope in self.scopes.items():
            kept = [visits[name] for visits in window if name in visits]
            step = scope.step(kept) if kept else None
            if step is not None:
                taken[name] = step
        return taken

    # What is asked for --------------------------------------------------------------------------

    def by_requirement(self, measured: Measured) -> Measured:
        """A taken step's violations as they are bounded: of groups each row has their mean."""
        if self.means is None:
            return measured
        return self.means.instead_of_samples(measured, self._reported_by_group())

    def _reported_by_group(self) -> list[str]:
        """The constraints whose groups' means are known: an equality's need ℓ − c with its sign."""
        return [
            name
            for name in self.bounds_on_means
            if not self.constraints[name].is_equality
            or (name in self.formulations and self.formulations[name].signed)
        ]

    def forces(self, name: str) -> Tensor:
        """∂ψ/∂v of the samples of the last step, (R, sides·K): see PointwiseModule.forces."""
        formulation = self.formulations.get(name)
        if formulation is None or formulation.scope == "batch":
            raise ValueError(
                f'Constraint "{name}": {formulation} has no force of a sample. Ask for one of '
                "Pointwise, Relaxed or Penalty."
            )
        if self._last is None:
            raise ValueError("There was no step yet, so no force.")
        return forces_of(name, self._last)

    def closing(self, held_out: HeldOut | None, conditions: Conditions) -> Closing:
        """The closing table of the steps until now."""
        self.history.read()
        means = dict[str, Tensor]()
        if self.means is not None:
            for name in self._reported_by_group():
                of_groups = self.means.judged(name).all()
                means[name] = largest(self.constraints[name].reported(of_groups))
        return closing_of(
            self.history,
            self.in_force,
            self.multipliers,
            self.groups,
            held_out,
            conditions,
            means,
        )


def without_margin(formulation: Formulation) -> Formulation:
    """One in force whose aim is the bound itself: of a mean over samples, which is no noise."""
    if not isinstance(formulation, Ascending) or formulation.scale is None:
        return formulation
    return formulation.scaled(replace(formulation.scale, margin=0.0))
