"""What every formulation has, and what those with learned multipliers share."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from numbers import Real
from typing import Any, Literal, TypeVar

from torch import Tensor

Scope = Literal["sample", "batch", "none"]
Adaptive = Literal["adaptive"]
Own = TypeVar("Own", bound="Formulation")
STANDARD_STEP = 0.1  # The paper's η, which has a unit: a standard Lagrangian offers no better one.


class Formulation(ABC):
    """ψ(v, λ) with its derivative in λ, and the size of the dual step.

    ``scope`` says what ψ acts on: each sample's violation ("sample": one multiplier per sample and
    column), one statistic of the batch ("batch"), or, with "none", each sample's violation without
    any multiplier. ``signed``: an equality's, of either sign, with v the residual ℓ − c.
    """

    scope: Scope
    dual_lr: float | None = 0.0
    signed: bool = False
    learns_threshold: bool = False
    """Whether it acts on what exceeds a threshold that is learned."""

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
        return float(self.dual_lr or 0.0)

    @property
    def needs_gradient(self) -> bool:
        """Whether it pulls at all, so that values without a gradient are an error."""
        return True

    @property
    def penalises(self) -> bool:
        """Whether it is known before a fit how it pulls on a violation at λ = 0."""
        return True

    @property
    def adaptive(self) -> bool:
        """Whether its α is found in the unit of the gradients: see ``gradient_units.py``."""
        return False

    def in_units(self: Own, pull: float, step: float, unit: float, size: float) -> Own:
        """An ``adaptive`` one with numbers: a violation of ``size`` r pulls with ``pull`` and
        moves λ by ``step``; ``unit`` Λ is 0 where nothing has been violated yet.
        """
        return self

    def residual(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """(v)₊, elementwise, of an equality |v|: what α is measured by."""
        return violation.abs() if self.signed else violation.clamp(min=0)

    def for_equality(self) -> Formulation:
        """The formulation that enforces ``equals``: by default this one, on |ℓ − c|."""
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
    """What the learned multipliers share: α and η."""

    alpha: float | Adaptive | None
    reach: float | None = None
    """r of an adaptive one in force: beyond it ψ is linear, and a visit's v counts as ±r."""

    def __init__(
        self, *, alpha: float | Adaptive | None = "adaptive", dual_lr: float | None = None
    ) -> None:
        name = type(self).__name__
        if isinstance(alpha, str) and alpha != "adaptive":
            raise ValueError(
                f'{name}(alpha={alpha!r}): alpha="adaptive" and the fit finds it; or give a number.'
            )
        if alpha == "adaptive" and dual_lr is not None:
            raise ValueError(
                f"{name}(dual_lr={dual_lr!r}) has a meaning beside a stated alpha only: state "
                "both, or leave both out."
            )
        if alpha is not None and not isinstance(alpha, str):
            alpha = number(name, "alpha", alpha, above=0.0)
        self.alpha = alpha
        self.dual_lr = None if dual_lr is None else number(name, "dual_lr", dual_lr, minimum=0.0)

    @property
    def step_size(self) -> float:
        """η as a number: 2α where it is not stated, or .1 for the standard Lagrangian."""
        if self.dual_lr is not None:
            return self.dual_lr
        return STANDARD_STEP if self.augmentation is None else 2 * self.augmentation

    @property
    def augmentation(self) -> float | None:
        """α as a number; of an adaptive one 1 outside a fit; None for the standard Lagrangian."""
        return 1.0 if isinstance(self.alpha, str) else self.alpha

    @property
    def adaptive(self) -> bool:
        return self.alpha == "adaptive"

    @property
    def penalises(self) -> bool:
        """Not that of a standard Lagrangian, nor one whose α the fit finds."""
        return self.alpha is not None and not self.adaptive

    def in_units(self: Own, pull: float, step: float, unit: float, size: float) -> Own:
        if not pull or not size:  # λ alone, which stays as it is.
            return self._changed(alpha=None, dual_lr=0.0)
        return self._changed(alpha=pull / (2 * size), dual_lr=step / size, reach=size)

    def ascend(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """The dual step; of an adaptive one in force at clip(v, −r, r)."""
        if self.reach is not None:
            violation = violation.clamp(-self.reach, self.reach)
        return super().ascend(violation, multiplier)

    def within_reach(self, violation: Tensor) -> Tensor:
        """v up to r, of an equality from −r to r; v itself where nothing limits it."""
        if self.reach is None:
            return violation
        return violation.clamp(-self.reach if self.signed else None, self.reach)

    def for_equality(self) -> Formulation:
        """The same with one multiplier of either sign for v = ℓ − c."""
        return self._changed(signed=True)


def number(
    owner: str, name: str, value: float, *, minimum: float | None = None, above: float | None = None
) -> float:
    """``value`` as a plain float; a ValueError names the owner's argument that is out of range."""
    valid = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if valid and (minimum is None or value >= minimum) and (above is None or value > above):
        return float(value)
    bound = f"> {above:g}" if above is not None else f">= {minimum:g}"
    raise ValueError(f"{owner}({name}={value!r}): {name} must be a finite number {bound}.")


def arguments_of(formulation: object) -> dict[str, Any]:
    """Its constructor's arguments, each from the attribute of its name, which must be there."""
    kind = type(formulation)
    parameters = inspect.signature(kind).parameters.values()
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters):
        return dict(vars(formulation))
    missing = [p.name for p in parameters if not hasattr(formulation, p.name)]
    if missing:
        raise ValueError(
            f"{kind.__name__} must keep its argument {missing[0]} as an attribute of that name, "
            "from which YAML and checkpoints read it."
        )
    return {p.name: getattr(formulation, p.name) for p in parameters}
