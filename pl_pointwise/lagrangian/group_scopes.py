"""What ψ acts on where samples are of groups: on each sample, or on each group's mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..constraint import Constraint
from ..errors import TrainingError
from ..formulations import Formulation
from .group_means import MeansOfConstraints, rows_of_a_step
from .scopes import Context, PerSample, Scope, Unweighted
from .terms import DualStep, Measured, Terms, last_visits


class PerGroup(PerSample):
    """ψ of each sample's violation and its group's multipliers, which follow the batch's mean.

    The bound is on each sample (``Constraint(..., each_sample=True)``), and its group shares λ.
    """

    def rows(self, index: Tensor, violation: Tensor) -> Tensor | None:
        return super().rows(self.owners(index), violation)

    def owners(self, index: Tensor) -> Tensor:
        """The groups of the samples index (b,)."""
        return owners_of(index, self.context.groups)

    def step(self, visits: Sequence[list[Tensor]]) -> DualStep | None:
        """On a row for each group: the mean of its samples' violations, and λ, alike within it."""
        index, judged, mask, multiplier = map(torch.cat, zip(*visits, strict=True))
        owners = self.owners(index)
        groups, row = torch.unique(owners, return_inverse=True)
        sums = torch.zeros(len(groups), judged.shape[1], dtype=judged.dtype)
        number = sums.index_add(0, row, mask.to(judged.dtype))
        total = sums.index_add(0, row, torch.where(mask, judged, 0))
        mean = total / number.clamp(min=1)
        of_groups = [groups, mean, number > 0, multiplier[last_visits(owners)]]
        return super().step([of_groups])


def owners_of(index: Tensor, groups: Tensor | None) -> Tensor:
    """The groups of the samples index (b,); −1 of padding."""
    assert groups is not None
    if len(index) and int(index.max()) >= len(groups):
        raise TrainingError(
            f"Sample index {int(index.max())} is outside the {len(groups):,} of groups."
        )
    return torch.where(index < 0, index, groups[index.clamp(min=0)])


class OnMeans(Scope):
    """ψ of each group's mean violation: see group_means.py."""

    def __init__(
        self,
        name: str,
        constraint: Constraint,
        formulation: Formulation,
        context: Context,
    ) -> None:
        super().__init__(name, constraint, formulation, context)
        # Of the losses of this step so far.
        self._rows: list[tuple[Tensor, Tensor, Tensor]] = []
        # Groups of this step, sorted, and their means.
        self._means: tuple[Tensor, Tensor] | None = None

    @property
    def means(self) -> MeansOfConstraints:
        """Those of all groups, as the steps until now left them."""
        assert self.context.means is not None
        return self.context.means

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
        index = torch.zeros(0, dtype=torch.long)
        values = torch.zeros(0, 1, device=device)
        mask = torch.zeros(0, 1, dtype=torch.bool, device=device)
        # A rank whose samples were all left out takes part in the collective with no rows.
        if terms:
            index = torch.cat(list(indices))
            values = torch.cat([of.followed[self.name].detach() for of in terms])
            mask = torch.cat([of.masks[self.name] for of in terms])
        owners_of(index, self.context.groups)  # Refuses positions outside.
        rows = [*self._rows, rows_of_a_step(index, values, mask)]
        self._rows = rows if keep else self._rows
        index, values, mask = map(torch.cat, zip(*rows, strict=True))
        self._means = self.means.followed(self.name).with_rows(index, values, mask)

    def forget(self) -> None:
        """What was seen of a step that is over, taken or not."""
        self._rows, self._means = [], None

    def means_of(self, index: Tensor, terms: Terms) -> Tensor:
        """The means of the groups of samples that were seen, as their violations (b, sides·K)."""
        assert self._means is not None
        groups, means = self._means
        violation, mask = terms.followed[self.name], terms.masks[self.name]
        if not len(groups):
            return torch.zeros_like(violation)
        # Padding is of no group: whatever row it gets, its mask leaves it out.
        owners = owners_of(index, self.context.groups)
        row = torch.searchsorted(groups, owners).clamp(max=len(groups) - 1)
        of_samples = means[row].nan_to_num()
        of_samples = of_samples.to(violation.device, violation.dtype, non_blocking=True)
        return torch.where(mask, of_samples, 0)

    def loss(self, terms: Terms, multiplier: Tensor | None, count: Tensor) -> Tensor:
        """Its value is that of ψ at the means, its gradient the mean of F_g ∇v."""
        violation, mean = terms.followed[self.name], terms.means[self.name]
        multiplier = torch.zeros_like(mean) if multiplier is None else multiplier
        force = self.formulation.slope(mean, multiplier).detach()
        psi = self.formulation.lagrangian(mean, multiplier)
        return self._mean(psi + force * (violation - violation.detach()), terms, count)


class UnweightedMeans(OnMeans, Unweighted):
    """ψ of each group's mean violation, without a multiplier."""


class PerGroupMean(OnMeans, PerGroup):
    """ψ of each group's mean violation and its multipliers."""

    def visit(self, measured: Measured) -> list[Tensor] | None:
        """The samples that a step had, (n,)."""
        real = measured.index[measured.index >= 0]
        return [real] if len(real) else None

    def step(self, visits: Sequence[list[Tensor]]) -> DualStep | None:
        """Of the groups that the window had samples of, by the part of them that it had."""
        samples = torch.unique(torch.cat([visit[0] for visit in visits]))
        groups, number = torch.unique(self.owners(samples), return_counts=True)
        judged = self.means.judged(self.name)
        part = (number / judged.sizes[groups])[:, None]
        mean = judged.of(groups)
        # A group may have been seen in samples alone that the constraint does not apply to.
        known, mean = ~mean.isnan(), mean.nan_to_num()
        multiplier = self.multipliers.table(self.name)[groups].double()
        stepped = self.formulation.ascend(mean, multiplier, part.double())
        stepped = torch.where(known, stepped, multiplier)
        self.multipliers.table(self.name)[groups] = stepped.float()
        return DualStep(groups, mean, known, multiplier, stepped)
