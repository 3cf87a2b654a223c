"""Where no bound can be given: what is known of an answer is local."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..correction import least_move, slopes_of
from .problems import ConvexProblems, feasible


class LocalSolution(NamedTuple):
    """Answers to problems that are not convex: nothing is said of better ones elsewhere.

    .. versionadded:: 0.3.0
    """

    y: Tensor  #: (B, V)
    violation: Tensor  #: (B,) float64, as that of a :class:`Solution`
    objective: Tensor  #: (B,) float64, f(y)
    #: (B,) float64, the share of ∇f that no constraint balances: 0 at best
    stationarity: Tensor


def stationarity(
    y: Tensor,
    objective: Callable[[Tensor], Tensor],
    inequalities: Callable[[Tensor], Tensor],
    within: Tensor | None = None,
    near: float = 1e-4,
) -> Tensor:
    """The KKT residual of answers: min over λ ≥ 0 of ‖∇f + Jᵀλ‖ / ‖∇f‖, (B,) float64.

    J has the constraints within ``near`` of their bound, and all vectors are within the equalities.
    At most 1; 0 where no small step improves a feasible y. It is no gap: a stationary point of a
    problem that is not convex may be far from the optimum.

    Args:
        y: (B, V), float64 for a small residual.
        objective: y ↦ f, (B,), row by row.
        inequalities: y ↦ g, (B, K), row by row; g ≤ 0 is satisfied.
        within: (V, D), orthonormal: the null space of the equalities.
        near: in units of g.

    .. versionadded:: 0.3.0

    >>> from pl_pointwise.bounds import stationarity
    >>> y = torch.tensor([[0.5, 0.0], [0.4, 0.0]], dtype=torch.float64)
    >>> found = stationarity(y, lambda y: (y - 1).square().sum(1), lambda y: y - 0.5)
    >>> found.round(decimals=3)  # 0 where nothing could be better.
    tensor([0.8940, 1.0000], dtype=torch.float64)
    """
    y = y.detach()
    slopes = slopes_of(inequalities, y)
    slope = slopes_of(lambda y: objective(y)[:, None], y)[:, 0]
    if within is not None:
        slopes, slope = slopes @ within, slope @ within
    active = (inequalities(y).detach() >= -near)[:, :, None]
    slopes = torch.where(active, slopes, 0)
    pulls = torch.where(active, slopes @ slope[:, :, None], 1)[:, :, 0]
    rest = slope - least_move(slopes, -pulls)
    return rest.norm(dim=1).double() / slope.norm(dim=1).double().clamp(min=1e-300)


class Stationary(nn.Module):
    """A solver of problems that are not convex: its answers come with their KKT residual.

    Args:
        model: x ↦ y (B, V).
        program: their constraints; its objective is not read.
        objective: y ↦ f (B,), row by row.
        tolerance: the largest violation, where y is float64.

    .. versionadded:: 0.3.0
    """

    returns = LocalSolution

    def __init__(
        self,
        model: nn.Module,
        program: ConvexProblems,
        objective: Callable[[Tensor], Tensor],
        tolerance: float = 1e-8,
    ) -> None:
        super().__init__()
        self.model, self.program = model, program
        self.objective, self.tolerance = objective, tolerance

    @torch.no_grad()
    def forward(self, x: Tensor) -> LocalSolution:
        """Answers in the dtype of x, corrected."""
        weights = next(self.model.parameters())
        y = self.model(x.to(weights.dtype)).double()
        y = self.program.onto_equalities(y, x)
        moved = feasible(y, self.program, x, x.dtype, self.tolerance)
        return self.described(x, moved.to(x.dtype))

    def described(self, x: Tensor, y: Tensor) -> LocalSolution:
        """What is known of answers y, (B, V)."""
        program, wide = self.program, y.double()
        residual = stationarity(
            wide, self.objective, lambda y: program.inequalities(y, x), program.null
        )
        return LocalSolution(y, program.violation(y, x), self.objective(wide), residual)
