"""Quadratic objectives and constraints: everything is known from their matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DataError
from .problems import ConvexProblems

EPSILON = torch.finfo(torch.float64).eps


class QuadraticProgram(ConvexProblems):
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

    .. versionadded:: 0.3.0

    >>> from pl_pointwise.bounds import QuadraticProgram
    >>> program = QuadraticProgram(  # ½‖y‖² at least, with y₁ + y₂ = x and y₁ ≤ 0.25.
    ...     Q=torch.ones(2), p=torch.zeros(2), A=torch.ones(1, 2),
    ...     G=torch.tensor([[1.0, 0.0]]), h=torch.tensor([0.25]),
    ... )
    >>> x = torch.tensor([[1.0]])
    >>> [round(float(program.dual(x, torch.tensor([[price]]))), 4) for price in (0.0, 0.5)]
    [0.25, 0.3125]
    """

    Q: Tensor
    p: Tensor
    A: Tensor
    G: Tensor
    h: Tensor
    H: Tensor | None
    diagonals: Tensor | None  # (K, V), where every H has nothing else
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
        Q, p, A, G, h = (matrix.detach().double() for matrix in (Q, p, A, G, h))  # noqa: N806
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
        numbers["diagonals"] = diagonals_of(quadratic)
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
                raise DataError(
                    f"{name} is {tuple(value.shape)}, and should be {shape}."
                )
            if not value.isfinite().all():
                raise DataError(f"{name} has numbers that are not finite.")
        if not h.isfinite().all():
            raise DataError(
                "h has numbers that are not finite: leave such a constraint out."
            )
        if not torch.equal(Q, Q.T):
            raise DataError("Q is not symmetric: give (Q + Qᵀ)/2.")

    def objective(self, y: Tensor, x: Tensor | None = None) -> Tensor:
        """f(y), (B, V) ↦ (B,) float64; x is not read."""
        y = y.double()
        return ((y @ self.Q) * y).sum(1) / 2 + y @ self.p

    def inequalities(self, y: Tensor, x: Tensor | None = None) -> Tensor:
        """g(y), (B, V) ↦ (B, K) float64; at most 0 is satisfied; x is not read."""
        y = y.double()
        linear = y @ self.G.T - self.h
        if self.H is None:
            return linear
        return linear + quadratic_terms(y, self.H, self.diagonals) / 2

    def slopes(self, y: Tensor, x: Tensor | None = None) -> Tensor:
        """∂g/∂y, (B, K, V) float64."""
        y = y.double()
        if self.H is None:
            return self.G.expand(len(y), -1, -1)
        if self.diagonals is not None:
            return self.G + self.diagonals * y[:, None, :]
        return self.G + torch.einsum("kij,bj->bki", self.H, y)

    def equalities(self, y: Tensor, x: Tensor) -> Tensor:
        """Ay − x, (B, E) float64."""
        return y.double() @ self.A.T - x.double()

    @property
    def steps(self) -> int:  # type: ignore[override]
        """One with linear constraints, which is the whole way to their optimum."""
        return 1 if self.H is None else 3

    def minimiser(self, x: Tensor, multipliers: Tensor) -> Tensor:
        """argmin over Ay = x of f(y) + λᵀg(y), (B, V) float64; λ (B, K) ≥ 0."""
        start, multipliers = x.double() @ self.plus.T, multipliers.double()
        slope = (start @ self.Q + self.p + multipliers @ self.G) @ self.null
        if self.H is None:
            return start - slope @ self.inverse @ self.null.T
        if self.diagonals is not None:
            pulls = multipliers @ self.diagonals * start
        else:
            pulls = torch.einsum("bk,kij,bj->bi", multipliers, self.H, start)
        slope = slope + pulls @ self.null
        factor = torch.linalg.cholesky(self._hessian(multipliers))
        return (
            start
            - torch.cholesky_solve(slope[:, :, None], factor)[:, :, 0] @ self.null.T
        )

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
        return inexact + 4 * len(self.p) * EPSILON * (
            sums + (multipliers * terms).sum(1)
        )

    def magnitudes(self, y: Tensor, x: Tensor | None = None) -> Tensor:
        """The sums of the sizes of the terms of g(y), (B, K): rounding is in proportion to them."""
        terms = y.abs() @ self.G.abs().T + self.h.abs()
        if self.H is not None:
            sizes = None if self.diagonals is None else self.diagonals.abs()
            terms = terms + quadratic_terms(y.abs(), self.H.abs(), sizes)
        return terms

    @torch.no_grad()
    def curvature_of_dual(self, x: Tensor, y: Tensor, multipliers: Tensor) -> Tensor:
        jacobian = self.slopes(y) @ self.null  # (B, K, D)
        if self.H is None:  # The same for all.
            same = jacobian[:1] @ self.inverse @ jacobian[:1].mT
            return same.expand(len(y), -1, -1)
        factor = torch.linalg.cholesky(self._hessian(multipliers))
        return jacobian @ torch.cholesky_solve(jacobian.mT, factor)


def diagonals_of(matrices: Tensor | None) -> Tensor | None:
    """Of H (K, V, V) the diagonals (K, V) where nothing else is in them, else None."""
    if matrices is None:
        return None
    diagonals = matrices.diagonal(dim1=1, dim2=2)
    only = torch.equal(torch.diag_embed(diagonals), matrices)
    return diagonals.contiguous() if only else None


def quadratic_terms(y: Tensor, matrices: Tensor, diagonals: Tensor | None) -> Tensor:
    """yᵀHₖy, (B, V) ↦ (B, K); by the diagonals where H has no more: V times as cheap."""
    if diagonals is not None:
        return y.square() @ diagonals.T
    return torch.einsum("bi,kij,bj->bk", y, matrices, y)
