"""What docs/penalties.md states: a relaxation is a hinge, and so is a constraint, of large weight.

A convex problem with every optimum by scipy: f(θ) = ½|θ − c|², v = Aθ − b, means over the samples.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import lsq_linear, minimize

from pl_pointwise import Formulation, Penalty, Relaxed

SAMPLES, SIZE = 12, 4
generator = np.random.default_rng(0)
A = generator.normal(size=(SAMPLES, SIZE))
b = A @ generator.normal(size=SIZE) + generator.uniform(0, 0.2, SAMPLES)  # can be satisfied
c = 3 * generator.normal(size=SIZE)


def f(theta: np.ndarray) -> float:
    return 0.5 * float(np.square(theta - c).sum())


def violations(theta: np.ndarray) -> np.ndarray:
    return A @ theta - b


def relaxed(beta: float, power: int) -> np.ndarray:
    """min over θ and u ≥ 0 of f + mean βuᵖ subject to v ≤ u: the θ of the optimum."""
    found = minimize(
        lambda x: f(x[:SIZE]) + beta * np.power(x[SIZE:], power).mean(),
        np.concatenate([c, violations(c).clip(0)]),
        constraints={"type": "ineq", "fun": lambda x: x[SIZE:] - violations(x[:SIZE])},
        bounds=[(None, None)] * SIZE + [(0, None)] * SAMPLES,
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    return found.x[:SIZE]


def constrained() -> tuple[np.ndarray, np.ndarray]:
    """The optimum with v ≤ 0, and its multipliers: c − θ = Aᵀλ / N on the active samples."""
    found = minimize(
        f, c, constraints={"type": "ineq", "fun": lambda x: -violations(x)}, method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )  # fmt: skip
    active = violations(found.x) > -1e-6
    multipliers = np.zeros(SAMPLES)
    multipliers[active] = lsq_linear(A[active].T / SAMPLES, c - found.x, bounds=(0, np.inf)).x
    return found.x, multipliers


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


def squared_hinge(weight: float, start: np.ndarray) -> np.ndarray:
    def loss(x: np.ndarray) -> float:
        return f(x) + weight * float(np.square(violations(x).clip(0)).mean())

    def gradient(x: np.ndarray) -> np.ndarray:
        return x - c + 2 * weight * A.T @ violations(x).clip(0) / SAMPLES

    return minimize(loss, start, jac=gradient, method="BFGS", options={"gtol": 1e-9}).x


def test_a_quadratic_relaxation_has_the_solution_of_the_squared_hinge() -> None:
    assert np.abs(relaxed(3.0, 2) - squared_hinge(3.0, c)).max() < 1e-5


def test_a_hinge_meets_the_constraints_once_its_weight_exceeds_the_largest_multiplier() -> None:
    solution, multipliers = constrained()
    largest = multipliers.max()
    above, below = relaxed(1.1 * largest, 1), relaxed(0.9 * largest, 1)
    assert np.abs(above - solution).max() < 1e-5
    assert violations(below).max() > 1e-3
    assert f(below) < f(solution)
    for direction in np.vstack([np.eye(SIZE), -np.eye(SIZE)]):  # and it is the hinge's optimum
        beside = below + 1e-3 * direction
        hinge = [f(x) + 0.9 * largest * violations(x).clip(0).mean() for x in (below, beside)]
        assert hinge[0] < hinge[1]


def test_a_squared_hinge_stops_short_by_half_the_multiplier_over_its_weight() -> None:
    solution, multipliers = constrained()
    active = multipliers > 1e-3
    short = violations(squared_hinge(1e5, solution))[active]
    assert short == pytest.approx(multipliers[active] / (2 * 1e5), rel=0.02)
