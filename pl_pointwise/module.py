"""The base module: what a task writes, then one training step as the algorithm.

Around the step (schedulers, checkpoints, the start and end of a fit): ``manual_optimization.py``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torchmetrics import Metric

from .batch_statistic import Slope
from .batch_terms import BatchTerms
from .checkpoints import (
    constructor_frame,
    declared_constraints,
    formulations_from,
    from_plain,
    replayed_random_state,
)
from .errors import TrainingError
from .evaluation import explain_gradient_errors
from .formulations import BatchFormulation, Constraint, Formulation
from .manual_optimization import ManualOptimization
from .optimizers import Training, connected_zero
from .repeated_step import RunningStatistics, without_non_finite
from .rows import take_rows
from .step import (
    OBJECTIVE,
    DualStep,
    Measured,
    MicroBatch,
    Terms,
    carries,
    complete_masks,
    index_of,
    last_visits,
    pack,
    packed_width,
    pieces_of,
    require_columns,
    require_mapping,
    unpack,
    validate_values,
    violations_of,
    weights,
    widest_dtype,
)
from .step_log import EpochSoFar, log_step

# Not None: jsonargparse would then hand None to a task that has a default of its own.
DEFAULT_TRAINING = Training()


class PointwiseModule(ManualOptimization):
    """Fine-tuning under constraints; a task is a subclass with three methods.

    ::

        class MyModule(PointwiseModule):
            def __init__(self, formulation: Formulation | None, tolerance: float = 0.1):
                super().__init__(
                    formulation=formulation, constraints={"fit": Constraint(at_most=tolerance)}
                )
                self.net = torch.nn.Linear(4, 1)

            def forward(self, batch):
                return self.net(batch["x"])[:, 0]

            def objective(self, outputs, batch):
                return outputs.abs()

            def constraint_values(self, outputs, batch):
                return {"fit": (outputs - batch["y"]).square()}

    A batch of the training DataLoader is one optimisation step, whatever the micro-batch size. In
    a step, in this order: :meth:`membership` of every micro-batch; then, per micro-batch,
    ``forward`` once, :meth:`objective` and :meth:`constraint_values` on its output, and the
    backward pass; then the step of the weights; last the step of the batch's multipliers.

    A batch is a mapping with ``index``, (B,), each sample's position in the training set, or a
    list of such mappings (micro-batches made by the collate function, of like length).

    Args:
        formulation: one for all constraints, one for each by name, or None for plain training.
            ``{class_path, init_args}`` stands for the object.
        constraints: by name.
        evaluation_constraints: the bounds by which ``validate`` and ``test`` measure violations,
            the same for every method that is compared; a name left out takes ``constraints``'.
        training: how it is trained: optimizer, micro-batches, clipping, order of the steps.

    Attributes:
        multipliers: λ by constraint, (N, K) float32 in training-set order; () for
            :class:`~pl_pointwise.formulations.Average` and the other statistics of the batch.
        thresholds: t by constraint of :class:`~pl_pointwise.formulations.CVaR`, () or (2,).
        violations, evaluated, evaluated_metrics, certificate: :class:`~.evaluation.Evaluated`'s.
        measured: what the last training step measured, of all ranks; None before the first.
            ``judged`` are the violations that multipliers follow and reports are about, of
            ``strict_values`` where the task gives them; ``followed`` those that the weights follow.
        dual_steps: the dual step it ended in, by constraint; empty where it took none. Both are
            for callbacks to read.
        pull_shares: how much of each constraint's pull is its multipliers' (multiplier_share.py).

    Raises:
        ValueError: a formulation for a constraint that does not exist, or none for one that does.
    """

    def __init__(
        self,
        *,
        formulation: Formulation | dict[str, Formulation] | None,
        constraints: dict[str, Constraint],
        evaluation_constraints: dict[str, Constraint] | None = None,
        training: Training = DEFAULT_TRAINING,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(frame=constructor_frame(self))
        self.constraints, self.evaluation_constraints = declared_constraints(
            constraints, evaluation_constraints
        )
        self.formulations = formulations_from(formulation, self.constraints)
        training = from_plain(Training, training)
        self.optimization = training.optimization
        self.micro_batch_size = training.micro_batch_size
        self.gradient_clip_val = training.gradient_clip_val
        self._primal_steps = training.primal_steps
        self._order = training.order
        self.multiplier_folder = training.multiplier_folder

        self.measured: Measured | None = None
        self.dual_steps: dict[str, DualStep] = {}
        self._epoch_so_far = EpochSoFar()
        self._columns: dict[str, int] = {}
        self._in_force: dict[str, Formulation] = {}
        self._statistics = RunningStatistics()

    # What a task writes -------------------------------------------------------------------------

    @abstractmethod
    def objective(self, outputs: Any, batch: Any) -> Tensor:
        """ℓ₀ of each sample, (B,), from the forward pass's output."""
        raise TrainingError(f"{type(self).__name__} has no objective(outputs, batch): define it.")

    @abstractmethod
    def constraint_values(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        """ℓ_k of each sample by constraint, (B,) or (B, K): values, not yet violations."""
        raise TrainingError(
            f"{type(self).__name__} has no constraint_values(outputs, batch): define it."
        )

    def membership(self, batch: Any) -> dict[str, Tensor]:
        """Which samples carry which term: bool (B,) by "objective" or constraint, or (B, K).

        Computed from the batch alone. A term left out is carried by every sample.
        """
        return {}

    def select(self, batch: Any, rows: Tensor) -> Any:
        """The given rows (R,) of a batch; override it where a batch is not made of rows."""
        return take_rows(batch, rows, self.shared_keys)

    def evaluation_metrics(self) -> dict[str, Metric]:
        """Fresh metrics of the task for one evaluated data set, by name; each a scalar.

        One that the data set's batches never update is not reported.
        """
        return {}

    def update_evaluation_metrics(
        self, metrics: dict[str, Metric], outputs: Any, batch: Any, real: Tensor, stage: str
    ) -> None:
        """Adds a batch of the data set ``stage``, by its name in the log keys.

        real: bool (B,), False for rows that only fill up a rank.
        """

    def finish_evaluation_metrics(self, metrics: dict[str, dict[str, Metric]]) -> None:
        """Before the metrics are computed, after the last batch of all data sets, on every rank.

        metrics: by data set and name.
        """

    def export(self, path: str | Path) -> Path:
        """Writes the model as a folder that other libraries load; a task says which.

        Raises:
            TypeError: the task has no export.
        """
        raise TypeError(f"{type(self).__name__} has no export(); define it to write {path}.")

    # The training step --------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """One step of the weights and one of the batch's multipliers.

        Returns: mean ℓ₀ + Σ mean ψ(v, λ) over the samples of all ranks, without a gradient.
        """
        self._resume_within_epoch(batch_idx)
        micro_batches = self._micro_batches(batch)
        counts = self._counts(micro_batches)
        self._before_zero_grad()
        self._statistics.keep(self)
        self._measure_units(micro_batches, counts)
        self._in_force = self._formulations_now()
        measured = self._measure(micro_batches, counts)
        self._statistics.forget_unchanged()
        measured = without_non_finite(self, measured, micro_batches, counts)
        self.measured, self.dual_steps = measured, {}
        if self._may_step(measured):
            self._primal_step()
            self._note_visits(measured)
            self.gradient_units.add(
                measured, self.formulations, self._in_force, self.trainer.num_training_batches
            )
            if len(self._window) >= self._primal_steps:
                self._dual_step()
                self.pull_shares.add(self)
        else:
            self._statistics.restore()
        log_step(self, measured)
        self._step_schedulers_after_batch()
        return torch.tensor(measured.lagrangian)

    def _micro_batches(self, batch: Any) -> list[MicroBatch]:
        """The batch in pieces of ``micro_batch_size``, each with the masks of its terms."""
        micro_batches = []
        for piece in pieces_of(batch):
            index = index_of(piece)
            size = self.micro_batch_size or len(index)
            if size >= len(index):
                micro_batches.append(self._micro_batch(piece, index))
                continue
            for rows in torch.arange(len(index)).split(size):
                micro_batches.append(self._micro_batch(self.select(piece, rows), index[rows]))
        return micro_batches

    def _micro_batch(self, batch: Any, index: Tensor) -> MicroBatch:
        names = [OBJECTIVE, *self.constraints]
        masks = self.membership(batch)
        require_mapping("membership()", masks, names, partial=True)
        return MicroBatch(batch, index, complete_masks(masks, names, index, self.device))

    def _counts(self, micro_batches: list[MicroBatch]) -> dict[str, Tensor]:
        """How many samples of the step carry each term, over all ranks, before any forward."""
        names = [OBJECTIVE, *self.constraints]
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
        """Accumulates the step's gradient; one gather and one copy bring what was measured.

        Every rank's batch has the same number of rows: samplers of several ranks pad.

        rows: how many, where no sample of this rank is left and it has no micro-batch.
        """
        packed, norm = self._forward_backward(micro_batches, counts)
        if not packed:
            width = packed_width(self._columns, self._per_sample, self.judges_strictly)
            packed = [torch.zeros(rows, width, dtype=widest_dtype(self.device), device=self.device)]
        return self._gathered(packed, norm)

    def _gathered(self, packed: list[Tensor], norm: Tensor) -> Measured:
        """Packed rows of all ranks."""
        rows = packed[0] if len(packed) == 1 else torch.cat(packed)
        if self.trainer.world_size > 1:
            rows = self.all_gather(rows).flatten(0, 1)  # type: ignore[union-attr]
        layout = self._columns, self._per_sample, self.judges_strictly
        flat = torch.cat([rows.flatten(), norm.to(rows).reshape(1)]).cpu()
        return unpack(flat[:-1].view(rows.shape), *layout, float(flat[-1]))

    @property
    def _per_sample(self) -> list[str]:
        return [name for name, f in self.formulations.items() if f.scope == "sample"]

    def _forward_backward(
        self, micro_batches: list[MicroBatch], counts: dict[str, Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """Accumulates the step's gradient, which only the last micro-batch synchronises; clips it.

        Returns: the packed rows of each micro-batch, and the gradient's norm before clipping.
        """
        self._optimizer().zero_grad()
        batch_terms = self._batch_terms()
        slopes = batch_terms and self._slopes(batch_terms, micro_batches, counts)
        packed = []
        for position, micro in enumerate(micro_batches):
            last = position == len(micro_batches) - 1
            with nullcontext() if last else self._without_gradient_sync():
                terms = self._terms(micro)
                multipliers = self._multiplier_rows(micro.index, terms)
                loss = self._lagrangian(terms, multipliers, counts)
                strict = self.judges_strictly
                packed.append(pack(micro.index, terms, multipliers, loss, strict))
                if batch_terms is not None:
                    slopes = slopes or batch_terms.slopes([terms], counts, self.device)
                    loss = loss + batch_terms.loss(terms, slopes, counts)
                # The ranks' gradients are averaged, and the counts are those of all ranks.
                ranks = self.trainer.world_size
                self.manual_backward(loss * ranks if ranks > 1 else loss)
        if not micro_batches:  # All samples of this rank were left out; the others wait for it.
            self.manual_backward(connected_zero(self))
        return packed, self._clip_gradient()

    def _terms(self, micro: MicroBatch, strict: bool = True) -> Terms:
        """strict: whether strict values are asked for, where the module judges by them."""
        outputs = self(micro.batch)
        count = len(micro.index)
        masks = {OBJECTIVE: micro.masks[OBJECTIVE]}
        objective = self.objective(outputs, micro.batch)
        objective = validate_values(objective, OBJECTIVE, count, vector=False)
        objective = torch.where(masks[OBJECTIVE], objective, 0)
        values = self._constraint_values(outputs, micro.batch, count)
        signed = {name for name, f in self.formulations.items() if f.signed}
        followed, oriented = violations_of(self.constraints, values, micro.masks, signed)
        masks |= oriented
        for name, violation in followed.items():
            require_columns(name, violation.shape[1], self._columns)
        judged = {name: violation.detach() for name, violation in followed.items()}
        if strict and self.judges_strictly:
            values = self.judged_values(outputs, micro.batch, values)
            judged, _ = violations_of(self.constraints, values, micro.masks, signed)
        terms = Terms(objective, followed, judged, masks)
        self._first_steps.terms(self, terms)
        return terms

    def _constraint_values(self, outputs: Any, batch: Any, count: int) -> dict[str, Tensor]:
        values = self.constraint_values(outputs, batch)
        require_mapping("constraint_values()", values, self.constraints)
        return {name: validate_values(value, name, count) for name, value in values.items()}

    def _multiplier_rows(self, index: Tensor, terms: Terms) -> dict[str, Tensor]:
        """λ_t of the samples, by constraint, on the violations' device by one asynchronous copy."""
        found = {}
        for name, formulation in self.formulations.items():
            if formulation.scope == "sample":
                violation = terms.followed[name]
                rows = self.multipliers.rows(name, index, violation.shape[1])
                rows = rows.pin_memory() if violation.is_cuda else rows
                found[name] = rows.to(violation.device, violation.dtype, non_blocking=True)
        return found

    def _lagrangian(
        self, terms: Terms, multipliers: dict[str, Tensor], counts: dict[str, Tensor]
    ) -> Tensor:
        """This micro-batch's share of mean ℓ₀ + Σ mean ψ(v, λ), of every ψ per sample."""
        loss = terms.objective.sum() / counts[OBJECTIVE]
        for name, formulation in self.formulations.items():
            if formulation.scope == "batch":
                continue
            violation, mask = terms.followed[name], terms.masks[name]
            formulation = self.in_force(name)
            multiplier = multipliers.get(name, torch.zeros_like(violation))
            if self._order == "dual_first":
                multiplier = formulation.ascend(terms.judged[name], multiplier)
            psi = formulation.lagrangian(violation, multiplier)
            normalised = weights(mask, self.constraints[name].sides, violation.dtype) / counts[name]
            loss = loss + (torch.where(mask, psi, 0) * normalised).sum()
        return loss

    # The steps of weights and multipliers -------------------------------------------------------

    def _primal_step(self) -> None:
        self._optimizer().step()
        self._taken_this_epoch += 1

    def _note_visits(self, measured: Measured) -> None:
        """Keeps what the dual step needs of this step, by constraint, until it is due.

        Per sample: index (n,), violation, mask and λ, (n, sides·K), of the samples that carry the
        constraint. Else the batch's statistic (sides,). Nothing where no sample carries it. Behind
        the judged violation, or its statistic, stands the followed one where it is another.
        """
        visits: dict[str, list[Tensor]] = {}
        batch_terms = self._batch_terms()
        for name, formulation in self.formulations.items():
            mask = measured.masks[name]
            rows = None if mask.all() else carries(mask)
            if rows is not None and not rows.any():
                continue
            if formulation.scope == "sample":
                visit = [
                    measured.index,
                    measured.judged[name],
                    mask,
                    measured.multipliers[name],
                ]
                visit += [measured.followed[name]] if measured.strict else []
                visits[name] = visit if rows is None else [part[rows] for part in visit]
            elif batch_terms is not None and formulation.scope == "batch":
                visits[name], psi = batch_terms.visit(name, measured)
                measured.lagrangian += psi
        self._window.append((self.current_epoch, visits))

    def _dual_step(self) -> None:
        """λ ← (λ + η ∂ψ/∂λ)₊ for the samples visited since the last dual step, and no others.

        Each at its last visit's violation; a statistic of the batch at its mean over the steps.
        """
        window, self._window = self._window, []
        for name in self.formulations:
            visits = [visits[name] for _, visits in window if name in visits]
            if not visits:
                continue
            formulation = self.in_force(name)
            if formulation.scope == "batch":
                value, *followed = (
                    torch.stack(of_steps).mean(0) for of_steps in zip(*visits, strict=True)
                )
                multiplier = self.multipliers.scalar(name, len(value)).to(value)
                stepped = formulation.ascend(value, multiplier)
                self.multipliers.write_scalar(name, stepped)
                mask = torch.ones_like(value, dtype=torch.bool)
                parts = [value, mask, multiplier, stepped, *(followed or [value])]
                self.dual_steps[name] = DualStep(None, *(part[None] for part in parts))
                continue
            parts = visits[0]
            if len(visits) > 1:
                parts = list(map(torch.cat, zip(*visits, strict=True)))
            if len(set(parts[0].tolist())) < len(parts[0]):
                last = last_visits(parts[0])
                parts = [part[last] for part in parts]
            index, judged, mask, multiplier, *followed = parts
            stepped = torch.where(mask, formulation.ascend(judged, multiplier), multiplier)
            self.multipliers.write(name, index, stepped)
            self.dual_steps[name] = DualStep(
                index, judged, mask, multiplier, stepped, *(followed or [judged])
            )
        self._await_ranks()  # λ_{t+1} stands where all will read it.

    # Constraints on a statistic of the batch (batch_terms.py) -----------------------------------

    def _batch_terms(self) -> BatchTerms | None:
        """None where every formulation acts on samples."""
        formulations = {
            name: cast("BatchFormulation", self.in_force(name))
            for name, declared in self.formulations.items()
            if declared.scope == "batch"
        }
        if not formulations:
            return None
        dual_first = self._order == "dual_first"
        return BatchTerms(
            formulations, self.constraints, self.multipliers, self.thresholds, dual_first
        )

    def _slopes(
        self, terms: BatchTerms, micro_batches: list[MicroBatch], counts: dict[str, Tensor]
    ) -> dict[str, Slope] | None:
        """∂ψ/∂mean of every statistic of the batch; None: the one forward pass that follows tells.

        With several micro-batches or ranks a pass without gradients finds the mean, and its random
        state is replayed afterwards, so that both passes see the same dropout.
        """
        if terms.linear:
            return terms.slopes_without_data()
        if len(micro_batches) == 1 and self.trainer.world_size == 1:
            return None
        found = self._terms_without_gradient(micro_batches, strict=terms.dual_first)
        return terms.slopes(found, counts, self.device, self._over_ranks)

    # The unit of the multipliers (gradient_units.py) ---------------------------------------------

    def in_force(self, name: str) -> Formulation:
        """A constraint's formulation with α a number: of the last training step, or of now."""
        return (self._in_force or self._formulations_now())[name]

    def _formulations_now(self) -> dict[str, Formulation]:
        total = self._total_steps
        share = min(1.0, self.global_step / total) if total else 0.5  # A fit without an end.
        return self.gradient_units.in_force(self.formulations, share)

    def _measure_units(self, micro_batches: list[MicroBatch], counts: dict[str, Tensor]) -> None:
        """Where it is due, the norms of ∇ mean ℓ₀ and of ∇ mean v over the violated values.

        One more pass over the batch for each. Plain passes, so that they run under every strategy
        and precision as the step does; their gradients are dropped.
        """
        objective: float | None = None
        for name in self.gradient_units.due(self.formulations, self.global_step):
            signed = self.formulations[name].signed

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
            self.gradient_units.measure(name, objective, violations, (squares / number) ** 0.5)

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
        self._optimizer().zero_grad()
        beside = []
        with replayed_random_state(self.device):
            for position, micro in enumerate(micro_batches):
                last = position == len(micro_batches) - 1
                with nullcontext() if last else self._without_gradient_sync():
                    total, sums = term(self._terms(micro, strict=False))
                    beside.append(sums.to(widest_dtype(self.device)))
                    scale = self.trainer.world_size / count  # The ranks' gradients are averaged.
                    self.manual_backward(total * scale + connected_zero(self))
        norm = float(self._gradient_norm()) / self._gradient_scale()
        self._optimizer().zero_grad()
        self._statistics.restore()
        return norm, torch.stack(beside).sum(0)

    def _terms_without_gradient(
        self, micro_batches: list[MicroBatch], strict: bool = False
    ) -> list[Terms]:
        """What the step will measure: the random state and running statistics are put back."""
        with torch.no_grad(), explain_gradient_errors(), replayed_random_state(self.device):
            found = [self._terms(micro, strict) for micro in micro_batches]
        self._statistics.restore()
        return found
