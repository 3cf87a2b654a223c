"""The base module: one training step as the algorithm. Around it: ``manual_optimization.py``."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import MeanMetric, Metric

from .data import PADDING, take_rows
from .errors import DataError
from .evaluation import Evaluated, gather
from .formulations import Constraint, Formulation, formulation_from
from .manual_optimization import ManualOptimization
from .metrics import violation_statistics
from .optimizers import Training
from .state import from_plain, replayed_random_state
from .step import (
    OBJECTIVE,
    DualStep,
    Found,
    MicroBatch,
    Price,
    Record,
    anchored,
    carriers,
    checked,
    complete_members,
    largest,
    last_visits,
    oriented,
    pack,
    require_names,
    side_means,
    unpack,
    weights,
    widest,
)

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
    :meth:`forward` once, :meth:`objective` and :meth:`constraint_values` on its output, and the
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
            :class:`~pl_pointwise.formulations.Average` and the other figures of the batch.
        thresholds: t by constraint of :class:`~pl_pointwise.formulations.CVaR`, () or (2,).
        violations: after ``validate`` and ``test``, by stage and constraint, all values of that
            pass, 1-D on the CPU.
        evaluated: the same, sample by sample.
        record: what the last training step found, for all ranks; None before the first.
        dual_steps: the dual step it ended in, by constraint; empty where it took none. Both are
            for callbacks to read.

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
        self.save_hyperparameters(ignore=["constraints", "evaluation_constraints"])
        if OBJECTIVE in constraints:
            raise ValueError(f'"{OBJECTIVE}" names the objective; call the constraint otherwise.')
        require_names("evaluation_constraints", evaluation_constraints or {}, constraints)
        self.constraints = dict(constraints)
        self.evaluation_constraints = {**constraints, **(evaluation_constraints or {})}
        self.formulations = _per_constraint(formulation, self.constraints)
        training = from_plain(Training, training)
        self.optimization = training.optimization
        self.micro_batch_size = training.micro_batch_size
        self.gradient_clip_val = training.gradient_clip_val
        self.primal_steps = training.primal_steps
        self.order = training.order
        self.multiplier_folder = training.multiplier_folder

        self.violations: dict[str, dict[str, Tensor]] = {}
        self.evaluated: dict[str, dict[str, Evaluated]] = {}
        self.record: Record | None = None
        self.dual_steps: dict[str, DualStep] = {}
        self._columns: dict[str, int] = {}
        self._evaluations: dict[str, _Evaluation] = {}

    # What a task writes -------------------------------------------------------------------------

    @abstractmethod
    def objective(self, outputs: Any, batch: Any) -> Tensor:
        """ℓ₀ of each sample, (B,), from the forward pass's output."""

    @abstractmethod
    def constraint_values(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        """ℓ_k of each sample by constraint, (B,) or (B, K): values, not yet violations."""

    def membership(self, batch: Any) -> dict[str, Tensor]:
        """Which samples carry which term: bool (B,) by "objective" or constraint, or (B, K).

        Computed from the batch alone. A term left out is carried by every sample.
        """
        return {}

    def select(self, batch: Any, rows: Tensor) -> Any:
        """The given rows (R,) of a batch; override it where a batch is not made of rows."""
        return take_rows(batch, rows)

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

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self._resume_within_epoch(batch_idx)
        micros = self._micro_batches(batch)
        counts = self._member_counts(micros)
        record = self._collect(*self._forward_backward(micros, counts))
        poisoned = record.poisoned()
        if poisoned.any():
            self._name_poisoned(record, poisoned)
        if poisoned.any() or not math.isfinite(record.gradient_norm):
            # A copy that only fills up a rank spoils the gradient as its sample does.
            poisoned |= record.index == PADDING
        if poisoned.any():
            norm = self._step_without(micros, counts, record, poisoned)
            record = record.rows(~poisoned, gradient_norm=norm)
        self.record, self.dual_steps = record, {}
        if self._may_step(record):
            self._primal_step()
            self._dual_step(record)
            self._threshold_step(record)
        self._log_running(record)
        self._step_schedulers("step", plateau=False)
        self._step_schedulers("step", plateau=True)
        if self.trainer.is_last_batch:
            self._step_schedulers("epoch", plateau=False)

    def _micro_batches(self, batch: Any) -> list[MicroBatch]:
        micros = []
        for piece in _pieces(batch):
            index = _index(piece)
            size = self.micro_batch_size or len(index)
            if size >= len(index):
                micros.append(self._micro_batch(piece, index))
                continue
            for rows in torch.arange(len(index)).split(size):
                micros.append(self._micro_batch(self.select(piece, rows), index[rows]))
        return micros

    def _micro_batch(self, batch: Any, index: Tensor) -> MicroBatch:
        names = [OBJECTIVE, *self.constraints]
        members = self.membership(batch)
        require_names("membership()", members, names)
        return MicroBatch(batch, index, complete_members(members, names, index, self.device))

    def _member_counts(self, micros: list[MicroBatch]) -> dict[str, Tensor]:
        """How many samples of the step carry each term, over all ranks, before any forward."""
        names = [OBJECTIVE, *self.constraints]
        counts = torch.zeros(len(names), dtype=torch.float32, device=self.device)
        for micro in micros:
            counts += torch.stack([carriers(micro.members[name]).sum() for name in names])
        counts = self._over_ranks(counts, "sum")
        return dict(zip(names, counts.clamp(min=1).unbind(), strict=True))

    def _forward_backward(
        self, micros: list[MicroBatch], counts: dict[str, Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """Accumulates the step's gradient, which only the last micro-batch synchronises; clips it.

        Returns: the packed rows of each micro-batch, and the gradient's norm before clipping.
        """
        self._optimizer().zero_grad()
        prices = self._prices(micros, counts)
        found = []
        for position, micro in enumerate(micros):
            last = position == len(micros) - 1
            with nullcontext() if last else self._without_gradient_sync():
                objective, violations, members = self._terms(micro)
                loss = self._loss(micro.index, objective, violations, members, counts, prices)
                # The ranks' gradients are averaged, and the counts are those of all ranks.
                self.manual_backward(loss * self.trainer.world_size)
            found.append(pack(micro.index, objective, violations, members))
        if not micros:  # Every row of this rank was left out, and the others wait for its gradient.
            self.manual_backward(_connected_zero(self))
        return found, self._clip_gradient()

    def _terms(self, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Objective (b,), violations (b, sides·K) and members of one micro-batch.

        Float32 or wider; zero where a sample does not carry the term.
        """
        outputs = self(micro.batch)
        rows = len(micro.index)
        members = {OBJECTIVE: micro.members[OBJECTIVE]}
        objective = checked(self.objective(outputs, micro.batch), OBJECTIVE, rows, vector=False)
        objective = torch.where(members[OBJECTIVE], objective, 0)
        values = self._constraint_values(outputs, micro.batch, rows)
        violations = {}
        for name, constraint in self.constraints.items():
            violation, carried = oriented(constraint, values[name], micro.members[name], name)
            violations[name] = torch.where(carried, violation, 0)
            members[name] = carried
            if self._columns.setdefault(name, violation.shape[1]) != violation.shape[1]:
                raise DataError(
                    f'Constraint "{name}": {violation.shape[1]} columns in this batch, '
                    f"{self._columns[name]} before. Give the same number in every batch and mark "
                    "missing ones in membership()."
                )
        return objective, violations, members

    def _constraint_values(self, outputs: Any, batch: Any, rows: int) -> dict[str, Tensor]:
        values = self.constraint_values(outputs, batch)
        require_names("constraint_values()", values, self.constraints)
        missing = [name for name in self.constraints if name not in values]
        if missing:
            raise ValueError(f"constraint_values() lacks {', '.join(map(repr, missing))}.")
        return {name: checked(value, name, rows) for name, value in values.items()}

    def _loss(
        self,
        index: Tensor,
        objective: Tensor,
        violations: dict[str, Tensor],
        members: dict[str, Tensor],
        counts: dict[str, Tensor],
        prices: dict[str, Price],
    ) -> Tensor:
        """This micro-batch's share of mean ℓ₀ + Σ mean ψ(v, λ)."""
        loss = objective.sum() / counts[OBJECTIVE]
        for name, formulation in self._formulations_now().items():
            violation, carried = violations[name], members[name]
            sides = self.constraints[name].sides
            if formulation.scope == "batch":
                price = prices.get(name)
                if price is None:
                    found = self._found([(violation.detach(), carried)], counts[name])
                    anchor = self._anchor(name, formulation, found)
                    mean = self._mean(name, formulation, found, anchor)
                    price = self._price(name, formulation, anchor, mean)
                slope = price.slope.to(violation).repeat_interleave(violation.shape[1] // sides)
                terms = slope * formulation.inner(anchored(violation, carried, price.anchor))
            else:
                multiplier = self._rows(name, formulation, index, violation)
                if self.order == "dual_first" and formulation.scope == "sample":
                    multiplier = formulation.ascend(violation.detach(), multiplier)
                terms = formulation.lagrangian(violation, multiplier)
            normalised = weights(carried, sides, violation.dtype) / counts[name]
            loss = loss + (torch.where(carried, terms, 0) * normalised).sum()
        return loss

    def _rows(
        self, name: str, formulation: Formulation, index: Tensor, violation: Tensor
    ) -> Tensor:
        """λ_t of the given samples on the violations' device, by one asynchronous copy."""
        if formulation.scope == "none":
            return torch.zeros_like(violation)
        rows = self.multipliers.rows(name, index, violation.shape[1])
        if violation.is_cuda:
            rows = rows.pin_memory()
        return rows.to(violation.device, violation.dtype, non_blocking=True)

    def _prices(self, micros: list[MicroBatch], counts: dict[str, Tensor]) -> dict[str, Price]:
        """What a violation costs under every constraint whose ψ acts on one figure of the batch.

        Where ψ is linear in the batch's mean that is λ. Elsewhere the mean must be known before the
        first backward pass: with several micro-batches or ranks a pass without gradients finds it,
        and its random state is replayed afterwards, so that both passes see the same dropout.
        """
        formulations = {n: f for n, f in self._formulations_now().items() if f.scope == "batch"}
        needed = self.order == "dual_first" or not all(f.linear for f in formulations.values())
        if needed and len(micros) == 1 and self.trainer.world_size == 1:
            return {}  # The one forward pass that follows knows the mean itself.
        parts: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in formulations}
        if formulations and needed:
            with torch.no_grad(), replayed_random_state(self.device):
                for micro in micros:
                    _, violations, members = self._terms(micro)
                    for name in formulations:
                        parts[name].append((violations[name], members[name]))
        prices = {}
        for name, formulation in formulations.items():
            found = self._found(parts[name], counts[name], over_ranks=needed)
            anchor = self._anchor(name, formulation, found)
            mean = self._mean(name, formulation, found, anchor) if needed else 0 * anchor
            prices[name] = self._price(name, formulation, anchor, mean)
        return prices

    def _found(
        self, parts: list[tuple[Tensor, Tensor]], count: Tensor | int, over_ranks: bool = False
    ) -> Found:
        """Of violations and members, (b, sides·K): all rows, or ``over_ranks`` only this one's."""
        device = parts[0][0].device if parts else self.device
        present = torch.zeros((), dtype=widest(device), device=device)
        for _, carried in parts:
            present = present + carriers(carried).sum()
        present = self._over_ranks(present, "sum") if over_ranks else present
        return Found(parts, count, 1 - present / count, over_ranks)

    def _anchor(self, name: str, formulation: Formulation, found: Found) -> Tensor:
        """The a of v − a of each side, (sides,), where the rows are and in the widest dtype."""
        sides = self.constraints[name].sides
        if formulation.anchor != "largest":
            learned = self.thresholds.get(name, torch.zeros(sides))
            return learned.reshape(sides).to(found.left_out)
        anchor = found.left_out.new_full((sides,), -math.inf)
        for violation, carried in found.parts:
            anchor = torch.maximum(anchor, largest(violation, carried, sides).to(anchor))
        anchor = self._over_ranks(anchor, "max") if found.over_ranks else anchor
        return torch.where(found.left_out > 0, anchor.clamp(min=0), anchor)

    def _mean(self, name: str, formulation: Formulation, found: Found, anchor: Tensor) -> Tensor:
        """The mean of inner(v − anchor) over the samples of all ranks, (sides,)."""
        sides, mean = self.constraints[name].sides, torch.zeros_like(anchor)
        for violation, carried in found.parts:
            terms = formulation.inner(anchored(violation.to(anchor), carried, anchor))
            normalised = weights(carried, sides, terms.dtype) / found.count
            mean = mean + side_means(terms, normalised, sides)
        mean = self._over_ranks(mean, "sum") if found.over_ranks else mean
        missing = found.left_out * formulation.inner(-anchor)
        return mean + torch.where(found.left_out > 0, missing, 0)

    def _price(self, name: str, formulation: Formulation, anchor: Tensor, mean: Tensor) -> Price:
        """∂ψ/∂mean (sides,) at the mean of inner(v − anchor) over the batch."""
        multiplier = self.multipliers.scalar(name, len(mean)).to(mean)
        with torch.enable_grad():
            mean = mean.detach().requires_grad_()
            figure = anchor + formulation.outer(mean)
            if self.order == "dual_first":
                multiplier = formulation.ascend(figure.detach(), multiplier)
            (slope,) = torch.autograd.grad(formulation.lagrangian(figure, multiplier).sum(), mean)
        return Price(anchor, slope)

    def _clip_gradient(self) -> Tensor:
        """The norm of the whole gradient, which is scaled down to ``gradient_clip_val``."""
        parameters = [p for p in self.parameters() if p.grad is not None]
        # Under float16 the gradients carry the scaler's factor until its step: so does the bound.
        scaler = self._gradient_scaler()
        scale = 1.0 if scaler is None else scaler.get_scale()
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if self.gradient_clip_val is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.gradient_clip_val * scale, norm)
        return norm / scale

    def _collect(self, found: list[Tensor], norm: Tensor) -> Record:
        """The rows of all ranks and the gradient's norm, by one gather and one copy to the CPU.

        Every rank's batch has the same number of rows: samplers of several ranks pad.
        """
        rows = torch.cat(found)
        if self.trainer.world_size > 1:
            rows = self.all_gather(rows).flatten(0, 1)  # type: ignore[union-attr]
        flat = torch.cat([rows.flatten(), norm.to(rows).reshape(1)]).cpu()
        return unpack(flat[:-1].view(rows.shape), self._columns, float(flat[-1]))

    def _may_step(self, record: Record) -> bool:
        """Whether the gradient is finite and some sample is left; the same answer on every rank."""
        expected = False
        if not any(bool(carried.any()) for carried in record.members.values()):
            reason = "no sample of the batch is left"
        elif math.isfinite(record.gradient_norm):
            return True
        else:
            reason = (
                f"the norm of the gradient is {record.gradient_norm}, of finite values (perhaps a "
                "root, logarithm or division at 0, also where membership() masks the value)"
            )
            scaler = self._gradient_scaler()
            if scaler is not None:
                scale = scaler.get_scale()
                scaler.update(scale * scaler.get_backoff_factor())
                expected = scale > 1  # It starts from a factor too large for float16.
        self._optimizer().zero_grad()
        self.skipped_steps += 1
        self._skipped_this_epoch += not expected
        self._warn(
            f"Step skipped ({self._where()}): {reason}. Neither weights nor multipliers moved; "
            f"{self.skipped_steps} so far."
        )
        return False

    def _primal_step(self) -> None:
        self._optimizer().step()
        self._taken_this_epoch += 1

    def _dual_step(self, record: Record) -> None:
        """λ ← (λ + η ∂ψ/∂λ)₊ for the samples visited since the last dual step, and no others."""
        self._window.append((self.current_epoch, self._visited(record)))
        if len(self._window) >= self.primal_steps:
            self._close_window()

    def _visited(self, record: Record) -> dict[str, list[Tensor]]:
        """What the dual step needs of this step, by constraint.

        Scope "sample": index (R,), violation and members (R, sides·K) of the rows that carry the
        constraint. Scope "batch": the batch's figure (sides,). Nothing where nobody carries it.
        """
        visited: dict[str, list[Tensor]] = {}
        for name, formulation in self.formulations.items():
            violation, carried = record.violations[name], record.members[name]
            rows = carried.any(1)
            if formulation.scope == "none" or not rows.any():
                continue
            if formulation.scope == "sample":
                visited[name] = [record.index[rows], violation[rows], carried[rows]]
            else:
                found = self._found([(violation, carried)], record.counts[name])
                anchor = self._anchor(name, formulation, found)
                mean = self._mean(name, formulation, found, anchor)
                visited[name] = [anchor + formulation.outer(mean)]
        return visited

    def _threshold_step(self, record: Record) -> None:
        """t ← t − threshold_lr · ∂g/∂t at the violations of this step, the same on every rank."""
        for name, formulation in self.formulations.items():
            violation, carried = record.violations[name], record.members[name]
            if formulation.anchor != "threshold" or not carried.any():
                continue
            found = self._found([(violation, carried)], record.counts[name])
            threshold = self._anchor(name, formulation, found).requires_grad_()
            mean = self._mean(name, formulation, found, threshold)
            figure = threshold + formulation.outer(mean)
            (slope,) = torch.autograd.grad(figure.sum(), threshold)
            stepped = (threshold - formulation.threshold_lr * slope).detach().float()
            self.thresholds[name] = stepped if len(stepped) > 1 else stepped[0]

    def _close_window(self) -> None:
        """The dual step of every sample visited in the window, at its last visit's violation."""
        window, self._window = self._window, []
        for name, declared in self.formulations.items():
            visits = [visited[name] for _, visited in window if name in visited]
            if not visits:
                continue
            formulation = declared.at_epoch(window[-1][0])
            if formulation.scope == "batch":
                mean = torch.stack([visit[0] for visit in visits]).mean(0)
                multiplier = self.multipliers.scalar(name, len(mean)).to(mean)
                stepped = formulation.ascend(mean, multiplier)
                self.multipliers.write_scalar(name, stepped)
                everyone = torch.ones_like(mean, dtype=torch.bool)
                self.dual_steps[name] = DualStep(
                    None, mean[None], everyone[None], multiplier[None], stepped[None]
                )
                continue
            index, violation, carried = (torch.cat(parts) for parts in zip(*visits, strict=True))
            last = last_visits(index)
            index, violation, carried = index[last], violation[last], carried[last]
            multiplier = self.multipliers.rows(name, index, violation.shape[1]).to(violation)
            stepped = torch.where(carried, formulation.ascend(violation, multiplier), multiplier)
            self._await_ranks()  # All have read λ_t.
            self.multipliers.write(name, index, stepped)
            self.dual_steps[name] = DualStep(index, violation, carried, multiplier, stepped)
        self._await_ranks()  # λ_{t+1} stands where all will read it.

    def _formulations_now(self) -> dict[str, Formulation]:
        return {name: f.at_epoch(self.current_epoch) for name, f in self.formulations.items()}

    # Values that are not finite -----------------------------------------------------------------

    def _name_poisoned(self, record: Record, poisoned: Tensor) -> None:
        self.left_out += int(poisoned.sum())
        for row in poisoned.nonzero()[:8, 0].tolist():
            terms = {"Objective": record.objective[row].reshape(1)}
            terms |= {f'Constraint "{n}"': v[row] for n, v in record.violations.items()}
            for term, values in terms.items():
                for value in values[~torch.isfinite(values.float())][:1].tolist():
                    self._warn(
                        f"{term}: {value} for sample {int(record.index[row])} ({self._where()}). "
                        f"Left out of this step; {self.left_out} so far. "
                        "Inspect that record or lower the learning rate."
                    )

    def _step_without(
        self,
        micros: list[MicroBatch],
        counts: dict[str, Tensor],
        record: Record,
        poisoned: Tensor,
    ) -> float:
        """Computes the step again without the poisoned rows; the norm of its gradient.

        Sharded weights are put together in every forward pass by all ranks, so there a rank needs
        as many micro-batches as before. NaN where it has not one row left to fill them.
        """
        left = self._without(micros, record.index[poisoned])
        if not self._weights_are_sharded():
            left = [micro for micro in left if len(micro.index)]
        elif not (~poisoned).view(self.trainer.world_size, -1).any(1).all():
            self._warn("A rank has no row left, and sharded weights need one on every rank.")
            return math.nan
        else:
            spare = next(micro for micro in left if len(micro.index))
            left = [micro if len(micro.index) else self._stand_in(spare) for micro in left]
        return float(self._forward_backward(left, counts)[1])

    def _without(self, micros: list[MicroBatch], left_out: Tensor) -> list[MicroBatch]:
        """The micro-batches without the samples ``left_out``; some may have no row any more."""
        kept = []
        for micro in micros:
            keep = ~torch.isin(micro.index, left_out)
            if keep.all() or not keep.any():
                batch = micro.batch if keep.any() else None
                kept.append(MicroBatch(batch, micro.index[keep], micro.members))
                continue
            rows = keep.nonzero()[:, 0]
            members = {n: m[rows.to(m.device)] for n, m in micro.members.items()}
            kept.append(MicroBatch(self.select(micro.batch, rows), micro.index[rows], members))
        return kept

    def _stand_in(self, micro: MicroBatch) -> MicroBatch:
        """A micro-batch of one row that counts nowhere."""
        members = {name: torch.zeros_like(m[:1]) for name, m in micro.members.items()}
        batch = self.select(micro.batch, torch.tensor([0]))
        return MicroBatch(batch, torch.tensor([PADDING]), members)

    def _where(self) -> str:
        return f"train, epoch {self.current_epoch}, step {self.global_step}"

    # Logging ------------------------------------------------------------------------------------

    def _log_running(self, record: Record) -> None:
        """``running/…``: this batch's values, taken while the weights move."""
        carried = record.members[OBJECTIVE]
        shown = {}
        if carried.any():
            shown["objective"] = record.objective[carried].mean()
            self.log("running/objective", shown["objective"])
        by_name = {n: record.violations[n][record.members[n]] for n in self.constraints}
        for name, values in by_name.items():
            if len(values):
                statistics = violation_statistics(values)
                self.log_dict({f"running/{name}/{key}": value for key, value in statistics.items()})
        pooled = torch.cat(list(by_name.values())) if by_name else torch.empty(0)
        if len(pooled):
            statistics = violation_statistics(pooled)
            shown |= {key: statistics[key] for key in ("cvar95", "violated")}
        self.log_dict(shown, prog_bar=True, logger=False)
        self.log("running/gradient_norm", record.gradient_norm)
        self.log("running/left_out", float(self.left_out))
        self.log("running/skipped_steps", float(self.skipped_steps))

    # Evaluation: no multiplier is read, none moves ----------------------------------------------

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(_stages("val", self.trainer.val_dataloaders)[dataloader_idx], batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(_stages("test", self.trainer.test_dataloaders)[dataloader_idx], batch)

    def on_train_start(self) -> None:
        super().on_train_start()
        self.violations, self.evaluated = {}, {}  # Of other weights, or of a sanity check's batches

    def on_validation_epoch_start(self) -> None:
        self._start_evaluations(_stages("val", self.trainer.val_dataloaders))

    def on_test_epoch_start(self) -> None:
        self._start_evaluations(_stages("test", self.trainer.test_dataloaders))

    def on_validation_epoch_end(self) -> None:
        self._log_evaluations()

    def on_test_epoch_end(self) -> None:
        self._log_evaluations()

    def _start_evaluations(self, stages: list[str]) -> None:
        """On every rank, whether or not it gets a batch: what follows at the end is collective."""
        self._evaluations = {
            stage: _Evaluation(
                MeanMetric(nan_strategy="disable").to(self.device),  # NaN in, NaN out.
                {name: [] for name in self.constraints},
                {name: m.to(self.device) for name, m in self.evaluation_metrics().items()},
            )
            for stage in stages
        }

    def _evaluate(self, stage: str, batch: Any) -> None:
        evaluation = self._evaluations[stage]
        for piece in _pieces(batch):
            micro = self._micro_batch(piece, _index(piece))
            rows = len(micro.index)
            outputs = self(piece)
            objective = checked(self.objective(outputs, piece), OBJECTIVE, rows, vector=False)
            evaluation.objective.update(objective[micro.members[OBJECTIVE]])
            values = self._constraint_values(outputs, piece, rows)
            for name, constraint in self.evaluation_constraints.items():
                violation, carried = oriented(constraint, values[name], micro.members[name], name)
                part = Evaluated(micro.index, violation.detach(), carried)
                evaluation.violations[name].append(part)
            real = (micro.index >= 0).to(self.device)
            self.update_evaluation_metrics(evaluation.task, outputs, piece, real, stage)

    def _log_evaluations(self) -> None:
        """``stage/objective``, ``stage/constraint/statistic``, ``stage/metric``: full passes."""
        self.finish_evaluation_metrics({s: e.task for s, e in self._evaluations.items()})
        for stage, evaluation in self._evaluations.items():
            results = {}
            with evaluation.objective.sync_context():
                carried = bool(evaluation.objective.weight > 0)
            if carried:  # What no sample of a data set carries is not reported of it.
                results[f"{stage}/objective"] = evaluation.objective.compute()
            self.violations[stage], self.evaluated[stage] = {}, {}
            for name, batches in evaluation.violations.items():
                found = gather(batches, self.evaluation_constraints[name].sides)
                if not len(found.pooled()):
                    continue
                self.violations[stage][name] = found.pooled()
                self.evaluated[stage][name] = found
                for statistic, value in violation_statistics(found.pooled()).items():
                    results[f"{stage}/{name}/{statistic}"] = value
            for name, metric in evaluation.task.items():
                if metric.update_called:  # Else it is one for other data sets.
                    results[f"{stage}/{name}"] = metric.compute()
            self.log_dict(results, add_dataloader_idx=False)
        self._evaluations = {}


@dataclass
class _Evaluation:
    """The running figures of one evaluated data set."""

    objective: MeanMetric
    violations: dict[str, list[Evaluated]]
    task: dict[str, Metric]


def _per_constraint(
    formulation: Formulation | Mapping[str, Any] | None, constraints: Mapping[str, Constraint]
) -> dict[str, Formulation]:
    """The formulation of every constraint by name; empty for plain training."""
    if formulation is None:
        return {}
    if isinstance(formulation, Formulation) or "class_path" in formulation:
        one = formulation_from(formulation)
        return {name: one for name in constraints if one is not None}
    require_names("formulation", formulation, constraints)
    missing = [name for name in constraints if name not in formulation]
    if missing:
        raise ValueError(f"No formulation for constraint {', '.join(map(repr, missing))}.")
    built = {name: formulation_from(config) for name, config in formulation.items()}
    return {name: one for name, one in built.items() if one is not None}


def _pieces(batch: Any) -> list[Any]:
    return list(batch) if isinstance(batch, (list, tuple)) else [batch]


def _index(batch: Any) -> Tensor:
    """(B,) on the CPU."""
    index = batch.get("index") if isinstance(batch, Mapping) else None
    if not isinstance(index, Tensor) or index.dim() != 1:
        raise DataError(
            'A batch needs "index", the position of each sample in its data set, as a tensor (B,): '
            "wrap the data set in pl_pointwise.data.IndexedDataset, or use PointwiseDataModule."
        )
    return index.cpu()


def _stages(stage: str, loaders: Any) -> list[str]:
    """The names of the evaluated data sets: of a dict its keys, of a list numbered ones."""
    if isinstance(loaders, Mapping):
        return list(loaders)
    if isinstance(loaders, (list, tuple)) and len(loaders) > 1:
        return [f"{stage}{number}" for number in range(len(loaders))]
    return [stage]


def _connected_zero(module: LightningModule) -> Tensor:
    """Zero, with a zero gradient for every trainable parameter."""
    total = torch.zeros((), device=module.device)
    for parameter in module.parameters():
        if parameter.requires_grad:
            total = total + (parameter * 0).sum()
    return total
