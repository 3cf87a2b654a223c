"""A proof with every answer: how far from the optimum it can be at most.

For any λ ≥ 0 the least Lagrangian bounds the optimum of a convex problem from below,

    D(λ; x) = min over y with Ay = x of  f(y) + λᵀg(y)  ≤  min f(y) subject to Ay = x, g(y) ≤ 0,

so that f(y) − D is more than a feasible y is above the optimum. A network λ(x), trained by D alone,
finds a good λ for every x, without solver or labels; Newton steps on D improve it for one x.

Signs: g ≤ 0 is satisfied. Bounds are computed in float64, whatever the dtype of the module and of
x, and lowered by what rounding and an inexact minimum can amount to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .correction import complementary, least_move, newton_corrected, slopes_of
from .errors import DataError

log = logging.getLogger(__name__)

EPSILON = torch.finfo(torch.float64).eps
FLOOR = 0.02
"""What λ(x) starts at where the price is 0, as a share of the largest price: ReLU has no slope
at 0."""


class Solution(NamedTuple):
    """Answers, and what is proved of them; a row for each x."""

    y: Tensor  #: (B, V)
    violation: Tensor  #: (B,) float64, the largest of g and |Ay − x|; at most 0 of g counts as 0
    objective: Tensor  #: (B,) float64, f(y)
    bound: Tensor  #: (B,) float64; no feasible point has a smaller f; −inf where none is known
    gap: Tensor  #: (B,) float64, what f(y) is above the optimum at most, as a share of it


class QuadraticProgram(nn.Module):
    """Convex quadratic problems of x: minimise ½yᵀQy + pᵀy s.t. Ay = x, ½yᵀHₖy + Gₖy ≤ hₖ.

    Args:
        Q: (V, V), or (V,) of a diagonal; within Ay = 0 positive definite.
        p: (V,).
        A: (E, V), of full rank.
        G: (K, V).
        h: (K,).
        H: (K, V, V) or (K, V) of diagonals, positive semidefinite; None: linear constraints.

    Raises:
        DataError: matrices whose sizes disagree, not finite, or an objective or a constraint that
            is not convex: no bound can be given.
    """

    Q: Tensor
    p: Tensor
    A: Tensor
    G: Tensor
    h: Tensor
    H: Tensor | None
    plus: Tensor  # A⁺, (V, E)
    null: Tensor  # (V, D), orthonormal: AN = 0
    hessian: Tensor  # NᵀQN
    inverse: Tensor  # Its inverse, with linear constraints.
    curved: Tensor  # NᵀHₖN, with quadratic ones.

    def __init__(
        self,
        Q: Tensor,  # noqa: N803
        p: Tensor,
        A: Tensor,  # noqa: N803
        G: Tensor,  # noqa: N803
        h: Tensor,
        H: Tensor | None = None,  # noqa: N803
    ) -> None:
        super().__init__()
        Q, p, A, G, h = (each.detach().double() for each in (Q, p, A, G, h))  # noqa: N806
        Q = torch.diag(Q) if Q.dim() == 1 else Q  # noqa: N806
        quadratic = None if H is None else H.detach().double()
        if quadratic is not None and quadratic.dim() == 2:
            quadratic = torch.diag_embed(quadratic)
        self._require_sizes(Q, p, A, G, h, quadratic)
        plus = torch.linalg.pinv(A)
        null = torch.linalg.svd(A)[2][len(A) :].T.contiguous()
        hessian = null.T @ Q @ null
        least = float(torch.linalg.eigvalsh(hessian)[0])
        if least <= 1e-10 * float(Q.abs().max()):
            raise DataError(
                "There is no bound: within the equalities the objective's Q has the eigenvalue "
                f"{least:.3g}, and has to be positive definite."
            )
        if quadratic is not None:
            lowest = float(torch.linalg.eigvalsh(quadratic).min())
            if lowest < -1e-10 * max(1.0, float(quadratic.abs().max())):
                raise DataError(
                    f"There is no bound: a constraint's H has the eigenvalue {lowest:.3g}, so that "
                    "it is not convex."
                )
        self.curvature = least
        numbers: dict[str, Tensor | None] = {"Q": Q, "p": p, "A": A, "G": G, "h": h}
        numbers |= {"H": quadratic, "plus": plus, "null": null, "hessian": hessian}
        if quadratic is None:
            numbers["inverse"] = torch.linalg.inv(hessian)
        else:
            numbers["curved"] = null.T @ quadratic @ null
        for name, value in numbers.items():
            self.register_buffer(name, value, persistent=False)

    @staticmethod
    def _require_sizes(
        Q: Tensor,  # noqa: N803
        p: Tensor,
        A: Tensor,  # noqa: N803
        G: Tensor,  # noqa: N803
        h: Tensor,
        H: Tensor | None,  # noqa: N803
    ) -> None:
        variables, count = len(p), len(h)
        wanted = {
            "Q": (Q, (variables, variables)),
            "p": (p, (variables,)),
            "A": (A, (len(A), variables)),
            "G": (G, (count, variables)),
        }
        if H is not None:
            wanted["H"] = (H, (count, variables, variables))
        for name, (value, shape) in wanted.items():
            if tuple(value.shape) != shape:
                raise DataError(f"{name} is {tuple(value.shape)}, and should be {shape}.")
            if not value.isfinite().all():
                raise DataError(f"{name} has numbers that are not finite.")
        if not h.isfinite().all():
            raise DataError("h has numbers that are not finite: leave such a constraint out.")
        if not torch.equal(Q, Q.T):
            raise DataError("Q is not symmetric: give (Q + Qᵀ)/2.")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves with a module, and stays in float64: rounded matrices are another problem."""
        device = fn(torch.empty(0, device=self.p.device)).device
        for name, value in self._buffers.items():
            self._buffers[name] = None if value is None else value.to(device)
        return self

    def objective(self, y: Tensor) -> Tensor:
        """f(y), (B, V) ↦ (B,) float64."""
        y = y.double()
        return ((y @ self.Q) * y).sum(1) / 2 + y @ self.p

    def inequalities(self, y: Tensor) -> Tensor:
        """g(y), (B, V) ↦ (B, K) float64; at most 0 is satisfied."""
        y = y.double()
        found = y @ self.G.T - self.h
        if self.H is None:
            return found
        return found + torch.einsum("bi,kij,bj->bk", y, self.H, y) / 2

    def slopes(self, y: Tensor) -> Tensor:
        """∂g/∂y, (B, K, V) float64."""
        y = y.double()
        if self.H is None:
            return self.G.expand(len(y), -1, -1)
        return self.G + torch.einsum("kij,bj->bki", self.H, y)

    def equalities(self, y: Tensor, x: Tensor) -> Tensor:
        """Ay − x, (B, E) float64."""
        return y.double() @ self.A.T - x.double()

    def violation(self, y: Tensor, x: Tensor) -> Tensor:
        """The largest of g and |Ay − x|, at least 0, (B,) float64."""
        worst = self.inequalities(y).amax(1).clamp(min=0)
        return torch.maximum(worst, self.equalities(y, x).abs().amax(1))

    def minimiser(self, x: Tensor, multipliers: Tensor) -> Tensor:
        """argmin over Ay = x of f(y) + λᵀg(y), (B, V) float64; λ (B, K) ≥ 0."""
        start, multipliers = x.double() @ self.plus.T, multipliers.double()
        slope = (start @ self.Q + self.p + multipliers @ self.G) @ self.null
        if self.H is None:
            return start - slope @ self.inverse @ self.null.T
        slope = slope + torch.einsum("bk,kij,bj->bi", multipliers, self.H, start) @ self.null
        factor = torch.linalg.cholesky(self._hessian(multipliers))
        return start - torch.cholesky_solve(slope[:, :, None], factor)[:, :, 0] @ self.null.T

    def _hessian(self, multipliers: Tensor) -> Tensor:
        """(B, D, D), of the Lagrangian within the equalities."""
        if self.H is None:
            return self.hessian.expand(len(multipliers), -1, -1)
        return self.hessian + torch.einsum("bk,kij->bij", multipliers, self.curved)

    def dual(self, x: Tensor, multipliers: Tensor) -> Tensor:
        """D(λ; x), (B,) float64, differentiable in λ; lowered by its own error."""
        multipliers = multipliers.double().clamp(min=0)
        y = self.minimiser(x, multipliers)
        value = self.objective(y) + (multipliers * self.inequalities(y)).sum(1)
        return value - self._error(y, multipliers)

    @torch.no_grad()
    def _error(self, y: Tensor, multipliers: Tensor) -> Tensor:
        """What D can be below the Lagrangian at y: ‖∇‖²/2m, and the rounding of the sums."""
        slope = y @ self.Q + self.p
        slope = slope + torch.einsum("bk,bkv->bv", multipliers, self.slopes(y))
        inexact = (slope @ self.null).square().sum(1) / (2 * self.curvature)
        sums = (y.abs() @ self.Q.abs() * y.abs()).sum(1) + y.abs() @ self.p.abs()
        terms = self.magnitudes(y)
        return inexact + 4 * len(self.p) * EPSILON * (sums + (multipliers * terms).sum(1))

    def magnitudes(self, y: Tensor) -> Tensor:
        """The sums of the sizes of the terms of g(y), (B, K): rounding is in proportion to them."""
        terms = y.abs() @ self.G.abs().T + self.h.abs()
        if self.H is not None:
            terms = terms + torch.einsum("bi,kij,bj->bk", y.abs(), self.H.abs(), y.abs())
        return terms

    @torch.no_grad()
    def ascend(self, x: Tensor, multipliers: Tensor, steps: int) -> Tensor:
        """λ (B, K) after Newton steps on D, each taken only as far as D grows.

        A step is the maximum of D's quadratic model over λ ≥ 0; with linear constraints D is its
        model, so that one step is enough if its active set is found.
        """
        multipliers = multipliers.double().clamp(min=0)
        best = self.dual(x, multipliers)
        for _ in range(steps):
            y = self.minimiser(x, multipliers)
            slope = self.inequalities(y)
            jacobian = self.slopes(y) @ self.null  # (B, K, D)
            if self.H is None:  # The same for all.
                curved = (jacobian[:1] @ self.inverse @ jacobian[:1].mT).expand(len(x), -1, -1)
            else:
                factor = torch.linalg.cholesky(self._hessian(multipliers))
                curved = jacobian @ torch.cholesky_solve(jacobian.mT, factor)
            wanted = slope + (curved @ multipliers[:, :, None])[:, :, 0]
            size = curved.diagonal(dim1=1, dim2=2).clamp(min=1e-300)
            target = complementary(curved, wanted, multipliers + slope / size > 0)
            length = torch.ones_like(best)
            for _ in range(8):  # Halves, until D grows.
                moved = multipliers + length[:, None] * (target - multipliers)
                value = self.dual(x, moved)
                better = (value > best) & (length > 0)
                multipliers = torch.where(better[:, None], moved, multipliers)
                best = torch.where(better, value, best)
                length = torch.where(better, 0, length / 2)
                if not (length > 0).any():
                    break
        return multipliers


class DualNetwork(nn.Module):
    """λ(x) ≥ 0, (B, E) ↦ (B, K): a network whose last layer starts at one λ for all x.

    Args:
        inputs: E.
        start: (K,) ≥ 0, such as the mean price of a run.
        width: of its two layers.
    """

    def __init__(self, inputs: int, start: Tensor, width: int = 200) -> None:
        super().__init__()
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(()))
        sizes, layers = (inputs, width, width), list[nn.Module]()
        for pair in pairwise(sizes):
            layers += [nn.Linear(*pair), nn.ReLU()]
        self.last = nn.Linear(width, len(start))
        self.network = nn.Sequential(*layers, self.last)
        self.start_at(start)

    @torch.no_grad()
    def start_at(self, start: Tensor) -> None:
        """From now on, until it is trained, λ(x) is ``start``, (K,), whatever x is."""
        start = start.detach().to(self.scale).clamp(min=0)
        self.scale.fill_(float(start.max()) or 1.0)
        nn.init.zeros_(self.last.weight)
        self.last.bias.copy_((start / self.scale).clamp(min=FLOOR))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.network(x.to(self.scale.dtype))
        return self.scale * found.relu()


def train_bound(
    network: DualNetwork,
    program: QuadraticProgram,
    x: Tensor,
    *,
    epochs: int = 20,
    batch: int = 200,
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> DualNetwork:
    """Trains λ(x) by D, which needs neither labels nor a solver.

    Args:
        network: started at a good λ.
        program: the problems.
        x: (N, E), those to train on.
        epochs: over x.
        batch: instances a step.
        learning_rate: of Adam, which falls to 0 linearly.
        seed: of the order.

    Returns:
        The network.
    """
    trained = [weight.requires_grad for weight in network.parameters()]
    optimizer = torch.optim.Adam(network.requires_grad_(True).parameters(), learning_rate)
    total = epochs * -(-len(x) // batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
    draw = torch.Generator().manual_seed(seed)
    network.train()
    with torch.inference_mode(False), torch.enable_grad():
        for _ in range(epochs):
            for rows in torch.randperm(len(x), generator=draw).split(batch):
                of = x[rows].clone()
                loss = -program.dual(of, network(of)).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    for weight, before in zip(network.parameters(), trained, strict=True):
        weight.grad = None
        weight.requires_grad_(before)
    return network.eval()


class Certified(nn.Module):
    """A solver x ↦ y whose answers come with their violation and with a bound of their gap.

    Its answer is corrected to the tolerance in float64, and so is argmin f + λᵀg, which λ(x) gives
    for nothing; of the two the better one is returned.

    Args:
        model: x ↦ y (B, V).
        program: the problems.
        network: λ(x).
        ascents: Newton steps on D for each x; 0: λ(x) alone. None: 1 with linear constraints, which
            is the whole way to their optimum, and 3 with quadratic ones.
        tolerance: the largest violation, where y is float64.
    """

    returns = Solution

    def __init__(
        self,
        model: nn.Module,
        program: QuadraticProgram,
        network: DualNetwork,
        ascents: int | None = None,
        tolerance: float = 1e-8,
    ) -> None:
        super().__init__()
        self.model, self.program, self.network = model, program, network
        self.tolerance = tolerance
        self.ascents = (1 if program.H is None else 3) if ascents is None else ascents

    @torch.no_grad()
    def forward(self, x: Tensor) -> Solution:
        """Answers in the dtype of x, and what is proved of them."""
        program, kind = self.program, x.dtype
        multipliers = self.multipliers(x)
        answer = self.model(x.to(self.network.scale.dtype)).double()
        answer = answer - program.equalities(answer, x) @ program.plus.T
        dual = program.minimiser(x, multipliers)
        found, least = answer, torch.full_like(answer[:, 0], torch.inf)
        for candidate in (answer, dual):
            moved = _feasible(candidate, program, kind, self.tolerance)
            value = program.objective(moved)
            allowed = program.inequalities(moved).amax(1) <= self.tolerance
            value = torch.where(allowed, value, torch.inf)
            better = value < least
            found = torch.where(better[:, None], moved, found)
            least = torch.where(better, value, least)
        return self.proved(x, found.to(kind), multipliers)

    @torch.no_grad()
    def multipliers(self, x: Tensor) -> Tensor:
        """λ(x) after the Newton steps, (B, K) float64."""
        given = self.network(x.to(self.network.scale.dtype))
        return self.program.ascend(x, given, self.ascents)

    @torch.no_grad()
    def proved(self, x: Tensor, y: Tensor, multipliers: Tensor | None = None) -> Solution:
        """What is proved of any answers y (B, V), such as another solver's."""
        multipliers = self.multipliers(x) if multipliers is None else multipliers
        bound, objective = self.program.dual(x, multipliers), self.program.objective(y)
        worst = self.program.violation(y, x)
        return Solution(y, worst, objective, bound, gap_of(objective, bound))


def _feasible(y: Tensor, program: QuadraticProgram, kind: torch.dtype, tolerance: float) -> Tensor:
    """y within the equalities, corrected in float64 so that it is feasible when cast to a dtype."""
    # Rounding moves a constraint by about that much: the aim is inside.
    rounding = 0.0 if kind == torch.float64 else 4 * torch.finfo(kind).eps
    inside = rounding * program.magnitudes(y)
    return newton_corrected(
        y,
        lambda y: program.inequalities(y) + inside,
        program.slopes,
        tolerance=tolerance,
        within=program.null,
    )


def gap_of(objective: Tensor, bound: Tensor) -> Tensor:
    """(f − D) as a share of the optimum, at most, (B,); inf where the optimum may be 0."""
    size = torch.minimum(objective.abs(), bound.abs())
    same = (objective.sign() == bound.sign()) & (size > 0)
    return torch.where(same, (objective - bound) / size, torch.inf)


# Where no bound can be given ----------------------------------------------------------------------


class LocalSolution(NamedTuple):
    """Answers to problems that are not convex: nothing is said of better ones elsewhere."""

    y: Tensor  #: (B, V)
    violation: Tensor  #: (B,) float64, as that of a :class:`Solution`
    objective: Tensor  #: (B,) float64, f(y)
    stationarity: Tensor  #: (B,) float64, the share of ∇f that no constraint balances: 0 at best


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
    """

    returns = LocalSolution

    def __init__(
        self,
        model: nn.Module,
        program: QuadraticProgram,
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
        y = y - self.program.equalities(y, x) @ self.program.plus.T
        return self.described(x, _feasible(y, self.program, x.dtype, self.tolerance).to(x.dtype))

    def described(self, x: Tensor, y: Tensor) -> LocalSolution:
        """What is known of answers y, (B, V)."""
        program, wide = self.program, y.double()
        found = stationarity(wide, self.objective, program.inequalities, program.null)
        return LocalSolution(y, program.violation(y, x), self.objective(wide), found)
