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

import math
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .checkpoints import damaged
from .formulations import Formulation

if TYPE_CHECKING:
    from .module import PointwiseModule

IDLE = 0.05
"""Below this share in every epoch, the multipliers might as well not have been there."""
OVERSHOT = 0.5
"""Above this overshoot λ pushes past the bound more than towards it."""
PUSHED = 0.05
"""But only if so many of the entries are satisfied and pushed, not a few that are left over,"""
DEPTH = 0.1
"""and they are so far past the bound, measured by the mean distance at which entries started: at
an optimum v scatters around 0. Most toy runs end below a tenth of it; their second and
third epochs with η = 2α, which overshoot, are at .4 to .6."""
FEWEST_EPOCHS = 3
"""The first visit of a sample finds λ = 0, and the second what one step made of it."""
TOGETHER = 8192
"""Entries that are looked at together: the steps of small batches would pay for each operation."""


@dataclass
class Pull:
    """Sums over the dual steps of an epoch."""

    entries: float = 0.0
    total: float = 0.0
    """|p(λ)|; the next three are parts of it."""
    of_multipliers: float = 0.0
    on_satisfied: float = 0.0
    on_multiplied: float = 0.0
    """Of the entries with λ ≠ 0."""
    pushed: float = 0.0
    """Entries that are satisfied and pulled."""
    depth: float = 0.0
    """|p(λ)·v| of these."""
    distance: float = 0.0
    """|v| of all entries."""

    def __add__(self, other: Pull) -> Pull:
        return Pull(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def figures(self) -> dict[str, float]:
        """share and overshoot; none where nothing was pulled."""
        if not self.total > 0:
            return {}
        share, overshoot = self.of_multipliers / self.total, self.on_satisfied / self.total
        return {"share": share, "overshoot": overshoot}


NEVER = (0.0, 0.0, 0.0)
NUMBERS = len(astuple(Pull())) + len(NEVER)


def slope(formulation: Formulation, violation: Tensor, multiplier: Tensor) -> Tensor:
    """p = ∂ψ/∂v, elementwise, of any formulation."""
    with torch.enable_grad():
        leaf = violation.detach().clone().requires_grad_()
        psi = formulation.lagrangian(leaf, multiplier.detach()).sum()
        return torch.autograd.grad(psi, leaf)[0] if psi.requires_grad else torch.zeros_like(leaf)


def pull_of(
    formulation: Formulation,
    violation: Tensor,
    multiplier: Tensor,
    mask: Tensor,
    judged: Tensor | None = None,
) -> Pull:
    """The sums over some entries; violation, multiplier and mask, which says who counts, alike.

    judged: strict violations, which say what is satisfied; None where there are no others.
    """
    violation, multiplier = violation[mask].double(), multiplier[mask].double()
    with_and_without = torch.stack([multiplier, torch.zeros_like(multiplier)])
    pull, without = slope(formulation, violation.expand(2, -1), with_and_without)
    violation = violation if judged is None else judged[mask].double()
    side, size = pull.sign(), pull.abs()
    added = side * (pull - without)
    satisfied = side * violation < 0
    parts = [
        size,
        torch.minimum(added.clamp(min=0), size),
        torch.where(satisfied, size, 0),
        torch.where(multiplier != 0, size, 0),
        satisfied.to(size),
        torch.where(satisfied, size * violation.abs(), 0),
        violation.abs(),
    ]
    return Pull(float(len(size)), *torch.stack(parts).sum(1).tolist())


class PullShares:
    """Share and overshoot of every constraint that has multipliers, epoch by epoch.

    A step costs O(batch); of an epoch a few sums are kept, the same on every rank.
    """

    def __init__(self) -> None:
        self._number = -1
        """The epoch that the sums are of: told by the steps, since a resume skips hooks."""
        self._epoch: dict[str, Pull] = {}
        self._past: dict[str, tuple[float, float, float]] = {}
        """Of the epochs before: how many pulled, the largest share, the mean |v| of the first."""
        self._pending: dict[str, tuple[Formulation, list[tuple[Tensor, ...]]]] = {}

    def add(self, module: PointwiseModule) -> None:
        """Adds the dual steps of the module's last training step, by the λ that pulled in it."""
        if module.current_epoch != self._number:
            self._past = self._with_this_epoch()
            self._number, self._epoch = module.current_epoch, {}
        for name, step in module.dual_steps.items():
            formulation = module.in_force(name)
            multiplier = step.after if module.order == "dual_first" else step.before
            if name in self._pending and self._pending[name][0] != formulation:
                self._settle(name)
            _, pending = self._pending.setdefault(name, (formulation, []))
            if step.surrogate is None:
                pending.append((step.violation, multiplier, step.mask))
            else:
                pending.append((step.surrogate, multiplier, step.mask, step.violation))
            if len(pending) * step.mask.numel() >= TOGETHER:
                self._settle(name)

    def figures(self) -> dict[str, dict[str, float]]:
        """``share`` and ``overshoot`` by constraint, of this epoch so far or the last one.

        None of a constraint that pulled nothing.
        """
        self._settle()
        found = {name: pull.figures() for name, pull in self._epoch.items()}
        return {name: figures for name, figures in found.items() if figures}

    def warnings(self, formulations: Mapping[str, Formulation]) -> Iterator[str]:
        """What to say at the end of a fit.

        Of a constraint whose multipliers carried next to nothing, or push samples that are past
        the bound. Nothing where η = 0, which asks for a penalty, nor of a fit too short to tell.
        """
        past = self._with_this_epoch()
        for name, pull in self._epoch.items():
            formulation, figures = formulations.get(name), pull.figures()
            epochs, largest, start = past[name]
            if formulation is None or not formulation.dual_lr:
                continue
            if not figures or epochs < FEWEST_EPOCHS:
                continue
            # Where few of those that pull were visited before, no η could have helped.
            if largest < IDLE and pull.on_multiplied >= pull.total / 2:
                yield (
                    f'The multipliers of "{name}" carried at most {100 * largest:.2g} % of the '
                    f"pull in each of {epochs:.0f} epochs: this run was that of a fixed penalty "
                    '(of Pointwise, Penalty(weight=alpha, shape="squared_hinge")). Raise dual_lr '
                    f"({_settings(formulation)}), or train for more epochs; docs/multipliers.md "
                    "says how they grow."
                )
            overshoot = figures["overshoot"]
            if (
                formulation.scope == "sample"  # A batch's statistic varies from batch to batch.
                and overshoot > OVERSHOT
                and pull.pushed > PUSHED * pull.entries
                and pull.depth > DEPTH * start * pull.on_satisfied
            ):
                yield (
                    f'In the last epoch {100 * overshoot:.0f} % of the pull of "{name}" fell on '
                    "samples that satisfied it already: λ overshoots. Lower dual_lr "
                    f"({_settings(formulation)}), or train for more epochs: a satisfied sample's "
                    "λ falls at every visit."
                )

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and by constraint its sums, then what is kept of the epochs before."""
        self._settle()
        sums = {
            name: [*astuple(self._epoch.get(name, Pull())), *self._past.get(name, NEVER)]
            for name in {**self._epoch, **self._past}
        }
        return {"epoch": self._number, "sums": sums}

    def load_state_dict(self, state: Any) -> None:
        """
        Raises:
            TrainingError: it is not what ``state_dict`` gives.
        """
        number, sums = map(state.get, ("epoch", "sums")) if isinstance(state, dict) else (0, None)
        if type(number) is not int or not isinstance(sums, dict):
            raise damaged("'pull_shares'")
        for name, numbers in sums.items():
            valid = isinstance(name, str) and type(numbers) is list and len(numbers) == NUMBERS
            if not valid or not all(type(x) is float and 0 <= x < math.inf for x in numbers):
                raise damaged("'pull_shares'")
        self._number, self._pending = number, {}
        self._epoch = {name: Pull(*numbers[:-3]) for name, numbers in sums.items()}
        self._past = {name: (n[-3], n[-2], n[-1]) for name, n in sums.items()}

    def _with_this_epoch(self) -> dict[str, tuple[float, float, float]]:
        self._settle()
        past = dict(self._past)
        for name, pull in self._epoch.items():
            epochs, largest, start = past.get(name, NEVER)
            start = start or pull.distance / max(1.0, pull.entries)
            share = pull.figures().get("share")
            pulled = (epochs, largest) if share is None else (epochs + 1, max(largest, share))
            past[name] = (*pulled, start)
        return past

    def _settle(self, *names: str) -> None:
        """Adds what is pending, of all constraints if none is named, to the sums."""
        for name in names or list(self._pending):
            formulation, pending = self._pending.pop(name)
            pull = pull_of(formulation, *map(torch.cat, zip(*pending, strict=True)))
            self._epoch[name] = self._epoch.get(name, Pull()) + pull


def _settings(formulation: Formulation) -> str:
    """η as it is, beside the classical step."""
    alpha = getattr(formulation, "alpha", None)
    classical = f"; 2·alpha is {2 * alpha:g}" if isinstance(alpha, float) else ""
    return f'here {formulation.dual_lr}; "auto" is the classical step, η = 2α{classical}'
