"""The heart: objective, constraints and multipliers of a batch as one loss, for any loop.

The training step of a PointwiseModule consists of it too (stepper.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from .constraint import Constraint
from .errors import DataError, TrainingError, one_of
from .formulations import Formulation
from .lagrangian.duals import Duals, group_numbers
from .lagrangian.scopes import Slope
from .lagrangian.terms import (
    OBJECTIVE,
    PADDING,
    DualStep,
    Layout,
    Measured,
    Terms,
    build_terms,
    carries,
    is_index,
    masks_from,
    number_of_ranks,
    one_per_sample,
    over_ranks,
    pack,
    rows_of_all_ranks,
    shape_of,
    strict_values_from,
    unpack,
    widest,
)
from .multipliers import Multipliers
from .plain import declared_constraints, formulations_from

VERSION = 1
"""The version of what :meth:`PointwiseLoss.state_dict` returns."""


class PointwiseLoss:
    """Mean ℓ₀ + Σ mean ψ(v, λ) of a batch, with a multiplier for every sample.

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
        groups: (N,), the number of each sample's group, from 0: samples of a group share a
            multiplier, which follows the mean of their violations in a step.
        parameters: the weights that are trained; needed with several ranks only.
        primal_steps: steps of the weights per dual step.
        order: "simultaneous": a loss uses λ before its batch's dual step; "dual_first": after it.

    Raises:
        DataError: ``groups`` that are not one number from 0 for each sample; numbers below 1.
        ValueError: constraints and formulations whose names differ, an unknown order.

    Attributes:
        multipliers: λ by constraint, (N, K) float32, of groups (G, K); () for a batch's statistic.
        thresholds: t by constraint of :class:`~pl_pointwise.formulations.CVaR`, () or (2,).
        measured: what the last step measured, of all ranks; None before the first.
        dual_steps: the dual step it ended in, by constraint; empty where it took none.
        steps_an_epoch: N over the samples of a step; set it where an epoch is not all of N.
    """

    def __init__(
        self,
        constraints: Mapping[str, Constraint],
        formulation: Formulation | Mapping[str, Formulation] | None,
        *,
        samples: int | None,
        groups: Sequence[int] | Tensor | None = None,
        parameters: Iterable[Tensor] | None = None,
        primal_steps: int = 1,
        order: str = "simultaneous",
    ) -> None:
        self.constraints, _ = declared_constraints(constraints, None)
        formulations = formulations_from(formulation, self.constraints)
        counts = {"samples": 1 if samples is None else samples, "primal_steps": primal_steps}
        for name, count in counts.items():
            if not isinstance(count, Integral) or count < 1:
                raise DataError(f"{name}={count!r}: give a whole number from 1.")
        one_of("order", order, ("simultaneous", "dual_first"))
        self.samples = samples or 0
        given = None if groups is None else group_numbers(groups, self.samples)
        self.duals = Duals(self.constraints, formulations, self.samples, primal_steps, order, given)
        self.measured: Measured | None = None
        self.dual_steps: dict[str, DualStep] = {}
        self.steps = 0  # Of the weights.
        self.steps_an_epoch: float | None = None
        self._rows = 0  # Samples of the largest step so far.
        self._parameters = None if parameters is None else list(parameters)
        self._flat: set[str] = set()  # Constraints that were found without a gradient.
        self._layout: Layout = {}
        self._tables: list[Tensor] = []  # Of the losses since the last step.

    @property
    def formulations(self) -> Mapping[str, Formulation]:
        return self.duals.formulations

    @property
    def multipliers(self) -> Multipliers:
        return self.duals.multipliers

    @property
    def thresholds(self) -> dict[str, Tensor]:
        return self.duals.thresholds

    # In a loop of one's own ---------------------------------------------------------------------

    def __call__(
        self,
        objective: Tensor,
        values: Mapping[str, Tensor],
        index: Tensor,
        *,
        masks: Mapping[str, Tensor] | None = None,
        strict: Mapping[str, Tensor] | None = None,
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

        Raises:
            DataError: a tensor of another shape, an index that is no position.
            TrainingError: a value that is not finite, with its sample, before anything moves; a
                call without gradients; calls for more than the training set without a step().
        """
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
        index = index.long().cpu()
        objective, values = one_per_sample(objective, values, self.constraints, len(index))
        device, masks = objective.device, {} if masks is None else masks
        masks, whole = masks_from(masks, index, [OBJECTIVE, *self.constraints], device)
        judged = None if strict is None else strict_values_from(strict, values, self.formulations)
        terms = build_terms(
            self.constraints, self.formulations, masks, objective, values, judged, whole
        )
        _require_finite(terms, index)
        counts = self.counts([masks], whole)
        if not self._tables:
            if not self.steps:
                self.duals.fit_tables()  # To what was set before.
            due = self.duals.units.due(self.formulations, self.steps)
            self.measure_units(due, counts, lambda name: self._gradient_of(name, terms, counts))
            rows = over_ranks((index >= 0).sum().to(device), "sum") if not self._rows else 0
            self.duals.put_in_force(self._epoch(int(rows)))
        loss, table = self.share(terms, index, counts, None, strict is not None)
        self._keep(table)
        # The ranks' gradients are averaged, and the counts are those of all ranks.
        return loss * number_of_ranks()

    def _keep(self, rows: Tensor) -> None:
        """Keeps the rows of a loss for :meth:`step`; refuses so many that it was forgotten."""
        self._tables.append(rows)
        given = sum(map(len, self._tables))
        if len(self._tables) > 1 and given > 2 * self.samples > 0:
            raise TrainingError(
                f"{given:,} samples since the last step(), of a training set of {self.samples:,}: "
                "call step() after each step of the optimizer."
            )

    def step(self) -> dict[str, DualStep]:
        """λ ← (λ + η ∂ψ/∂λ)₊ of the samples of the last loss; after the optimizer's step.

        Raises:
            TrainingError: no loss since the last step.
        """
        if not self._tables:
            raise TrainingError("PointwiseLoss.step() without a loss since the last step.")
        rows, self._tables = torch.cat(self._tables), []
        most = over_ranks(torch.tensor(len(rows), device=rows.device), "max")
        filling = rows.new_zeros(int(most) - len(rows), rows.shape[1])
        filling[:, 0] = PADDING  # The first column is the index.
        measured = self.gather([rows, filling], rows.new_zeros(()))
        self.measured = measured
        return self.take(measured, self._epoch(int((measured.index >= 0).sum())))

    def skip(self) -> None:
        """Instead of :meth:`step` where the weights did not move, as on an overflow in float16."""
        self._tables = []

    def _epoch(self, rows: int) -> float:
        """Steps an epoch, from the samples of this step over all ranks; the last ones are fewer."""
        self._rows = max(self._rows, rows)
        if self.steps_an_epoch is not None:
            return self.steps_an_epoch
        return math.ceil(self.samples / max(1, self._rows)) or math.inf

    def _gradient_of(
        self, name: str, terms: Terms, counts: Mapping[str, Tensor]
    ) -> tuple[float, float, float]:
        values = self.pushed(name, terms)
        found = values.detach().to(widest(values.device))
        number, total = over_ranks(torch.stack([(found > 0).sum(), found.sum()]), "sum").tolist()
        weights = self._parameters or [*_leaves_of(values)]
        if not (number or name == OBJECTIVE) or not values.requires_grad or not weights:
            return 0.0, number, total
        if number_of_ranks() > 1 and self._parameters is None:
            raise TrainingError(
                "PointwiseLoss(parameters=model.parameters()) is needed with several ranks: their "
                "gradients are added up, in that order."
            )
        mean = values.sum() * (1 / counts[name])
        gradients = torch.autograd.grad(mean, weights, retain_graph=True, allow_unused=True)
        summed = [
            over_ranks(torch.zeros_like(w) if g is None else g, "sum")
            for g, w in zip(gradients, weights, strict=True)
        ]
        return norm_of(summed), number, total

    # The parts of a step, which a module's Stepper takes one by one -----------------------------

    def counts(self, masks: Sequence[Mapping[str, Tensor]], whole: bool) -> dict[str, Tensor]:
        """How many samples each term applies to, 1 at least, over all micro-batches and ranks.

        whole: whether the masks are known to be True everywhere.
        """
        names = [OBJECTIVE, *self.constraints]
        if whole:
            samples = float(sum(len(of_micro_batch[OBJECTIVE]) for of_micro_batch in masks))
            device = masks[0][OBJECTIVE].device
            numbers = torch.full((len(names),), samples, dtype=torch.float32, device=device)
        else:
            found = [carries(of_micro_batch[n]).sum() for of_micro_batch in masks for n in names]
            numbers = torch.stack(found).view(len(masks), -1).sum(0, dtype=torch.float32)
        if number_of_ranks() > 1:
            numbers = over_ranks(numbers, "sum")
        return dict(zip(names, numbers.clamp(min=1).unbind(), strict=True))

    def pushed(self, name: str, terms: Terms) -> Tensor:
        """ℓ₀, or (v)₊ of a constraint (|v| of an equality): what Λ compares the gradients of."""
        if name == OBJECTIVE:
            return terms.objective
        violation = terms.followed[name]
        return violation.abs() if self.formulations[name].signed else violation.clamp(min=0)

    def measure_units(
        self,
        names: Sequence[str],
        counts: Mapping[str, Tensor],
        gradient_of: Callable[[str], tuple[float, float, float]],
    ) -> list[str]:
        """Measures Λ of constraints; returns the names of which a norm is not finite.

        gradient_of: of a term the norm ‖∇ Σ ℓ₀ / count‖ or ‖∇ Σ (v)₊ / count‖ over all ranks, how
            many values are above 0, and their sum.
        """
        objective, again = None, []
        for name in names:
            norm, number, total = gradient_of(name)
            if number and objective is None:
                objective = gradient_of(OBJECTIVE)[0]
            if number and norm == 0 and name not in self._flat:
                self._flat.add(name)
                self.duals.warn(
                    f'Constraint "{name}": the gradient of its violated values is 0 for every '
                    "trained weight, so nothing enforces it. In constraint_values() and forward(), "
                    "look for a clamp, a rounding, or a part that is frozen."
                )
            if number and objective is not None:
                violations = norm * float(counts[name]) / number
                self.duals.units.measure(name, objective, violations, total / number)
            if not math.isfinite(norm + (objective or 0.0)):
                again.append(name)
        return again

    def share(
        self,
        terms: Terms,
        index: Tensor,
        counts: Mapping[str, Tensor],
        slopes: Mapping[str, Slope] | None,
        strict: bool,
    ) -> tuple[Tensor, Tensor]:
        """A micro-batch's share of the loss, and its rows for :meth:`gather`.

        slopes: of the batch's statistics, where they are not known and this is not the batch.
        """
        on_batch, multipliers = self.duals.on_batch, dict[str, Tensor]()
        loss = terms.objective.sum() / counts[OBJECTIVE]
        for name, scope in self.duals.scopes.items():
            if name in on_batch:
                continue
            multiplier = scope.rows(index, terms.followed[name])
            if multiplier is not None:
                multipliers[name] = multiplier
            loss = loss + scope.loss(terms, multiplier, counts[name])
        table, self._layout = pack(index, terms, multipliers, loss, strict)
        if on_batch:
            slopes = slopes or self.duals.slopes([terms], counts)
            shares = (on_batch[n].loss_of(terms, slope, counts[n]) for n, slope in slopes.items())
            loss = loss + sum(shares)
        return loss, table

    def gather(self, tables: Sequence[Tensor], gradient_norm: Tensor) -> Measured:
        """What the micro-batches of all ranks measured, from their rows."""
        rows = tables[0] if len(tables) == 1 else torch.cat(list(tables))
        rows = rows if number_of_ranks() == 1 else rows_of_all_ranks(rows)
        return unpack(rows, self._layout, gradient_norm)

    def empty_rows(self, rows: int, device: torch.device) -> Tensor:
        """Of a rank of which no sample is left."""
        width = sum(self._layout.values())
        return torch.zeros(rows, width, dtype=widest(device), device=device)

    def take(self, measured: Measured, steps_an_epoch: float) -> dict[str, DualStep]:
        """Learns from a step that the weights have taken; the dual step, where one is due."""
        self.dual_steps = self.duals.step(measured, steps_an_epoch)
        self.steps += 1
        return self.dual_steps

    # In a checkpoint ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """λ and all that moves it, tensors and plain values; between two steps."""
        return {
            "version": VERSION,
            "steps": self.steps,
            "rows": self._rows,
            **self.duals.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from :meth:`state_dict`, to the bit.

        Raises:
            TrainingError: of another number of samples, of another version, or damaged.
        """
        owners = self.multipliers.samples
        try:
            if state["version"] != VERSION:
                raise ValueError(f"version {state['version']}")
            self.duals.load_state_dict(state)
            self.steps, self._rows, self._tables = int(state["steps"]), int(state["rows"]), []
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise TrainingError(
                f"This is no state of a PointwiseLoss of version {VERSION}, or damaged: {error}."
            ) from error
        if state["samples"] != owners:
            raise TrainingError(
                f"These multipliers belong to {state['samples']:,} samples, this PointwiseLoss has "
                f"{owners:,}: give it the training set of before."
            )
        self.duals.fit_tables()


def norm_of(gradients: Iterable[Tensor]) -> float:
    """The norm of a gradient in parts, the same in whatever order they are."""
    norms = [torch.linalg.vector_norm(part.detach()) for part in gradients]
    whole = [getattr(norm, "full_tensor", lambda norm=norm: norm)() for norm in norms]
    if not whole:
        return 0.0
    return math.sqrt(math.fsum(float(n) ** 2 for n in torch.stack(whole).tolist()))


def _require_finite(terms: Terms, index: Tensor) -> None:
    named = [(OBJECTIVE, terms.objective), *terms.followed.items(), *terms.judged.items()]
    for name, values in named:
        finite = torch.isfinite(values.detach().float())
        if not finite.all():
            row = int((~finite).nonzero()[0, 0])
            value = float(values.detach()[row][~finite[row]].flatten()[0])
            raise TrainingError(
                f'"{name}" is {value} for sample {int(index[row])}, and nothing has moved. Inspect '
                "that record or lower the learning rate."
            )


def _leaves_of(value: Tensor) -> Iterator[Tensor]:
    """The weights that a value depends on."""
    nodes, seen = [value.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes += [following for following, _ in node.next_functions]
