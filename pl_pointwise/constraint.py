"""A bound on a value of each sample, and what violates it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property
from numbers import Real

import torch
from torch import Tensor


@dataclass(frozen=True)
class Constraint:
    """A bound on a value ℓ: ``ℓ ≤ at_most``, ``ℓ ≥ at_least``, both (interval), ``ℓ = equals``.

    An interval is two constraints on one value: its violation has twice the columns, and each side
    has multipliers of its own.

    For an equality, reports show |ℓ − c|; an evaluation constraint may be an interval about c. The
    multipliers of Pointwise, Relaxed and Average follow ℓ − c with its sign: λ > 0 pushes ℓ down,
    λ < 0 up. Every other formulation acts on |ℓ − c|.

    Where the samples are of groups (``groups=`` of a loss, ``groups`` of a data set), the bound is
    on the mean of each group. With ``each_sample=True`` it is on each sample, and only λ is shared.

    With ``share=0.05`` at most 5 % of the training samples may violate the bound, the others not;
    which ones, training finds. A sample of several values violates it by any of them.

        >>> Constraint(at_most=0.5).violation(torch.tensor([0.25, 0.75]))
        tensor([-0.2500,  0.2500])

    Raises:
        ValueError: no bound, one that is not a finite number, an empty interval; a share that is
            not between 0 and 1, or of an equality.
    """

    at_most: float | None = None
    at_least: float | None = None
    equals: float | None = None
    each_sample: bool = False
    share: float | None = None

    def __post_init__(self) -> None:
        bounds = [
            bound
            for bound in (self.at_most, self.at_least, self.equals)
            if bound is not None
        ]
        if not bounds:
            raise ValueError(
                "A constraint needs a bound: Constraint(at_most=…), (at_least=…) or (equals=…)."
            )
        if not all(isinstance(bound, Real) for bound in bounds):
            raise ValueError(
                "A bound of a constraint is one number. For one of each sample let "
                "constraint_values() return value − bound, with Constraint(at_most=0), or for a "
                "lower bound with at_least=0."
            )
        if not all(math.isfinite(bound) for bound in bounds):
            raise ValueError(
                f"The bounds of a constraint must be finite numbers, got {self}."
            )
        if self.equals is not None and len(bounds) > 1:
            raise ValueError(
                f"equals stands alone, without at_most and at_least: got {self}."
            )
        # Both equal is an equality in all but name, with λ of its own on each side.
        if len(bounds) == 2 and bounds[0] < bounds[1]:
            raise ValueError(f"Empty interval: at_least exceeds at_most in {self}.")
        self._check_share()

    def _check_share(self) -> None:
        if self.share is None:
            return
        if isinstance(self.share, bool) or not isinstance(self.share, Real):
            raise ValueError(
                f"share={self.share!r}: a number between 0 and 1, as 0.05 for 5 %."
            )
        if not 0 < self.share < 1:
            raise ValueError(
                f"share={self.share:g}: the part of the samples that may violate the bound, "
                "between 0 and 1, as 0.05 for 5 %. Leave it out where none may."
            )
        if self.equals is not None:
            raise ValueError(
                "share is of a bound: give at_most, at_least or both (an interval about the "
                "value), not equals, which every sample misses by a hair."
            )
        # It says whose the bound is among groups, and a share is of samples.
        if self.each_sample:
            raise ValueError("share is without groups: leave each_sample out.")

    @property
    def is_equality(self) -> bool:
        """Whether ℓ has to be one value: its multipliers have signs, its reports |ℓ − c|."""
        return self.equals is not None

    @cached_property
    def sides(self) -> int:
        """2 for an interval, else 1."""
        return 2 if self.at_most is not None and self.at_least is not None else 1

    def in_words(self) -> str:
        """The bound with its sign.

        >>> Constraint(at_most=0.5).in_words(), Constraint(at_least=0, at_most=2).in_words()
        ('≤ 0.5', '≥ 0 and ≤ 2')
        >>> Constraint(at_most=0.5, share=0.05).in_words()
        '≤ 0.5 but for 5 %'
        """
        bounds = {"=": self.equals, "≥": self.at_least, "≤": self.at_most}
        words = [
            f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None
        ]
        exempt = "" if self.share is None else f" but for {100 * self.share:g} %"
        return " and ".join(words) + exempt

    def description(self) -> str:
        """The bound as files keep it, to be compared with that of an earlier run or version.

        Fields that came later stand in it only where they are set.

        >>> Constraint(at_most=0.5).description()
        'Constraint(at_most=0.5, at_least=None, equals=None)'
        """
        parts = []
        for field in fields(self):
            value = getattr(self, field.name)
            if (
                field.name in ("at_most", "at_least", "equals")
                or value != field.default
            ):
                parts.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def value_at(self, violation: float) -> float:
        """The value that violates by so much, in the unit of the bound.

        Of an interval and of an equality the violation itself: how far the value is off.

        >>> Constraint(at_most=0.5).value_at(0.25), Constraint(at_least=0.5).value_at(0.25)
        (0.75, 0.25)
        """
        # The side that is violated is not known here.
        if self.equals is not None or self.sides == 2:
            return violation
        if self.at_most is not None:
            return self.at_most + violation
        assert self.at_least is not None
        return self.at_least - violation

    def violation(self, values: Tensor) -> Tensor:
        """ℓ − at_most, at_least − ℓ or |ℓ − equals|, positive violates, in the shape of the values.

        For an interval (B, 2) or (B, 2K): first the upper side's columns, then the lower side's.
        """
        if self.equals is not None:
            return (values - self.equals).abs()
        upper = None if self.at_most is None else values - self.at_most
        lower = None if self.at_least is None else self.at_least - values
        if upper is None or lower is None:
            return upper if lower is None else lower  # type: ignore[return-value]
        # One value a sample becomes two columns, K of them 2K.
        join = torch.stack if values.dim() == 1 else torch.cat
        return join([upper, lower], dim=1)

    def outside(self, violation: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Of each value the larger of an interval's two, (b, sides·K) → (b, K); masks alike."""
        if self.sides == 1:
            return violation, mask
        of_sides = violation.unflatten(1, (self.sides, -1))
        # Both sides of a value apply where it does.
        return of_sides.amax(1), mask.unflatten(1, (self.sides, -1))[:, 0]

    def residual(self, values: Tensor) -> Tensor:
        """ℓ − equals, with its sign, for an equality; else the violation. Shapes alike."""
        return self.violation(values) if self.equals is None else values - self.equals

    def reported(self, residual: Tensor) -> Tensor:
        """The violation behind a residual: |ℓ − c| for an equality, else unchanged."""
        return residual if self.equals is None else residual.abs()
