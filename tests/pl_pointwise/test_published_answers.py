"""Small problems with an answer known from elsewhere, through the module's own training loop.

Equalities have one multiplier of either sign. Written as intervals of width 0 they had two that
both grew, and only their difference was an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linprog, minimize
from torch import Tensor

from pl_pointwise import Average, Constraint, Penalty, Pointwise, PointwiseModule, Relaxed, Training
from tests.pl_pointwise.quasi_newton import QuasiNewton
from tests.pl_pointwise.toy import ToyData, trainer

ENGEL = Path(__file__).with_name("engel.csv")
"""Income and food expenditure of 235 Belgian households, 1857: public domain, from statsmodels."""


class Rows:
    """The given columns, (N, …) each, row by row."""

    def __init__(self, **columns: Any) -> None:
        self.columns = {name: torch.as_tensor(value).double() for name, value in columns.items()}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        return {name: column[position] for name, column in self.columns.items()}


class Small(PointwiseModule):
    """Weights w (d,); objective(w) is every sample's, values(w, batch) are the constraints'."""

    def __init__(
        self,
        size: int,
        objective: Callable[[Tensor], Tensor],
        values: Callable[[Tensor, Any], dict[str, Tensor]],
        constraints: dict[str, Constraint],
        formulation: Any,
        primal_steps: int,
    ) -> None:
        super().__init__(
            formulation=formulation,
            constraints=constraints,
            training=Training(primal_steps=primal_steps),
        )
        self.functions = objective, values
        self.w = torch.nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def forward(self, batch: Any) -> Tensor:
        return self.w

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:
        return self.functions[0](outputs).expand(len(batch["index"]))

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return self.functions[1](outputs, batch)

    def configure_optimizers(self) -> Any:
        return QuasiNewton(self.parameters())


def solve(
    rows: Rows,
    size: int,
    objective: Callable[[Tensor], Tensor],
    values: Callable[[Tensor, Any], Tensor | dict[str, Tensor]],
    constraints: Constraint | dict[str, Constraint],
    formulation: Any,
    *,
    steps: int = 200,
    primal_steps: int = 10,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights, and multipliers by constraint, in float64."""
    single = isinstance(constraints, Constraint)
    module = Small(
        size,
        objective,
        (lambda w, batch: {"only": values(w, batch)}) if single else values,  # type: ignore[arg-type]
        {"only": constraints} if single else constraints,  # type: ignore[arg-type, dict-item]
        formulation,
        primal_steps,
    )
    trainer(max_epochs=steps, log_every_n_steps=10**6).fit(
        module, ToyData(rows, batch_size=len(rows))
    )
    return module.w.detach(), {name: t.double() for name, t in module.multipliers.items()}


# Equalities --------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [0.2, 1.7])
def test_equality_has_one_multiplier_with_the_sign_of_its_push(wanted: float) -> None:
    """½(w − 1)² subject to w = c: λ = 1 − c, above 0 where it pushes w down, below 0 where up."""
    rows = Rows(x=[0.0])
    for formulation in (Pointwise(alpha=5.0, dual_lr=10.0), Average(dual_lr=0.8)):
        w, multipliers = solve(
            rows,
            1,
            lambda w: 0.5 * (w[0] - 1).square(),
            lambda w, batch: w,
            Constraint(equals=wanted),
            formulation,
            steps=60,
            primal_steps=3,
        )
        assert float(w[0]) == pytest.approx(wanted, abs=1e-5)
        assert multipliers["only"].numel() == 1
        assert float(multipliers["only"]) == pytest.approx(1 - wanted, abs=1e-5)


def test_interval_of_width_zero_keeps_two_multipliers_whose_difference_is_the_equalitys() -> None:
    """Each side is an inequality of its own, as before: what an overlay says does not change."""
    _, multipliers = solve(
        Rows(x=[0.0]),
        1,
        lambda w: 0.5 * (w[0] - 1).square(),
        lambda w, batch: w,
        Constraint(at_least=0.2, at_most=0.2),
        Pointwise(alpha=2.0, dual_lr=4.0),
    )
    upper, lower = multipliers["only"][0].tolist()
    assert upper - lower == pytest.approx(0.8, abs=1e-4)


def test_die_of_mean_four_and_a_half_has_the_largest_entropy() -> None:
    """Jaynes's die: p_k ∝ exp(−λk), with λ = −0.3710489."""
    faces = torch.arange(1, 7, dtype=torch.float64)
    w, multipliers = solve(
        Rows(x=[0.0]),
        6,
        lambda w: (w.softmax(0) * w.log_softmax(0)).sum(),
        lambda w, batch: (w.softmax(0) @ faces)[None],
        Constraint(equals=4.5),
        Pointwise(alpha=2.0, dual_lr=4.0),
    )
    published = torch.tensor([0.05435, 0.07877, 0.1142, 0.1654, 0.2398, 0.3475]).double()
    torch.testing.assert_close(w.softmax(0), published, rtol=0, atol=5e-5)
    assert float(multipliers["only"]) == pytest.approx(-0.3710489, abs=1e-5)


def test_minimum_norm_under_linear_equations_is_the_pseudo_inverses() -> None:
    """½‖w‖² subject to Aw = b, an equation a sample: w = A⁺b, λ/N = −(AAᵀ)⁻¹b."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(4, 7)), rng.normal(size=4)
    w, multipliers = solve(
        Rows(a=a, b=b),
        7,
        lambda w: 0.5 * w.square().sum(),
        lambda w, batch: batch["a"] @ w - batch["b"],
        Constraint(equals=0.0),
        Pointwise(alpha=20.0, dual_lr=40.0),
        steps=150,
    )
    np.testing.assert_allclose(w.numpy(), np.linalg.pinv(a) @ b, atol=1e-6)
    found = multipliers["only"][:, 0].numpy() / 4
    np.testing.assert_allclose(found, -np.linalg.solve(a @ a.T, b), atol=1e-6)


def test_average_equality_is_that_of_the_mean() -> None:
    """½‖w‖² subject to mean_i a_i·w = 1: w = ā/‖ā‖², λ = −1/‖ā‖²."""
    a = np.random.default_rng(1).normal(size=(5, 3)) + 1
    mean = a.mean(0)
    w, multipliers = solve(
        Rows(a=a),
        3,
        lambda w: 0.5 * w.square().sum(),
        lambda w, batch: batch["a"] @ w,
        Constraint(equals=1.0),
        Average(alpha=3.0, dual_lr=6.0),
    )
    np.testing.assert_allclose(w.numpy(), mean / (mean @ mean), atol=1e-5)
    assert float(multipliers["only"]) == pytest.approx(-1 / (mean @ mean), abs=1e-5)


@pytest.mark.parametrize("shape", ["hinge", "squared_hinge"])
def test_penalty_on_an_equality_is_that_of_the_distance(shape: Any) -> None:
    """½(w − 1)² + λ₀|w| rests at (1 − λ₀)₊ and ½(w − 1)² + λ₀w² at 1/(1 + 2λ₀)."""
    w, multipliers = solve(
        Rows(x=[0.0]),
        1,
        lambda w: 0.5 * (w[0] - 1).square(),
        lambda w, batch: w,
        Constraint(equals=0.0),
        Penalty(weight=0.4, shape=shape),
        steps=30,
    )
    assert not multipliers
    assert float(w[0]) == pytest.approx(0.6 if shape == "hinge" else 1 / 1.8, abs=1e-6)


# Regression quantiles ----------------------------------------------------------------------------


def engel() -> tuple[np.ndarray, np.ndarray, Rows]:
    """Income, expenditure, and both as samples in hundreds of francs, income from its mean."""
    income, food = np.loadtxt(ENGEL, delimiter=",", skiprows=1).T
    return income, food, Rows(x=(income - income.mean()) / 100, y=food / 100)


def line(w: Tensor, income: np.ndarray) -> np.ndarray:
    """Intercept and slope in francs."""
    level, slope = w.tolist()
    return np.array([100 * level - slope * income.mean(), slope])


def quantile(rows: Rows, constraints: Any, formulation: Any) -> tuple[Tensor, dict[str, Tensor]]:
    def residual(w: Tensor, batch: Any) -> Any:
        found = batch["y"] - w[0] - w[1] * batch["x"]
        return dict.fromkeys(constraints, found) if isinstance(constraints, dict) else found

    return solve(rows, 2, lambda w: 0 * w.sum(), residual, constraints, formulation, steps=160)


@pytest.mark.parametrize(
    "constraint",
    [Constraint(equals=0.0), Constraint(at_least=0.0, at_most=0.0)],
    ids=["equality", "interval"],
)
def test_median_regression_is_an_equality_at_a_linear_price(constraint: Constraint) -> None:
    """statsmodels' engel: 81.48225 + .56018·income; λ = ±β, with the sign of the residual."""
    income, food, rows = engel()
    formulation = Relaxed(alpha=20.0, beta=1.0, cost="linear", dual_lr=40.0)
    w, multipliers = quantile(rows, constraint, formulation)
    found = line(w, income)
    np.testing.assert_allclose(found, [81.48225, 0.56018], rtol=1e-5, atol=1e-4)
    if constraint.equals is None:
        return
    residual = food - found[0] - found[1] * income
    price = multipliers["only"][:, 0].numpy()
    far = np.abs(residual) > 1
    assert far.sum() > 220
    np.testing.assert_allclose(price[far], np.sign(residual[far]), atol=1e-6)
    assert np.abs(price).max() <= 1 + 1e-6
    # Stationarity: the prices balance, and so do they weighted with the incomes.
    assert abs(price.sum()) < 1e-3
    assert abs(price @ (income - income.mean())) / 100 < 1e-2


@pytest.mark.parametrize("level", [0.25, 0.9])
def test_other_quantiles_have_a_price_for_each_side(level: float) -> None:
    """Two constraints on one value, at the prices τ and 1 − τ: scipy's linear program's line."""
    income, food, rows = engel()
    count = len(rows)
    program = linprog(
        np.r_[0, 0, np.full(count, level), np.full(count, 1 - level)],
        A_eq=np.c_[np.ones(count), income, np.eye(count), -np.eye(count)],
        b_eq=food,
        bounds=[(None, None)] * 2 + [(0, None)] * (2 * count),
    )
    w, _ = quantile(
        rows,
        {"above": Constraint(at_most=0.0), "below": Constraint(at_least=0.0)},
        {
            "above": Relaxed(alpha=20.0, beta=level, cost="linear", dual_lr=40.0),
            "below": Relaxed(alpha=20.0, beta=1 - level, cost="linear", dual_lr=40.0),
        },
    )
    np.testing.assert_allclose(line(w, income), program.x[:2], rtol=1e-5, atol=1e-4)


# A quadratic program -----------------------------------------------------------------------------


def test_multipliers_over_n_are_a_quadratic_programs_to_six_digits() -> None:
    """½(w − c)ᵀQ(w − c) subject to a_i·w ≤ b_i, against scipy's SLSQP: w and λ/N to 1e-6."""
    rng = np.random.default_rng(4)
    root = rng.normal(size=(4, 4))
    q, centre = root @ root.T + np.eye(4), rng.normal(size=4)
    a, b = rng.normal(size=(9, 4)), np.full(9, 0.2)
    program = minimize(
        lambda w: 0.5 * (w - centre) @ q @ (w - centre),
        np.zeros(4),
        jac=lambda w: q @ (w - centre),
        constraints={"type": "ineq", "fun": lambda w: b - a @ w, "jac": lambda w: -a},
        method="SLSQP",
        options={"ftol": 1e-16, "maxiter": 1000},
    )
    # Exactly, from which of its constraints are active.
    active = (b - a @ program.x) < 1e-6
    assert active.sum() >= 2
    corner = np.block([[q, a[active].T], [a[active], np.zeros((active.sum(), active.sum()))]])
    solution = np.linalg.solve(corner, np.r_[q @ centre, b[active]])
    np.testing.assert_allclose(solution[:4], program.x, atol=1e-6)
    expected = np.zeros(9)
    expected[active] = solution[4:]
    assert expected.min() >= 0

    matrix, middle = torch.from_numpy(q), torch.from_numpy(centre)
    w, multipliers = solve(
        Rows(a=a, b=b),
        4,
        lambda w: 0.5 * (w - middle) @ matrix @ (w - middle),
        lambda w, batch: batch["a"] @ w - batch["b"],
        Constraint(at_most=0.0),
        Pointwise(alpha=40.0, dual_lr=80.0),
        steps=400,
    )
    np.testing.assert_allclose(w.numpy(), solution[:4], atol=1e-6)
    np.testing.assert_allclose(multipliers["only"][:, 0].numpy() / 9, expected, atol=1e-6)
