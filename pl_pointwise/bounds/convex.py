"""Convex problems given as functions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..correction import slopes_of
from ..errors import DataError
from .problems import ConvexProblems

EPSILON = torch.finfo(torch.float64).eps
NEWTON_STEPS = 30
HALVINGS = 30
CONVERGED = 1e-27
"""A decrease that a step promises, relative to the value, below which none is taken."""


class ConvexProgram(ConvexProblems):
    """Convex problems of x given as functions: minimise f(y; x) s.t. Ay = b(x), g(y; x) ≤ 0.

    The least Lagrangian is found by Newton's method. What it misses is bounded by the gradient p
    that is left at y: a convex function lies above its tangent, so that within the box no point is
    lower than the Lagrangian at y by more than Σ max over the box of −pᵢ(y'ᵢ − yᵢ).

    That f and g are convex in y is a promise of the user; :meth:`require_convex` looks for a
    counterexample. Rounding within the functions is not seen: what is lowered is in proportion to
    their values.

    Args:
        objective: (y, x) ↦ f, (B, V), (B, E) ↦ (B,), row by row, twice differentiable in y.
        inequalities: (y, x) ↦ g, (B, K), row by row, twice differentiable in y; g ≤ 0 is
            satisfied.
        lower: (V,), no feasible y is below it.
        upper: (V,), no feasible y is above it. The functions are defined within the box, which may
            be wide: its size counts only where the minimum is inexact.
        A: (F, V), of full rank; None: no equalities.
        b: x ↦ b, (B, F); None: b is x.

    Raises:
        DataError: sizes that disagree, a box that is empty or not finite, b without A.

    Example:
        >>> import torch
        >>> from pl_pointwise.bounds import ConvexProgram
        >>> program = ConvexProgram(  # The cheapest supply of a demand x, one source limited.
        ...     objective=lambda y, x: y.exp().sum(1),
        ...     inequalities=lambda y, x: y[:, :1] - 0.2,
        ...     lower=torch.full((3,), -5.0),
        ...     upper=torch.full((3,), 5.0),
        ...     A=torch.ones(1, 3),
        ... )
        >>> x = torch.tensor([[1.2]])
        >>> multipliers = program.ascend(x, torch.zeros(1, 1), steps=5)
        >>> round(float(program.dual(x, multipliers)), 4)  # At y = (0.2, 0.5, 0.5).
        4.5188

    .. versionadded:: 0.3.0
    """

    A: Tensor
    lower: Tensor
    upper: Tensor

    def __init__(
        self,
        objective: Callable[[Tensor, Tensor], Tensor],
        inequalities: Callable[[Tensor, Tensor], Tensor],
        lower: Tensor,
        upper: Tensor,
        A: Tensor | None = None,  # noqa: N803
        b: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        lower, upper = lower.detach().double(), upper.detach().double()
        if lower.dim() != 1 or lower.shape != upper.shape:
            raise DataError(
                f"lower is {tuple(lower.shape)} and upper {tuple(upper.shape)}: give one number "
                "for each variable, (V,)."
            )
        if not (torch.isfinite(lower) & torch.isfinite(upper) & (lower < upper)).all():
            raise DataError("lower has to be below upper, and both finite.")
        if A is None and b is not None:
            raise DataError("b(x) is given without A: Ay = b(x) needs both.")
        variables = len(lower)
        matrix = lower.new_zeros(0, variables) if A is None else A.detach().double()
        if matrix.dim() != 2 or matrix.shape[1] != variables:
            raise DataError(
                f"A is {tuple(matrix.shape)}, and should be (F, {variables})."
            )
        rank = int(torch.linalg.matrix_rank(matrix)) if len(matrix) else 0
        if rank < len(matrix):
            raise DataError(
                f"A has {len(matrix)} rows of rank {rank}: leave out those that follow from others."
            )
        self._objective, self._inequalities, self._b = objective, inequalities, b
        # The one leads from b to a point with Ay = b, the other spans the moves that keep it.
        plus = torch.linalg.pinv(matrix)
        null = torch.linalg.svd(matrix)[2][len(matrix) :].T.contiguous()
        numbers = {
            "A": matrix,
            "lower": lower,
            "upper": upper,
            "plus": plus,
            "null": null,
        }
        for name, value in numbers.items():
            self.register_buffer(name, value, persistent=False)

    def objective(self, y: Tensor, x: Tensor) -> Tensor:
        value = self._objective(y.double(), x.double())
        return self._required("objective", value, (len(y),))

    def inequalities(self, y: Tensor, x: Tensor) -> Tensor:
        value = self._inequalities(y.double(), x.double())
        return self._required("inequalities", value, (len(y), value.shape[-1]))

    @staticmethod
    def _required(name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        if tuple(value.shape) != shape:
            wanted = (
                "one value per row, (B,)"
                if len(shape) == 1
                else "a row per row of y, (B, K)"
            )
            raise DataError(f"{name} gave {tuple(value.shape)}: it should be {wanted}.")
        return value

    def slopes(self, y: Tensor, x: Tensor) -> Tensor:
        return slopes_of(lambda y: self.inequalities(y, x), y.double())

    def equalities(self, y: Tensor, x: Tensor) -> Tensor:
        if not len(self.A):
            return y.double()[:, :0]
        wanted = x.double() if self._b is None else self._b(x.double())
        return y.double() @ self.A.T - self._required(
            "b(x)", wanted, (len(y), len(self.A))
        )

    def magnitudes(self, y: Tensor, x: Tensor) -> Tensor:
        return self.inequalities(y, x).abs() + y.abs().amax(1, keepdim=True)

    def lagrangian(self, y: Tensor, x: Tensor, multipliers: Tensor) -> Tensor:
        """f + λᵀg, (B,)."""
        return self.objective(y, x) + (multipliers * self.inequalities(y, x)).sum(1)

    def minimiser(self, x: Tensor, multipliers: Tensor) -> Tensor:
        """By Newton's method from the middle of the box; it does not leave the box."""
        multipliers = multipliers.detach().double().clamp(min=0)
        middle = ((self.lower + self.upper) / 2).expand(len(x), -1)
        with torch.no_grad():
            y = self.onto_equalities(middle, x)
            value = self.lagrangian(y, x, multipliers)
            for _ in range(NEWTON_STEPS):
                slope, curvature = self._derivatives(y, x, multipliers)
                slope = slope @ self.null
                direction = -self._solved(self.null.T @ curvature @ self.null, slope)
                # Below 0: the decrease of a short step.
                promised = (slope * direction).sum(1)
                if (promised.abs() <= CONVERGED * (1 + value.abs())).all():
                    break
                direction = direction @ self.null.T
                length = self._room(y, direction)
                # The last steps lower the gradient, and the value by less than its rounding.
                rounding = 8 * EPSILON * (1 + value.abs())
                for _ in range(HALVINGS):
                    moved = y + length[:, None] * direction
                    now = self.lagrangian(moved, x, multipliers)
                    lower = now <= value + 1e-4 * length * promised + rounding
                    if lower.all():
                        break
                    length = torch.where(lower, length, length / 2)
                # A step that leaves the functions' domain is not taken either.
                y = torch.where(lower[:, None], moved, y)
                value = torch.where(lower, now, value)
                if not lower.any():
                    break
        return y

    def _room(self, y: Tensor, direction: Tensor) -> Tensor:
        """The longest step, at most 1, that stays within the box, (B,)."""
        edge = torch.where(direction > 0, self.upper, self.lower)
        room = (edge - y) / torch.where(direction == 0, 1, direction)
        # A variable that stands still, or is outside already, holds no step back.
        room = torch.where((direction == 0) | (room < 0), torch.inf, room)
        return (0.99 * room.amin(1)).clamp(max=1)

    @staticmethod
    def _solved(matrices: Tensor, values: Tensor) -> Tensor:
        """M⁻¹v, (B, D), M made definite where it is not."""
        size = matrices.diagonal(dim1=1, dim2=2).abs().amax(1).clamp(min=1.0)
        ridge = 1e-12 * size[:, None, None] * torch.eye(matrices.shape[1]).to(matrices)
        return torch.linalg.solve(matrices + ridge, values[:, :, None])[:, :, 0]

    def _derivatives(
        self, y: Tensor, x: Tensor, multipliers: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradient (B, V) and Hessian (B, V, V) of the Lagrangian in y."""
        with torch.inference_mode(False), torch.enable_grad():
            y = y.detach().clone().requires_grad_()
            total = self.lagrangian(y, x.clone(), multipliers.clone()).sum()
            slope = torch.autograd.grad(total, y, create_graph=True)[0]
            rows = list[Tensor]()
            for column in slope.unbind(1):
                # A linear part has a slope without a graph: its row of the Hessian is 0.
                row = None
                if column.requires_grad:
                    row = torch.autograd.grad(
                        column.sum(), y, retain_graph=True, allow_unused=True
                    )[0]
                rows.append(torch.zeros_like(y) if row is None else row)
        return slope.detach(), torch.stack(rows, 1).detach()

    def dual(self, x: Tensor, multipliers: Tensor) -> Tensor:
        multipliers = multipliers.double().clamp(min=0)
        y = self.minimiser(x, multipliers)
        value = self.lagrangian(y, x, multipliers) - self._error(
            y, x, multipliers.detach()
        )
        # Without a point of the functions' domain nothing is known.
        return torch.where(value.isfinite(), value, -torch.inf)

    def _error(self, y: Tensor, x: Tensor, multipliers: Tensor) -> Tensor:
        """What D can be below the Lagrangian at y: its tangent over the box, and rounding."""
        slope, _ = self._derivatives(y, x, multipliers)
        slope = slope @ self.null @ self.null.T
        farthest = torch.minimum(slope * (self.lower - y), slope * (self.upper - y))
        with torch.no_grad():
            sizes = self.objective(y, x).abs()
            sizes = sizes + (multipliers * self.inequalities(y, x).abs()).sum(1)
        return -farthest.sum(1) + 4 * len(self.lower) * EPSILON * sizes

    @torch.no_grad()
    def curvature_of_dual(self, x: Tensor, y: Tensor, multipliers: Tensor) -> Tensor:
        jacobian = self.slopes(y, x) @ self.null  # (B, K, D)
        _, curvature = self._derivatives(y, x, multipliers)
        curvature = self.null.T @ curvature @ self.null
        columns = [self._solved(curvature, row) for row in jacobian.unbind(1)]
        return jacobian @ torch.stack(columns, 2)

    @torch.no_grad()
    def require_convex(self, x: Tensor, draws: int = 1000) -> None:
        """Looks for two points whose middle is above the middle of their values.

        Args:
            x: (N, E), instances.
            draws: pairs of points of the box.

        Raises:
            DataError: names the function. That none is found is no proof.
        """
        # Always the same, so that what was refused once is refused again.
        draw = torch.Generator().manual_seed(0)
        of = x[torch.randint(len(x), (draws,), generator=draw).to(x.device)]
        shares = torch.rand(2, draws, len(self.lower), generator=draw).to(self.lower)
        first, second = self.lower + shares * (self.upper - self.lower)
        for name, function in (
            ("objective", lambda y: self.objective(y, of)[:, None]),
            ("inequalities", lambda y: self.inequalities(y, of)),
        ):
            ends = (function(first) + function(second)) / 2
            size = (function(first).abs() + function(second).abs()).clamp(min=1.0)
            above = function((first + second) / 2) - ends > 1e-9 * size
            if above.any():
                of_constraint = int(above.any(0).nonzero()[0])
                which = f" {of_constraint}" if name == "inequalities" else ""
                raise DataError(
                    f"There is no bound: {name}{which} is not convex in y within lower and upper: "
                    "between two points it lies above their line. Narrow the box if it is convex "
                    "where answers are."
                )
