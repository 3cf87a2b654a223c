"""Losses of fixed weights and of cooper's multipliers, of all members at once.

cooper 1.0.1: the loss is mean ℓ₀ + Σ λv over the batch (a sum), and λ ← (λ + rate·v)₊ for the
samples of the batch, both at the weights and the λ of before the step. Augmented: Σ ((λ + cv)₊² −
λ²)/2c, of an equality Σ λv + cv²/2, and λ ← (λ + cv)₊. tests/benchmarks compare both with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .methods import COOPER, Rival
from .task import Task, Terms


class Rivals:
    """Fixed weights and cooper's λ of M members.

    Args:
        task: its constraints, membership and groups.
        members: a method of each.
    """

    def __init__(self, task: Task, members: Sequence[Rival]) -> None:
        self.task = task
        self.number = len(members)
        names = list(task.constraints)
        weights = {
            shape: torch.zeros(len(members), len(names))
            for shape in ("hinge", "squared")
        }
        self.rate = torch.zeros(len(members))
        self.augmented = torch.tensor([each.shape == "cooper AL" for each in members])
        self.of_group = torch.tensor([each.of_group for each in members])
        for place, each in enumerate(members):
            if each.shape in COOPER:
                self.rate[place] = each.numbers[0]
            else:
                weights[each.shape][place] = torch.tensor(each.numbers).expand(
                    len(names)
                )
        self.weights = {
            name: {s: w[:, k] for s, w in weights.items()}
            for k, name in enumerate(names)
        }
        # (M, rows, K), rows of samples or of groups.
        self.multipliers: dict[str, Tensor] = {}
        self._visits: list[tuple[str, Tensor, Tensor]] = []

    def loss(self, terms: Terms, index: Tensor) -> Tensor:
        """(M,): of each member; index (M, B)."""
        objective, values = terms
        loss = _mean(objective, self.task.applies("objective", index))
        self._visits = []
        for name, violation in self.task.residuals(values).items():
            applies = self.task.applies(name, index)
            loss = loss + self._of_samples(name, violation, applies)
            if self.task.groups is not None:
                owners = self.task.groups[index]
                number = int(self.task.groups.max()) + 1
                violation, applies = group_means(violation, applies, owners, number)
                loss = loss + self._of_groups(name, violation, applies)
                index_of_rows = torch.arange(number).expand(self.number, -1)
            else:
                index_of_rows = index
            loss = loss + self._of_multipliers(name, violation, applies, index_of_rows)
        return loss

    def step(self) -> None:
        """λ of the last loss's samples, after the step of the weights."""
        for name, index, violation in self._visits:
            table = self.multipliers[name]
            stepped = table.gather(1, index) + self.rate[:, None, None] * violation
            if self.task.constraints[name].equals is None:
                stepped = stepped.clamp(min=0)
            table.scatter_(1, index, stepped)

    def _of_samples(
        self, name: str, violation: Tensor, applies: Tensor | None
    ) -> Tensor:
        return self._penalty(name, violation, applies) * ~self.of_group

    def _of_groups(self, name: str, violation: Tensor, applies: Tensor) -> Tensor:
        return self._penalty(name, violation, applies) * self.of_group

    def _penalty(self, name: str, violation: Tensor, applies: Tensor | None) -> Tensor:
        equal = self.task.constraints[name].equals is not None
        excess = violation.abs() if equal else violation.relu()
        weights = self.weights[name]
        hinge = _mean(excess.mean(2), applies)
        squared = _mean(excess.square().mean(2), applies)
        return weights["hinge"] * hinge + weights["squared"] * squared

    def _of_multipliers(
        self, name: str, violation: Tensor, applies: Tensor | None, index: Tensor
    ) -> Tensor:
        """What λ adds to the loss, summed over a batch, (M,)."""
        if not self.rate.any():
            return violation.new_zeros(self.number)
        columns = violation.shape[2]
        if name not in self.multipliers:
            groups = self.task.groups
            rows = self.task.samples if groups is None else int(groups.max()) + 1
            self.multipliers[name] = torch.zeros(self.number, rows, columns)
        if applies is not None:
            violation = torch.where(applies[..., None], violation, 0)
        places = index[..., None].expand(-1, -1, columns)
        self._visits.append((name, places, violation.detach()))
        multipliers = self.multipliers[name].gather(1, places)
        coefficient = (self.rate * self.augmented)[:, None, None]
        pushed = violation
        if self.task.constraints[name].equals is None:
            # ((λ + cv)₊² − λ²)/2c is λu + cu²/2 with u = max(v, −λ/c).
            lowest = -multipliers / coefficient.clamp(min=1e-30)
            below = (violation < lowest) & self.augmented[:, None, None]
            pushed = torch.where(below, lowest, violation)
        return (multipliers * pushed + coefficient / 2 * pushed.square()).sum((1, 2))


def group_means(
    violation: Tensor, applies: Tensor | None, owners: Tensor, number: int
) -> tuple[Tensor, Tensor]:
    """The mean of each group's values in a batch, (M, G, K), and whether it has any, (M, G).

    violation: (M, B, K). applies: (M, B). owners: (M, B), the group of each sample.
    """
    present = torch.ones_like(owners, dtype=violation.dtype)
    if applies is not None:
        present = applies.to(violation.dtype)
        violation = torch.where(applies[..., None], violation, 0)
    columns = violation.shape[2]
    places = owners[..., None].expand(-1, -1, columns)
    zeros = violation.new_zeros(len(owners), number, columns)
    sums = zeros.scatter_add(1, places, violation)
    counts = violation.new_zeros(len(owners), number).scatter_add(1, owners, present)
    return sums / counts.clamp(min=1)[..., None], counts > 0


def _mean(values: Tensor, applies: Tensor | None) -> Tensor:
    """(M, B) ↦ (M,): over the samples that a term applies to, 0 where there are none."""
    if applies is None:
        return values.mean(1)
    return torch.where(applies, values, 0).sum(1) / applies.sum(1).clamp(min=1)
