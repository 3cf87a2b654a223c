"""What ψ acts on, and so whose λ is: here the violations of samples, each with a λ or without.

Those of groups are in group_scopes.py, that of a batch's statistic in batch_scope.py. Shapes as in
terms.py; what belongs to a side has (sides,).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..constraint import Constraint
from ..errors import TrainingError
from ..formulations import Formulation
from ..multipliers import Multipliers
from .group_means import MeansOfConstraints
from .shares import Share
from .terms import DualStep, Measured, Terms, carries, last_visits, weights


@dataclass(frozen=True)
class Context:
    """What the scopes of all constraints have in common."""

    multipliers: Multipliers  #: λ of all constraints
    thresholds: dict[str, Tensor]  #: t by constraint, which a scope replaces
    dual_first: bool  #: whether the step of the weights uses λ after this step's update
    groups: Tensor | None  #: (N,), of each sample; None where λ is a sample's
    means: MeansOfConstraints | None  #: of these groups, where bounds are on them
    shares: Mapping[str, Share]  #: of the constraints that a share may violate


class Scope(ABC):
    """What the ψ of one constraint acts on.

    A step asks in this order: ``rows`` of a micro-batch, its ``loss``, and of the whole step, once
    the weights have taken it, ``visit``; at the end of a window of steps ``step``.
    """

    dimensions: int | None = None
    """Of the table of multipliers: 2 of (N, sides·K), 0 where (sides,) stands for the batch."""

    def __init__(
        self,
        name: str,
        constraint: Constraint,
        formulation: Formulation,
        context: Context,
    ) -> None:
        self.name = name
        self.sides = constraint.sides
        self.formulation = formulation  # That in force, from the first step on.
        self.context = context
        self.multipliers = context.multipliers

    @abstractmethod
    def rows(self, index: Tensor, violation: Tensor) -> Tensor | None:
        """λ_t of the samples index (b,), as their violations; None where they have none."""

    @abstractmethod
    def loss(self, terms: Terms, multiplier: Tensor | None, count: Tensor) -> Tensor:
        """A micro-batch's share of mean ψ(v, λ), a scalar; ``count`` samples over all ranks."""

    @abstractmethod
    def visit(self, measured: Measured) -> list[Tensor] | None:
        """What the dual step needs of a step; None where it has nothing to do."""

    @abstractmethod
    def step(self, visits: Sequence[list[Tensor]]) -> DualStep | None:
        """Moves λ by what the steps of a window left; None where it has no λ."""

    def _mean(self, psi: Tensor, terms: Terms, count: Tensor) -> Tensor:
        """A micro-batch's share of the mean of ψ over the samples that it applies to."""
        mask = terms.masks[self.name]
        # Without masks there is nothing to leave out, and no work for it in the graph.
        psi = psi if terms.whole else torch.where(mask, psi, 0)
        if mask.shape[1] == self.sides:
            return psi.sum() / count
        return (psi * (weights(mask, self.sides, psi.dtype) / count)).sum()


class Unweighted(Scope):
    """ψ of each sample's violation, without a multiplier."""

    def rows(self, index: Tensor, violation: Tensor) -> Tensor | None:
        return None

    def loss(self, terms: Terms, multiplier: Tensor | None, count: Tensor) -> Tensor:
        violation = terms.followed[self.name]
        psi = self.formulation.lagrangian(violation, torch.zeros_like(violation))
        return self._mean(psi, terms, count)

    def visit(self, measured: Measured) -> list[Tensor] | None:
        return None

    def step(self, visits: Sequence[list[Tensor]]) -> DualStep | None:
        return None


class PerSample(Scope):
    """ψ of each sample's violation and its own multipliers."""

    dimensions = 2

    def rows(self, index: Tensor, violation: Tensor) -> Tensor | None:
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
                f"samples: {self.multipliers.words.index} is the position in it."
            ) from error
        # From memory that is not pinned a copy to a GPU makes the host wait for it.
        rows = rows.pin_memory() if violation.is_cuda else rows
        return rows.to(violation.device, violation.dtype, non_blocking=True)

    def loss(self, terms: Terms, multiplier: Tensor | None, count: Tensor) -> Tensor:
        assert multiplier is not None
        violation = terms.followed[self.name]
        if self.context.dual_first:
            multiplier = self.formulation.ascend(terms.judged[self.name], multiplier)
        psi = self.formulation.lagrangian(violation, multiplier)
        return self._mean(psi, terms, count)

    def visit(self, measured: Measured) -> list[Tensor] | None:
        """Of samples it applies to the index (n,), and violation, mask and λ (n, sides·K)."""
        name = self.name
        mask = measured.masks[name]
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

    def step(self, visits: Sequence[list[Tensor]]) -> DualStep | None:
        parts = visits[0]
        if len(visits) > 1:
            parts = list(map(torch.cat, zip(*visits, strict=True)))
        # A sample that came twice within the window steps once, with its last violation.
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
        return self.formulation.ascend(judged, multiplier)


class PerSampleButShare(PerSample):
    """The same, but for the samples that are exempt: see shares.py."""

    def _mean(self, psi: Tensor, terms: Terms, count: Tensor) -> Tensor:
        exempt = terms.exempt[self.name][:, None]
        return super()._mean(torch.where(exempt, 0, psi), terms, count)

    def visit(self, measured: Measured) -> list[Tensor] | None:
        """Beside them whether each sample is exempt, bool (n,)."""
        visit = super().visit(measured)
        share = self.context.shares[self.name]
        return None if visit is None else [*visit, share.exempt(visit[0])]

    def _ascended(self, parts: Sequence[Tensor]) -> Tensor:
        multiplier, exempt = parts[3], parts[4][:, None]
        return torch.where(exempt, multiplier / 2, super()._ascended(parts))
