"""Trained to convergence, the formulations reach the solutions that other solvers find.

Margin constraints y(w·x) ≥ 1 under ½‖w‖², with a relaxation that is paid for, are the support
vector machine: at the quadratic cost βu² that of the squared hinge, at the linear cost βu that of
the hinge. With means over N in place of sums, C of the sum form is β/N, and stationarity in w reads
w = mean(λ_i y_i x_i): the mean form's λ_i is N times the sum form's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.svm import LinearSVC
from torch import Tensor

from pl_pointwise import (
    Average,
    Constraint,
    CVaR,
    Formulation,
    Pointwise,
    PointwiseModule,
    Relaxed,
    Tilted,
)
from tests.pl_pointwise.toy import ToyData, trainer

SAMPLES, FEATURES = 60, 3


class Program(PointwiseModule):
    """½‖w − c‖² as every sample's objective, subject to a_i·w ≤ b_i, of each or of a statistic."""

    def __init__(
        self, formulation: Formulation, centre: Tensor, rate: float, decay: int
    ) -> None:
        super().__init__(
            formulation=formulation, constraints={"row": Constraint(at_most=0.0)}
        )
        self.centre, self.rate, self.decay = centre, rate, decay
        self.w = torch.nn.Parameter(torch.zeros_like(centre))

    def forward(self, batch: Any) -> Tensor:
        return batch["a"] @ self.w - batch["b"]

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:
        return 0.5 * (self.w - self.centre).square().sum().expand(len(outputs))

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"row": outputs}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([self.w], lr=self.rate)
        return [optimizer], [
            torch.optim.lr_scheduler.StepLR(optimizer, self.decay, gamma=0.5)
        ]


def solve(
    a: Tensor,
    b: Tensor,
    centre: Tensor,
    formulation: Formulation,
    epochs: int,
    rate: float,
    *,
    batch_size: int | None = None,
    decay: int = 10**6,
    micro_batch_size: int | None = None,
) -> tuple[Tensor, Tensor, Program]:
    """a (N, F), b (N,); returns w and λ, of every row in one batch unless said otherwise."""
    module = Program(formulation, centre, rate, decay)
    module.training_settings.micro_batch_size = micro_batch_size
    rows = [{"a": one, "b": bound} for one, bound in zip(a, b, strict=True)]
    runner = trainer(max_epochs=epochs, log_every_n_steps=10**6)
    runner.fit(module, ToyData(rows, batch_size=batch_size or len(a)))
    return module.w.detach(), module.multipliers["row"].double(), module


@pytest.mark.parametrize("cost", ["quadratic", "linear"])
def test_relaxed_margins_are_the_support_vector_machine(cost: Any) -> None:
    """Two overlapping classes, so that some margins cannot be kept."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    noise = 0.7 * torch.randn(SAMPLES, generator=generator, dtype=torch.float64)
    y = torch.sign(x @ torch.tensor([1.0, -2.0, 0.5]).double() + noise)

    beta = 2.0
    formulation = Relaxed(alpha=2.0, beta=beta, cost=cost, dual_lr=2.0)
    a, b, centre = -y[:, None] * x, -torch.ones_like(y), torch.zeros(FEATURES).double()
    w, multiplier, _ = solve(
        a, b, centre, formulation, 150, 0.1, batch_size=30, decay=25
    )
    multiplier = multiplier[:, 0]

    loss = "squared_hinge" if cost == "quadratic" else "hinge"
    machine = LinearSVC(
        loss=loss,
        C=beta / SAMPLES,
        fit_intercept=False,
        dual=True,
        tol=1e-10,
        max_iter=10**6,
    ).fit(x.numpy(), y.numpy())

    def objective(weights: np.ndarray) -> float:
        hinge = np.maximum(0, 1 - y.numpy() * (x.numpy() @ weights))
        bought = hinge**2 if cost == "quadratic" else hinge
        return 0.5 * weights @ weights + beta * bought.mean()

    assert objective(w.numpy()) == pytest.approx(objective(machine.coef_[0]), rel=0.005)
    # w = mean(λ y x), the multipliers are the machine's dual variables.
    combined = (multiplier * y) @ x / SAMPLES
    torch.testing.assert_close(combined, w, rtol=0.01, atol=0.005)
    hinge = (1 - y * (x @ w)).clamp(min=0)
    if cost == "quadratic":  # c'(u*) = λ at u* = the violation
        torch.testing.assert_close(multiplier, 2 * beta * hinge, rtol=0.05, atol=0.05)
    else:  # 0 ≤ λ ≤ β, β where relaxed, 0 where satisfied with room
        assert multiplier.max() <= beta * (1 + 1e-3)
        assert (multiplier[hinge > 0.1] > 0.95 * beta).all()
        assert (multiplier[y * (x @ w) > 1.1] < 0.05 * beta).all()
    assert 0.2 < (multiplier > 0.05).double().mean() < 1  # some satisfied, some not


def polyhedron() -> tuple[Tensor, Tensor, Tensor]:
    """Twelve halfspaces around w = 0, and a point outside, to be projected."""
    generator = torch.Generator().manual_seed(11)
    a = torch.randn(12, FEATURES, generator=generator, dtype=torch.float64)
    return a, torch.full((12,), 0.3).double(), torch.tensor([1.0, -0.5, 0.8]).double()


@pytest.mark.parametrize(
    "formulation",
    [Pointwise(alpha=2.0, dual_lr=2.0), Pointwise(alpha=None, dual_lr=1.0)],
    ids=["augmented", "standard"],
)
def test_pointwise_solution_and_multipliers_are_the_programs(
    formulation: Formulation,
) -> None:
    """The sum form's multiplier of row i is λ_i / N, because the constraints' mean is priced."""
    a, b, centre = (each.numpy() for each in polyhedron())
    program = minimize(
        lambda w: 0.5 * np.sum((w - centre) ** 2),
        np.zeros(FEATURES),
        jac=lambda w: w - centre,
        constraints={"type": "ineq", "fun": lambda w: b - a @ w, "jac": lambda w: -a},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    active = (b - a @ program.x) < 1e-6
    assert 1 <= active.sum() <= FEATURES
    # Stationarity: c − w = Σ μ_i a_i over the active rows, unique where those are independent.
    multipliers = np.zeros(len(a))
    multipliers[active] = np.linalg.lstsq(a[active].T, centre - program.x, rcond=None)[
        0
    ]
    assert multipliers.min() >= -1e-6

    w, found, _ = solve(*polyhedron(), formulation, 150, 0.3)
    np.testing.assert_allclose(w.numpy(), program.x, atol=2e-3)
    np.testing.assert_allclose(found[:, 0].numpy() / len(a), multipliers, atol=5e-3)


def test_average_solution_and_multiplier_are_the_programs() -> None:
    """One constraint mean_i(a_i·w − b_i) ≤ 0: the projection onto one halfspace, in closed form."""
    a, b, centre = polyhedron()
    normal = a.mean(0)
    b += (normal @ centre - 0.3) - b.mean()  # c violates it by 0.3
    multiplier = 0.3 / normal.square().sum()
    w, found, _ = solve(a, b, centre, Average(alpha=1.0, dual_lr=2.0), 100, 0.3)
    torch.testing.assert_close(w, centre - multiplier * normal, rtol=1e-3, atol=1e-3)
    assert found.shape == ()
    assert float(found) == pytest.approx(float(multiplier), rel=1e-2)


NUMBERS = torch.randn(
    20, generator=torch.Generator().manual_seed(5), dtype=torch.float64
)


def above(
    formulation: Formulation, epochs: int, rate: float, **options: Any
) -> tuple[float, float, Program]:
    """½(w + 1)², the statistic of a_i − w at most 0: w and its price."""
    one = torch.ones(20, 1).double()
    w, found, module = solve(
        -one, -NUMBERS, -one[0], formulation, epochs, rate, **options
    )
    return float(w), float(found), module


def test_tilted_solution_and_multiplier_are_in_closed_form() -> None:
    """(1/τ) log mean exp(τ(a − w)) ≤ 0 is w ≥ (1/τ) log mean exp(τa), and the price w + 1."""
    least = float((4 * NUMBERS).exp().mean().log() / 4)
    formulation = Tilted(tilt=4.0, alpha=1.0, dual_lr=0.5)
    w, multiplier, _ = above(formulation, 100, 0.5, micro_batch_size=7)
    assert w == pytest.approx(least, abs=1e-4)
    assert multiplier == pytest.approx(least + 1, abs=1e-3)


def test_cvar_solution_threshold_and_multiplier_are_in_closed_form() -> None:
    """Of 20 numbers the worst 3.5: the fourth largest counts half, and is the threshold."""
    numbers = np.sort(NUMBERS.numpy())[::-1]
    least = (numbers[:3].sum() + numbers[3] / 2) / 3.5
    formulation = CVaR(level=0.825, threshold_lr=0.02, alpha=1.0, dual_lr=0.5)
    w, multiplier, module = above(formulation, 160, 0.15)
    # The threshold steps to and fro across the quantile, and w after it.
    assert w == pytest.approx(least, abs=0.03)
    assert float(module.thresholds["row"]) == pytest.approx(
        numbers[3] - least, abs=0.03
    )
    assert multiplier == pytest.approx(least + 1, rel=0.01)
