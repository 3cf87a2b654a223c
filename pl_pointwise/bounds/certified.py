"""Answers that come with their violation and with a bound of their gap."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .network import DualNetwork
from .problems import ConvexProblems, feasible


class Solution(NamedTuple):
    """Answers, and what is proved of them; a row for each x.

    .. versionadded:: 0.3.0
    """

    y: Tensor  #: (B, V)
    #: (B,) float64, the largest of g and |Ay − x|; at most 0 of g counts as 0
    violation: Tensor
    objective: Tensor  #: (B,) float64, f(y)
    #: (B,) float64; no feasible point has a smaller f; −inf where none is known
    bound: Tensor
    #: (B,) float64, what f(y) is above the optimum at most, as a share of it
    gap: Tensor


class Certified(nn.Module):
    """A solver x ↦ y whose answers come with their violation and with a bound of their gap.

    Its answer is corrected to the tolerance in float64, and so is argmin f + λᵀg, which λ(x) gives
    for nothing; of the two the better one is returned.

    Args:
        model: x ↦ y (B, V).
        program: the problems.
        network: λ(x).
        ascents: Newton steps on D for each x; 0: λ(x) alone. None: 1 where the objective is
            quadratic and constraints are linear, which is the whole way to their optimum, else 3.
        tolerance: the largest violation, where y is float64.

    .. versionadded:: 0.3.0

    >>> from pl_pointwise.bounds import Certified, DualNetwork, QuadraticProgram
    >>> program = QuadraticProgram(  # ½‖y‖² at least, with y₁ + y₂ = x and y₁ ≤ 0.25.
    ...     Q=torch.ones(2), p=torch.zeros(2), A=torch.ones(1, 2),
    ...     G=torch.tensor([[1.0, 0.0]]), h=torch.tensor([0.25]),
    ... )
    >>> network = DualNetwork(1, start=torch.tensor([0.2]))
    >>> solver = Certified(nn.Linear(1, 2), program, network)  # A model that is not trained.
    >>> found = solver(torch.tensor([[1.0]]))
    >>> found.y, bool(found.gap < 1e-4)
    (tensor([[0.2500, 0.7500]]), True)
    """

    returns = Solution

    def __init__(
        self,
        model: nn.Module,
        program: ConvexProblems,
        network: DualNetwork,
        ascents: int | None = None,
        tolerance: float = 1e-8,
    ) -> None:
        super().__init__()
        self.model, self.program, self.network = model, program, network
        self.tolerance = tolerance
        self.ascents = program.steps if ascents is None else ascents

    @torch.no_grad()
    def forward(self, x: Tensor) -> Solution:
        """Answers in the dtype of x, and what is proved of them."""
        program, kind = self.program, x.dtype
        multipliers = self.multipliers(x)
        answer = self.model(x.to(self.network.scale.dtype)).double()
        answer = program.onto_equalities(answer, x)
        dual = program.minimiser(x, multipliers)
        best, least = answer, torch.full_like(answer[:, 0], torch.inf)
        for candidate in (answer, dual):
            moved = feasible(candidate, program, x, kind, self.tolerance)
            value = program.objective(moved, x)
            allowed = program.inequalities(moved, x).amax(1) <= self.tolerance
            value = torch.where(allowed, value, torch.inf)
            better = value < least
            best = torch.where(better[:, None], moved, best)
            least = torch.where(better, value, least)
        return self.proved(x, best.to(kind), multipliers)

    @torch.no_grad()
    def multipliers(self, x: Tensor) -> Tensor:
        """λ(x) after the Newton steps, (B, K) float64."""
        start = self.network(x.to(self.network.scale.dtype))
        return self.program.ascend(x, start, self.ascents)

    @torch.no_grad()
    def proved(
        self, x: Tensor, y: Tensor, multipliers: Tensor | None = None
    ) -> Solution:
        """What is proved of any answers y (B, V), such as another solver's."""
        multipliers = self.multipliers(x) if multipliers is None else multipliers
        bound, objective = (
            self.program.dual(x, multipliers),
            self.program.objective(y, x),
        )
        worst = self.program.violation(y, x)
        return Solution(y, worst, objective, bound, gap_of(objective, bound))


def gap_of(objective: Tensor, bound: Tensor) -> Tensor:
    """(f − D) as a share of the optimum, at most, (B,); inf where the optimum may be 0."""
    size = torch.minimum(objective.abs(), bound.abs())
    same = (objective.sign() == bound.sign()) & (size > 0)
    return torch.where(same, (objective - bound) / size, torch.inf)
