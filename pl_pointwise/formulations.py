"""The ways to enforce a constraint.

Sign convention, everywhere in this package: a violation ``v ≤ 0`` is satisfied, ``v > 0`` violates.

Training minimises mean ℓ₀ + Σ mean ψ(v, λ) over the weights and ascends along ∂ψ/∂λ. Everything
here is elementwise and pure; docs/formulations.md has the table that these functions implement.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from .errors import TrainingError
from .plain import Configured

ScopeName = Literal["sample", "batch", "none"]
Adaptive = Literal["adaptive"]
Anchor = Literal["zero", "largest", "threshold"]
Shape = Literal["linear", "hinge", "squared_hinge"]
# The paper's η, which has a unit: a standard Lagrangian offers no better one.
STANDARD_STEP = 0.1


@dataclass(frozen=True)
class Scale:
    """The numbers of an adaptive formulation, which gradient_units.py measures.

    Attributes:
        alpha: α; None while nothing has been violated: ψ is that of λ alone, which does not move.
        step: η.
        reach: r, 0 with it: beyond r ψ is linear, and in an update v counts as ±r.
        margin: what is added to v, so that the aim is inside the bound.
        unit: Λ·min(1/s, 10), the unit of a price.
    """

    alpha: float | None = None
    step: float = 0.0
    reach: float = 0.0
    margin: float = 0.0
    unit: float = 0.0


class Formulation(Configured, ABC):
    """ψ(v, λ) with its derivative in λ, and the size of the dual step.

    ``scope`` says what ψ acts on: each sample's violation ("sample": one multiplier per sample and
    column), one statistic of the batch ("batch"), or, with "none", each sample's violation without
    any multiplier. ``signed``: for an equality λ has either sign, and v is the residual ℓ − c.

    >>> Pointwise(alpha=1.0).config()["init_args"]  # what YAML and checkpoints hold of it
    {'alpha': 1.0, 'dual_lr': None, 'memory': True}
    """

    dual_lr: float | None = 0.0
    signed: bool = False
    learns_threshold: bool = False
    """Whether it acts on what exceeds a threshold that is learned."""

    @property
    @abstractmethod
    def scope(self) -> ScopeName:
        """What ψ acts on; a subclass sets the attribute."""

    @abstractmethod
    def lagrangian(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """ψ(v, λ), elementwise, both of one shape (or broadcastable); λ ≥ 0 unless ``signed``."""

    @abstractmethod
    def dual_direction(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """∂ψ/∂λ, elementwise: the direction of dual ascent."""

    def slope(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """∂ψ/∂v, elementwise: the force on a value; by autograd where no formula is given."""
        # Callbacks ask for it too, and some of them run where gradients are off.
        with torch.enable_grad():
            violation = violation.detach().requires_grad_()
            psi = self.lagrangian(violation, multiplier.detach())
            (slope,) = torch.autograd.grad(psi.sum(), violation)
        return slope

    def ascend(
        self, violation: Tensor, multiplier: Tensor, part: Tensor | float = 1.0
    ) -> Tensor:
        """One dual step, λ ← λ + η ∂ψ/∂λ, projected onto λ ≥ 0 unless ``signed``.

        part: of η, 1 or elementwise less: of a group that a batch holds a part of.
        """
        step = self.step_size * part
        stepped = multiplier + step * self.dual_direction(violation, multiplier)
        return stepped if self.signed else stepped.clamp(min=0)

    @property
    def step_size(self) -> float:
        """η as a number."""
        return float(self.dual_lr or 0.0)

    @property
    def needs_gradient(self) -> bool:
        """Whether it pushes at all, so that values without a gradient are an error."""
        return True

    @property
    def acts_below_the_bound(self) -> bool:
        """Whether it pushes a satisfied sample whose multiplier is 0."""
        return False

    @property
    def adaptive(self) -> bool:
        """Whether α is measured in the unit of the gradients: see ``gradient_units.py``."""
        return False

    def residual(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """(v)₊, elementwise; for an equality |v|. α is measured by it."""
        return violation.abs() if self.signed else violation.clamp(min=0)

    def for_equality(self) -> Formulation:
        """The formulation that enforces ``equals``: by default this one, on |ℓ − c|."""
        return self

    def config(self) -> dict[str, Any]:
        """``{class_path, init_args}``, the form in which YAML and checkpoints hold it."""
        path = f"{type(self).__module__}.{type(self).__qualname__}"
        return {"class_path": path, "init_args": arguments_of(self)}

    def __repr__(self) -> str:
        arguments = ", ".join(
            f"{name}={value!r}" for name, value in arguments_of(self).items()
        )
        return f"{type(self).__name__}({arguments})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    # Equal by attributes, which a user may set anew: so it cannot be a key of a dict.
    __hash__ = None  # type: ignore[assignment]


class Ascending(Formulation):
    """What the learned multipliers share: α and η."""

    alpha: float | Adaptive | None
    scale: Scale | None = None
    """Of an adaptive one in force."""

    def __init__(
        self,
        *,
        alpha: float | Adaptive | None = "adaptive",
        dual_lr: float | None = None,
    ) -> None:
        name = type(self).__name__
        if isinstance(alpha, str) and alpha != "adaptive":
            raise ValueError(
                f'{name}(alpha={alpha!r}): alpha="adaptive" sets it in training; or give a number.'
            )
        # η is measured with α then, and a stated one would be dropped in silence.
        if alpha == "adaptive" and dual_lr is not None:
            raise ValueError(
                f"{name}(dual_lr={dual_lr!r}) has a meaning only with a stated alpha: state "
                "both, or leave both out."
            )
        # None stays None: the standard Lagrangian has no α.
        if alpha is not None and not isinstance(alpha, str):
            alpha = number(name, "alpha", alpha, above=0.0)
        self.alpha = alpha
        self.dual_lr = (
            None if dual_lr is None else number(name, "dual_lr", dual_lr, minimum=0.0)
        )

    @property
    def step_size(self) -> float:
        """η as a number: 2α where it is not stated, or 0.1 for the standard Lagrangian."""
        if self.dual_lr is not None:
            return self.dual_lr
        return STANDARD_STEP if self.augmentation is None else 2 * self.augmentation

    @property
    def augmentation(self) -> float | None:
        """α as a number; the standard Lagrangian: None; an adaptive one has it in a run only."""
        # Of a declared one: in force it is a copy with a number.
        if isinstance(self.alpha, str):
            raise TrainingError(
                f"{self!r} has no α outside a run, which measures its unit: train it by "
                "PointwiseLoss or a PointwiseModule, or state alpha."
            )
        return self.alpha

    @property
    def adaptive(self) -> bool:
        return self.alpha == "adaptive"

    def scaled(self, scale: Scale) -> Ascending:
        """An ``adaptive`` one in force: with α and η as numbers."""
        # A copy: checkpoints and configurations tell of the declared one, which stays "adaptive".
        scaled = copy(self)
        scaled.alpha, scaled.dual_lr, scaled.scale = scale.alpha, scale.step, scale
        return scaled

    def lagrangian(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """ψ(v, λ) = α(v + λ/2α)₊² − λ²/4α, elementwise; λv for α None, of an equality λv + αv².

        This is λu + αu² with u = max(v, −λ/2α), and is computed so: the difference of the two large
        terms loses 6 % in float32 at α = 1e-6.
        """
        alpha = self.augmentation
        if alpha is None:
            return multiplier * violation
        # Below −λ/2α an inequality is slack, and ψ stays at −λ²/4α; an equality has no such side.
        reached = violation
        if not self.signed:
            reached = torch.maximum(violation, -multiplier / (2 * alpha))
        return multiplier * reached + alpha * reached.square()

    def dual_direction(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """max(v, −λ/2α), elementwise; v for α None and of an equality."""
        alpha = self.augmentation
        # A multiplier of either sign has no slack to be held at.
        if alpha is None or self.signed:
            return violation + torch.zeros_like(multiplier)
        return torch.maximum(violation, -multiplier / (2 * alpha))

    def ascend(
        self, violation: Tensor, multiplier: Tensor, part: Tensor | float = 1.0
    ) -> Tensor:
        """The dual step; with a reach λ + η·clip(v + margin, ±r), so that λ falls as it rises."""
        scale = self.scale
        # Stated numbers, or nothing violated yet: the step of the paper.
        if scale is None or scale.alpha is None:
            return super().ascend(violation, multiplier, part)
        aimed = (violation + scale.margin).clamp(-scale.reach, scale.reach)
        stepped = multiplier + scale.step * part * aimed
        return stepped if self.signed else stepped.clamp(min=0)

    def for_equality(self) -> Formulation:
        """The same with one multiplier of either sign for v = ℓ − c."""
        # A copy: the given one may be declared for other constraints too, which are bounds.
        signed = copy(self)
        signed.signed = True
        return signed


def number(
    owner: str,
    name: str,
    value: float,
    *,
    minimum: float | None = None,
    above: float | None = None,
) -> float:
    """``value`` as a plain float; a ValueError names the owner's argument that is out of range."""
    # To Python True is the number 1, which nobody means who writes it here.
    valid = (
        isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    )
    if (
        valid
        and (minimum is None or value >= minimum)
        and (above is None or value > above)
    ):
        return float(value)
    bound = f"> {above:g}" if above is not None else f">= {minimum:g}"
    raise ValueError(
        f"{owner}({name}={value!r}): {name} must be a finite number {bound}."
    )


def arguments_of(formulation: object) -> dict[str, Any]:
    """Its constructor's arguments, each from the attribute of its name."""
    names = inspect.signature(type(formulation)).parameters
    return {name: getattr(formulation, name) for name in names}


class Penalty(Formulation):
    """A fixed weight on the violation; nothing is learned.

    linear: ψ = λ₀·v, so satisfied samples are pushed too, and the tolerance has no effect.
    hinge: ψ = λ₀·(v)₊.  squared_hinge: ψ = λ₀·(v)₊². For an equality v is |ℓ − c|.

    Args:
        weight: λ₀ ≥ 0.
        shape: of ψ as a function of v.

    Raises:
        ValueError: a negative weight; another shape; linear for an equality.

    >>> Penalty(weight=10, shape="hinge").lagrangian(torch.tensor([-1.0, 0.5]))
    tensor([0., 5.])
    """

    scope: ScopeName = "none"

    def __init__(self, *, weight: float, shape: Shape = "linear") -> None:
        self.weight = number("Penalty", "weight", weight, minimum=0.0)
        if shape not in ("linear", "hinge", "squared_hinge"):
            raise ValueError(
                f"Penalty(shape={shape!r}): linear, hinge or squared_hinge."
            )
        self.shape = shape

    @property
    def needs_gradient(self) -> bool:
        return self.weight > 0

    @property
    def acts_below_the_bound(self) -> bool:
        return self.shape == "linear"

    def lagrangian(self, violation: Tensor, multiplier: Tensor | None = None) -> Tensor:
        """ψ(v) = λ₀·v, λ₀·(v)₊ or λ₀·(v)₊²; the multiplier is ignored."""
        if self.shape == "linear":
            return self.weight * violation
        excess = violation.relu()
        return self.weight * (excess if self.shape == "hinge" else excess.square())

    def dual_direction(
        self, violation: Tensor, multiplier: Tensor | None = None
    ) -> Tensor:
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

    g = a + outer(mean of inner(v − a)), with the mean of all ranks (multipliers.py). ``anchor``
    says what a is: 0, the batch's largest violation, or a learned threshold.
    """

    scope: ScopeName = "batch"
    anchor: Anchor = "zero"

    def __init__(
        self, *, dual_lr: float | None = None, alpha: float | Adaptive | None = None
    ) -> None:
        # The parent would take 2α for an η left out, and refuses any beside an adaptive α.
        stated = (
            dual_lr if dual_lr is not None or alpha == "adaptive" else STANDARD_STEP
        )
        super().__init__(alpha=alpha, dual_lr=stated)

    @property
    def threshold_step(self) -> float:
        """The size of the step of a learned threshold."""
        return 0.0

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

    def for_equality(self) -> Formulation:
        """For a mean, one multiplier of either sign for v = ℓ − c; a tail is that of |ℓ − c|."""
        return super().for_equality() if self.anchor == "zero" else self


class Average(BatchFormulation):
    """One multiplier for the batch mean v̄ of a constraint: the usual constrained fine-tuning.

    Standard (α None): ψ = λ·v̄. Augmented: the expression of :class:`Pointwise` at v̄. An equality
    asks that the mean of ℓ be c, and has one multiplier of either sign.

    Args:
        dual_lr: η ≥ 0, the size of the dual step; None is 0.1.
        alpha: augmentation α > 0 (half the usual ρ), None for the standard Lagrangian, or
            "adaptive": α and η follow the gradients.

    Raises:
        ValueError: a number out of its range; ``dual_lr`` beside an adaptive ``alpha``.

    >>> Average(dual_lr=0.5).ascend(torch.tensor(0.2), torch.tensor(1.0))  # λ + η·v̄
    tensor(1.1000)
    """


class Tilted(BatchFormulation):
    """One multiplier for the tilted mean of a constraint: g = (1/τ) log mean exp(τv) ≤ 0.

    Between :class:`Average` (τ → 0) and a constraint on the worst sample of the batch (τ → ∞); also
    known as the entropic risk. In a small batch g is lower than over all samples.

    Args:
        tilt: τ > 0, in one over the units of the violation.
        dual_lr, alpha: as those of :class:`Average`.

    Raises:
        ValueError: as :class:`Average`; a tilt that is not above 0.

    >>> tilted, v = Tilted(tilt=2.0), torch.tensor([-1.0, 0.5])
    >>> 0.5 + tilted.outer(tilted.inner(v - 0.5).mean())  # between their mean, −0.25, and 0.5
    tensor(0.1777)
    """

    anchor: Anchor = "largest"  # v − a ≤ 0, so that no exponential overflows

    def __init__(
        self,
        *,
        tilt: float,
        dual_lr: float | None = None,
        alpha: float | Adaptive | None = None,
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

    The least g over t is CVaR_p, the mean of the worst 1 − p of the violations, at t their
    p-quantile (Rockafellar and Uryasev). t is learned, one number per side from 0: after every step
    t ← t − ``threshold_lr``·∂g/∂t with ∂g/∂t = 1 − share(v > t)/(1 − p) of the batch.

    Args:
        level: p in [0, 1).
        threshold_lr: the size of the step of t, in the units of the violation; of an adaptive
            one in units of r, the mean of its violated values.
        dual_lr, alpha: as those of :class:`Average`.

    Raises:
        ValueError: as :class:`Average`; a level outside [0, 1).

    >>> CVaR(level=0.5).inner(torch.tensor([-1.0, 0.0, 0.5, 1.0])).mean()  # of the worst half
    tensor(0.7500)
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
        # At 1 the tail is empty, and inner() would divide by 0.
        if self.level >= 1.0:
            raise ValueError(
                f"CVaR(level={level!r}): level must be a fraction below 1."
            )
        self.threshold_lr = number("CVaR", "threshold_lr", threshold_lr, minimum=0.0)

    @property
    def threshold_step(self) -> float:
        """The size of the step of t in the units of v; 0 of an adaptive one without an r yet."""
        return self.threshold_lr * (1.0 if self.scale is None else self.scale.reach)

    def inner(self, violation: Tensor) -> Tensor:
        """(v − t)₊/(1 − p), elementwise in v − t."""
        return violation.relu() / (1 - self.level)


class SampleFormulation(Ascending):
    """ψ of each sample's violation, with a multiplier per sample and column."""

    def lagrangian(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """ψ(v, λ), elementwise; of an adaptive one at v + margin, and linear beyond its reach."""
        scale = self.scale
        # A stated α has no reach; and before anything was violated an adaptive one has no α.
        if scale is None or scale.alpha is None:
            return self.psi(violation, multiplier)
        violation = violation + scale.margin
        # An inequality is bounded above alone: far inside the bound ψ is flat by itself.
        near = violation.clamp(-scale.reach if self.signed else None, scale.reach)
        force = self.force(near, multiplier)
        return self.psi(near, multiplier) + force * (violation - near)

    def slope(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """∂ψ/∂v, elementwise; beyond the reach it is what it is there."""
        # ψ is λv, of Relaxed less a term without v; the zeros give λ the shape of v.
        if self.augmentation is None:
            return multiplier + torch.zeros_like(violation)
        scale = self.scale
        # Beyond the reach ψ is linear, so its slope is that of the edge.
        if scale is not None and scale.alpha is not None:
            lowest = -scale.reach if self.signed else None
            violation = (violation + scale.margin).clamp(lowest, scale.reach)
        return self.force(violation, multiplier)

    psi = Ascending.lagrangian
    """ψ(v, λ) within the reach, elementwise."""

    def force(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """∂ψ/∂v of it with an α, elementwise: (λ + 2αv)₊; of an equality λ + 2αv."""
        alpha = self.augmentation
        force = multiplier if alpha is None else multiplier + 2 * alpha * violation
        return force if self.signed else force.clamp(min=0)


class Pointwise(SampleFormulation):
    """One multiplier for every sample: the requirement is on each input.

    ``Pointwise()`` needs only the bounds of the constraints: α and η follow the gradients
    (docs/formulations.md). With numbers it is the paper's augmented Lagrangian.

    Args:
        alpha: "adaptive", an augmentation α > 0 (half the usual ρ), or None for the standard
            Lagrangian λ·v.
        dual_lr: η ≥ 0, the size of the dual step with a stated α; None is the classical
            multiplier step, η = 2α, and 0.1 where there is no α.
        memory: False keeps no multiplier: a penalty on each violated sample, whose weight follows
            the gradients. With few training samples it violates fewer new ones
            (docs/few_instances.md); in training more violation stays.

    Raises:
        ValueError: a number out of its range; ``dual_lr`` beside an adaptive ``alpha``; no memory
            with another ``alpha``.

    >>> v, multipliers = torch.tensor([0.5, -1.0]), torch.tensor([0.0, 1.0])
    >>> Pointwise(alpha=1.0).ascend(v, multipliers)  # the first sample violates
    tensor([1., 0.])
    """

    scope: ScopeName = "sample"

    def __init__(
        self,
        *,
        alpha: float | Adaptive | None = "adaptive",
        dual_lr: float | None = None,
        memory: bool = True,
    ) -> None:
        super().__init__(alpha=alpha, dual_lr=dual_lr)
        if not isinstance(memory, bool):
            raise ValueError(f"Pointwise(memory={memory!r}): True or False.")
        if not memory and alpha != "adaptive":
            raise ValueError(
                f"Pointwise(alpha={alpha!r}, memory=False): without multipliers a stated alpha is "
                'Penalty(weight=…, shape="squared_hinge"). Leave alpha out, or take that.'
            )
        self.memory = memory
        # Without memory there is no table of λ, as of a Penalty.
        self.scope = "sample" if memory else "none"


class Relaxed(SampleFormulation):
    """Pointwise, with a relaxation u ≥ 0 per sample at a cost c(u), minimised over u.

    ψ(v, λ) = min over u ≥ 0 of c(u) + ψ_pointwise(v − u, λ). A sample that cannot be satisfied
    relaxes its bound instead of driving its multiplier up without limit.

    With ``Relaxed(price=10)`` a requirement pushes at most ten times as hard as the objective, in
    any unit: each of the samples that violate it or have a multiplier at most 10Λ over their share
    (docs/formulations.md), of which a tenth counts at least.

    Args:
        alpha: as that of :class:`Pointwise`; None with a quadratic cost only.
        beta: price β > 0 of relaxing; β → ∞ is :class:`Pointwise`.
        price: β over Λ/s > 0 instead of ``beta``, where alpha is "adaptive".
        cost: "quadratic" c(u) = βu², or "linear" c(u) = βu, which caps the force on a sample at β
            (the soft margin). None is quadratic with ``beta`` and linear with ``price``.
        dual_lr: as that of :class:`Pointwise`.

    Raises:
        ValueError: neither or both of ``beta`` and ``price``; a cost without the α it needs; a
            number out of its range.

    >>> relaxed = Relaxed(alpha=1.0, beta=3.0, cost="linear")
    >>> relaxed.relaxation(torch.tensor([1.0, 4.0]), torch.zeros(2))  # force 2·4 > β: u = 2.5
    tensor([0.0000, 2.5000])
    """

    scope: ScopeName = "sample"

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
            raise ValueError(
                "Relaxed needs a price of relaxing: either beta=… or price=…."
            )
        if cost not in ("quadratic", "linear", None):
            raise ValueError(
                f'Relaxed(cost={cost!r}): cost is "quadratic" or "linear".'
            )
        # A price is a multiple of Λ, which an adaptive α alone measures, and the largest force,
        # which a linear cost alone has.
        if price is not None and (alpha != "adaptive" or cost == "quadratic"):
            raise ValueError(
                "Relaxed(price=…) leaves alpha and cost out; or give beta=…."
            )
        # βu + λ(v − u) has no least value over u as soon as λ > β.
        if cost == "linear" and alpha is None:
            raise ValueError(
                'Relaxed(cost="linear", alpha=None) is unbounded: give an alpha > 0.'
            )
        self.beta = None if beta is None else number("Relaxed", "beta", beta, above=0.0)
        self.price = (
            None if price is None else number("Relaxed", "price", price, above=0.0)
        )
        self.cost = cost or ("quadratic" if price is None else "linear")

    @property
    def beta_in_force(self) -> float:
        """β as a number; a price is in Λ, once that is known."""
        if self.beta is not None:
            return self.beta
        # Before Λ is known, or where it is 0, the price is taken as it stands.
        unit = 1.0 if self.scale is None else self.scale.unit or 1.0
        return (self.price or 0.0) * unit

    def ascend(
        self, violation: Tensor, multiplier: Tensor, part: Tensor | float = 1.0
    ) -> Tensor:
        """The dual step; with a reach a quadratic cost lowers it by ηλ/2β, a linear one bounds it.

        λ/2β is u* of the standard Lagrangian, and β the bound of ``|λ|``.
        """
        if self.scale is None or self.scale.alpha is None:
            return super().ascend(violation, multiplier, part)
        beta = self.beta_in_force
        # Under a linear cost no force exceeds β, so no multiplier is worth more.
        if self.cost == "linear":
            return super().ascend(violation, multiplier, part).clamp(-beta, beta)
        kept = 1 - self.scale.step * part / (2 * beta)
        return super().ascend(violation, multiplier * kept, part)

    def residual(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """0 where the cost is linear and relaxes: there the force is β, whatever v is."""
        residual = super().residual(violation, multiplier)
        # A quadratic cost relaxes every violated sample, and pushes it all the same.
        if self.cost != "linear" or self.augmentation is None:
            return residual
        return torch.where(self.relaxation(violation, multiplier) == 0, residual, 0)

    def psi(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """ψ(v, λ), elementwise, with s = λ + 2αv:

        quadratic: αβ/(α+β)·(v + λ/2α)₊² − λ²/4α
        linear:    s ≤ β as pointwise;  s > β: βv − (λ−β)²/4α
        standard:  λv − λ²/4β

        Of an equality ψ(σv, σλ), σ the sign of s: u has either sign and costs c(|u|).
        """
        _, v, multiplier = self._as_inequality(violation, multiplier)
        alpha, beta = self.augmentation, self.beta_in_force
        if alpha is None:
            return multiplier * v - multiplier.square() / (4 * beta)
        shifted = multiplier + 2 * alpha * v
        if self.cost == "linear":
            capped = beta * v - (multiplier - beta).square() / (4 * alpha)
            return torch.where(shifted > beta, capped, super().psi(v, multiplier))
        # s > 0: the square expanded, so that small α does not cancel.
        active = (
            beta * (multiplier * v + alpha * v.square()) - multiplier.square() / 4
        ) / (alpha + beta)
        return torch.where(shifted > 0, active, -multiplier.square() / (4 * alpha))

    def force(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """∂ψ/∂v, elementwise: quadratic (s)₊·β/(α+β), linear min((s)₊, β); of an equality σ·."""
        side, v, multiplier = self._as_inequality(violation, multiplier)
        alpha, beta = self.augmentation or 0.0, self.beta_in_force
        shifted = multiplier + 2 * alpha * v
        if self.cost == "linear":
            return side * shifted.clamp(0, beta)
        return side * (shifted.clamp(min=0) * beta / (alpha + beta))

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
            pointwise = torch.maximum(v, -multiplier / (2 * alpha))
            return side * torch.where(
                shifted > beta, (beta - multiplier) / (2 * alpha), pointwise
            )
        active = (beta * v - multiplier / 2) / (alpha + beta)
        return side * torch.where(shifted >= 0, active, -multiplier / (2 * alpha))

    def relaxation(self, violation: Tensor, multiplier: Tensor) -> Tensor:
        """u*(v, λ) ≥ 0, the relaxation each sample takes, in the units of the violation.

        quadratic: α/(2(α+β))·(2v + λ/α)₊;  linear: (s − β)₊/2α;  standard: λ/2β

        Of an equality, σ times that of σv and σλ.
        """
        side, v, multiplier = self._as_inequality(violation, multiplier)
        alpha, beta = self.augmentation, self.beta_in_force
        # Without α nothing but λ holds v back, and u does not depend on v.
        if alpha is None:
            return multiplier / (2 * beta) + torch.zeros_like(v)
        shifted = multiplier + 2 * alpha * v
        if self.cost == "linear":
            return side * (shifted - beta).clamp(min=0) / (2 * alpha)
        return side * shifted.clamp(min=0) / (2 * (alpha + beta))

    def _as_inequality(
        self, violation: Tensor, multiplier: Tensor
    ) -> tuple[Tensor | int, Tensor, Tensor]:
        """σ, σv, σλ: an equality acts as the bound on its violated side, σ = sign(s)."""
        alpha = self.augmentation
        # Without α the relaxation is λ/2β, of the sign of λ by itself.
        if not self.signed or alpha is None:
            return 1, violation, multiplier
        below = multiplier + 2 * alpha * violation.detach() < 0
        side = torch.where(below, -1, 1).to(violation.dtype)
        return side, side * violation, side * multiplier
