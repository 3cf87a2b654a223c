"""An optimizer for tests that compare with published solutions: few steps, many digits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class QuasiNewton(torch.optim.Optimizer):
    """x ← x − Hg for each x, with H the BFGS estimate of its inverse Hessian from earlier steps.

    One gradient a step, as a training loop gives it: no line search, but steps within ``trust``.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], trust: float = 0.5) -> None:
        super().__init__(parameters, {"lr": 1.0})
        self.trust = trust

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for x in self.param_groups[0]["params"]:
            state, gradient = self.state[x], x.grad.clone()
            eye = torch.eye(len(x), dtype=x.dtype)
            inverse = state.get("inverse", eye)
            if state:
                moved, change = x - state["x"], gradient - state["gradient"]
                curvature = moved @ change
                if curvature > 1e-4 * moved.norm() * change.norm():
                    left = eye - torch.outer(moved, change) / curvature
                    inverse = left @ inverse @ left.T + torch.outer(moved, moved) / curvature
            state |= {"x": x.clone(), "gradient": gradient, "inverse": inverse}
            step = inverse @ gradient
            x -= step * min(1.0, self.trust / max(float(step.norm()), 1e-300))
