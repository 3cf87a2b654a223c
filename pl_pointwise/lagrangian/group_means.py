"""The mean of each group of samples, of which a batch holds a part.

A requirement on groups is v̄_g ≤ 0, v̄_g the mean of the violations of the n_g samples of group g.
With N samples in all and the multipliers λ_g, the Lagrangian of the convention per sample is

    mean ℓ₀ + Σ_g n_g/N · ψ(v̄_g, λ_g),    its gradient in the weights  Σ_g n_g/N · F_g ∇v̄_g,

with the force F_g = ∂ψ/∂v at v̄_g and λ_g. As n_g ∇v̄_g = Σ_{i in g} ∇v_i, this is

    1/N Σ_i F_{g(i)} ∇v_i,    of which a batch of B samples tells  1/B Σ_{i in batch} F_{g(i)} ∇v_i:

every sample of a group is pushed alike, by the force of its group's mean, and the mean over the
batch is that of any other term. So a group weighs as many times as it has samples, and its λ is a
price as a sample's is: loosening its bound by δ lowers the mean objective by λ_g · δ · n_g/N.

v̄_g needs all samples of the group, and a batch holds few. So the last value of every sample is
kept, and v̄_g is the mean over them: a running mean whose memory is one epoch, in which each sample
counts once in whatever order they come. At rest it has no noise. A mean with a factor, of equal
mean age and equal number of samples (w = 2b/(n + b) of a batch with b of n), weighs them unevenly
and keeps the noise of n samples drawn anew, σ/√n, for ever. The batch's own values are in v̄_g
before the force is taken: where it holds the whole group, v̄_g is exact. In the first epoch it is
the mean of those that were seen.

λ_g moves with each step that has samples of the group, by the part of them that it has: b_g/n_g of
an update of v̄_g, so that an epoch is one update, as it is of a sample's λ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..constraint import Constraint
from .terms import (
    PADDING,
    Measured,
    last_visits,
    number_of_ranks,
    over_ranks,
    rows_of_all_ranks,
)


class GroupMeans:
    """Means over the samples of groups of their last values.

    >>> means = GroupMeans(torch.tensor([0, 0, 1]))
    >>> values, mask = torch.tensor([[1.0], [5.0]]), torch.ones(2, 1, dtype=torch.bool)
    >>> means.put(torch.tensor([0, 2]), values, mask)  # samples 0 and 2
    >>> groups, found = means.with_rows(torch.tensor([1]), torch.tensor([[4.0]]), mask[:1])
    >>> groups.tolist(), found.tolist()  # of the groups of these rows, as if they were put in
    ([0], [[2.5]])

    Args:
        groups: (N,) int64, the group of each sample, from 0.
    """

    def __init__(self, groups: Tensor) -> None:
        self.groups = groups
        self.sizes = torch.bincount(groups)  # (G,), n_g.
        # (N, C) float64, NaN of what was not seen yet.
        self.values: Tensor | None = None
        # (G, C) float64
        self._sums, self._numbers = torch.zeros(0, 1), torch.zeros(0, 1)
        self._changes = 0  # Rows put in since the sums were last taken over all values.

    def put(self, index: Tensor, values: Tensor, mask: Tensor) -> None:
        """Keeps values of samples, index (n,), values and mask (n, C); −1 is padding."""
        index, values, mask = each_once(index, values, mask)
        if not len(index):
            return
        change, new = self._change(index, values, mask)
        assert self.values is not None
        self.values[index] = torch.where(mask, values, self.values[index])
        self._changes += len(index)
        if self._changes >= len(self.groups):  # Differences leave a rounding behind.
            self._sum_up()
        else:
            self._sums.index_add_(0, self.groups[index], change)
            self._numbers.index_add_(0, self.groups[index], new)

    def with_rows(
        self, index: Tensor, values: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The groups of these rows, sorted (m,), and their means (m, C) with these values.

        Nothing is kept. NaN of a group without a value.
        """
        index, values, mask = each_once(index, values, mask)
        owners, row = torch.unique(self.groups[index], return_inverse=True)
        change, new = self._change(index, values, mask)
        sums = self._sums[owners].index_add_(0, row, change)
        return owners, sums / self._numbers[owners].index_add_(0, row, new)

    def all(self) -> Tensor:
        """The means of all groups, (G, C), NaN of one without a value."""
        return self._sums / self._numbers

    def of(self, groups: Tensor) -> Tensor:
        """The means of groups (m,), (m, C); NaN of one without a value."""
        if self.values is None:
            return torch.full((len(groups), 1), torch.nan, dtype=torch.float64)
        return self._sums[groups] / self._numbers[groups]

    def _change(
        self, index: Tensor, values: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the rows add to the sums and to the numbers of their groups, (n, C) each."""
        if self.values is None:
            shape = (len(self.groups), values.shape[1])
            self.values = torch.full(shape, torch.nan, dtype=torch.float64)
            self._sum_up()
        before = self.values[index]
        # A value that is there already is replaced, and its group's number stays.
        new = mask & before.isnan()
        return torch.where(mask, values - before.nan_to_num(), 0.0), new.double()

    def _sum_up(self) -> None:
        assert self.values is not None
        shape = (int(self.groups.max()) + 1, self.values.shape[1])
        self._sums, self._numbers = (
            torch.zeros(shape, dtype=torch.float64).index_add_(0, self.groups, rows)
            for rows in (self.values.nan_to_num(), (~self.values.isnan()).double())
        )
        self._changes = 0

    # In a checkpoint ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values; empty before the first value."""
        if self.values is None:
            return {}
        return {"values": self.values, "sums": self._sums, "changes": self._changes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from :meth:`state_dict`, to the bit.

        Raises:
            ValueError: of another number of samples.
        """
        if not state:
            return
        values = state["values"].clone()
        if values.dim() != 2 or len(values) != len(self.groups):
            raise ValueError(
                f"values of {tuple(values.shape)} for {len(self.groups)} samples"
            )
        self.values = values
        # For the groups' numbers; the sums of the state have the rounding of the run.
        self._sum_up()
        self._sums, self._changes = state["sums"].clone(), int(state["changes"])


class MeansOfConstraints:
    """The means of groups for every constraint whose bound is on them.

    Args:
        groups: (N,), the group of each sample.
        names: of the constraints.
    """

    def __init__(self, groups: Tensor, names: Sequence[str]) -> None:
        self.groups, self.names = groups, list(names)
        self._followed = {name: GroupMeans(groups) for name in names}
        # Of strict values, where there are any.
        self._judged: dict[str, GroupMeans] = {}

    def followed(self, name: str) -> GroupMeans:
        """Of what the weights follow."""
        return self._followed[name]

    def judged(self, name: str) -> GroupMeans:
        """Of what multipliers and reports follow."""
        return self._judged.get(name, self._followed[name])

    def put(self, measured: Measured) -> None:
        """Keeps what a step measured."""
        for name in self.names:
            index, mask = measured.index, measured.masks[name]
            self._followed[name].put(index, measured.followed[name], mask)
            # Without strict values both are the same, and are kept once.
            if measured.strict:
                judged = self._judged.setdefault(name, GroupMeans(self.groups))
                judged.put(index, measured.judged[name], mask)

    def instead_of_samples(self, measured: Measured, names: Iterable[str]) -> Measured:
        """A step that was put in, each row's violations being its group's means."""
        index = measured.index
        real = (index >= 0)[:, None]
        owners = self.groups[index.clamp(min=0)]
        followed, judged = dict(measured.followed), dict(measured.judged)
        for name in names:
            applies = measured.masks[name] & real
            followed[name] = torch.where(
                applies, self.followed(name).of(owners).nan_to_num(), 0
            )
            judged[name] = torch.where(
                applies, self.judged(name).of(owners).nan_to_num(), 0
            )
        return replace(measured, followed=followed, judged=judged)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values, by constraint."""
        followed = {name: means.state_dict() for name, means in self._followed.items()}
        judged = {name: means.state_dict() for name, means in self._judged.items()}
        return {"followed": followed, "judged": judged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from :meth:`state_dict`; of constraints that it has none of, from nothing."""
        for name, of in state["followed"].items():
            if name in self._followed:
                self._followed[name].load_state_dict(of)
        for name, of in state["judged"].items():
            if name in self._followed:
                self._judged[name] = GroupMeans(self.groups)
                self._judged[name].load_state_dict(of)


def means_of_groups(values: Tensor, groups: Tensor) -> Tensor:
    """The mean over each group's samples, (n, C) and (n,) to (G, C); NaN does not count.

    >>> means_of_groups(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([0, 0, 2]))[:, 0]
    tensor([2., nan, 5.])
    """
    shape = (int(groups.max()) + 1 if len(groups) else 0, values.shape[1])
    sums, numbers = (
        torch.zeros(shape, dtype=torch.float64).index_add_(0, groups, rows.double())
        for rows in (values.nan_to_num(), ~values.isnan())
    )
    return (sums / numbers).to(values.dtype)


def worst_mean(constraint: Constraint, residual: Tensor, groups: Tensor) -> Tensor:
    """(G,), the largest violation of each group's means, of residuals (n, sides·K); NaN of none."""
    means = constraint.reported(means_of_groups(residual, groups))
    return largest(means)


def largest(violation: Tensor) -> Tensor:
    """(n,), the largest of each row that is not NaN; NaN of a row without any."""
    worst = violation.masked_fill(violation.isnan(), -torch.inf).amax(1)
    return worst.masked_fill(worst == -torch.inf, torch.nan)


def each_once(
    index: Tensor, values: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Each sample once, as it came last, without padding and without what is not finite."""
    values = values.double()
    kept = (index != PADDING) & values.isfinite().all(1)
    index, values, mask = index[kept], values[kept], mask[kept]
    if len(set(index.tolist())) < len(index):
        last = last_visits(index)
        index, values, mask = index[last], values[last], mask[last]
    return index, values, mask


def rows_of_a_step(
    index: Tensor, values: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of all ranks, (n,) and (n, C), on the CPU; each rank may have another number.

    A collective: every rank calls it, one without rows too.
    """
    if number_of_ranks() == 1:
        return index, values.cpu().double(), mask.cpu()
    device = values.device
    shape = torch.tensor([len(index), values.shape[1]], device=device)
    most, columns = over_ranks(shape, "max").tolist()
    # Apple's GPUs have no float64; a position above 2²⁴ would not be exact there.
    wide = torch.float32 if device.type == "mps" else torch.float64
    rows = torch.zeros(most, 1 + 2 * columns, dtype=wide, device=device)
    # A gather takes as many rows of each rank, so those that are not there are padding.
    rows[:, 0] = PADDING
    if len(index):
        rows[: len(index)] = torch.cat(
            [index.to(device)[:, None].to(wide), values.to(wide), mask.to(wide)], dim=1
        )
    rows = rows_of_all_ranks(rows).cpu().double()
    positions, table, applies = rows.split([1, columns, columns], dim=1)
    return positions[:, 0].long(), table, applies.bool()
