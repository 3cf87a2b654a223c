"""The heart: objective, constraints and multipliers of a batch as one loss, for any loop.

The training step of a PointwiseModule consists of it too (stepper.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from .constraint import Constraint
from .errors import DataError, TrainingError, one_of
from .formulations import Ascending, Formulation
from .lagrangian.checks import Checks, Door
from .lagrangian.declared import declared_constraints, formulations_from
from .lagrangian.gradient_units import GradientUnits, leaves_of, norm_of
from .lagrangian.group_means import MeansOfConstraints, largest, worst_mean
from .lagrangian.prices import Prices, Step
from .lagrangian.shares import Share, refuse_shares, refuse_stream, without_exempt
from .lagrangian.terms import (
    OBJECTIVE,
    PADDING,
    DualStep,
    Layout,
    Measured,
    Terms,
    build_terms,
    carries,
    group_numbers,
    is_index,
    masks_from,
    number_of_ranks,
    over_ranks,
    pack,
    require_finite,
    require_names,
    shape_of,
    strict_values_from,
    unpack,
    widest,
)
from .lagrangian.trained import (
    COMPILED,
    REENTRANT,
    Movement,
    Weights,
    as_backward_of_fabric,
    is_sharded,
    keep_buffers_of_compiled_graphs,
    refuse_static_graph,
    require_all_sharded,
    require_equal_over_ranks,
    source_of,
    trained,
)
from .multipliers import Multipliers, OnMeans, PerBatch, PerGroup, Slope, scope_of
from .report.closing import closing_of
from .report.closing_table import Closing, Conditions, HeldOut
from .report.history import UNREAD_ROWS, UNREAD_STEPS, History

log = logging.getLogger(__name__)

VERSION = 1
"""The version of what :meth:`PointwiseLoss.state_dict` returns."""

CLOSURES = (
    "A loss that an optimizer computes again in a closure (LBFGS, SAM) takes keep=False, and after "
    "its step comes one loss that counts."
)


def _check_count(name: str, count: object) -> None:
    if not isinstance(count, Integral) or isinstance(count, bool) or count < 1:
        raise DataError(f"{name}={count!r}: give a whole number from 1.")


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
        groups: (N,), the number of each sample's group, from 0: a bound is then on the mean of
            each group, which has one multiplier; with ``Constraint(…, each_sample=True)`` it is on
            each sample, and λ is shared.
        parameters: the model, or its parameters; needed with several ranks only. Which of them are
            trained is asked for at each measurement.
        primal_steps: steps of the weights per dual step.
        order: "simultaneous": a loss uses λ before its batch's dual step; "dual_first": after it.
        total_steps: of the weights in the whole run, where it is known. In more than ten epochs few
            violating samples push less hard, and in more than 900 steps λ waits for the weights
            while most samples violate (docs/formulations.md).

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
    """

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
        self.constraints, _ = declared_constraints(constraints, None)
        formulations = formulations_from(formulation, self.constraints)
        _check_count("samples", 1 if samples is None else samples)
        _check_count("primal_steps", primal_steps)
        _check_count("total_steps", 1 if total_steps is None else total_steps)
        one_of("order", order, ("simultaneous", "dual_first"))
        self.samples = samples or 0
        given = None if groups is None else group_numbers(groups, self.samples)
        owners = self.samples if given is None else int(given.max()) + 1
        self.door = Door()
        self._multipliers, self._thresholds = Multipliers(owners), dict[str, Tensor]()
        # Of groups, where bounds are on them.
        self.means: MeansOfConstraints | None = None
        # Of a state, until the groups are known.
        self._saved_means: Mapping[str, Any] = {}
        self.shares = self._new_shares(self.samples)
        self.configure(formulations, primal_steps, order, given)
        # Λ and r of the formulations that find their own α.
        self.units = GradientUnits()
        self.in_force: dict[str, Formulation] = {}  # With α a number, of the last step.
        # Of the training set that the multipliers belong to.
        self.fingerprint: str | None = None
        self.measured: Measured | None = None
        self.dual_steps: dict[str, DualStep] = {}
        self.history = History(self.constraints, self.samples)
        self.steps = 0  # Of the weights.
        self.steps_an_epoch: float | None = None
        self.total_steps = total_steps
        self.layout: Layout = {}  # Of the rows that share() returned last.
        self.warn: Callable[[str], None] = log.warning
        self._rows = 0  # Samples of the largest step so far.
        self._source = source_of(parameters)  # Of the trained weights.
        self._open = False  # Whether a step has begun, with a first loss.
        self._before: dict[str, Any] | None = None  # The units before what it measured.
        self._differentiated: list[list[bool]] = []  # Of each of its losses.
        self._indices: list[Tensor] = []  # Of its losses.
        self._movement = Movement()
        self._said = set[str]()  # Warnings that come once.
        # Norm of the weights that a state belongs to.
        self._weights_saved: float | None = None
        self._flat: set[str] = set()  # Constraints that were found without a gradient.
        self._tables: list[Tensor] = []  # Of the losses since the last step.
        # The updated samples of the steps since the last dual step.
        self._window: list[dict[str, list[Tensor]]] = []

    def configure(
        self,
        formulations: Mapping[str, Formulation],
        primal_steps: int,
        order: str,
        groups: Tensor | None,
    ) -> None:
        """How λ moves from now on, and whose it is."""
        refuse_shares(self.constraints, formulations, groups)
        self._formulations, self.groups = formulations, groups
        self.checks = Checks(self.constraints, formulations, self.door)
        if any(formulation.adaptive for formulation in formulations.values()):
            # Measuring Λ differentiates a graph once more.
            keep_buffers_of_compiled_graphs()
        self.primal_steps, self.dual_first = primal_steps, order == "dual_first"
        self._make_means(self.means)
        self._hold(self.multipliers, self.thresholds)
        if self.dual_first and any(
            isinstance(s, PerGroup) for s in self.scopes.values()
        ):
            raise TrainingError(
                'order="dual_first" with groups: a group\'s λ follows the mean of its violations, '
                'which a batch\'s loss would need first. Take order="simultaneous".'
            )
        for name in self.on_means:
            if self.constraints[name].is_equality and not formulations[name].signed:
                raise TrainingError(
                    f'Constraint "{name}": {formulations[name]} acts on |ℓ − c|, whose mean over a '
                    "group is not how far the group's mean is from c. Take Pointwise or Relaxed, "
                    "or Constraint(equals=…, each_sample=True)."
                )

    def _hold(self, multipliers: Multipliers, thresholds: dict[str, Tensor]) -> None:
        """Keeps other λ and t, and the scopes: what ψ acts on, by constraint."""
        self._multipliers, self._thresholds = multipliers, thresholds
        state: dict[str, Any] = {"multipliers": multipliers, "thresholds": thresholds}
        state |= {
            "dual_first": self.dual_first,
            "groups": self.groups,
            "means": self.means,
        }
        state |= {"shares": self.shares}
        self.scopes = {
            name: scope_of(
                name, formulation, constraint=self.constraints[name], **state
            )
            for name, formulation in self.formulations.items()
        }
        self.on_batch = {
            n: s for n, s in self.scopes.items() if isinstance(s, PerBatch)
        }
        self.on_means = {n: s for n, s in self.scopes.items() if isinstance(s, OnMeans)}

    @property
    def formulations(self) -> Mapping[str, Formulation]:
        return self._formulations

    @property
    def multipliers(self) -> Multipliers:
        return self._multipliers

    @property
    def prices(self) -> Prices:
        self.history.read()
        return self.history.prices

    @property
    def thresholds(self) -> dict[str, Tensor]:
        return self._thresholds

    # In a loop of one's own ---------------------------------------------------------------------

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
        index = self._required_index(index)
        device = getattr(objective, "device", index.device)
        masks = {} if masks is None else masks
        words, names = self.door.words, [OBJECTIVE, *self.constraints]
        masks, whole = masks_from(masks, index, names, device, words)
        judge = None
        if strict is not None:
            judge = lambda of: strict_values_from(strict, of, self.formulations, words)  # noqa: E731
        given = masks, objective, values, judge, whole
        terms = build_terms(self.constraints, self.formulations, *given, words)
        require_finite(terms, index)
        if self.checks.unproven:
            self.checks.of_terms(terms, self.warn, together=number_of_ranks() > 1)
        own = self.counts([masks], whole)
        self.see([terms], [index], objective.device, keep)
        if not self._open:
            self._begin(terms, own, index)
        slopes, of_step = None, own
        if counts is not None:
            of_step = self._counts_of_step(counts, device)
            slopes = self.slopes([terms], own) if self.on_batch else None
        loss, table = self.share(terms, index, of_step, slopes, strict is not None)
        loss = self._for_ddp(loss)
        if keep:
            self._keep(table, index, loss)
        return loss

    def _for_ddp(self, loss: Tensor) -> Tensor:
        """DDP averages the ranks' gradients, and waits for those of every rank."""
        # Of the mean over ranks the counts are those of all of them already.
        loss = loss * number_of_ranks()
        if number_of_ranks() > 1 and not loss.requires_grad:
            nothing: Tensor | int = sum((w * 0).sum() for w in trained(self._source))
            loss = loss + nothing
        return loss

    def _required_index(self, index: Any) -> Tensor:
        """The samples of a training step as positions in the training set, on the CPU."""
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
        if not self.samples:
            refuse_stream(self.constraints)
        positions: Tensor = index.long().cpu()
        largest = int(positions.max()) if len(positions) else PADDING
        if self.samples and largest >= self.samples:
            raise TrainingError(
                f"Sample index {largest} is outside the training set of {self.samples} samples: "
                "index is each sample's position in it, from 0."
            )
        return positions

    def _begin(self, terms: Terms, counts: Mapping[str, Tensor], index: Tensor) -> None:
        """With the first loss of a step: what is due in it."""
        self._open, self._before = True, None
        if not self.steps:
            self.fit_tables()  # To what was set before.
            self.history.norm = norm_of(trained(self._source))
        self._compare_weights()
        units, next_step = self.units, self.units.next_step
        due = units.due(self.formulations, self.steps)
        # A state of now is that of before this step, which a resume takes again.
        if due:
            self._before = {**units.state_dict(), "next": next_step}
        if due or not self.steps:
            parts = [terms.objective.sum(), *(v.sum() for v in terms.followed.values())]
            self._movement.watch(trained(self._source) or leaves_of(torch.stack(parts)))
        self.measure_units(
            due, counts, lambda name: self._gradient_of(name, terms, counts)
        )
        device = terms.objective.device
        rows = over_ranks((index >= 0).sum().to(device), "sum") if not self._rows else 0
        self.put_in_force(self._epoch(int(rows)))
        if self.steps < Movement.STEPS:
            self._movement.before()

    def _counts_of_step(
        self, counts: Mapping[str, int], device: torch.device
    ) -> dict[str, Tensor]:
        """Those that a caller knows, over all ranks, 1 at least."""
        names = [OBJECTIVE, *self.constraints]
        require_names("counts", counts, names)
        for name in names:
            count = counts[name]
            if not isinstance(count, Integral) or count < 0:
                raise DataError(
                    f'counts["{name}"]={count!r}: give how many samples it applies to in all of '
                    "the step's micro-batches on this rank, a whole number from 0."
                )
        given = torch.tensor([float(counts[n]) for n in names], device=device)
        return dict(
            zip(names, over_ranks(given, "sum").clamp(min=1).unbind(), strict=True)
        )

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
        found = None
        if held_out is not None:
            worst = {
                name: self._worst_held_out(name, values.detach().cpu(), groups)
                for name, values in held_out.items()
            }
            found = HeldOut(self.constraints, worst)
        norm = norm_of(trained(self._source))
        growth = norm / self.history.norm if norm and self.history.norm else None
        return self.closing(found, Conditions(growth=growth))

    def _worst_held_out(
        self, name: str, values: Tensor, groups: Sequence[int] | Tensor | None
    ) -> Tensor:
        """The largest violation of each sample, or of each group's means."""
        constraint, size = self.constraints[name], len(values)
        if name not in self.bounds_on_means:
            return constraint.violation(values).reshape(size, -1).amax(1)
        if groups is None:
            raise DataError(
                f'held_out["{name}"]: its bound is on the mean of each group. Say which group each '
                f"of the {size:,} samples is of: report(held_out, groups=…)."
            )
        numbers = group_numbers(groups, size)
        return worst_mean(
            constraint, constraint.residual(values).reshape(size, -1), numbers
        )

    @property
    def bounds_on_means(self) -> list[str]:
        """The constraints whose bound is on the mean of each group."""
        if self.groups is None:
            return []
        return [
            name for name, bound in self.constraints.items() if not bound.each_sample
        ]

    def closing(self, held_out: HeldOut | None, conditions: Conditions) -> Closing:
        """The closing table of the steps until now."""
        self.history.read()
        means = dict[str, Tensor]()
        for name in self._reported_by_group():
            assert self.means is not None
            found = self.means.judged(name).all()
            means[name] = largest(self.constraints[name].reported(found))
        return closing_of(
            self.history,
            self.in_force,
            self.multipliers,
            self.groups,
            held_out,
            conditions,
            means,
        )

    def _keep(self, rows: Tensor, index: Tensor, loss: Tensor) -> None:
        """Keeps the rows of a loss for :meth:`step`; refuses so many that it was forgotten."""
        self._tables.append(rows)
        given = sum(map(len, self._tables))
        if len(self._tables) > 1 and given > 2 * self.samples > 0:
            raise TrainingError(
                f"{given:,} samples since the last step(), of a training set of {self.samples:,}: "
                f"call step() after each step of the optimizer. {CLOSURES}"
            )
        self._refuse_closures(index)
        differentiated = [False]
        if loss.requires_grad:
            loss.register_hook(lambda _: differentiated.__setitem__(0, True))
        self._differentiated.append(differentiated)

    def _refuse_closures(self, index: Tensor) -> None:
        """Of the same samples again within a step, as an optimizer evaluates a closure again."""
        alike = sum(torch.equal(index, before) for before in self._indices)
        self._indices.append(index)
        if alike and len(index) and self.samples:
            if alike >= 7:
                raise TrainingError(
                    f"The same samples came {alike + 1} times since the last step(). {CLOSURES}"
                )
            self._warn_once(
                f"The same samples came twice since the last step(). {CLOSURES}"
            )

    def step(self) -> dict[str, DualStep]:
        """λ ← (λ + η ∂ψ/∂λ)₊ of the samples of the last loss; after the optimizer's step.

        Raises:
            TrainingError: no loss since the last step.
        """
        if not self._tables:
            raise TrainingError(
                "PointwiseLoss.step() without a loss since the last step."
            )
        self._notice_no_step()
        rows = torch.cat(self._tables)
        self.skip()
        most = over_ranks(torch.tensor(len(rows), device=rows.device), "max")
        filling = rows.new_zeros(int(most) - len(rows), rows.shape[1])
        filling[:, 0] = PADDING  # The first column is the index.
        self.measured = unpack([rows, filling], self.layout, rows.new_zeros(()))
        steps = self.take(
            self.measured, self._epoch(int((self.measured.index >= 0).sum()))
        )
        if self.steps in (1, 8):
            require_equal_over_ranks(trained(self._source))
        return steps

    def skip(self) -> None:
        """Instead of :meth:`step` where the weights did not move: an overflow in float16, a batch
        that was dropped or failed, a loss that was only looked at."""
        self._tables, self._indices, self._differentiated = [], [], []
        self._open, self._before = False, None
        self.forget()

    def _notice_no_step(self) -> None:
        """Warns of losses from which the weights took no step."""
        if not all(done for (done,) in self._differentiated):
            self._warn_once(
                "A loss since the last step() was not differentiated, and its samples' λ moves all "
                "the same. Call skip() after a batch that is dropped, fails or is only looked at."
            )
        if self.steps < Movement.STEPS and self._movement.stood_still():
            self._warn_once(
                "Three times no weight moved between a loss and step(): call skip() where the "
                "optimizer took no step (an overflow: GradScaler, "
                "accelerator.optimizer_step_was_skipped), and step() once for all micro-batches "
                "(if accelerator.sync_gradients)."
            )

    def _warn_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self.warn(sentence)

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
        number, total = over_ranks(
            torch.stack([(found > 0).sum(), found.sum()]), "sum"
        ).tolist()
        if not (number or name == OBJECTIVE):
            return 0.0, number, total
        weights = self._weights_of(values)
        norm = self._norm_of_gradient(values.sum() * (1 / counts[name]), weights)
        return norm, number, total

    def _weights_of(self, values: Tensor) -> list[Tensor]:
        """The trained weights whose gradients Λ compares; over ranks the same, in one order."""
        given = trained(self._source)
        if number_of_ranks() > 1:
            if self._source is None:
                raise TrainingError(
                    "PointwiseLoss(parameters=model) is needed with several ranks: their gradients "
                    "are added up, in one order."
                )
            refuse_static_graph(values)
            return given
        if require_all_sharded(given):
            return given
        own, leaves = {id(weight) for weight in given}, [*leaves_of(values)]
        # Those of a copy, or of a model that was made anew, are in the graph alone.
        return [weight for weight in [*leaves, values] if id(weight) in own] or leaves

    def _norm_of_gradient(self, mean: Tensor, weights: list[Tensor]) -> float:
        """‖∇ mean‖ over all ranks; a rank whose values have no graph has a gradient of 0."""
        if require_all_sharded(weights):
            return _norm_by_backward(mean * number_of_ranks(), weights)
        gradients: Sequence[Tensor | None] = [None] * len(weights)
        if mean.requires_grad and weights:
            try:
                with as_backward_of_fabric():
                    gradients = torch.autograd.grad(
                        mean, weights, retain_graph=True, allow_unused=True
                    )
            except RuntimeError as error:
                if "donated" in str(error):
                    raise TrainingError(COMPILED) from error
                if "use_reentrant" in str(error):
                    raise TrainingError(REENTRANT) from error
                raise
        summed = [
            over_ranks(torch.zeros_like(w) if g is None else g, "sum")
            for g, w in zip(gradients, weights, strict=True)
        ]
        return norm_of(summed)

    # The parts of a step, which a module's Stepper takes one by one -----------------------------

    def counts(
        self, masks: Sequence[Mapping[str, Tensor]], whole: bool
    ) -> dict[str, Tensor]:
        """How many samples each term applies to, 1 at least, over all micro-batches and ranks.

        whole: whether the masks are known to be True everywhere.
        """
        names = [OBJECTIVE, *self.constraints]
        if whole:
            samples = float(
                sum(len(of_micro_batch[OBJECTIVE]) for of_micro_batch in masks)
            )
            device = masks[0][OBJECTIVE].device
            numbers = torch.full(
                (len(names),), samples, dtype=torch.float32, device=device
            )
        else:
            found = [
                carries(of_micro_batch[n]).sum()
                for of_micro_batch in masks
                for n in names
            ]
            numbers = (
                torch.stack(found).view(len(masks), -1).sum(0, dtype=torch.float32)
            )
        if number_of_ranks() > 1:
            numbers = over_ranks(numbers, "sum")
        return dict(zip(names, numbers.clamp(min=1).unbind(), strict=True))

    def see(
        self,
        terms: Sequence[Terms],
        indices: Sequence[Tensor],
        device: torch.device,
        keep: bool = True,
    ) -> None:
        """Gives micro-batches the means of their groups, with the values of all ranks.

        A collective where groups have a bound. keep: whether the next ones of this step are
        together with these.
        """
        for scope in self.on_means.values():
            scope.see(terms, indices, device, keep)
        for of, index in zip(terms, indices, strict=True):
            self.give_means(of, index)

    def give_means(self, terms: Terms, index: Tensor) -> None:
        """The means of the groups of a micro-batch that was seen, and who is exempt in it."""
        for name, share in self.shares.items():
            violation = terms.followed[name]
            terms.exempt[name] = share.exempt(index).to(
                violation.device, non_blocking=True
            )
        for name, scope in self.on_means.items():
            terms.means[name] = scope.means_of(index, terms)

    def forget(self) -> None:
        """What was seen of a step that is over, or is taken once more."""
        for scope in self.on_means.values():
            scope.forget()

    def by_requirement(
        self, measured: Measured, names: Iterable[str] | None = None
    ) -> Measured:
        """A taken step's violations as they are bounded: of groups each row has their mean."""
        names = self._reported_by_group() if names is None else names
        if self.means is None or not names:
            return measured
        return self.means.instead_of_samples(measured, names)

    def _reported_by_group(self) -> list[str]:
        """The constraints whose groups' means are known: an equality's need ℓ − c with its sign."""
        signed = {name for name, each in self.formulations.items() if each.signed}
        return [
            name
            for name in self.bounds_on_means
            if not self.constraints[name].is_equality or name in signed
        ]

    def pushed(self, name: str, terms: Terms) -> Tensor:
        """ℓ₀, or (v)₊ of a constraint (|v| of an equality): what Λ compares the gradients of.

        Of groups the value is that of their mean, and the gradient that of each sample's share.
        """
        if name == OBJECTIVE:
            return terms.objective
        violation = terms.followed[name]
        if name in self.shares:
            violation = torch.where(terms.exempt[name][:, None], 0, violation)
        if name in self.on_means:
            mean = terms.means[name]
            size = mean.abs() if self.formulations[name].signed else mean.clamp(min=0)
            side = (
                mean.sign() if self.formulations[name].signed else (mean > 0).to(mean)
            )
            return size + side * (violation - violation.detach())
        return (
            violation.abs()
            if self.formulations[name].signed
            else violation.clamp(min=0)
        )

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
            never = self.units.unit(name) is None and name not in self._flat
            if number and norm == 0 and never:
                self._flat.add(name)
                self.warn(
                    f'Constraint "{name}": the gradient of its violated values is 0 for every '
                    f"trained weight, so nothing enforces it. In {self.door.values}, "
                    "look for a clamp, a rounding, or a part that is frozen."
                )
            if number and objective is not None:
                violations = norm * float(counts[name]) / number
                self.units.measure(name, objective, violations, total / number)
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
        multipliers = dict[str, Tensor]()
        loss = terms.objective.sum() / counts[OBJECTIVE]
        for name, scope in self.scopes.items():
            if name in self.on_batch:
                continue
            multiplier = scope.rows(index, terms.followed[name])
            if multiplier is not None:
                multipliers[name] = multiplier
            loss = loss + scope.loss(terms, multiplier, counts[name])
        table, self.layout = pack(index, terms, multipliers, loss, strict)
        if self.on_batch:
            slopes = slopes or self.slopes([terms], counts)
            shares = (
                self.on_batch[n].loss_of(terms, s, counts[n]) for n, s in slopes.items()
            )
            loss = loss + sum(shares)
        return loss, table

    def put_in_force(self, steps_an_epoch: float = math.inf) -> None:
        """The formulations of this step; steps from one visit of a sample to the next."""
        between = max(steps_an_epoch, self.primal_steps)
        given = self.formulations, self.constraints, between, self.total_steps
        self.in_force = self.units.in_force(*given)
        for name in self.on_means:
            self.in_force[name] = without_margin(self.in_force[name])
        for name, scope in self.scopes.items():
            scope.formulation = self.in_force[name]

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
        visits = {
            name: visit
            for name, scope in self.scopes.items()
            if (visit := scope.visit(measured)) is not None
        }
        self._window.append(visits)
        of_units, measured = (
            self.by_requirement(measured, names) for names in (self.on_means, None)
        )
        unread = self.history.unread
        statistics = {
            n: self.multipliers[n].clone()
            for n in self.on_batch
            if n in self.multipliers
        }
        unread.append(
            Step(measured, self.in_force, statistics, self.dual_first, exempt)
        )
        if (
            len(unread) >= UNREAD_STEPS
            or len(unread) * len(measured.index) >= UNREAD_ROWS
        ):
            self.history.read()
        of_units = without_exempt(of_units, exempt)
        self.units.add(of_units, self.formulations, self.in_force, steps_an_epoch)
        for name, share in self.shares.items():  # Who is exempt in the next step.
            share.put(measured.index, measured.judged[name], measured.masks[name])
        self.steps, self.dual_steps = self.steps + 1, {}
        if len(self._window) >= self.primal_steps:
            window, self._window = self._window, []
            for name, scope in self.scopes.items():
                kept = [visits[name] for visits in window if name in visits]
                if kept and (step := scope.step(kept)) is not None:
                    self.dual_steps[name] = step
        self.checks.of_steps(self.steps, self.history, self.warn)
        return self.dual_steps

    # At the start of a fit ----------------------------------------------------------------------

    def start(
        self, samples: int, fingerprint: str | None, resumed: bool, first: bool
    ) -> None:
        """Keeps the multipliers if they belong to this training set, or starts them again.

        samples, fingerprint: of the training set; 0 and None of a stream. resumed: whether they are
        a checkpoint's. first: whether steps are counted from 0 by a fit that is not resumed.
        """
        if not samples:
            refuse_stream(self.constraints)
        if not resumed and fingerprint != self.fingerprint:
            if self.fingerprint is not None and samples:
                self.warn(
                    "Another training set than before: the multipliers start at 0 again."
                )
            owners = samples if self.groups is None else int(self.groups.max()) + 1
            self.means = None
            self._make_means(None)
            self.shares = self._new_shares(samples)
            self._hold(self.multipliers.for_samples(owners), {})
            self.units, self._window = GradientUnits(), []
        if not resumed:
            self.history = History(self.constraints, samples)
        self.fingerprint = fingerprint
        self.fit_tables()
        if first:  # What was measured stays until it is measured again.
            self.units.load_state_dict({**self.units.state_dict(), "next": 0})

    def fit_tables(self) -> None:
        """Fits multipliers and thresholds to the formulations of now, or refuses them.

        Kept under another formulation of the same scope; dropped, with a warning, without one.
        """
        multipliers = self.multipliers
        for name in set(multipliers).intersection(multipliers.pending()):
            self.warn(
                f'Multipliers of "{name}" are the checkpoint\'s, not those that were set.'
            )
            del multipliers.pending()[name]
        for name in [*multipliers, *multipliers.pending()]:
            formulation = self.formulations.get(name)
            dimensions = None if formulation is None else self.scopes[name].dimensions
            if formulation is None or dimensions is None:
                what = (
                    "no such constraint" if formulation is None else repr(formulation)
                )
                self.warn(
                    f'Multipliers of "{name}" are dropped: this module has {what}.'
                )
                multipliers.reset(name)
                continue
            table = multipliers.get(name)
            if table is None:
                table = multipliers.pending()[name]
            elif (table.dim() == 2) != (dimensions == 2):
                scope = "sample" if table.dim() == 2 else "constraint"
                raise TrainingError(
                    f'Constraint "{name}": its multipliers are one per {scope}, and those of '
                    f"{formulation} are not. Start them again from 0: "
                    f"{self.door.remedy.format(name=name)}."
                )
            if not formulation.signed and (table < 0).any():
                raise TrainingError(
                    f'Constraint "{name}" has multipliers below 0, which only an equality has. '
                    f"Set others, or start them from 0: {self.door.remedy.format(name=name)}."
                )
        # What was reset takes no step from values of before, nor from a threshold of before.
        self._window = [
            {name: visit for name, visit in visits.items() if name in multipliers}
            for visits in self._window
        ]
        for name in [*self.thresholds]:
            if name not in multipliers or not self.formulations[name].learns_threshold:
                del self.thresholds[name]

    # In a checkpoint ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """λ and all that moves it, tensors and plain values; between two steps."""
        weights = [w for w in trained(self._source) if not is_sharded(w)]
        return {
            "version": VERSION,
            "steps": self.steps,
            "rows": self._rows,
            "groups": self._digest_of_groups(),
            # To compare at a resume, as files of two steps may stand in one folder.
            "weights": norm_of(weights) if weights else None,
            **self.dual_state(),
        }

    def _digest_of_groups(self) -> str | None:
        return (
            None
            if self.groups is None
            else sha256(self.groups.numpy().tobytes()).hexdigest()
        )

    def _compare_weights(self) -> None:
        """Warns, in the first step after a state was loaded, of weights of another step."""
        saved, self._weights_saved = self._weights_saved, None
        weights = (
            [w for w in trained(self._source) if not is_sharded(w)] if saved else []
        )
        now = norm_of(weights)
        if saved and weights and abs(now - saved) > 1e-5 * saved:
            self.warn(
                f"The weights are not those that these multipliers were saved with (norm {now:g}, "
                f"then {saved:g}): a checkpoint may hold files of two steps. Write each into a new "
                "folder, or as one file."
            )

    def __getstate__(self) -> dict[str, Any]:
        """A copy asks the graph for its weights: those of the original are not its own."""
        fresh: dict[str, Any] = {
            "_source": None,
            "_movement": Movement(),
            "_differentiated": [],
        }
        return self.__dict__ | fresh

    def dual_state(self) -> dict[str, Any]:
        """What of it a checkpoint of Lightning's needs, which counts the steps itself."""
        self.history.read()
        return {
            "samples": self.multipliers.samples,
            "multipliers": self.multipliers.state_dict(),
            "thresholds": dict(self.thresholds),
            "gradient_units": self._before or self.units.state_dict(),
            "fingerprint": self.fingerprint,
            "window": self._window,
            "group_means": self.means.state_dict() if self.means else self._saved_means,
            "shares": {name: share.state_dict() for name, share in self.shares.items()},
            "history": self.history.state_dict(),
        }

    def load_state_dict(
        self, state: Mapping[str, Any], steps: int | None = None
    ) -> None:
        """Goes on from :meth:`state_dict`, to the bit. What is refused changes nothing.

        steps: of the weights, as the rest of the checkpoint counts them; None compares nothing.

        Raises:
            TrainingError: of another number of samples, other data or groups, of another version or
                step, or damaged.
        """
        before = dict(self.__dict__)
        try:
            self._compare_state(state, steps)
            self.units = GradientUnits()
            self.load_dual_state(state)
            self.fingerprint = before["fingerprint"] or state["fingerprint"]
            self.steps, self._rows = int(state["steps"]), int(state["rows"])
            self._weights_saved = state.get("weights")
            self.skip()
            self.fit_tables()
        except (
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            RuntimeError,
        ) as error:
            self.__dict__.update(before)
            if isinstance(error, TrainingError):
                raise
            raise TrainingError(
                f"This is no state of a PointwiseLoss of version {VERSION}, or damaged: {error}."
            ) from error

    def _compare_state(self, state: Mapping[str, Any], steps: int | None) -> None:
        """Refuses a state that is not of this training set, before anything of it is loaded."""
        if state["version"] != VERSION:
            raise ValueError(f"version {state['version']}")
        owners, theirs = self.multipliers.samples, int(state["samples"])
        if theirs != owners:
            raise TrainingError(
                f"These multipliers belong to {theirs:,} samples, this PointwiseLoss has "
                f"{owners:,}: give it the training set of before."
            )
        fingerprints = {self.fingerprint, state["fingerprint"]} - {None}
        groups = self._digest_of_groups()
        if len(fingerprints) > 1 or state.get("groups", groups) != groups:
            raise TrainingError(
                "These multipliers belong to another training set, order or groups: each would go "
                "on with another sample. Restore the data as they were, in their order, or start "
                "without this state."
            )
        if steps is not None and steps != int(state["steps"]):
            raise TrainingError(
                f"These multipliers are of step {int(state['steps']):,}, the weights of step "
                f"{steps:,}. Resume from a checkpoint that holds both."
            )

    def _make_means(self, known: MeansOfConstraints | None) -> None:
        """Those of these groups and constraints; those of a state once the groups are known."""
        self.means, groups = None, self.groups
        if groups is None or not self.bounds_on_means:
            return
        if known is not None and known.groups.equal(groups):
            self.means = known
            return
        self.means = MeansOfConstraints(groups, self.bounds_on_means)
        if self._saved_means:
            self.means.load_state_dict(self._saved_means)
            self._saved_means = {}

    def _new_shares(self, samples: int) -> dict[str, Share]:
        """Of the constraints that a share of the samples may violate, without a value yet."""
        found = {name: bound.share for name, bound in self.constraints.items()}
        return {
            name: Share(samples, share)
            for name, share in found.items()
            if share is not None
        }

    def load_dual_state(self, state: Mapping[str, Any]) -> None:
        multipliers = self.multipliers.for_samples(int(state["samples"]))
        multipliers.load_state_dict(state["multipliers"])
        thresholds = {
            name: value.to("cpu", torch.float32, copy=True)
            for name, value in state["thresholds"].items()
        }
        self._saved_means = state.get("group_means", {})  # Older ones had none.
        self._make_means(None)
        self.shares = self._new_shares(multipliers.samples)
        for name, kept in state.get("shares", {}).items():
            if name in self.shares:
                self.shares[name].load_state_dict(kept)
        self._hold(multipliers, thresholds)
        self.units.load_state_dict(state["gradient_units"])
        self._window = [dict(visits) for visits in state["window"]]
        self.fingerprint = state["fingerprint"]
        samples = self.samples if self.groups is not None else multipliers.samples
        self.history = History.from_state(
            self.constraints, samples, state.get("history")
        )


def without_margin(formulation: Formulation) -> Formulation:
    """One in force whose aim is the bound itself: of a mean over samples, which is no noise."""
    scale = formulation.scale if isinstance(formulation, Ascending) else None
    if scale is None or not isinstance(formulation, Ascending):
        return formulation
    return formulation.scaled(replace(scale, margin=0.0))


def _norm_by_backward(mean: Tensor, weights: list[Tensor]) -> float:
    """Of sharded weights, whose gradients are averaged over ranks where backward() leaves them."""
    kept = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    with as_backward_of_fabric():
        mean.backward(retain_graph=True)
    norm = norm_of(weight.grad for weight in weights if weight.grad is not None)
    for weight, gradient in zip(weights, kept, strict=True):
        weight.grad = gradient
    return norm
