"""What every formulation has, and what those with learned multipliers share.

Their mathematics: ``formulations.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, TypeVar

from torch import Tensor

from .augmented import arguments_of, grown, number, optional_number

Scope = Literal["sample", "batch", "none"]
Auto = Literal["auto"]
Own = TypeVar("Own", bound="Formulation")
STANDARD_STEP = 0.1  # The paper's η, which has a unit: a standard Lagrangian offers no better one.
GROWTH = 1e6  # Where alpha_max is None α grows up to so many times its first value.


class Formulation(ABC):
    """ψ(v, λ) with its derivative in λ, and the size of the dual step.

    ``scope`` says what ψ acts on: each sample's violation ("sample": one multiplier per sample and
    column), one statistic of the batch ("batch", see :class:`BatchFormulation`), or, with "none",
    each sample's violation without any multiplier.

    ``signed`` is True where it enforces an equality by one multiplier of either sign: v is then the
    residual ℓ − c. See :meth:`for_equality`.
    """

    scope: Scope
    dual_lr: float | Auto = 0.0
    signed: bool = False

    @abstractmethod
    def lagrangian(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """ψ(v, λ), elementwise, both of one shape (or broadcastable); λ ≥ 0 unless ``signed``."""

    @abstractmethod
    def dual_direction(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """∂ψ/∂λ, elementwise: the direction of dual ascent."""

    def ascend(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """One dual step, λ ← λ + η ∂ψ/∂λ, projected onto λ ≥ 0 unless ``signed``."""
        stepped = multiplier + self.step_size * self.dual_direction(violation, multiplier)
        return stepped if self.signed else stepped.clamp(min=0)

    @property
    def step_size(self) -> float:
        """η as a number."""
        return float(self.dual_lr)

    def for_equality(self) -> Formulation:
        """The formulation that enforces ``Constraint(equals=…)``.

        By default this one, on the violation |ℓ − c|, as if it were any other.

        Raises:
            ValueError: it has no meaning for an equality.
        """
        return self

    def at_epoch(self, epoch: int) -> Formulation:
        """The formulation in force during an epoch (α may grow, see ``alpha_growth``)."""
        return self

    def config(self) -> dict[str, Any]:
        """``{class_path, init_args}``, the form in which YAML and checkpoints hold it."""
        path = f"{type(self).__module__}.{type(self).__qualname__}"
        return {"class_path": path, "init_args": arguments_of(self)}

    def _changed(self: Own, **attributes: Any) -> Own:
        """A copy with other attributes, made without the constructor."""
        copy = object.__new__(type(self))
        copy.__dict__.update(vars(self), **attributes)
        return copy

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in arguments_of(self).items())
        return f"{type(self).__name__}({arguments})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


class Ascending(Formulation):
    """What the learned multipliers share: α, its growth, η, and the caps of both."""

    alpha: float | Auto | None
    alpha_growth: float | Auto

    def __init__(
        self,
        alpha: float | Auto | None,
        dual_lr: float | Auto,
        alpha_growth: float | Auto | None,
        alpha_every: int,
        alpha_max: float | None,
        multiplier_max: float | None,
    ) -> None:
        name = type(self).__name__
        if alpha_growth is None:
            alpha_growth = "auto" if alpha == "auto" else 1.0
        if self.scope == "batch" and "auto" in (alpha, alpha_growth):
            raise ValueError(f'{name}: only Pointwise and Relaxed find α by "auto"; give a number.')
        self.alpha = "auto" if alpha == "auto" else optional_number(name, "alpha", alpha)
        self.dual_lr = _auto_or_number(name, "dual_lr", dual_lr, minimum=0.0)
        self.alpha_growth = _auto_or_number(name, "alpha_growth", alpha_growth, minimum=1.0)
        self.alpha_every = int(number(name, "alpha_every", alpha_every, minimum=1))
        self.alpha_max = optional_number(name, "alpha_max", alpha_max)
        self.multiplier_max = optional_number(name, "multiplier_max", multiplier_max)
        if self.alpha is None and (self.alpha_growth != 1.0 or alpha_max is not None):
            raise ValueError(
                f"{name}(alpha=None) has no α to grow: leave alpha_growth at 1 and alpha_max out."
            )
        if isinstance(self.alpha, float) and self.alpha_max and self.alpha > self.alpha_max:
            raise ValueError(f"{name}: alpha={alpha} starts above alpha_max={alpha_max}.")

    @property
    def step_size(self) -> float:
        """η as a number: of "auto" 2α, or .1 for the standard Lagrangian, which has no α."""
        if not isinstance(self.dual_lr, str):
            return self.dual_lr
        return STANDARD_STEP if self.augmentation is None else 2 * self.augmentation

    @property
    def augmentation(self) -> float | None:
        """α as a number, of "auto" 1 where no fit has told; None for the standard Lagrangian."""
        return 1.0 if isinstance(self.alpha, str) else self.alpha

    @property
    def adapts(self) -> bool:
        """Whether a fit finds or grows α by what it measures: see ``adaptive_alpha.py``."""
        return "auto" in (self.alpha, self.alpha_growth)

    def with_alpha(self: Own, alpha: float) -> Own:
        """The same with this α."""
        return self._changed(alpha=alpha)

    def largest_alpha(self, first: float) -> float:
        """Where α stops growing that started at ``first``."""
        return self.alpha_max or GROWTH * first

    def at_epoch(self, epoch: int) -> Formulation:
        """α · alpha_growth^⌊epoch / alpha_every⌋ in place of α, at most ``alpha_max``."""
        if self.alpha is None or isinstance(self.alpha, str):
            return self
        if isinstance(self.alpha_growth, str) or self.alpha_growth == 1.0:
            return self
        times, largest = epoch // self.alpha_every, self.largest_alpha(self.alpha)
        return self.with_alpha(grown(self.alpha, self.alpha_growth, times, largest))

    def ascend(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """The dual step, projected onto |λ| ≤ ``multiplier_max`` as well."""
        stepped = super().ascend(violation, multiplier)
        cap = self.multiplier_max
        return stepped if cap is None else stepped.clamp(-cap, cap)

    def for_equality(self) -> Formulation:
        """The same with one multiplier of either sign for v = ℓ − c."""
        return self._changed(signed=True)


def _auto_or_number(owner: str, name: str, value: float | Auto, minimum: float) -> float | Auto:
    return "auto" if value == "auto" else number(owner, name, value, minimum=minimum)
