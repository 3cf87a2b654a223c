"""A correction at inference: what a model answers is moved until no constraint is violated."""

from __future__ import annotations

from collections.abc import Callable
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
        self.model, self.violations = model, violations
        self.steps, self.tolerance = steps, tolerance
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
    """Answers y (B, V) after the steps; violations: y ↦ v, (B, K). The rest: :class:`Corrected`."""
    with torch.inference_mode(False):  # With gradients, whatever the caller has switched off.
        directions = None if within is None else projector(within)
        y = y.detach().clone()
        best = y.detach()
        least = torch.full_like(y[:, 0], torch.inf)
        for step in range(steps + 1):
            excess = violations(y.requires_grad_()).clamp(min=0)
            worst = excess.detach().amax(1)
            best = torch.where((worst < least)[:, None], y.detach(), best)
            least = torch.minimum(worst, least)
            due = (least > tolerance)[:, None]
            if step == steps or not due.any():
                break
            (gradient,) = torch.autograd.grad(excess.square().sum() / 2, y)
            gradient = gradient if directions is None else gradient @ directions
            size = excess.detach().square().sum(1, keepdim=True)
            length = gradient.square().sum(1, keepdim=True)
            # Without a gradient nothing helps.
            y = torch.where(due & (length > 0), y - size / length * gradient, y).detach()
    return best


def projector(directions: Tensor) -> Tensor:
    """The orthogonal projector (V, V) on the span of the columns of directions, (V, D)."""
    if directions.dim() != 2 or directions.shape[1] > len(directions):
        raise ValueError(
            f"within is {tuple(directions.shape)}: give a basis (V, V − E) of the directions that "
            "leave the equalities as they are, or their projector (V, V)."
        )
    basis, lengths, _ = torch.linalg.svd(directions.detach().double(), full_matrices=False)
    basis = basis[:, lengths > 1e-6 * lengths.max()]
    return (basis @ basis.T).to(directions)
