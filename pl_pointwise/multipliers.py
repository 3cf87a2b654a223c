"""λ: where it lives, and whose it is: a sample's, its group's, or a statistic's of the batch.

λ is float32, on the CPU, in training-set order, a row per sample. It is neither a Parameter (DDP
would divide its step by the number of ranks) nor a buffer (DDP would overwrite it from rank 0, and
a bf16 module would cast it). A batch's rows cost O(batch).

Shapes as in lagrangian/terms.py; what belongs to a side has (sides,).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .constraint import Constraint
from .errors import TrainingError
from .formulations import BatchFormulation, Formulation
from .lagrangian.group_means import MeansOfConstraints, rows_of_a_step
from .lagrangian.shares import Share
from .lagrangian.terms import (
    DualStep,
    Measured,
    Terms,
    carries,
    last_visits,
    over_ranks,
    weights,
    widest,
)


class Multipliers(Mapping[str, Tensor]):
    """λ of every constraint: (N, K) for multipliers per sample, () for one per constraint.

    An interval has its two sides side by side: (N, 2K), or (2,). A table is allocated when its
    number of columns K is first seen; every rank holds the same values. ``samples`` is N.

    >>> multipliers = Multipliers(samples=3)  # module.multipliers, once a module is trained
    >>> multipliers.load_state_dict({"fit": torch.tensor([[0.0], [2.0], [0.5]])})
    >>> multipliers["fit"][:, 0].argsort(descending=True)  # the hardest sample first
    tensor([1, 2, 0])
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._tables: dict[str, Tensor] = {}
        self._initial: dict[str, Tensor] = {}  # Of tables that are not allocated yet.

    def __getitem__(self, name: str) -> Tensor:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def reset(self, *names: str) -> None:
        """λ of these constraints, or of all, starts again from 0; KeyError for an unknown name."""
        known = {**self._tables, **self._initial}
        unknown = [name for name in names if name not in known]
        if unknown:
            raise KeyError(
                f"no multipliers of {', '.join(unknown)}; there are {', '.join(known)}"
            )
        for name in names or known:
            self._tables.pop(name, None)
            self._initial.pop(name, None)

    def set(self, name: str, values: Tensor | float) -> None:
        """λ of a constraint from now on, or from the first step of the next fit.

        values: one number, (N, K) for one per sample and column ((N,) for K = 1), or () and (2,)
        for one per side. Either sign for an equality, else ≥ 0.

        Raises:
            ValueError: values that are not finite, or of another shape than there are.
        """
        values = torch.as_tensor(values).detach().to("cpu", torch.float32, copy=True)
        if values.dim() > 2 or not torch.isfinite(values).all():
            raise ValueError(
                f'Multipliers of "{name}": needs finite numbers, one or of shape (N, K), got '
                f"{tuple(values.shape)}."
            )
        table = self._tables.get(name)
        if table is None:
            self._initial[name] = values
            return
        expanded = _as_table(values, tuple(table.shape))
        if expanded is None:
            raise ValueError(
                f'Multipliers of "{name}" have shape {tuple(table.shape)}, the values '
                f"{tuple(values.shape)}. Call reset({name!r}) first to give them another."
            )
        table.copy_(expanded)

    def for_samples(self, samples: int) -> Multipliers:
        """A store for another training set, from 0 or from what :meth:`set` was given before."""
        store = Multipliers(samples)
        store._initial = dict(self._initial)
        return store

    def pending(self) -> dict[str, Tensor]:
        """What :meth:`set` was given for multipliers that no step has needed yet."""
        return self._initial

    def state_dict(self) -> dict[str, Tensor]:
        """The tables themselves, not copies."""
        return dict(self._tables)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes copies of tables; refuses those of other samples, or not finite."""
        for name, table in state.items():
            if table.dim() > 2 or (table.dim() == 2 and len(table) != self.samples):
                raise ValueError(
                    f'"{name}": {tuple(table.shape)} for {self.samples:,} samples'
                )
            if not torch.isfinite(table).all():
                raise ValueError(f'"{name}": multipliers that are not finite')
        self._tables = {
            name: torch.zeros(table.shape, dtype=torch.float32).copy_(table)
            for name, table in state.items()
        }

    def table(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """λ of a constraint, not a copy; of a shape allocated where it is not yet, or refused."""
        if shape is None:
            return self._tables[name]
        if name not in self._tables:
            initial = self._initial.get(name, torch.zeros((), dtype=torch.float32))
            values = _as_table(initial, shape)
            if values is None:
                raise TrainingError(
                    f'Constraint "{name}": initial multipliers of shape {tuple(initial.shape)} for '
                    f"a table of shape {shape}. Give module.multipliers.set() one number, or that."
                )
            self._tables[name] = values.clone()
            self._initial.pop(name, None)
        table = self._tables[name]
        if tuple(table.shape) != shape:
            raise TrainingError(
                f'Constraint "{name}": multipliers of shape {tuple(table.shape)}, values that need '
                f"{shape}. Mark missing columns in membership(), or call multipliers.reset()."
            )
        return table


def _as_table(values: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """One number, or a value per row and column, as a table of ``shape``; None if it is neither."""
    if values.dim() == 1 and len(shape) == 2 and shape[1] == 1:
        values = values[:, None]
    return (
        values.expand(shape)
        if values.dim() == 0 or tuple(values.shape) == shape
        else None
    )


# What ψ acts on ----------------------------------------------------------------------------------


class Weight:
    """ψ of each sample's violation, without a multiplier."""

    dimensions: int | None = None
    """Of the table of multipliers: 2 of (N, sides·K), 0 where (sides,) stands for the batch."""

    def __init__(
        self,
        name: str,
        constraint: Constraint,
        formulation: Formulation,
        dual_first: bool,
        multipliers: Multipliers,
        thresholds: dict[str, Tensor],
        groups: Tensor | None,
        means: MeansOfConstraints | None,
    ) -> None:
        self.name, self.sides = name, constraint.sides
        self.formulation: Any = formulation  # That in force, from the first step on.
        # The step of the weights uses λ after this step's update.
        self.dual_first = dual_first
        self.multipliers, self.thresholds = multipliers, thresholds
        self.groups = groups  # (N,), of each sample; None where λ is a sample's.
        self.means: Any = means  # Of these groups, where bounds are on them.

    def rows(self, index: Tensor, violation: Tensor) -> Tensor | None:
        """λ_t of the samples index (b,), as their violations; None where they have none."""
        return None

    def loss(self, terms: Terms, multiplier: Tensor | None, count: Tensor) -> Tensor:
        """A micro-batch's share of mean ψ(v, λ), a scalar; ``count`` samples over all ranks."""
        violation = terms.followed[self.name]
        multiplier = torch.zeros_like(violation) if multiplier is None else multiplier
        if self.dual_first:
            multiplier = self.formulation.ascend(terms.judged[self.name], multiplier)
        return self._mean(
            self.formulation.lagrangian(violation, multiplier), terms, count
        )

    def visit(self, measured: Measured) -> list[Tensor] | None:
        """What the dual step needs of a step; None where it has nothing to do."""
        return None

    def step(self, visits: Sequence[list[Tensor]]) -> DualStep | None:
        """Moves λ by what the steps of a window left; None where they left nothing."""
        return None

    def _mean(self, psi: Tensor, terms: Terms, count: Tensor) -> Tensor:
        mask = terms.masks[self.name]
        psi = psi if terms.whole else torch.where(mask, psi, 0)
        if mask.shape[1] == self.sides:
            return psi.sum() / count
        return (psi * (weights(mask, self.sides, psi.dtype) / count)).sum()


class PerSample(Weight):
    """ψ of each sample's violation and its own multipliers."""

    dimensions = 2

    def rows(self, index: Tensor, violation: Tensor) -> Tensor:
        """λ_t on the violations' device by one asynchronous copy; 0 of a stream and of padding."""
        samples = self.multipliers.samples
        if not samples:
            return torch.zeros_like(violation)
        table = self.multipliers.table(self.name, (samples, violation.shape[1]))
        try:
            rows = table[index].masked_fill_((index < 0)[:, None], 0.0)
        except IndexError as error:
            raise TrainingError(
                f"Sample index {int(index.max())} is outside the training set of {samples} "
                'samples: batch["index"] is the position in it.'
            ) from error
        rows = rows.pin_memory() if violation.is_cuda else rows
        return rows.to(violation.device, violation.dtype, non_blocking=True)

    def visit(self, measured: Measured) -> list[Tensor] | None:
        """Of samples it applies to the index (n,), and violation, mask and λ (n, sides·K)."""
        name, mask = self.name, measured.masks[self.name]
        rows = None if measured.whole or mask.all() else carries(mask)
        if not self.multipliers.samples or (rows is not None and not rows.any()):
            return None
        visit = [
            measured.index,
            measured.judged[name],
            mask,
            measured.multipliers[name],
        ]
        return visit if rows is None else [part[rows] for part in visit]

    def step(self, visits: Sequence[list[Tensor]]) -> DualStep:
        parts = visits[0]
        if len(visits) > 1:
            parts = list(map(torch.cat, zip(*visits, strict=True)))
        if len(set(parts[0].tolist())) < len(parts[0]):
            last = last_visits(parts[0])
            parts = [part[last] for part in parts]
        index, judged, mask, multiplier = parts[:4]
        stepped = torch.where(mask, self._ascended(parts), multiplier)
        self.multipliers.table(self.name)[index] = stepped.float()
        return DualStep(index, judged, mask, multiplier, stepped)

    def _ascended(self, parts: Sequence[Tensor]) -> Tensor:
        """λ after its step, of what :meth:`visit` left."""
        _, judged, _, multiplier = parts[:4]
        ascended: Tensor = self.formulation.ascend(judged, multiplier)
        return ascended


class PerSampleButShare(PerSample):
    """The same, but for the samples that are exempt: see lagrangian/shares.py."""

    share: Share

    def _mean(self, psi: Tensor, terms: Terms, count: Tensor) -> Tensor:
        exempt = terms.exempt[self.name][:, None]
        return super()._mean(torch.where(exempt, 0, psi), terms, count)

    def visit(self, measured: Measured) -> list[Tensor] | None:
        """Beside them whether each sample is exempt, bool (n,)."""
        visit = super().visit(measured)
        return None if visit is None else [*visit, self.share.exempt(visit[0])]

    def _ascended(self, parts: Sequence[Tensor]) -> Tensor:
        multiplier, exempt = parts[3], parts[4][:, None]
        return torch.where(exempt, multiplier / 2, super()._ascended(parts))


class PerGroup(PerSample):
    """ψ of each sample's violation and its group's multipliers, which follow the batch's mean.

    The bound is on each sample (``Constraint(..., each_sample=True)``), and its group shares λ.
    """

    def rows(self, index: Tensor, violation: Tensor) -> Tensor:
        return super().rows(self.owners(index), violation)

    def owners(self, index: Tensor) -> Tensor:
        """The groups of the samples index (b,)."""
        return owners_of(index, self.groups)

    def step(self, visits: Sequence[list[Tensor]]) -> DualStep:
        """On a row for each group: the mean of its samples' violations, and λ, alike within it."""
        index, judged, mask, multiplier = map(torch.cat, zip(*visits, strict=True))
        owners = self.owners(index)
        groups, row = torch.unique(owners, return_inverse=True)
        sums = torch.zeros(len(groups), judged.shape[1], dtype=judged.dtype)
        number = sums.index_add(0, row, mask.to(judged.dtype))
        mean = sums.index_add(0, row, torch.where(mask, judged, 0)) / number.clamp(
            min=1
        )
        return super().step(
            [[groups, mean, number > 0, multiplier[last_visits(owners)]]]
        )


def owners_of(index: Tensor, groups: Tensor | None) -> Tensor:
    """The groups of the samples index (b,); −1 of padding."""
    assert groups is not None
    if len(index) and int(index.max()) >= len(groups):
        raise TrainingError(
            f"Sample index {int(index.max())} is outside the {len(groups):,} of groups."
        )
    return torch.where(index < 0, index, groups[index.clamp(min=0)])


class OnMeans(Weight):
    """ψ of each group's mean violation, without a multiplier: see lagrangian/group_means.py."""

    means: MeansOfConstraints

    def __init__(self, *args: Any, **state: Any) -> None:
        super().__init__(*args, **state)
        # Of the losses of this step so far.
        self._rows: list[tuple[Tensor, Tensor, Tensor]] = []
        # Groups of this step and their means.
        self._found: tuple[Tensor, Tensor] | None = None

    def see(
        self,
        terms: Sequence[Terms],
        indices: Sequence[Tensor],
        device: torch.device,
        keep: bool,
    ) -> None:
        """Takes in micro-batches of a step, whose values the means of their groups are then with.

        A collective. keep: whether what comes within the step is together with them.
        """
        index, values = (
            torch.zeros(0, dtype=torch.long),
            torch.zeros(0, 1, device=device),
        )
        mask = torch.zeros(0, 1, dtype=torch.bool, device=device)
        if terms:
            index = torch.cat(list(indices))
            values = torch.cat([of.followed[self.name].detach() for of in terms])
            mask = torch.cat([of.masks[self.name] for of in terms])
        owners_of(index, self.groups)  # Refuses positions outside.
        rows = [*self._rows, rows_of_a_step(index, values, mask)]
        self._rows = rows if keep else self._rows
        index, values, mask = map(torch.cat, zip(*rows, strict=True))
        self._found = self.means.followed(self.name).with_rows(index, values, mask)

    def forget(self) -> None:
        """What was seen of a step that is over, taken or not."""
        self._rows, self._found = [], None

    def means_of(self, index: Tensor, terms: Terms) -> Tensor:
        """The means of the groups of samples that were seen, as their violations (b, sides·K)."""
        assert self._found is not None
        groups, means = self._found
        violation, mask = terms.followed[self.name], terms.masks[self.name]
        if not len(groups):
            return torch.zeros_like(violation)
        row = torch.searchsorted(groups, owners_of(index, self.groups)).clamp(
            max=len(groups) - 1
        )
        found = (
            means[row]
            .nan_to_num()
            .to(violation.device, violation.dtype, non_blocking=True)
        )
        return torch.where(mask, found, 0)

    def loss(self, terms: Terms, multiplier: Tensor | None, count: Tensor) -> Tensor:
        """Its value is that of ψ at the means, its gradient the mean of F_g ∇v."""
        violation, mean = terms.followed[self.name], terms.means[self.name]
        multiplier = torch.zeros_like(mean) if multiplier is None else multiplier
        force = self.formulation.slope(mean, multiplier).detach()
        psi = self.formulation.lagrangian(mean, multiplier)
        return self._mean(psi + force * (violation - violation.detach()), terms, count)


class PerGroupMean(OnMeans, PerGroup):
    """ψ of each group's mean violation and its multipliers."""

    def visit(self, measured: Measured) -> list[Tensor] | None:
        """The samples that a step had, (n,)."""
        real = measured.index[measured.index >= 0]
        return [real] if len(real) else None

    def step(self, visits: Sequence[list[Tensor]]) -> DualStep:
        """Of the groups that the window had samples of, by the part of them that it had."""
        samples = torch.unique(torch.cat([visit[0] for visit in visits]))
        groups, number = torch.unique(self.owners(samples), return_counts=True)
        judged = self.means.judged(self.name)
        part = (number / judged.sizes[groups])[:, None]
        mean = judged.of(groups)
        known, mean = ~mean.isnan(), mean.nan_to_num()
        multiplier = self.multipliers.table(self.name)[groups].double()
        stepped = self.formulation.ascend(mean, multiplier, part.double())
        stepped = torch.where(known, stepped, multiplier)
        self.multipliers.table(self.name)[groups] = stepped.float()
        return DualStep(groups, mean, known, multiplier, stepped)


@dataclass
class Slope:
    """∂ψ/∂(mean of inner), with the anchor at which it was taken, (sides,) both."""

    anchor: Tensor
    slope: Tensor


class PerBatch(Weight):
    """ψ of one statistic g of the batch, and one multiplier per side.

    g = a + outer(mean of inner(v − a)), with inner and outer of the formulation, and a its anchor.
    Its derivative in each violation is outer′(mean)·inner′(v − a), so that a backward pass through
    slope · inner(v − a), with the slope ∂ψ/∂mean known before a step's first one, gives the
    gradient of ψ(g, λ).
    """

    dimensions = 0
    formulation: BatchFormulation

    @property
    def table(self) -> Tensor:
        """λ itself, () or (2,)."""
        return self.multipliers.table(self.name, (2,) if self.sides > 1 else ())

    @property
    def multiplier(self) -> Tensor:
        """λ of each side, (sides,), a copy."""
        return self.table.reshape(self.sides).clone()

    @property
    def threshold(self) -> Tensor:
        """t of each side, (sides,); 0 where the formulation learns none."""
        threshold = self.thresholds.get(self.name, torch.zeros(self.sides))
        return threshold.reshape(self.sides)

    @property
    def knows_slope(self) -> bool:
        """Whether ∂ψ/∂mean is λ, whatever the batch."""
        return self.formulation.linear and not self.dual_first

    def slope(self, terms: Sequence[Terms], count: Tensor) -> Slope:
        """∂ψ/∂mean of all micro-batches of all ranks; ``count`` samples over them."""
        threshold, multiplier = self.threshold, self.multiplier
        if self.knows_slope:
            return Slope(threshold, multiplier)
        anchor, mean = self._statistic(terms, "followed", count, threshold)
        multiplier = multiplier.to(mean, non_blocking=True)
        if self.dual_first:
            judged = self._value(*self._statistic(terms, "judged", count, threshold))
            multiplier = self.formulation.ascend(judged, multiplier)
        with torch.enable_grad():
            mean.requires_grad_()
            psi = self.formulation.lagrangian(self._value(anchor, mean), multiplier)
            return Slope(anchor, *torch.autograd.grad(psi.sum(), mean))

    def loss_of(self, terms: Terms, slope: Slope, count: Tensor) -> Tensor:
        """A micro-batch's share of a term whose gradient is that of ψ(g, λ)."""
        violation, mask = terms.followed[self.name], terms.masks[self.name]
        factor = _by_column(slope.slope, violation)
        psi = factor * self.formulation.inner(_anchored(violation, mask, slope.anchor))
        return self._mean(psi, terms, count)

    def visit(self, measured: Measured) -> list[Tensor] | None:
        """The statistic that λ follows (sides,), on the CPU.

        Adds ψ of that of the weights to the Lagrangian, and takes the step of the threshold,
        t − threshold_step · ∂g/∂t.
        """
        name, formulation = self.name, self.formulation
        mask, count = measured.masks[name], torch.tensor(measured.counts[name])
        if not mask.all() and not mask.any():
            return None
        threshold = self.threshold.double().requires_grad_(formulation.learns_threshold)
        value = self._value(*self._statistic(measured, "followed", count, threshold))
        followed = judged = value.detach()
        if measured.strict:
            judged = self._value(
                *self._statistic(measured, "judged", count, self.threshold)
            )
        measured.lagrangian += float(
            formulation.lagrangian(followed, self.multiplier).sum()
        )
        if formulation.learns_threshold:
            (slope,) = torch.autograd.grad(value.sum(), threshold)
            stepped = (threshold - formulation.threshold_step * slope).detach().float()
            self.thresholds[name] = stepped if len(stepped) > 1 else stepped[0]
        return [judged]

    def step(self, visits: Sequence[list[Tensor]]) -> DualStep:
        value = torch.stack([judged for (judged,) in visits]).mean(0)
        multiplier = self.multiplier.to(value)
        stepped = self.formulation.ascend(value, multiplier)
        self.table.copy_(stepped.reshape(self.table.shape))
        mask = torch.ones_like(value, dtype=torch.bool)
        parts = (value, mask, multiplier, stepped)
        return DualStep(None, *(part[None] for part in parts))

    def _value(self, anchor: Tensor, mean: Tensor) -> Tensor:
        """g."""
        return anchor + self.formulation.outer(mean)

    def _statistic(
        self,
        of: Sequence[Terms] | Measured,
        kind: str,
        count: Tensor,
        threshold: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The anchor and the mean of inner(v − a) of all ranks, in the widest dtype.

        Differentiable in ``threshold``; samples that were left out of ``count`` have v = 0.

        of: this rank's micro-batches, or what a step measured of all ranks.
        kind: "followed" or "judged".
        """
        sides, formulation = self.sides, self.formulation
        parts: Sequence[Any] = of if isinstance(of, Sequence) else [of]
        reduce = (
            over_ranks if isinstance(of, Sequence) else lambda value, operation: value
        )
        found = [
            (getattr(p, kind)[self.name].detach(), p.masks[self.name]) for p in parts
        ]
        present = torch.zeros((), dtype=widest(count.device), device=count.device)
        for _, mask in found:
            present = present + carries(mask).sum()
        left_out = 1 - reduce(present, "sum") / count
        anchor = threshold.to(left_out, non_blocking=True)
        if formulation.anchor == "largest":
            anchor = left_out.new_full((sides,), -math.inf)
            for violation, mask in found:
                if not len(violation):
                    continue
                alone = violation.masked_fill(~mask, -math.inf).unflatten(
                    1, (sides, -1)
                )
                anchor = torch.maximum(
                    anchor, alone.transpose(0, 1).flatten(1).amax(1).to(anchor)
                )
            anchor = reduce(anchor, "max")
            anchor = torch.where(left_out > 0, anchor.clamp(min=0), anchor)
        mean = torch.zeros_like(anchor)
        for violation, mask in found:
            terms = formulation.inner(_anchored(violation.to(anchor), mask, anchor))
            normalised = weights(mask, sides, terms.dtype) / count
            mean = mean + (terms * normalised).unflatten(1, (sides, -1)).sum((0, 2))
        mean = reduce(mean, "sum")
        missing = left_out * formulation.inner(-anchor)
        return anchor, mean + torch.where(left_out > 0, missing, 0)


def _by_column(of_sides: Tensor, violation: Tensor) -> Tensor:
    """A number of each side for every column, (sides·K,), as the violations (b, sides·K)."""
    columns = violation.shape[1] // len(of_sides)
    return of_sides.to(violation, non_blocking=True).repeat_interleave(columns)


def _anchored(violation: Tensor, mask: Tensor, anchor: Tensor) -> Tensor:
    """v − a, zero where the mask is False."""
    return torch.where(mask, violation - _by_column(anchor, violation), 0)


def scope_of(
    name: str,
    formulation: Formulation,
    constraint: Constraint,
    groups: Tensor | None,
    shares: Mapping[str, Share],
    **state: Any,
) -> Weight:
    """What the formulation of a constraint acts on; ``state``: the other arguments of Weight."""
    if name in shares:
        scope = PerSampleButShare(name, constraint, formulation, groups=groups, **state)
        scope.share = shares[name]
        return scope
    per_sample, weight = PerSample, Weight
    if groups is not None and constraint.each_sample:
        per_sample = PerGroup
    elif groups is not None:
        per_sample, weight = PerGroupMean, OnMeans
    kinds = {"sample": per_sample, "batch": PerBatch, "none": weight}
    kind = kinds[formulation.scope]
    return kind(name, constraint, formulation, groups=groups, **state)
