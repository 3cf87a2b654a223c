"""At most a share of the samples may violate a bound: which ones are exempt.

With a share a of N samples, at most k = ⌊a·N⌋ of v_1 … v_N may be above 0: the (k+1)-th largest is
at most 0. At a local optimum of that problem the k samples of the largest v are as if they had no
bound, and all others are bounded as ever. So in each step

    E = the k samples with the largest v at their last visit,
    a sample of E:    no force; at each visit its λ is halved;
    every other one:  ψ(v, λ), as without a share, λ too.

E holds itself: an exempt sample is pushed by nothing, so its v stays among the largest, and where
one that is bounded comes to lie above it for good, the two change places. That finds a local
optimum: which k are exempt is a choice of samples, and it begins with the worst.

Those that change places lie on either side of the bound, and would end there, up to a tenth more
than k of them. So E aims inside, as a multiplier does: where V samples violate, it is smaller by
V − k + ⌊k/20⌋, and by no more than ⌊k/10⌋ + 1. At rest about 19 of 20 allowed ones violate.

The rank is by last values, of the steps before this one: ranks and micro-batches know E without
another pass or a word between them. N counts the samples that the constraint applied to so far. A
sample counts once, by the largest of its values, of both sides of an interval.

The Lagrangian remains the mean over all samples that the constraint applies to: those of E add 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..constraint import Constraint
from ..errors import TrainingError
from ..formulations import Formulation, Pointwise, Relaxed
from .group_means import each_once
from .terms import Measured

RANKINGS = 64
"""Of all samples, at most in an epoch: each takes time in proportion to their number."""


def allowed(share: float, samples: int) -> int:
    """How many of so many samples may violate.

    >>> allowed(0.05, 400), allowed(0.29, 100), allowed(0.05, 19)
    (20, 29, 0)
    """
    return math.floor(share * samples + 1e-9)  # 0.29 · 100 is below 29 in binary.


def inside(allowed: int, violating: int) -> int:
    """How many fewer than those allowed are exempt, where so many violate.

    >>> inside(20, 18), inside(20, 20), inside(20, 200), inside(3, 3)
    (0, 1, 3, 0)
    """
    spare = allowed // 20
    most = min(allowed, 1 + allowed // 10)
    return max(0, min(violating + spare - allowed, most))


class Share:
    """Last values of the samples of one constraint, and which of them are exempt.

    >>> share = Share(samples=4, share=0.5)
    >>> violation = torch.tensor([[3.0], [-1.0], [1.0], [2.0]])
    >>> share.put(torch.arange(4), violation, violation.isfinite())
    >>> share.exempt(torch.tensor([0, 2, -1]))
    tensor([ True, False, False])

    Args:
        samples: N.
        share: of them that may violate.
    """

    def __init__(self, samples: int, share: float) -> None:
        self.share = share
        self.values = torch.full((samples,), torch.nan, dtype=torch.float64)
        self._exempt = torch.zeros(samples, dtype=torch.bool)
        self._rows = 0  # Put in since the samples were ranked.

    def put(self, index: Tensor, violation: Tensor, mask: Tensor) -> None:
        """Keeps values of samples, index (n,), violation and mask (n, sides·K); −1 is padding."""
        index, violation, mask = each_once(index, violation, mask)
        applies = mask.any(1)
        if not applies.any():
            return
        worst = violation.masked_fill(~mask, -torch.inf).amax(1)
        self.values[index[applies]] = worst[applies]
        self._rows += int(applies.sum())
        # Not in every step: a ranking takes time in proportion to all samples.
        if self._rows >= len(self.values) / RANKINGS:
            self._rank()

    def exempt(self, index: Tensor) -> Tensor:
        """Which of the samples index (b,) have no force, bool (b,)."""
        return self._exempt[index.clamp(min=0)] & (index >= 0)

    def _rank(self) -> None:
        known = ~self.values.isnan()
        number = allowed(self.share, int(known.sum()))
        ranked = self.values.masked_fill(~known, -torch.inf)
        number -= inside(number, int((ranked > 0).sum()))
        self._exempt = torch.zeros_like(known)
        self._exempt[ranked.argsort(descending=True, stable=True)[:number]] = True
        self._rows = 0

    # In a checkpoint ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values; in place of a copy the tensors themselves."""
        return {"values": self.values, "exempt": self._exempt, "rows": self._rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from :meth:`state_dict`, to the bit.

        Raises:
            ValueError: of another number of samples.
        """
        if state["values"].shape != self.values.shape:
            raise ValueError(
                f"{len(state['values'])} values for {len(self.values)} samples"
            )
        self.values = state["values"].clone()
        self._exempt = state["exempt"].clone()
        self._rows = int(state["rows"])


def without_exempt(measured: Measured, exempt: Mapping[str, Tensor]) -> Measured:
    """A step in which a constraint does not apply to its exempt samples, bool (R,) by name."""
    if not exempt:
        return measured
    masks = dict(measured.masks)
    for name, rows in exempt.items():
        masks[name] = masks[name] & ~rows[:, None]
    return replace(measured, masks=masks, whole=False)


def refuse_shares(
    constraints: Mapping[str, Constraint],
    formulations: Mapping[str, Formulation],
    groups: Tensor | None,
) -> None:
    """Refuses a share under a formulation or with groups that have no samples to exempt."""
    for name, constraint in constraints.items():
        if constraint.share is None:
            continue
        if groups is not None:
            raise TrainingError(
                f'Constraint "{name}": share={constraint.share:g} is of samples, and with groups '
                "a bound is on their means. Leave groups out, or share."
            )
        formulation = formulations.get(name)
        if formulation is None:  # It is only measured, and its share is reported.
            continue
        # Pointwise(memory=False) has no λ of a sample either.
        if formulation.scope != "sample" or not isinstance(
            formulation, (Pointwise, Relaxed)
        ):
            raise TrainingError(
                f'Constraint "{name}": share={constraint.share:g} exempts samples that have λ of '
                f"their own, and {formulation} has none. Take Pointwise() or Relaxed()."
            )


def refuse_stream(constraints: Mapping[str, Constraint]) -> None:
    """Refuses a share of a training set whose samples have no position."""
    for name, constraint in constraints.items():
        if constraint.share is not None:
            raise TrainingError(
                f'Constraint "{name}": share={constraint.share:g} ranks all training samples by '
                "their last values, and a stream has none. Give a data set with a length "
                "(PointwiseLoss(samples=N))."
            )
