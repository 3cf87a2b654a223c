"""Constraints and the ways to enforce them.

Sign convention, everywhere in this package: a violation ``v ≤ 0`` is satisfied, ``v > 0`` violates.

A formulation is one scalar function ψ(v, λ) of a violation and its multiplier. Training minimises
mean ℓ₀ + Σ mean ψ(v, λ) over the weights (primal) and ascends along ∂ψ/∂λ over the multipliers
(dual). Where one number stands for the batch, ψ acts on it: on the mean of the violations, or with
:class:`Tilted` and :class:`CVaR` on their tail. Everything here is elementwise and pure: no mean,
no storage, no step of the weights. docs/formulations.md has the table these functions implement.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

Scope = Literal["sample", "batch", "none"]
Anchor = Literal["zero", "largest", "threshold"]


@dataclass(frozen=True)
class Constraint:
    """A bound on a value ℓ: ``ℓ ≤ at_most``, ``ℓ ≥ at_least``, or both (an interval).

    An interval is two constraints on one value, so its violation has twice the columns and each
    side its own multipliers; an equality is an interval of width zero.

    Raises:
        ValueError: no bound, a bound that is not a finite number, or ``at_least > at_most``.
    """

    at_most: float | None = None
    at_least: float | None = None

    def __post_init__(self) -> None:
        bounds = [bound for bound in (self.at_most, self.at_least) if bound is not None]
        if not bounds:
            raise ValueError("A constraint needs a bound: Constraint(at_most=…) or (at_least=…).")
        if not all(math.isfinite(bound) for bound in bounds):
            raise ValueError(f"The bounds of a constraint must be finite numbers, got {self}.")
        if len(bounds) == 2 and bounds[0] < bounds[1]:
            raise ValueError(f"Empty interval: at_least exceeds at_most in {self}.")

    @property
    def sides(self) -> int:
        """1 for a one-sided bound, 2 for an interval."""
        return (self.at_most is not None) + (self.at_least is not None)

    def violation(self, values: Tensor) -> Tensor:
        """Orient values ℓ into violations: ℓ − at_most, at_least − ℓ; positive violates.

        values: (B,) or (B, K).
        Returns: the same shape for a one-sided bound. For an interval (B, 2) or (B, 2K): first the
        upper side's columns, then the lower side's.
        """
        upper = None if self.at_most is None else values - self.at_most
        lower = None if self.at_least is None else self.at_least - values
        if upper is None or lower is None:
            return upper if lower is None else lower  # type: ignore[return-value]
        if values.dim() == 1:
            return torch.stack([upper, lower], dim=1)
        return torch.cat([upper, lower], dim=1)


class Formulation(ABC):
    """ψ(v, λ) with its derivative in λ, and the size of the dual step.

    ``scope`` says what ψ acts on: each sample's violation ("sample": one multiplier per sample and
    column), one statistic of the batch ("batch", see :class:`BatchFormulation`), or, with "none",
    each sample's violation without any multiplier.
    """

    scope: Scope
    dual_lr: float = 0.0

    @abstractmethod
    def lagrangian(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """ψ(v, λ), elementwise. Both arguments of one shape (or broadcastable), λ ≥ 0."""

    @abstractmethod
    def dual_direction(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """∂ψ/∂λ, elementwise: the direction of dual ascent."""

    def ascend(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """One projected dual step, λ ← (λ + η ∂ψ/∂λ)₊."""
        direction = self.dual_direction(violation, multiplier)
        return (multiplier + self.dual_lr * direction).clamp(min=0)

    def at_epoch(self, epoch: int) -> Formulation:
        """The formulation in force during an epoch (α may grow, see ``alpha_growth``)."""
        return self

    def config(self) -> dict[str, Any]:
        """``{class_path, init_args}``, the form in which YAML and checkpoints hold it.

        An argument of the constructor is read from the attribute of its name; attributes that are
        no arguments are left out.

        Raises:
            ValueError: there is no such attribute.
        """
        kind, values = type(self), vars(self)
        parameters = inspect.signature(kind).parameters.values()
        if not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters):
            missing = [p.name for p in parameters if not hasattr(self, p.name)]
            if missing:
                raise ValueError(
                    f"{kind.__name__} must keep its argument {missing[0]} as an attribute of that "
                    "name, from which YAML and checkpoints read it."
                )
            values = {p.name: getattr(self, p.name) for p in parameters}
        return {
            "class_path": f"{kind.__module__}.{kind.__qualname__}",
            "init_args": dict(values),
        }

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({arguments})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


class Penalty(Formulation):
    """A fixed price: ψ = λ₀·v, linear, so satisfied samples keep being pushed.

    Args:
        weight: λ₀ ≥ 0.
    """

    scope: Scope = "none"

    def __init__(self, *, weight: float) -> None:
        self.weight = _number("Penalty", "weight", weight, minimum=0.0)

    def lagrangian(self, violation: Tensor, multiplier: Tensor | None = None) -> Tensor:
        """ψ(v) = λ₀·v; the multiplier is ignored."""
        return self.weight * violation

    def dual_direction(self, violation: Tensor, multiplier: Tensor | None = None) -> Tensor:
        """Zero: nothing is learned."""
        return torch.zeros_like(violation)


class _Ascending(Formulation):
    """What the learned multipliers share: α, its growth, and η."""

    def __init__(
        self, alpha: float | None, dual_lr: float, alpha_growth: float, alpha_every: int
    ) -> None:
        name = type(self).__name__
        self.alpha = None if alpha is None else _number(name, "alpha", alpha, above=0.0)
        self.dual_lr = _number(name, "dual_lr", dual_lr, minimum=0.0)
        self.alpha_growth = _number(name, "alpha_growth", alpha_growth, minimum=1.0)
        self.alpha_every = int(_number(name, "alpha_every", alpha_every, minimum=1))
        if self.alpha is None and self.alpha_growth != 1.0:
            raise ValueError(f"{name}(alpha=None) has no α to grow: leave alpha_growth at 1.")

    def at_epoch(self, epoch: int) -> Formulation:
        """α · alpha_growth^⌊epoch / alpha_every⌋ in place of α; everything else as it is."""
        if self.alpha is None or self.alpha_growth == 1.0:
            return self
        grown = object.__new__(type(self))
        grown.__dict__.update(vars(self))
        grown.alpha = self.alpha * self.alpha_growth ** (epoch // self.alpha_every)
        return grown


class BatchFormulation(_Ascending):
    """ψ(g, λ) of one statistic g of the batch, with one multiplier per side of the constraint.

    g = a + outer(mean of inner(v − a)) is the violation that stands for the batch; the mean is that
    of all ranks (batch_statistic.py). ``anchor`` says what a is: 0, the batch's largest violation,
    or a learned threshold that descends ∂g/∂a with ``threshold_lr``.
    """

    scope: Scope = "batch"
    anchor: Anchor = "zero"
    threshold_lr: float = 0.0

    @property
    def linear(self) -> bool:
        """Whether ψ is linear in the mean, so that ∂ψ/∂mean = λ is known before the mean."""
        return self.alpha is None

    def inner(self, violation: Tensor) -> Tensor:
        """What is averaged over the batch, elementwise in v − a."""
        return violation

    def outer(self, mean: Tensor) -> Tensor:
        """g − a from that mean, elementwise."""
        return mean

    def lagrangian(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """ψ(g, λ) = λg, or α(g + λ/2α)₊² − λ²/4α; g and λ scalars per side."""
        return _augmented(violation, multiplier, self.alpha)

    def dual_direction(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """g, or max(g, −λ/2α)."""
        return _augmented_direction(violation, multiplier, self.alpha)


class Average(BatchFormulation):
    """One multiplier for the batch mean v̄ of a constraint: today's constrained fine-tuning.

    Standard (α None): ψ = λ·v̄. Augmented: the expression of :class:`Pointwise` at v̄.

    Args:
        dual_lr: η ≥ 0, the size of the dual step.
        alpha: augmentation α > 0 (half the usual ρ), or None for the standard Lagrangian.
        alpha_growth: factor by which α grows; 1 keeps it fixed.
        alpha_every: epochs between two growths.
    """

    def __init__(
        self,
        *,
        dual_lr: float = 0.1,
        alpha: float | None = None,
        alpha_growth: float = 1.0,
        alpha_every: int = 1,
    ) -> None:
        super().__init__(alpha, dual_lr, alpha_growth, alpha_every)


class Tilted(BatchFormulation):
    """One multiplier for the tilted mean of a constraint: g = (1/τ) log mean exp(τv) ≤ 0.

    Between :class:`Average` (τ → 0) and a constraint on the worst sample of the batch (τ → ∞): each
    sample's share of the price grows with its violation as exp(τv). Known as tilted risk, or the
    entropic risk measure; 1/τ is a temperature, in the units of the violation. In a small batch g
    is lower than over all samples, which the expectation of the logarithm always is.

    Args:
        tilt: τ > 0, in one over the units of the violation.
        dual_lr: η ≥ 0, the size of the dual step.
        alpha: augmentation α > 0 (half the usual ρ), or None for the standard Lagrangian.
        alpha_growth: factor by which α grows; 1 keeps it fixed.
        alpha_every: epochs between two growths.
    """

    anchor: Anchor = "largest"  # v − a ≤ 0, so that no exponential overflows

    def __init__(
        self,
        *,
        tilt: float,
        dual_lr: float = 0.1,
        alpha: float | None = None,
        alpha_growth: float = 1.0,
        alpha_every: int = 1,
    ) -> None:
        super().__init__(alpha, dual_lr, alpha_growth, alpha_every)
        self.tilt = _number("Tilted", "tilt", tilt, above=0.0)

    @property
    def linear(self) -> bool:
        return False

    def inner(self, violation: Tensor) -> Tensor:
        """exp(τ(v − a))/τ, elementwise in v − a ≤ 0, a the batch's largest violation."""
        return (self.tilt * violation).exp() / self.tilt

    def outer(self, mean: Tensor) -> Tensor:
        """log(τ·mean)/τ."""
        return (self.tilt * mean).log() / self.tilt


class CVaR(BatchFormulation):
    """One multiplier for the mean of a constraint's tail: g = t + mean (v − t)₊/(1 − p) ≤ 0.

    The least g over t is CVaR_p, the mean of the worst 1 − p of the violations, and the t that
    gives it their p-quantile (Rockafellar and Uryasev). Only samples above t are pushed. t is
    learned: one number per side, from 0, after every step of the weights
    t ← t − ``threshold_lr``·∂g/∂t with ∂g/∂t = 1 − share(v > t)/(1 − p) of the batch. So a batch of
    fewer than 1/(1 − p) samples does: the quantile is that of the data, not of the batch.

    p = 0 is :class:`Average` once t is below every violation; p → 1 the worst sample.

    Args:
        level: p in [0, 1).
        threshold_lr: the size of the step of t, in the units of the violation.
        dual_lr: η ≥ 0, the size of the dual step.
        alpha: augmentation α > 0 (half the usual ρ), or None for the standard Lagrangian.
        alpha_growth: factor by which α grows; 1 keeps it fixed.
        alpha_every: epochs between two growths.
    """

    anchor: Anchor = "threshold"

    def __init__(
        self,
        *,
        level: float = 0.95,
        threshold_lr: float = 0.1,
        dual_lr: float = 0.1,
        alpha: float | None = None,
        alpha_growth: float = 1.0,
        alpha_every: int = 1,
    ) -> None:
        super().__init__(alpha, dual_lr, alpha_growth, alpha_every)
        self.level = _number("CVaR", "level", level, minimum=0.0)
        if self.level >= 1.0:
            raise ValueError(
                f"CVaR(level={level!r}): level must be a fraction below 1; 0.95 is the mean of the "
                "worst twentieth."
            )
        self.threshold_lr = _number("CVaR", "threshold_lr", threshold_lr, minimum=0.0)

    def inner(self, violation: Tensor) -> Tensor:
        """(v − t)₊/(1 − p), elementwise in v − t."""
        return violation.relu() / (1 - self.level)


class Pointwise(_Ascending):
    """One multiplier for every sample: the requirement holds for each input.

    Args:
        alpha: augmentation α > 0 (half the usual ρ), or None for the standard Lagrangian λ·v.
        dual_lr: η ≥ 0, the size of the dual step; η = 2α is the classical multiplier step.
        alpha_growth: factor by which α grows; 1 keeps it fixed (the shifted-penalty method).
        alpha_every: epochs between two growths.
    """

    scope: Scope = "sample"

    def __init__(
        self,
        *,
        alpha: float | None = 1.0,
        dual_lr: float = 0.1,
        alpha_growth: float = 1.0,
        alpha_every: int = 1,
    ) -> None:
        super().__init__(alpha, dual_lr, alpha_growth, alpha_every)

    def lagrangian(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """ψ(v, λ) = α(v + λ/2α)₊² − λ²/4α, elementwise; ∂ψ/∂v = (λ + 2αv)₊.

        violation, multiplier: one shape, λ ≥ 0.  Equation: docs/formulations.md
        """
        return _augmented(violation, multiplier, self.alpha)

    def dual_direction(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """max(v, −λ/2α)."""
        return _augmented_direction(violation, multiplier, self.alpha)


class Relaxed(_Ascending):
    """Pointwise, with a relaxation u ≥ 0 per sample bought at a cost c(u), u minimised out.

    ψ(v, λ) = min over u ≥ 0 of c(u) + ψ_pointwise(v − u, λ). A sample that cannot be satisfied
    relaxes its bound instead of driving its multiplier up without limit.

    Args:
        alpha: augmentation α > 0 (half the usual ρ), or None for the standard Lagrangian
            (quadratic cost only).
        beta: price β > 0 of relaxing; β → ∞ is :class:`Pointwise`.
        cost: "quadratic" c(u) = βu², or "linear" c(u) = βu, which caps the force on a sample at β
            (the soft margin).
        dual_lr: η ≥ 0, the size of the dual step.
        alpha_growth: factor by which α grows; 1 keeps it fixed.
        alpha_every: epochs between two growths.
    """

    scope: Scope = "sample"

    def __init__(
        self,
        *,
        alpha: float | None = 1.0,
        beta: float,
        cost: Literal["quadratic", "linear"] = "quadratic",
        dual_lr: float = 0.1,
        alpha_growth: float = 1.0,
        alpha_every: int = 1,
    ) -> None:
        super().__init__(alpha, dual_lr, alpha_growth, alpha_every)
        self.beta = _number("Relaxed", "beta", beta, above=0.0)
        if cost not in ("quadratic", "linear"):
            raise ValueError(f'Relaxed(cost={cost!r}): cost is "quadratic" or "linear".')
        if cost == "linear" and alpha is None:
            raise ValueError(
                'Relaxed(cost="linear", alpha=None) is unbounded below in u once λ > β: '
                'give an alpha > 0, or take cost="quadratic".'
            )
        self.cost = cost

    def lagrangian(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """ψ(v, λ), elementwise, with s = λ + 2αv:

        quadratic: αβ/(α+β)·(v + λ/2α)₊² − λ²/4α
        linear:    s ≤ β as pointwise;  s > β: βv − (λ−β)²/4α
        standard:  λv − λ²/4β
        """
        v, multiplier, alpha, beta = violation, multiplier, self.alpha, self.beta
        if alpha is None:
            return multiplier * v - multiplier.square() / (4 * beta)
        shifted = multiplier + 2 * alpha * v
        inactive = -multiplier.square() / (4 * alpha)
        if self.cost == "linear":
            capped = beta * v - (multiplier - beta).square() / (4 * alpha)
            return torch.where(shifted > beta, capped, _augmented(v, multiplier, alpha))
        # s > 0: the square expanded, so that small α does not cancel.
        active = (beta * (multiplier * v + alpha * v.square()) - multiplier.square() / 4) / (
            alpha + beta
        )
        return torch.where(shifted > 0, active, inactive)

    def dual_direction(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """∂ψ/∂λ, elementwise, with s = λ + 2αv:

        quadratic: (βv − λ/2)/(α+β) where s ≥ 0, else −λ/2α
        linear:    (β−λ)/2α where s > β, else max(v, −λ/2α)
        standard:  v − λ/2β
        """
        v, multiplier, alpha, beta = violation, multiplier, self.alpha, self.beta
        if alpha is None:
            return v - multiplier / (2 * beta)
        shifted = multiplier + 2 * alpha * v
        if self.cost == "linear":
            pointwise = _augmented_direction(v, multiplier, alpha)
            return torch.where(shifted > beta, (beta - multiplier) / (2 * alpha), pointwise)
        active = (beta * v - multiplier / 2) / (alpha + beta)
        return torch.where(shifted >= 0, active, -multiplier / (2 * alpha))

    def relaxation(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """u*(v, λ) ≥ 0, the relaxation each sample takes, in the units of the violation.

        quadratic: α/(2(α+β))·(2v + λ/α)₊;  linear: (s − β)₊/2α;  standard: λ/2β
        """
        alpha, beta = self.alpha, self.beta
        if alpha is None:
            return multiplier / (2 * beta) + torch.zeros_like(violation)
        shifted = multiplier + 2 * alpha * violation
        if self.cost == "linear":
            return (shifted - beta).clamp(min=0) / (2 * alpha)
        return shifted.clamp(min=0) / (2 * (alpha + beta))


def _augmented(violation: Tensor, multiplier: Tensor, alpha: float | None) -> Tensor:
    """λv for α None, else α(v + λ/2α)₊² − λ²/4α, shared by Average and Pointwise.

    Where λ + 2αv > 0 the square equals λv + αv²; computed so, because subtracting the two large
    terms loses 6 % in float32 at α = 1e-6.
    """
    if alpha is None:
        return multiplier * violation
    active = multiplier * violation + alpha * violation.square()
    inactive = -multiplier.square() / (4 * alpha)
    return torch.where(multiplier + 2 * alpha * violation > 0, active, inactive)


def _augmented_direction(violation: Tensor, multiplier: Tensor, alpha: float | None) -> Tensor:
    """v for α None, else max(v, −λ/2α)."""
    if alpha is None:
        return violation + torch.zeros_like(multiplier)
    return torch.maximum(violation, -multiplier / (2 * alpha))


def _number(
    owner: str,
    name: str,
    value: float,
    *,
    minimum: float | None = None,
    above: float | None = None,
) -> float:
    valid = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if valid and (minimum is None or value >= minimum) and (above is None or value > above):
        return float(value)
    bound = f"> {above:g}" if above is not None else f">= {minimum:g}"
    raise ValueError(f"{owner}({name}={value!r}): {name} must be a finite number {bound}.")
