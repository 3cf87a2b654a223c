"""Every formulation is the table of docs/formulations.md: values, derivatives, limits, errors.

The reference here is written from the printed squares, in float64, and never from the package's
own expansions; derivatives come from autograd, the relaxation from a numerical minimum over u.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from torch import Tensor

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
from pl_pointwise.formulations import arguments_of
from pl_pointwise.lagrangian.declared import formulation_from
from tests.pl_pointwise.table import FORMULATIONS, psi, rule_of

# Several decades on both sides of zero, and exact zeros.
magnitudes = st.floats(-3, 3).map(lambda power: 10.0**power)
violations = st.one_of(
    st.just(0.0), st.builds(lambda m, s: m * s, magnitudes, st.sampled_from([-1, 1]))
)
multipliers = st.one_of(st.just(0.0), magnitudes)


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def all_formulations(alpha: float, beta: float) -> list[Formulation]:
    """Those of the table, with these numbers where they have one."""
    numbers, found = {"alpha": alpha, "weight": beta, "tilt": beta, "beta": beta}, []
    for one in FORMULATIONS.values():
        if isinstance(one, Formulation):
            stated = arguments_of(one).items()
            found.append(type(one)(**{n: v and numbers.get(n, v) for n, v in stated}))
    return found


def printed(formulation: Formulation, v: Tensor, m: Tensor) -> Tensor:
    """ψ as the table prints it, with the square."""
    rule = rule_of(formulation)
    assert rule is not None
    return psi(rule, v, m)


def close(found: Any, expected: float, scale: float = 1.0) -> bool:
    return abs(float(found) - expected) <= 1e-9 * max(1.0, scale, abs(expected))


@given(violations, multipliers, magnitudes, magnitudes)
def test_lagrangian_is_the_printed_square(
    v: float, m: float, alpha: float, beta: float
) -> None:
    for formulation in all_formulations(alpha, beta):
        found = formulation.lagrangian(scalar(v), scalar(m))
        # The printed form subtracts two large numbers; its own rounding is the tolerance's scale.
        scale = (
            m**2 / alpha
            + alpha * v**2
            + (beta + m) * abs(v)
            + beta**2 / alpha
            + m**2 / beta
        )
        assert close(
            found, float(printed(formulation, scalar(v), scalar(m))), scale * 1e-3
        ), formulation


@given(violations, multipliers, magnitudes, magnitudes)
def test_derivative_columns_equal_autograd(
    v: float, m: float, alpha: float, beta: float
) -> None:
    """A wrong ∂ψ/∂λ moves multipliers the wrong way while the loss still looks right."""
    for formulation in all_formulations(alpha, beta):
        violation = scalar(v).requires_grad_()
        multiplier = scalar(m).requires_grad_()
        shifted = m + 2 * alpha * v
        kinks = [shifted] + (
            [shifted - beta] if getattr(formulation, "cost", "") == "linear" else []
        )
        assume(all(abs(kink) > 1e-9 * (m + abs(alpha * v) + beta) for kink in kinks))
        slope, ascent = torch.autograd.grad(
            formulation.lagrangian(violation, multiplier),
            [violation, multiplier],
            allow_unused=True,
            materialize_grads=True,
        )
        (force,) = torch.autograd.grad(
            printed(formulation, violation, multiplier), violation
        )
        scale = m + alpha * abs(v) + beta
        assert close(slope, float(force), scale), formulation
        direction = formulation.dual_direction(scalar(v), scalar(m))
        scale = abs(v) + (m + beta) / alpha + m / beta
        assert close(direction, float(ascent), scale), formulation


@pytest.mark.parametrize("cost", ["quadratic", "linear"])
@given(v=violations, m=multipliers, alpha=magnitudes, beta=magnitudes)
def test_relaxed_is_the_minimum_over_the_relaxation(
    cost: Any, v: float, m: float, alpha: float, beta: float
) -> None:
    """ψ = min over u ≥ 0 of c(u) + ψ_pointwise(v − u, λ), and ``relaxation`` is where."""
    relaxed = Relaxed(alpha=alpha, beta=beta, cost=cost)
    pointwise = Pointwise(alpha=alpha)

    def price(u: float) -> float:
        bought = beta * u**2 if cost == "quadratic" else beta * u
        return bought + float(printed(pointwise, scalar(v - u), scalar(m)))

    found = float(relaxed.lagrangian(scalar(v), scalar(m)))
    at = float(relaxed.relaxation(scalar(v), scalar(m)))
    assert at >= 0
    scale = max(1.0, abs(found), m**2 / alpha, alpha * v**2, beta * abs(v))
    # ψ is attained at u*, and no other u ≥ 0 is cheaper.
    assert abs(price(at) - found) <= 1e-9 * scale
    upper = 2 * (abs(v) + m / (2 * alpha)) + 1e-3
    best = minimize_scalar(
        price, bounds=(0.0, upper), method="bounded", options={"xatol": 1e-12}
    )
    assert found <= min(best.fun, price(0.0), price(upper)) + 1e-9 * scale
    # Strongly convex in u, so the argmin is unique and the numerical one is near.
    curvature = alpha + (beta if cost == "quadratic" else 0.0)
    if cost == "quadratic" or m + 2 * alpha * v > beta:
        tolerance = math.sqrt(1e-9 * scale / curvature) + 1e-4 * upper
        assert abs(at - best.x) <= tolerance


@pytest.mark.parametrize(
    ("cost", "shape"), [("linear", "hinge"), ("quadratic", "squared_hinge")]
)
def test_the_best_multiplier_of_a_relaxation_leaves_the_hinge_of_weight_beta(
    cost: Any, shape: Any
) -> None:
    """What docs/penalties.md states."""
    values = torch.linspace(-1, 3, 41, dtype=torch.float64)
    candidates = torch.linspace(0, 20, 20001, dtype=torch.float64)
    relaxed = Relaxed(alpha=0.7, beta=2.0, cost=cost)
    best = relaxed.lagrangian(values[:, None], candidates[None]).max(1).values
    hinge = Penalty(weight=2.0, shape=shape).lagrangian(
        values, torch.zeros_like(values)
    )
    torch.testing.assert_close(best, hinge, atol=1e-6, rtol=0)


@given(v=violations, m=multipliers, beta=magnitudes)
def test_standard_relaxed_buys_what_its_multiplier_pays(
    v: float, m: float, beta: float
) -> None:
    """Its ψ, βu² + λ(v − u) at this u, is the printed one."""
    at = m / (2 * beta)
    assert close(
        Relaxed(alpha=None, beta=beta).relaxation(scalar(v), scalar(m)), at, at
    )


@pytest.mark.parametrize("alpha", [1e-6, 1e-4, 1.0, 1e3])
def test_float32_keeps_its_digits_at_small_alpha(alpha: float) -> None:
    """The printed square loses 6 % at α = 1e-6, λ = 1, v = 0.1 in float32: λ²/4α cancels."""
    grid = [*itertools.product([0.01, 0.1, 1.0, 3.0], [0.5, 1.0, 2.0])]
    for formulation in all_formulations(alpha, beta=2.0):
        if getattr(formulation, "cost", "") == "linear" and alpha < 1e-3:
            continue  # Beyond β its ψ itself is of the size of 1/α.
        for v, m in grid:
            exact = formulation.lagrangian(scalar(v), scalar(m))
            rounded = formulation.lagrangian(torch.tensor(v), torch.tensor(m))
            assert rounded.dtype == torch.float32
            assert abs(float(rounded - exact)) <= 1e-5 * (abs(float(exact)) + 0.01), (
                formulation
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (3, 2)])
def test_dtype_and_shape_are_kept(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    v, m = torch.full(shape, 0.5, dtype=dtype), torch.full(shape, 2.0, dtype=dtype)
    for formulation in all_formulations(1.5, 2.5):
        methods = ["lagrangian", "dual_direction", "ascend"]
        if isinstance(formulation, Relaxed):
            methods.append("relaxation")
        for method in methods:
            found = getattr(formulation, method)(v, m)
            assert (found.dtype, found.shape) == (dtype, torch.Size(shape)), (
                formulation,
                method,
            )


def test_gradient_is_finite_where_a_branch_not_taken_overflows() -> None:
    """torch.where lets the NaN of the other branch through its backward pass."""
    for formulation in all_formulations(1e3, 1e-3):
        v = torch.tensor([-1e18, 1e18], dtype=torch.float32, requires_grad=True)
        m = torch.tensor([1.0, 1.0])
        (slope,) = torch.autograd.grad(formulation.lagrangian(v, m).sum(), v)
        assert torch.isfinite(slope).all(), formulation


# What a batch comes to ---------------------------------------------------------------------------

samples = st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=40)


def figure(formulation: Formulation, v: Tensor, anchor: Tensor) -> Tensor:
    return anchor + formulation.outer(formulation.inner(v - anchor).mean())


def tail_mean(values: list[float], level: float) -> float:
    """The mean of the worst 1 − p, the value at the edge counted in part."""
    wanted = (1 - level) * len(values)
    total, left = 0.0, wanted
    for value in sorted(values, reverse=True):
        total += min(1.0, left) * value
        left -= min(1.0, left)
    return total / wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(numbers=samples, tilt=magnitudes)
def test_tilted_mean_is_the_log_sum_exp(
    dtype: torch.dtype, numbers: list[float], tilt: float
) -> None:
    """exp(1e4) is infinite in every format; the largest violation taken out first, none is."""
    v = torch.tensor(numbers, dtype=dtype)
    found = figure(Tilted(tilt=tilt), v, v.max())
    exact = torch.logsumexp(tilt * v.double(), 0).item() - math.log(len(v))
    epsilon = torch.finfo(dtype).eps
    assert abs(float(found) - exact / tilt) <= 20 * epsilon * (
        1 / tilt + max(map(abs, numbers))
    )


@given(samples, st.floats(0, 0.99))
def test_least_over_the_threshold_is_the_mean_of_the_tail(
    numbers: list[float], level: float
) -> None:
    """g is convex and piecewise linear in t with kinks at the violations: its minimum is at one."""
    v = torch.tensor(numbers, dtype=torch.float64)
    cvar = CVaR(level=level)
    found = min(float(figure(cvar, v, t)) for t in v)
    assert found == pytest.approx(tail_mean(numbers, level), rel=1e-9, abs=1e-7)


INVALID = [
    *itertools.product([Tilted], ["tilt"], [0, math.nan, math.inf, "1", True]),
    *itertools.product([CVaR], ["level"], [1, -0.1, None]),
    (CVaR, "threshold_lr", -0.1),
    *((kind, "alpha", 0) for kind in (Tilted, CVaR, Pointwise, Average, Relaxed)),
    *((kind, "dual_lr", -0.1) for kind in (Pointwise, Average, Relaxed)),
    *((kind, "dual_lr", 0.1) for kind in (Pointwise, Relaxed)),  # Without an alpha.
    *((kind, "alpha", "adaptiv") for kind in (Pointwise, Relaxed, Average)),
    (Relaxed, "price", 1.0),  # Beside beta.
    (Relaxed, "cost", "cubic"),
    (Penalty, "shape", "square"),
    *itertools.product([Relaxed], ["beta"], [0, None]),
    (Penalty, "weight", -1e-9),
]


@pytest.mark.parametrize(("kind", "name", "value"), INVALID)
def test_invalid_argument_is_refused_by_name(kind: Any, name: str, value: Any) -> None:
    needed = {Relaxed: {"beta": 1.0}, Tilted: {"tilt": 1.0}, Penalty: {"weight": 1.0}}
    arguments = needed.get(kind, {})
    with pytest.raises(ValueError, match=name):
        kind(**{**arguments, name: value})


def test_linear_cost_without_augmentation_is_refused() -> None:
    with pytest.raises(ValueError, match="unbounded"):
        Relaxed(alpha=None, beta=1.0, cost="linear")


# Configurations ----------------------------------------------------------------------------------


class Hinge(Pointwise):
    """A formulation of the user's own, which is understood once imported."""


@given(magnitudes, magnitudes, magnitudes)
def test_configuration_round_trip(alpha: float, beta: float, step: float) -> None:
    for formulation in (*all_formulations(alpha, beta), Hinge(alpha=alpha)):
        if formulation.scope != "none":
            formulation.dual_lr = step
        # plain enough for YAML and JSON
        config = json.loads(json.dumps(formulation.config()))
        assert formulation_from(config) == formulation
        assert type(formulation_from(config)) is type(formulation)


@pytest.mark.parametrize(
    "path",
    ["os.system", "", "pl_pointwise.Constraint", "pl_pointwise.formulations.Missing"],
)
def test_unknown_class_is_refused_and_the_known_ones_are_named(path: str) -> None:
    with pytest.raises(ValueError, match=r"pl_pointwise\.formulations\.Pointwise"):
        formulation_from({"class_path": path, "init_args": {}})


@pytest.mark.parametrize(
    "name", ["foreign_trap", "pl_pointwise_trap", "foreign_trap.inner"]
)
def test_loading_a_configuration_imports_no_foreign_module(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint from elsewhere must not be able to run code by naming a module."""
    (tmp_path / f"{name.split('.')[0]}.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="Unknown formulation"):
        formulation_from({"class_path": f"{name}.Pointwise", "init_args": {}})


# Constraints -------------------------------------------------------------------------------------

values_1d = torch.tensor([-1.0, 0.0, 0.5, 2.0])
values_2d = torch.tensor([[-1.0, 0.0], [0.5, 2.0], [1.0, 1.0]])


def test_upper_bound_is_violated_above_and_lower_bound_below() -> None:
    upper, lower = Constraint(at_most=0.5), Constraint(at_least=0.5)
    torch.testing.assert_close(upper.violation(values_1d), values_1d - 0.5)
    torch.testing.assert_close(lower.violation(values_1d), 0.5 - values_1d)
    assert upper.sides == lower.sides == 1


@pytest.mark.parametrize("values", [values_1d, values_2d])
def test_interval_has_the_upper_columns_first_then_the_lower(values: Tensor) -> None:
    interval, columns = (
        Constraint(at_least=-0.5, at_most=1.0),
        values.reshape(len(values), -1),
    )
    assert interval.sides == 2
    expected = torch.cat([columns - 1.0, -0.5 - columns], 1)
    torch.testing.assert_close(interval.violation(values), expected)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({}, "needs a bound"),
        ({"at_most": math.nan}, "finite"),
        ({"at_least": math.inf}, "finite"),
        ({"at_least": 1.0, "at_most": 0.5}, "Empty interval"),
        (
            {"at_least": torch.ones(3)},
            r"return value − bound, with Constraint\(at_most=0\)",
        ),
    ],
)
def test_bounds_that_cannot_be_are_refused(
    bounds: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Constraint(**bounds)


def test_a_formulation_says_what_it_acts_on() -> None:
    """It was built, and the first training step ended with an AttributeError."""

    class Cubic(Formulation):
        def lagrangian(self, violation: Tensor, multiplier: Tensor) -> Tensor:
            return violation.relu() ** 3

        def dual_direction(self, violation: Tensor, multiplier: Tensor) -> Tensor:
            return torch.zeros_like(violation)

    with pytest.raises(TypeError, match="scope"):
        Cubic()  # type: ignore[abstract]
