"""The ways to enforce a constraint.

Sign convention, everywhere in this package: a violation ``v ≤ 0`` is satisfied, ``v > 0`` violates.

A formulation is one scalar function ψ(v, λ) of a violation and its multiplier. Training minimises
mean ℓ₀ + Σ mean ψ(v, λ) over the weights and ascends along ∂ψ/∂λ over the multipliers. Where one
number stands for the batch, ψ acts on it. Everything here is elementwise and pure.
docs/formulations.md has the table these functions implement.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .formulation import STANDARD_STEP, Adaptive, Ascending, Own, Scope, number
from .formulation import Formulation as Formulation

Anchor = Literal["zero", "largest", "threshold"]
Shape = Literal["linear", "hinge", "squared_hinge"]


def augmented(
    violation: Tensor, multiplier: Tensor, alpha: float | None, signed: bool = False
) -> Tensor:
    """λv for α None, else α(v + λ/2α)₊² − λ²/4α; of an equality, ``signed``, λv + αv².

    Where λ + 2αv > 0 the square equals λv + αv²; computed so, because subtracting the two large
    terms loses 6 % in float32 at α = 1e-6.
    """
    if alpha is None:
        return multiplier * violation
    active = multiplier * violation + alpha * violation.square()
    if signed:
        return active
    inactive = multiplier.square() / (-4 * alpha)
    return torch.where(multiplier + 2 * alpha * violation > 0, active, inactive)


def augmented_direction(
    violation: Tensor, multiplier: Tensor, alpha: float | None, signed: bool = False
) -> Tensor:
    """v for α None and for an equality, else max(v, −λ/2α)."""
    if alpha is None or signed:
        return violation + torch.zeros_like(multiplier)
    return torch.maximum(violation, -multiplier / (2 * alpha))


class Penalty(Formulation):
    """A fixed price on the violation; nothing is learned.

    linear: ψ = λ₀·v, so that satisfied samples keep being pushed and no tolerance has an effect.
    hinge: ψ = λ₀·(v)₊.  squared_hinge: ψ = λ₀·(v)₊², which is :class:`Pointwise` with λ ≡ 0 and
    α = λ₀. Of an equality, v is |ℓ − c|, and linear is refused.

    Args:
        weight: λ₀ ≥ 0.
        shape: of ψ as a function of v.
    """

    scope: Scope = "none"

    def __init__(self, *, weight: float, shape: Shape = "linear") -> None:
        self.weight = number("Penalty", "weight", weight, minimum=0.0)
        if shape not in ("linear", "hinge", "squared_hinge"):
            raise ValueError(f"Penalty(shape={shape!r}): linear, hinge or squared_hinge.")
        self.shape = shape

    @property
    def needs_gradient(self) -> bool:
        return self.weight > 0

    def lagrangian(self, violation: Tensor, multiplier: Tensor | None = None) -> Tensor:
        """ψ(v) = λ₀·v, λ₀·(v)₊ or λ₀·(v)₊²; the multiplier is ignored."""
        if self.shape == "linear":
            return self.weight * violation
        excess = violation.relu()
        return self.weight * (excess if self.shape == "hinge" else excess.square())

    def dual_direction(self, violation: Tensor, multiplier: Tensor | None = None) -> Tensor:
        """Zero: nothing is learned."""
        return torch.zeros_like(violation)

    def for_equality(self) -> Formulation:
        if self.shape == "linear":
            raise ValueError(
                'Penalty(shape="linear") cannot enforce an equality: it pushes past c. Take '
                'shape="hinge" or "squared_hinge".'
            )
        return self


class BatchFormulation(Ascending):
    """ψ(g, λ) of one statistic g of the batch, with one multiplier per side of the constraint.

    g = a + outer(mean of inner(v − a)) is the violation that stands for the batch; the mean is that
    of all ranks (batch_statistic.py). ``anchor`` says what a is: 0, the batch's largest violation,
    or a learned threshold that descends ∂g/∂a with ``threshold_lr``.
    """

    scope: Scope = "batch"
    anchor: Anchor = "zero"
    threshold_lr: float = 0.0

    def __init__(
        self, *, dual_lr: float | None = None, alpha: float | Adaptive | None = None
    ) -> None:
        stated = dual_lr if dual_lr is not None or alpha == "adaptive" else STANDARD_STEP
        super().__init__(alpha=alpha, dual_lr=stated)

    @property
    def linear(self) -> bool:
        """Whether ψ is linear in the mean, so that ∂ψ/∂mean = λ is known before the mean."""
        return self.augmentation is None

    def inner(self, violation: Tensor) -> Tensor:
        """What is averaged over the batch, elementwise in v − a."""
        return violation

    def outer(self, mean: Tensor) -> Tensor:
        """g − a from that mean, elementwise."""
        return mean

    def in_units(self: Own, pull: float, step: float, unit: float, size: float) -> Own:
        """α = 3Λ/2r all along and η = .1Λ/r: its λ moves in every step, not once an epoch."""
        return super().in_units(3 * unit, STANDARD_STEP * unit, unit, size)

    def lagrangian(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """ψ(g, λ) = λg, or α(g + λ/2α)₊² − λ²/4α; g and λ scalars per side."""
        return augmented(violation, multiplier, self.augmentation, self.signed)

    def dual_direction(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """g, or max(g, −λ/2α)."""
        return augmented_direction(violation, multiplier, self.augmentation, self.signed)

    def for_equality(self) -> Formulation:
        """Of the mean, one multiplier of either sign for v = ℓ − c; a tail is that of |ℓ − c|."""
        return self._changed(signed=True) if self.anchor == "zero" else self


class Average(BatchFormulation):
    """One multiplier for the batch mean v̄ of a constraint: today's constrained fine-tuning.

    Standard (α None): ψ = λ·v̄. Augmented: the expression of :class:`Pointwise` at v̄. An equality
    asks that the mean of ℓ be c, and has one multiplier of either sign.

    Args:
        dual_lr: η ≥ 0, the size of the dual step; None is .1.
        alpha: augmentation α > 0 (half the usual ρ), None for the standard Lagrangian, or
            "adaptive": α and η follow the gradients (:mod:`pl_pointwise.gradient_units`).
    """


class Tilted(BatchFormulation):
    """One multiplier for the tilted mean of a constraint: g = (1/τ) log mean exp(τv) ≤ 0.

    Between :class:`Average` (τ → 0) and a constraint on the worst sample of the batch (τ → ∞): each
    sample's share of the price grows with its violation as exp(τv). Known as tilted risk, or the
    entropic risk measure. In a small batch g is lower than over all samples.

    Args:
        tilt: τ > 0, in one over the units of the violation.
        dual_lr, alpha: as those of :class:`Average`.
    """

    anchor: Anchor = "largest"  # v − a ≤ 0, so that no exponential overflows

    def __init__(
        self, *, tilt: float, dual_lr: float | None = None, alpha: float | Adaptive | None = None
    ) -> None:
        super().__init__(alpha=alpha, dual_lr=dual_lr)
        self.tilt = number("Tilted", "tilt", tilt, above=0.0)

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
    gives it their p-quantile (Rockafellar and Uryasev). t is learned: one number per side, from 0,
    after every step t ← t − ``threshold_lr``·∂g/∂t with ∂g/∂t = 1 − share(v > t)/(1 − p) of the
    batch. So the quantile is that of the data, and a small batch does.

    p = 0 is :class:`Average` once t is below every violation; p → 1 the worst sample.

    Args:
        level: p in [0, 1).
        threshold_lr: the size of the step of t, in the units of the violation; of an adaptive
            one in units of its violated values' root mean square.
        dual_lr, alpha: as those of :class:`Average`.
    """

    anchor: Anchor = "threshold"
    learns_threshold = True

    def __init__(
        self,
        *,
        level: float = 0.95,
        threshold_lr: float = 0.1,
        dual_lr: float | None = None,
        alpha: float | Adaptive | None = None,
    ) -> None:
        super().__init__(alpha=alpha, dual_lr=dual_lr)
        self.level = number("CVaR", "level", level, minimum=0.0)
        if self.level >= 1.0:
            raise ValueError(f"CVaR(level={level!r}): level must be a fraction below 1.")
        self.threshold_lr = number("CVaR", "threshold_lr", threshold_lr, minimum=0.0)

    def in_units(self, pull: float, step: float, unit: float, size: float) -> CVaR:
        """With the step of t too."""
        found = super().in_units(pull, step, unit, size)
        return found._changed(threshold_lr=self.threshold_lr * size)

    def inner(self, violation: Tensor) -> Tensor:
        """(v − t)₊/(1 − p), elementwise in v − t."""
        return violation.relu() / (1 - self.level)


class Pointwise(Ascending):
    """One multiplier for every sample: the requirement holds for each input.

    ``Pointwise()`` needs nothing but the bounds of the constraints: α and η follow the gradients,
    see :mod:`pl_pointwise.gradient_units`. With numbers it is the paper's augmented Lagrangian.

    Args:
        alpha: "adaptive", an augmentation α > 0 (half the usual ρ), or None for the standard
            Lagrangian λ·v.
        dual_lr: η ≥ 0, the size of the dual step beside a stated α; None is the classical
            multiplier step, η = 2α, and .1 where there is no α.
    """

    scope: Scope = "sample"

    def lagrangian(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """ψ(v, λ) = α(v + λ/2α)₊² − λ²/4α, elementwise; ∂ψ/∂v = (λ + 2αv)₊.

        Of an equality λv + αv², and ∂ψ/∂v = λ + 2αv. Linear beyond the reach of an adaptive one.
        """
        alpha, near = self.augmentation, self.within_reach(violation)
        psi = augmented(near, multiplier, alpha, self.signed)
        if near is violation or alpha is None:
            return psi
        force = multiplier + 2 * alpha * near
        return psi + (force if self.signed else force.clamp(min=0)) * (violation - near)

    def dual_direction(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """max(v, −λ/2α); v for α None and of an equality."""
        return augmented_direction(violation, multiplier, self.augmentation, self.signed)


class Relaxed(Ascending):
    """Pointwise, with a relaxation u ≥ 0 per sample bought at a cost c(u), u minimised out.

    ψ(v, λ) = min over u ≥ 0 of c(u) + ψ_pointwise(v − u, λ). A sample that cannot be satisfied
    relaxes its bound instead of driving its multiplier up without limit.

    The price is stated in the objective's unit over the constraint's, ``beta``, or as ``price``:
    ``Relaxed(price=10)`` lets a requirement pull at most ten times as hard on its sample as the
    objective does on all (Λ of :mod:`pl_pointwise.gradient_units`), in any unit.

    Args:
        alpha: as that of :class:`Pointwise`; None with a quadratic cost only.
        beta: price β > 0 of relaxing; β → ∞ is :class:`Pointwise`.
        price: β/Λ > 0 in place of ``beta``, where alpha is "adaptive".
        cost: "quadratic" c(u) = βu², or "linear" c(u) = βu, which caps the force on a sample at β
            (the soft margin). None is quadratic with ``beta`` and linear with ``price``.
        dual_lr: as that of :class:`Pointwise`.
    """

    scope: Scope = "sample"

    def __init__(
        self,
        *,
        alpha: float | Adaptive | None = "adaptive",
        beta: float | None = None,
        price: float | None = None,
        cost: Literal["quadratic", "linear"] | None = None,
        dual_lr: float | None = None,
    ) -> None:
        super().__init__(alpha=alpha, dual_lr=dual_lr)
        if (beta is None) == (price is None):
            raise ValueError("Relaxed needs a price of relaxing: either beta=… or price=….")
        if cost not in ("quadratic", "linear", None):
            raise ValueError(f'Relaxed(cost={cost!r}): cost is "quadratic" or "linear".')
        if price is not None and (alpha != "adaptive" or cost == "quadratic"):
            raise ValueError("Relaxed(price=…) leaves alpha and cost out; or give beta=….")
        if cost == "linear" and alpha is None:
            raise ValueError('Relaxed(cost="linear", alpha=None) is unbounded: give an alpha > 0.')
        self.beta = None if beta is None else number("Relaxed", "beta", beta, above=0.0)
        self.price = None if price is None else number("Relaxed", "price", price, above=0.0)
        self.cost = cost or ("quadratic" if price is None else "linear")

    @property
    def beta_in_force(self) -> float:
        """β as a number; of a stated ``price`` outside a fit that, as if Λ were 1."""
        return float(self.beta if self.beta is not None else self.price or 0.0)

    def in_units(self, pull: float, step: float, unit: float, size: float) -> Relaxed:
        """With β = price·Λ too."""
        found = super().in_units(pull, step, unit, size)
        if self.price is not None and unit:
            found.beta = self.price * unit
        return found

    def residual(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """0 where the cost is linear and relaxes: such a sample pulls with β, whatever v is."""
        found = super().residual(violation, multiplier)
        if self.cost != "linear" or self.augmentation is None:
            return found
        return torch.where(self.relaxation(violation, multiplier) == 0, found, 0)

    def lagrangian(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """ψ(v, λ), elementwise, with s = λ + 2αv:

        quadratic: αβ/(α+β)·(v + λ/2α)₊² − λ²/4α
        linear:    s ≤ β as pointwise;  s > β: βv − (λ−β)²/4α
        standard:  λv − λ²/4β

        Of an equality ψ(σv, σλ), σ the sign of s: u has either sign and costs c(|u|). Linear beyond
        the reach of an adaptive one.
        """
        side, v, multiplier = self._as_inequality(self.within_reach(violation), multiplier)
        alpha, beta = self.augmentation, self.beta_in_force
        if alpha is None:
            return multiplier * v - multiplier.square() / (4 * beta)
        shifted = multiplier + 2 * alpha * v
        inactive = -multiplier.square() / (4 * alpha)
        if self.cost == "linear":
            capped = beta * v - (multiplier - beta).square() / (4 * alpha)
            psi = torch.where(shifted > beta, capped, augmented(v, multiplier, alpha))
            force = shifted.clamp(0, beta)
        else:
            # s > 0: the square expanded, so that small α does not cancel.
            active = (beta * (multiplier * v + alpha * v.square()) - multiplier.square() / 4) / (
                alpha + beta
            )
            psi = torch.where(shifted > 0, active, inactive)
            force = shifted.clamp(min=0) * beta / (alpha + beta)
        return psi if self.reach is None else psi + force * (side * violation - v)

    def dual_direction(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """∂ψ/∂λ, elementwise, with s = λ + 2αv:

        quadratic: (βv − λ/2)/(α+β) where s ≥ 0, else −λ/2α
        linear:    (β−λ)/2α where s > β, else max(v, −λ/2α)
        standard:  v − λ/2β

        Of an equality σ times that of σv and σλ.
        """
        side, v, multiplier = self._as_inequality(violation, multiplier)
        alpha, beta = self.augmentation, self.beta_in_force
        if alpha is None:
            return v - multiplier / (2 * beta)
        shifted = multiplier + 2 * alpha * v
        if self.cost == "linear":
            pointwise = augmented_direction(v, multiplier, alpha)
            return side * torch.where(shifted > beta, (beta - multiplier) / (2 * alpha), pointwise)
        active = (beta * v - multiplier / 2) / (alpha + beta)
        return side * torch.where(shifted >= 0, active, -multiplier / (2 * alpha))

    def relaxation(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """u*(v, λ) ≥ 0, the relaxation each sample takes, in the units of the violation.

        quadratic: α/(2(α+β))·(2v + λ/α)₊;  linear: (s − β)₊/2α;  standard: λ/2β

        Of an equality, σ times that of σv and σλ.
        """
        side, v, multiplier = self._as_inequality(violation, multiplier)
        alpha, beta = self.augmentation, self.beta_in_force
        if alpha is None:
            return multiplier / (2 * beta) + torch.zeros_like(v)
        shifted = multiplier + 2 * alpha * v
        if self.cost == "linear":
            return side * (shifted - beta).clamp(min=0) / (2 * alpha)
        return side * shifted.clamp(min=0) / (2 * (alpha + beta))

    def _as_inequality(
        self, violation: Tensor, multiplier: Tensor
    ) -> tuple[Tensor | int, Tensor, Tensor]:
        """σ, σv, σλ: an equality is the bound on the side that it is pressed from, σ = sign(s)."""
        alpha = self.augmentation
        if not self.signed or alpha is None:
            return 1, violation, multiplier
        below = multiplier + 2 * alpha * violation.detach() < 0
        side = torch.where(below, -1, 1).to(violation.dtype)
        return side, side * violation, side * multiplier
