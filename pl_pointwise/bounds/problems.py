"""What a kind of convex problem brings, and what is the same for all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..correction import complementary, newton_corrected


class ConvexProblems(nn.Module, ABC):
    """Convex problems of x: minimise f(y; x) subject to Ay = b(x) and g(y; x) ≤ 0.

    What a kind of problem brings is its functions and the minimum of its Lagrangian; the bound's
    ascent is the same for all.

    .. versionadded:: 0.3.0
    """

    plus: Tensor  #: A⁺, (V, E)
    null: Tensor  #: (V, D), orthonormal: AN = 0
    steps = 3  #: Newton steps on D that bring a λ(x) near the best one.

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves with a module, and stays in float64: rounded matrices are another problem."""
        device = fn(torch.empty(0, device=self.null.device)).device
        for name, value in self._buffers.items():
            self._buffers[name] = None if value is None else value.to(device)
        return self

    @abstractmethod
    def objective(self, y: Tensor, x: Tensor) -> Tensor:
        """f(y; x), (B, V), (B, E) ↦ (B,) float64."""

    @abstractmethod
    def inequalities(self, y: Tensor, x: Tensor) -> Tensor:
        """g(y; x), (B, V), (B, E) ↦ (B, K) float64; at most 0 is satisfied."""

    @abstractmethod
    def slopes(self, y: Tensor, x: Tensor) -> Tensor:
        """∂g/∂y, (B, K, V) float64."""

    @abstractmethod
    def equalities(self, y: Tensor, x: Tensor) -> Tensor:
        """Ay − b(x), (B, E) float64."""

    @abstractmethod
    def minimiser(self, x: Tensor, multipliers: Tensor) -> Tensor:
        """argmin over Ay = b(x) of f + λᵀg, (B, V) float64; λ (B, K) ≥ 0."""

    @abstractmethod
    def dual(self, x: Tensor, multipliers: Tensor) -> Tensor:
        """D(λ; x), (B,) float64, differentiable in λ; lowered by its own error."""

    @abstractmethod
    def magnitudes(self, y: Tensor, x: Tensor) -> Tensor:
        """The sizes of the terms of g, (B, K): rounding is in proportion to them."""

    @abstractmethod
    def curvature_of_dual(self, x: Tensor, y: Tensor, multipliers: Tensor) -> Tensor:
        """−∂²D/∂λ², (B, K, K): J (Hessian of the Lagrangian)⁻¹ Jᵀ at its minimiser y."""

    def require_convex(self, x: Tensor) -> None:
        """Refuses problems that are not convex where their matrices do not tell."""

    def violation(self, y: Tensor, x: Tensor) -> Tensor:
        """The largest of g and |Ay − b|, at least 0, (B,) float64."""
        worst = self.inequalities(y, x).amax(1).clamp(min=0)
        unequal = self.equalities(y, x).abs()
        return torch.maximum(worst, unequal.amax(1)) if unequal.shape[1] else worst

    def onto_equalities(self, y: Tensor, x: Tensor) -> Tensor:
        """The nearest point to y with Ay = b(x), (B, V) float64."""
        return y.double() - self.equalities(y, x) @ self.plus.T

    @torch.no_grad()
    def ascend(self, x: Tensor, multipliers: Tensor, steps: int) -> Tensor:
        """λ (B, K) after Newton steps on D, each taken only as far as D grows.

        A step is the maximum of D's quadratic model over λ ≥ 0; with a quadratic objective and
        linear constraints D is its model, so that one step is enough if its active set is found.
        """
        multipliers = multipliers.double().clamp(min=0)
        best = self.dual(x, multipliers)
        for _ in range(steps):
            y = self.minimiser(x, multipliers)
            slope = self.inequalities(y, x)
            curved = self.curvature_of_dual(x, y, multipliers)
            wanted = slope + (curved @ multipliers[:, :, None])[:, :, 0]
            size = curved.diagonal(dim1=1, dim2=2).clamp(min=1e-300)
            target = complementary(curved, wanted, multipliers + slope / size > 0)
            length = torch.ones_like(best)
            before = best
            for _ in range(8):  # Halves, until D grows.
                moved = multipliers + length[:, None] * (target - multipliers)
                value = self.dual(x, moved)
                better = (value > best) & (length > 0)
                multipliers = torch.where(better[:, None], moved, multipliers)
                best = torch.where(better, value, best)
                length = torch.where(better, 0, length / 2)
                if not (length > 0).any():
                    break
            if not (best > before).any():
                break
        return multipliers


def feasible(
    y: Tensor, program: ConvexProblems, x: Tensor, kind: torch.dtype, tolerance: float
) -> Tensor:
    """y within the equalities, corrected in float64 so that it is feasible when cast to a dtype."""
    # Rounding moves a constraint by about that much: the aim is inside.
    rounding = 0.0 if kind == torch.float64 else 4 * torch.finfo(kind).eps
    inside = rounding * program.magnitudes(y, x)
    return newton_corrected(
        y,
        lambda y: program.inequalities(y, x) + inside,
        lambda y: program.slopes(y, x),
        tolerance=tolerance,
        within=program.null,
    )
