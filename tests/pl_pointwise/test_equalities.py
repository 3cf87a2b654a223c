"""Equalities have one multiplier of either sign; penalties have a shape; α and λ have caps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from pl_pointwise import (
    Average,
    Constraint,
    CVaR,
    Formulation,
    Penalty,
    Pointwise,
    Relaxed,
    Tilted,
)
from tests.pl_pointwise.test_formulations import (
    magnitudes,
    multipliers,
    scalar,
    values_1d,
    values_2d,
    violations,
)


def test_equality_has_a_signed_residual_and_reports_its_size() -> None:
    equality = Constraint(equals=0.5)
    assert equality.sides == 1
    torch.testing.assert_close(equality.residual(values_1d), values_1d - 0.5)
    torch.testing.assert_close(equality.violation(values_2d), (values_2d - 0.5).abs())
    for bound in (Constraint(at_most=0.5), Constraint(at_least=0.0, at_most=1.0)):
        assert torch.equal(bound.residual(values_2d), bound.violation(values_2d))


@pytest.mark.parametrize("name", ["at_most", "at_least"])
def test_equality_stands_alone(name: str) -> None:
    with pytest.raises(ValueError, match="equals stands alone"):
        Constraint(equals=0.5, **{name: 0.5})
    with pytest.raises(ValueError, match="finite"):
        Constraint(equals=math.nan)


# Equalities: one multiplier of either sign --------------------------------------------------------

signed = st.builds(lambda m, s: m * s, multipliers, st.sampled_from([-1, 1]))


def pairs_for_equality(alpha: float, beta: float) -> list[Formulation]:
    return [
        Average(),
        Average(alpha=alpha),
        Pointwise(alpha=None),
        Pointwise(alpha=alpha),
        Relaxed(alpha=alpha, beta=beta),
        Relaxed(alpha=alpha, beta=beta, cost="linear"),
        Relaxed(alpha=None, beta=beta),
    ]


@given(violations, signed, magnitudes, magnitudes)
def test_equality_is_odd_and_its_pull_the_formulas(
    v: float, m: float, alpha: float, beta: float
) -> None:
    """∂ψ/∂v = λ + 2αv, β/(α+β) of it, or it clipped to ±β; and ψ(−v, −λ) = ψ(v, λ)."""
    s = m + 2 * alpha * v
    pulls = [m, s, m, s, beta / (alpha + beta) * s, min(max(s, -beta), beta), m]
    for declared, pull in zip(pairs_for_equality(alpha, beta), pulls, strict=True):
        formulation = declared.for_equality()
        at = scalar(v).requires_grad_()
        price = scalar(m).requires_grad_()
        psi = formulation.lagrangian(at, price)
        slope, direction = torch.autograd.grad(psi, (at, price))
        size = abs(m) + 2 * alpha * abs(v) + 1e-12
        assert float(slope) == pytest.approx(pull, rel=1e-6, abs=1e-7 * size), (
            formulation
        )
        found = formulation.dual_direction(scalar(v), scalar(m))
        near = abs(s) < 1e-6 * size or abs(abs(s) - beta) < 1e-6 * size
        if not near:
            bound = 1e-6 * (abs(v) + abs(m) / alpha + beta / alpha + abs(m) / beta)
            assert float(found) == pytest.approx(
                float(direction), rel=1e-6, abs=bound
            ), formulation
        mirrored = formulation.lagrangian(scalar(-v), scalar(-m))
        assert float(mirrored) == pytest.approx(
            float(psi.detach()), rel=1e-9, abs=1e-12
        )


@pytest.mark.parametrize("cost", ["quadratic", "linear"])
@pytest.mark.parametrize(
    ("v", "m"), [(0.7, -0.4), (-1.3, 0.2), (0.1, 0.05), (-0.4, -2.0)]
)
def test_relaxed_equality_is_the_minimum_over_relaxations_of_either_sign(
    cost: Any, v: float, m: float
) -> None:
    alpha, beta = 0.8, 0.6

    def total(u: float) -> float:
        bought = beta * u * u if cost == "quadratic" else beta * abs(u)
        return bought + m * (v - u) + alpha * (v - u) ** 2

    formulation = Relaxed(alpha=alpha, beta=beta, cost=cost).for_equality()
    best = minimize_scalar(
        total, bounds=(-10, 10), method="bounded", options={"xatol": 1e-10}
    )
    assert float(formulation.lagrangian(scalar(v), scalar(m))) == pytest.approx(
        best.fun, abs=1e-8
    )
    u = formulation.relaxation(scalar(v), scalar(m))
    assert float(u) == pytest.approx(best.x, abs=1e-6)
    direction = formulation.dual_direction(scalar(v), scalar(m))
    assert float(direction) == pytest.approx(v - float(u), abs=1e-9)


def test_equality_is_not_projected_and_a_bound_is() -> None:
    pointwise = Pointwise(alpha=1.0, dual_lr=1.0)
    v, m = torch.tensor([-0.5, -2.0, 2.0]), torch.zeros(3)
    assert pointwise.ascend(v, m).tolist() == pytest.approx([0.0, 0.0, 2.0])
    assert pointwise.for_equality().ascend(v, m).tolist() == pytest.approx(
        [-0.5, -2.0, 2.0]
    )
    assert pointwise.for_equality().signed
    assert pointwise.for_equality().config() == pointwise.config()


def test_formulations_of_a_tail_and_penalties_act_on_the_distance() -> None:
    for formulation in (Tilted(tilt=1.0), CVaR(), Penalty(weight=1.0, shape="hinge")):
        assert formulation.for_equality() is formulation
        assert not formulation.signed
    with pytest.raises(ValueError, match='Take shape="hinge"'):
        Penalty(weight=1.0).for_equality()
