"""A correction at inference: what a model answers is moved until no constraint is violated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class Corrected(nn.Module):
    """A model whose answers are moved along the gradient of ``½ Σ max(v, 0)²``, within equalities.

    A step of y goes to where the violations, weighted by themselves, would be 0 if they were
    linear: ``y − (Σ v₊² / ‖g‖²) g``, g the gradient, projected. For convex v it brings y nearer to
    every feasible point, so it cannot diverge and has no rate. Of each sample the answer with the
    least worst violation is given: never a worse one than the model's.

    Args:
        model: x ↦ y, (B, V).
        violations: (y, x) ↦ v, (B, K), differentiable in y, row by row; v ≤ 0 is satisfied. A
            module's buffers move and are saved with this one.
        steps: at most.
        tolerance: in units of v. A sample without a violation above it is left alone.
        within: directions that y may move in, the span of its columns: the null space of the
            equalities (V, V − E), or a projector (V, V). None: all.

    .. versionadded:: 0.3.0

    >>> from pl_pointwise.correction import Corrected
    >>> solver = Corrected(nn.Identity(), lambda y, x: y.sum(1, keepdim=True) - 1)
    >>> solver(torch.tensor([[1.0, 1.0], [0.2, 0.3]]))  # y₁ + y₂ ≤ 1.
    tensor([[0.5000, 0.5000],
            [0.2000, 0.3000]])
    """

    within: Tensor | None

    def __init__(
        self,
        model: nn.Module,
        violations: Callable[[Tensor, Any], Tensor],
        steps: int = 100,
        tolerance: float = 1e-4,
        within: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.violations = violations
        self.steps = steps
        self.tolerance = tolerance
        self.register_buffer("within", None if within is None else projector(within))

    def forward(self, x: Any) -> Tensor:
        """The model's answer to x, corrected, without a gradient."""
        y: Tensor = self.model(x)
        with torch.inference_mode(False):  # An inference tensor never has a gradient.
            x = x.clone() if isinstance(x, Tensor) else x
        return corrected(
            y, lambda y: self.violations(y, x), self.steps, self.tolerance, self.within
        )


def corrected(
    y: Tensor,
    violations: Callable[[Tensor], Tensor],
    steps: int = 100,
    tolerance: float = 1e-4,
    within: Tensor | None = None,
) -> Tensor:
    """Answers y (B, V) after the steps; violations: y ↦ v, (B, K). The rest: :class:`Corrected`.

    .. versionadded:: 0.3.0

    >>> from pl_pointwise.correction import corrected
    >>> corrected(torch.tensor([[1.0, 1.0]]), lambda y: y.sum(1, keepdim=True) - 1)
    tensor([[0.5000, 0.5000]])
    """
    # With gradients, whatever the caller has switched off.
    with torch.inference_mode(False):
        directions = None if within is None else projector(within)
        y = y.detach().clone()
        best = y.detach()
        least = torch.full_like(y[:, 0], torch.inf)
        # One round more than steps, in which the answer of the last step is judged.
        for step in range(steps + 1):
            excess = violations(y.requires_grad_()).clamp(min=0)
            worst = excess.detach().amax(1)
            # NaN is less than nothing, so an answer that has it is never the best.
            best = torch.where((worst < least)[:, None], y.detach(), best)
            least = torch.minimum(worst, least)
            due = (least > tolerance)[:, None]
            if step == steps or not due.any():
                break
            (gradient,) = torch.autograd.grad(excess.square().sum() / 2, y)
            if directions is not None:
                gradient = gradient @ directions
            size = excess.detach().square().sum(1, keepdim=True)
            length = gradient.square().sum(1, keepdim=True)
            # Without a gradient nothing helps.
            y = torch.where(
                due & (length > 0), y - size / length * gradient, y
            ).detach()
    return best


def projector(directions: Tensor) -> Tensor:
    """The orthogonal projector (V, V) on the span of the columns of directions, (V, D)."""
    basis = basis_of(directions)
    return (basis @ basis.T).to(directions)


def basis_of(directions: Tensor) -> Tensor:
    """An orthonormal basis of the span of the columns of directions, (V, D), float64."""
    if directions.dim() != 2 or directions.shape[1] > len(directions):
        raise ValueError(
            f"within is {tuple(directions.shape)}: give a basis (V, V − E) of the directions that "
            "leave the equalities as they are, or their projector (V, V)."
        )
    basis, lengths, _ = torch.linalg.svd(
        directions.detach().double(), full_matrices=False
    )
    # Columns that follow from others have no length, as those of a projector that it takes to 0.
    return basis[:, lengths > 1e-6 * lengths.max()]


class NewtonCorrected(nn.Module):
    """A model whose answers are moved to near points by Newton steps: exact, not to a tolerance.

    A step costs a system of K + E equations for each sample, and a gradient for each constraint if
    ``slopes`` are not given; a few are enough where those of :class:`Corrected` are hundreds. The
    rest: :func:`newton_corrected`.

    Args:
        model: x ↦ y, (B, V).
        violations: (y, x) ↦ v, (B, K), differentiable in y, row by row; v ≤ 0 is satisfied.
        equalities: (y, x) ↦ e, (B, E), likewise; 0 is satisfied. None: there are none.
        slopes: (y, x) ↦ ∂(v, e)/∂y, (B, K + E, V); None: by autograd.
        steps: at most.
        tolerance: in units of v and e; None: 1e-8 in float64, 1e-5 in float32.
        within: directions that y may move in, as those of :class:`Corrected`.
    """

    within: Tensor | None

    def __init__(
        self,
        model: nn.Module,
        violations: Callable[[Tensor, Any], Tensor],
        equalities: Callable[[Tensor, Any], Tensor] | None = None,
        slopes: Callable[[Tensor, Any], Tensor] | None = None,
        steps: int = 20,
        tolerance: float | None = None,
        within: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.violations = violations
        self.equalities = equalities
        self.slopes = slopes
        self.steps = steps
        self.tolerance = tolerance
        self.register_buffer("within", None if within is None else basis_of(within))

    def forward(self, x: Any) -> Tensor:
        """The model's answer to x, corrected, without a gradient."""
        y: Tensor = self.model(x)
        with torch.inference_mode(False):  # An inference tensor never has a gradient.
            x = x.clone() if isinstance(x, Tensor) else x
            y = y.detach().clone()
        exact, slopes = self.equalities, self.slopes
        wide = y.dtype == torch.float64
        return newton_corrected(
            y,
            lambda y: self.violations(y, x),
            None if slopes is None else lambda y: slopes(y, x),
            equalities=None if exact is None else lambda y: exact(y, x),
            steps=self.steps,
            tolerance=self.tolerance or (1e-8 if wide else 1e-5),
            within=None if self.within is None else self.within.to(y),
        )


def newton_corrected(
    y: Tensor,
    violations: Callable[[Tensor], Tensor],
    slopes: Callable[[Tensor], Tensor] | None = None,
    *,
    equalities: Callable[[Tensor], Tensor] | None = None,
    steps: int = 20,
    tolerance: float = 1e-8,
    within: Tensor | None = None,
) -> Tensor:
    """Answers y (B, V), moved to the nearest point that meets the linearised constraints, again.

    A step solves min ‖u‖²/2 + ‖(v + ∇v·u)₊, e + ∇e·u‖²/2μ by its dual. μ is nearly 0 at first: a
    projection for linear constraints; for smooth ones the violation falls quadratically, to 1e-8 in
    a few steps in float64. A step that does not lower a sample's squared violations is not taken,
    and the next has a larger μ (Levenberg–Marquardt): it is shorter, and more along their gradient.

    Args:
        y: (B, V).
        violations: y ↦ v (B, K); v ≤ 0 is satisfied.
        slopes: y ↦ ∂v/∂y (B, K, V), below them those of e; None: by autograd, of values that are
            computed row by row.
        equalities: y ↦ e (B, E); 0 is satisfied.
        steps: at most, those included that are not taken.
        tolerance: in units of v and e.
        within: directions that y may move in, as those of :class:`Corrected`: (V, D), orthonormal.

    .. versionadded:: 0.3.0

    >>> outside = torch.tensor([[1.0, 1.0]], dtype=torch.float64)
    >>> newton_corrected(outside, lambda y: y.square().sum(1, keepdim=True) - 1)  # ‖y‖ ≤ 1.
    tensor([[0.7071, 0.7071]], dtype=torch.float64)
    """

    values = partial(_values, violations, equalities)
    y = y.detach()
    v = values(y).detach()
    inequalities = v.shape[1] if equalities is None else violations(y).shape[1]
    exact = torch.arange(v.shape[1], device=v.device) >= inequalities
    best = y
    least = excess_of(v, exact).amax(1)
    damping = torch.zeros_like(least)
    for _ in range(steps):
        due = least > tolerance
        if not due.any():
            break
        jacobian = slopes_of(values, y) if slopes is None else slopes(y)
        # A little inside, so that rounding does not keep it out.
        wanted = v[due] + torch.where(exact, 0, tolerance / 2)
        moved = y.clone()
        moved[due] += _move(jacobian[due], wanted, exact, damping[due], within)
        after = values(moved).detach()
        lower = _size(after, exact) < _size(v, exact)
        y = torch.where(lower[:, None], moved, y)
        v = torch.where(lower[:, None], after, v)
        damping = _damping_after(damping, lower)
        worst = excess_of(v, exact).amax(1)
        best = torch.where((worst < least)[:, None], y, best)
        least = torch.minimum(worst, least)
    return best


def _values(
    violations: Callable[[Tensor], Tensor],
    equalities: Callable[[Tensor], Tensor] | None,
    y: Tensor,
) -> Tensor:
    """v and e of an answer, (B, K + E)."""
    v = violations(y)
    return v if equalities is None else torch.cat([v, equalities(y)], 1)


def _size(v: Tensor, exact: Tensor) -> Tensor:
    """The sum of squared violations, (B,)."""
    return excess_of(v, exact).square().sum(1)


def _move(
    slopes: Tensor, v: Tensor, exact: Tensor, damping: Tensor, within: Tensor | None
) -> Tensor:
    """A step (B, V), in the directions that y may move in."""
    if within is None:
        return least_move(slopes, v, exact, damping)
    # In the coordinates of the directions.
    return least_move(slopes @ within, v, exact, damping) @ within.T


def _damping_after(damping: Tensor, lower: Tensor) -> Tensor:
    """μ of the next step: a tenth where this one lowered the violations, else ten times."""
    damping = torch.where(lower, damping / 10, (10 * damping).clamp(min=DAMPING))
    return torch.where(damping < DAMPING, 0, damping)


DAMPING = 1e-2
"""The least μ that is not 0, as a share of the longest squared slope."""


def excess_of(v: Tensor, exact: Tensor) -> Tensor:
    """(v)₊, or |v| of an equality, (B, K); exact: bool (K,). NaN counts as inf."""
    excess = torch.where(exact, v.abs(), v.clamp(min=0))
    return excess.nan_to_num(nan=torch.inf)


def slopes_of(violations: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
    """∂v/∂y, (B, K, V), by autograd."""
    with torch.inference_mode(False), torch.enable_grad():
        y = y.detach().clone().requires_grad_()
        v = violations(y)
        slopes = []
        for column in v.unbind(1):  # The rows do not depend on one another.
            (slope,) = torch.autograd.grad(column.sum(), y, retain_graph=True)
            slopes.append(slope)
    return torch.stack(slopes, 1)


def least_move(
    slopes: Tensor,
    v: Tensor,
    exact: Tensor | None = None,
    damping: Tensor | None = None,
) -> Tensor:
    """argmin ‖u‖ subject to v + Ju ≤ 0, (B, D), by its dual; slopes: J (B, K, D); v: (B, K).

    exact: bool (K,), those of which v + Ju = 0 is asked for. damping: (B,), μ of a penalty in place
    of constraints, as a share of the longest squared slope.
    """
    active = v > 0 if exact is None else (v > 0) | exact
    matrices = slopes @ slopes.mT
    forces = complementary(matrices, v, active, free=exact, damping=damping)
    return -(forces[:, None, :] @ slopes)[:, 0]


TOGETHER = 10
"""Rounds in which all that are wrong change; then one of a row, so that no set comes back."""


def complementary(
    matrices: Tensor,
    values: Tensor,
    active: Tensor,
    rounds: int = 50,
    free: Tensor | None = None,
    damping: Tensor | None = None,
) -> Tensor:
    """argmax over λ ≥ 0 of vᵀλ − ½λᵀMλ, (B, K), by its active set; a ridge keeps M definite.

    Args:
        matrices: M, (B, K, K), positive semidefinite.
        values: v, (B, K).
        active: bool (B, K), those that are tried first as above 0.
        rounds: at most; after ten of them one change each, so that no set comes back. What is not
            found within them is λ ≥ 0 all the same.
        free: bool (K,), λ of either sign; among the active ones.
        damping: (B,), a larger ridge, as a share of a row's largest diagonal element.
    """
    bound = torch.ones_like(active[0]) if free is None else ~free
    diagonal = matrices.diagonal(dim1=1, dim2=2)
    # A row whose gradients are all 0 would be singular with a share of nothing on its diagonal.
    largest = diagonal.amax(1, keepdim=True).clamp(min=1e-30)
    share = 1e-12 if damping is None else damping[:, None].clamp(min=1e-12)
    ridge = share * largest
    allowed = 1e-12 * values.abs().amax(1, keepdim=True)
    multipliers = torch.zeros_like(values)
    # Rows without a solution yet.
    left = torch.arange(len(values), device=values.device)
    for attempt in range(rounds):
        matrix = matrices[left]
        value = values[left]
        on = active[left]
        # Of the active ones the matrix, of the others the identity, which leaves them at 0.
        both_on = on[:, :, None] & on[:, None, :]
        system = torch.where(both_on, matrix, 0)
        system = system + torch.diag_embed(torch.where(on, ridge[left], 1.0))
        forces = torch.linalg.solve(system, torch.where(on, value, 0))
        multipliers[left] = torch.where(bound, forces.clamp(min=0), forces)
        # One below 0 is let go; one of which more would help is taken.
        rest = value - (matrix @ forces[:, :, None])[:, :, 0]
        wrong = (on & bound & (forces < 0)) | (~on & (rest > allowed[left]))
        if attempt >= TOGETHER:
            # In a fixed order, here the last one of a row (Murty): then no set comes back.
            last = wrong.shape[1] - 1 - wrong.flip(1).int().argmax(1)
            wrong = wrong & nn.functional.one_hot(last, wrong.shape[1]).bool()
        due = wrong.any(1)
        if not due.any():
            break
        active = active.clone()
        active[left] = on ^ wrong
        left = left[due]
    return multipliers
