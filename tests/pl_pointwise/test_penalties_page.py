"""What docs/penalties.md states of our formulas: a relaxation is a hinge of weight β at its best λ.

That a hinge and a constraint have one solution is a theorem, and no code of ours.
"""

from __future__ import annotations

import pytest
import torch

from pl_pointwise import Formulation, Penalty, Relaxed


@pytest.mark.parametrize(
    ("formulation", "shape"),
    [
        (Relaxed(alpha=0.7, beta=2.0, cost="linear"), "hinge"),
        (Relaxed(alpha=0.7, beta=2.0, cost="quadratic"), "squared_hinge"),
    ],
)
def test_the_best_multiplier_of_a_relaxation_leaves_the_hinge_of_weight_beta(
    formulation: Formulation, shape: str
) -> None:
    values = torch.linspace(-1, 3, 41, dtype=torch.float64)
    multipliers = torch.linspace(0, 20, 20001, dtype=torch.float64)
    best = formulation.lagrangian(values[:, None], multipliers[None]).max(1).values
    hinge = Penalty(weight=2.0, shape=shape).lagrangian(values, torch.zeros_like(values))
    torch.testing.assert_close(best, hinge, atol=1e-6, rtol=0)
