"""How much of the pull of a constraint is its multipliers': what they add to a fixed penalty.

The pull on an entry (a sample and a column, or the one statistic of a batch) is p(λ) = ∂ψ/∂v, by
which the step of the weights lowers its violation v: (λ + 2αv)₊ for Pointwise; β/(α+β) times that,
or at most β, for Relaxed. Without its multiplier it would be p(0): a squared hinge of weight α.
With σ the sign of p(λ), which is 1 but for equalities, over the carried entries of an epoch,

    share      Σ min(σ(p(λ) − p(0))₊, |p(λ)|) / Σ |p(λ)|        λ/(λ + 2αv) of one that violates
    overshoot  Σ |p(λ)| over those with σv < 0 / Σ |p(λ)|       satisfied, and λ still pushes

A satisfied entry is pulled by λ alone, and of a standard Lagrangian (α None) every entry is: its
share is 1. A ratio of sums, so that an entry counts as much as it pulls; of an entry that several
steps of the weights visited before the dual step, as of that step, the last visit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from .constraint import Constraint
from .formulations import Formulation
from .step import DualStep

# A constraint is said to be unmet at the end of a fit where each of these is exceeded.
FEW = 0.05
"""The share of violated values."""
SHALLOW = 0.1
"""Their mean depth, of the deepest epoch's: at an optimum v scatters around 0."""
AT_REST = 0.01
"""How much λ grew, of itself: those of a relaxation come to rest."""


@dataclass
class Pull:
    """Sums over the dual steps of an epoch."""

    total: float = 0.0
    """|p(λ)|; the next two are parts of it."""
    of_multipliers: float = 0.0
    on_satisfied: float = 0.0
    entries: float = 0.0
    violated: float = 0.0
    """Entries with a reported violation above 0."""
    depth: float = 0.0
    """The reported violation of these."""
    before: float = 0.0
    """|λ| before the dual step, and after it."""
    after: float = 0.0

    def __add__(self, other: Pull) -> Pull:
        return Pull(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def figures(self) -> dict[str, float]:
        """share and overshoot; none where nothing was pulled."""
        if not self.total > 0:
            return {}
        share, overshoot = self.of_multipliers / self.total, self.on_satisfied / self.total
        return {"share": share, "overshoot": overshoot}


def pull_of(
    formulation: Formulation,
    violation: Tensor,
    multiplier: Tensor,
    judged: Tensor | None = None,
) -> Pull:
    """|p| and its parts, summed over entries: violation and multiplier, (n,) each.

    judged: strict violations, which say what is satisfied; None where there are no others.
    """
    violation, multiplier = violation.double(), multiplier.double()
    with_and_without = torch.stack([multiplier, torch.zeros_like(multiplier)]).detach()
    with torch.enable_grad():
        leaf = violation.expand(2, -1).detach().clone().requires_grad_()
        psi = formulation.lagrangian(leaf, with_and_without).sum()
        slopes = torch.autograd.grad(psi, leaf)[0] if psi.requires_grad else torch.zeros_like(leaf)
    pull, without = slopes
    side, size = pull.sign(), pull.abs()
    added = torch.minimum((side * (pull - without)).clamp(min=0), size)
    satisfied = side * (violation if judged is None else judged.double()) < 0
    return Pull(*torch.stack([size, added, torch.where(satisfied, size, 0)]).sum(1).tolist())


class PullShares:
    """Share and overshoot of every constraint that has multipliers, epoch by epoch.

    A step costs O(batch); of an epoch a few sums are kept, the same on every rank.
    """

    def __init__(self) -> None:
        self._number = -1
        """The epoch that the sums are of: told by the steps, since a resume skips hooks."""
        self._epoch: dict[str, Pull] = {}
        self._deepest: dict[str, float] = {}
        """Of the epochs before: the largest mean of (v)₊."""

    def add(
        self,
        epoch: int,
        steps: Mapping[str, DualStep],
        formulations: Mapping[str, Formulation],
        constraints: Mapping[str, Constraint],
        dual_first: bool,
    ) -> None:
        """Adds the dual steps of a training step, by the λ that pulled in it.

        formulations: as they were in force.
        """
        if epoch != self._number:
            self._deepest = self._with_this_epoch()
            self._number, self._epoch = epoch, {}
        for name, step in steps.items():
            mask, judged = step.mask, step.judged[step.mask]
            multiplier = step.after if dual_first else step.before
            pull = pull_of(formulations[name], step.followed[mask], multiplier[mask], judged)
            excess = constraints[name].reported(judged).double().clamp(min=0)
            pull.entries = float(len(excess))
            pull.violated, pull.depth = float((excess > 0).sum()), float(excess.sum())
            pull.before = float(step.before[mask].double().abs().sum())
            pull.after = float(step.after[mask].double().abs().sum())
            self._epoch[name] = self._epoch.get(name, Pull()) + pull

    def figures(self) -> dict[str, dict[str, float]]:
        """``share`` and ``overshoot`` by constraint, of this epoch so far or the last one.

        None of a constraint that pulled nothing.
        """
        found = {name: pull.figures() for name, pull in self._epoch.items()}
        return {name: figures for name, figures in found.items() if figures}

    def warnings(self, formulations: Mapping[str, Formulation]) -> Iterator[str]:
        """What to say at the end of a fit: constraints that are not met, of which λ still grows."""
        for name, pull in self._epoch.items():
            depth = pull.depth / max(1.0, pull.entries)
            deep = depth > SHALLOW * self._deepest.get(name, 0.0)
            grows = pull.after - pull.before > AT_REST * pull.after
            if name in formulations and pull.violated > FEW * pull.entries and deep and grows:
                yield (
                    f"In the last epoch {100 * pull.violated / pull.entries:.0f} % of the values "
                    f'of "{name}" still violated it, by {pull.depth / pull.violated:.2g} on '
                    "average, and their multipliers still grew. Train for more epochs; where that "
                    "does not help, the tolerance is out of reach: take a looser one, or Relaxed."
                )

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and by constraint its sums and the depth of the epochs before."""
        sums = {
            name: [*astuple(self._epoch.get(name, Pull())), self._deepest.get(name, 0.0)]
            for name in {**self._epoch, **self._deepest}
        }
        return {"epoch": self._number, "sums": sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._number, sums = int(state["epoch"]), state["sums"]
        self._epoch = {name: Pull(*numbers[:-1]) for name, numbers in sums.items()}
        self._deepest = {name: numbers[-1] for name, numbers in sums.items()}

    def _with_this_epoch(self) -> dict[str, float]:
        deepest = dict(self._deepest)
        for name, pull in self._epoch.items():
            depth = pull.depth / max(1.0, pull.entries)
            deepest[name] = max(deepest.get(name, 0.0), depth)
        return deepest
