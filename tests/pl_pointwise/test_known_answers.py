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
    Training,
)
from tests.pl_pointwise.toy import ToyData, trainer

SAMPLES, FEATURES = 60, 3


class Margins:
    """Two overlapping classes, so that some margins cannot be kept."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
        noise = 0.7 * torch.randn(SAMPLES, generator=generator, dtype=torch.float64)
        self.y = torch.sign(self.x @ torch.tensor([1.0, -2.0, 0.5]).double() + noise)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        return {"x": self.x[position], "y": self.y[position]}


class Linear(PointwiseModule):
    """½‖w‖² as every sample's objective, subject to y(w·x) ≥ 1."""

    def __init__(self, formulation: Formulation, learning_rate: float, decay_at: int) -> None:
        super().__init__(
            formulation=formulation,
            constraints={"margin": Constraint(at_least=1.0)},
            training=Training(),
        )
        self.learning_rate, self.decay_at = learning_rate, decay_at
        self.w = torch.nn.Parameter(torch.zeros(FEATURES, dtype=torch.float64))

    def forward(self, batch: Any) -> Tensor:
        return batch["x"] @ self.w

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:
        return 0.5 * self.w.square().sum().expand(len(outputs))

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"margin": batch["y"] * outputs}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([self.w], lr=self.learning_rate)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, self.decay_at, gamma=0.5)
        return [optimizer], [scheduler]


def train(
    formulation: Formulation, batch_size: int, epochs: int, learning_rate: float = 0.1
) -> tuple[Linear, Tensor, Tensor]:
    """The module after fit, its weights and its multipliers by sample."""
    rows = Margins()
    module = Linear(formulation, learning_rate, decay_at=max(1, epochs // 6))
    quiet = {"enable_model_summary": False, "log_every_n_steps": 10**6}
    trainer(max_epochs=epochs, **quiet).fit(module, ToyData(rows, batch_size=batch_size))
    multiplier = module.multipliers["margin"].double()
    return module, module.w.detach(), multiplier[:, 0] if multiplier.dim() else multiplier


@pytest.mark.parametrize("cost", ["quadratic", "linear"])
def test_relaxed_margins_are_the_support_vector_machine(cost: Any) -> None:
    beta = 2.0
    rows = Margins()
    formulation = Relaxed(alpha=2.0, beta=beta, cost=cost, dual_lr=2.0)
    _, w, multiplier = train(formulation, batch_size=30, epochs=150)

    x, y = rows.x.numpy(), rows.y.numpy()
    loss = "squared_hinge" if cost == "quadratic" else "hinge"
    machine = LinearSVC(
        loss=loss, C=beta / SAMPLES, fit_intercept=False, dual=True, tol=1e-10, max_iter=10**6
    ).fit(x, y)

    def objective(weights: np.ndarray) -> float:
        hinge = np.maximum(0, 1 - y * (x @ weights))
        bought = hinge**2 if cost == "quadratic" else hinge
        return 0.5 * weights @ weights + beta * bought.mean()

    best = objective(machine.coef_[0])
    assert objective(w.numpy()) == pytest.approx(best, rel=0.005)
    # w = mean(λ y x), the multipliers are the machine's dual variables.
    combined = (multiplier * rows.y) @ rows.x / SAMPLES
    torch.testing.assert_close(combined, w, rtol=0.01, atol=0.005)
    hinge = (1 - rows.y * (rows.x @ w)).clamp(min=0)
    if cost == "quadratic":  # c'(u*) = λ at u* = the violation
        torch.testing.assert_close(multiplier, 2 * beta * hinge, rtol=0.05, atol=0.05)
    else:  # 0 ≤ λ ≤ β, β where relaxed, 0 where satisfied with room
        assert multiplier.max() <= beta * (1 + 1e-3)
        assert (multiplier[hinge > 0.1] > 0.95 * beta).all()
        assert (multiplier[rows.y * (rows.x @ w) > 1.1] < 0.05 * beta).all()
    assert 0.2 < (multiplier > 0.05).double().mean() < 1  # some satisfied, some not


class Intercepts:
    """Rows for a feasible problem: ‖w − c‖² subject to a_i·w ≤ b_i for every i."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        self.a = torch.randn(12, FEATURES, generator=generator, dtype=torch.float64)
        self.b = torch.full((12,), 0.3, dtype=torch.float64)  # w = 0 is feasible

    def __len__(self) -> int:
        return 12

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        return {"a": self.a[position], "b": self.b[position]}


CENTRE = torch.tensor([1.0, -0.5, 0.8], dtype=torch.float64)


class Projection(PointwiseModule):
    """½‖w − c‖² subject to a_i·w − b_i ≤ 0: the projection of c onto a polyhedron."""

    def __init__(self, formulation: Formulation, learning_rate: float) -> None:
        super().__init__(
            formulation=formulation, constraints={"halfspace": Constraint(at_most=0.0)}
        )
        self.learning_rate = learning_rate
        self.w = torch.nn.Parameter(torch.zeros(FEATURES, dtype=torch.float64))

    def forward(self, batch: Any) -> Tensor:
        return batch["a"] @ self.w - batch["b"]

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:
        return 0.5 * (self.w - CENTRE).square().sum().expand(len(outputs))

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"halfspace": outputs}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.w], lr=self.learning_rate)


@pytest.mark.parametrize(
    "formulation",
    [
        Pointwise(alpha=2.0, dual_lr=2.0),
        Pointwise(alpha=None, dual_lr=1.0),
    ],
    ids=["augmented", "standard"],
)
def test_pointwise_solution_and_multipliers_are_the_programs(formulation: Formulation) -> None:
    """The sum form's multiplier of row i is λ_i / N, because the constraints' mean is priced."""
    rows = Intercepts()
    a, b, centre = rows.a.numpy(), rows.b.numpy(), CENTRE.numpy()
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
    multipliers = np.zeros(len(rows))
    multipliers[active] = np.linalg.lstsq(a[active].T, centre - program.x, rcond=None)[0]
    assert multipliers.min() >= -1e-6

    module = Projection(formulation, learning_rate=0.3)
    trainer(max_epochs=150, log_every_n_steps=10**6).fit(module, ToyData(rows, batch_size=12))
    np.testing.assert_allclose(module.w.detach().numpy(), program.x, atol=2e-3)
    found = module.multipliers["halfspace"][:, 0].numpy() / len(rows)
    np.testing.assert_allclose(found, multipliers, atol=5e-3)


@pytest.mark.parametrize("alpha", [None, 1.0])
def test_average_solution_and_multiplier_are_the_programs(alpha: float | None) -> None:
    """One constraint mean_i(a_i·w − b_i) ≤ 0: the projection onto one halfspace, in closed form."""
    rows = Intercepts()
    normal = rows.a.mean(0)
    rows.b += (normal @ CENTRE - 0.3) - rows.b.mean()  # c violates it by 0.3
    multiplier = 0.3 / normal.square().sum()

    module = Projection(Average(alpha=alpha, dual_lr=2.0), learning_rate=0.3)
    data = ToyData(rows, batch_size=12)
    trainer(max_epochs=100, log_every_n_steps=10**6).fit(module, data)
    torch.testing.assert_close(
        module.w.detach(), CENTRE - multiplier * normal, rtol=1e-3, atol=1e-3
    )
    assert module.multipliers["halfspace"].shape == ()
    assert float(module.multipliers["halfspace"]) == pytest.approx(float(multiplier), rel=1e-2)


class Levels:
    """Numbers whose tail w has to stay above."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.a = torch.randn(20, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        return {"a": self.a[position]}


class Above(PointwiseModule):
    """½(w + 1)² as every sample's objective, the figure of a_i − w at most 0."""

    def __init__(self, formulation: Formulation, learning_rate: float) -> None:
        super().__init__(formulation=formulation, constraints={"above": Constraint(at_most=0.0)})
        self.learning_rate = learning_rate
        self.w = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, batch: Any) -> Tensor:
        return batch["a"] - self.w

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:
        return 0.5 * (self.w + 1).square().expand(len(outputs))

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"above": outputs}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.w], lr=self.learning_rate)


def above(
    formulation: Formulation, epochs: int, learning_rate: float, micro_batch_size: int | None = None
) -> Above:
    module = Above(formulation, learning_rate)
    module.training_settings.micro_batch_size = micro_batch_size
    runner = trainer(max_epochs=epochs, log_every_n_steps=10**6)
    runner.fit(module, ToyData(Levels(), batch_size=20))
    return module


@pytest.mark.parametrize(("tilt", "alpha"), [(0.5, None), (4.0, 1.0)])
def test_tilted_solution_and_multiplier_are_in_closed_form(tilt: float, alpha: Any) -> None:
    """(1/τ) log mean exp(τ(a − w)) ≤ 0 is w ≥ (1/τ) log mean exp(τa), and the price w + 1."""
    numbers = Levels().a.numpy()
    least = np.log(np.mean(np.exp(tilt * numbers))) / tilt
    module = above(Tilted(tilt=tilt, alpha=alpha, dual_lr=0.5), 100, 0.5, micro_batch_size=7)
    assert float(module.w.detach()) == pytest.approx(least, abs=1e-4)
    assert float(module.multipliers["above"]) == pytest.approx(least + 1, abs=1e-3)


@pytest.mark.parametrize("alpha", [None, 1.0])
def test_cvar_solution_threshold_and_multiplier_are_in_closed_form(alpha: Any) -> None:
    """Of 20 numbers the worst 3.5: the fourth largest counts half, and is the threshold."""
    numbers = np.sort(Levels().a.numpy())[::-1]
    least = (numbers[:3].sum() + numbers[3] / 2) / 3.5
    module = above(CVaR(level=0.825, threshold_lr=0.02, alpha=alpha, dual_lr=0.5), 160, 0.15)
    # The threshold steps to and fro across the quantile, and w after it.
    assert float(module.w.detach()) == pytest.approx(least, abs=0.03)
    assert float(module.thresholds["above"]) == pytest.approx(numbers[3] - least, abs=0.03)
    assert float(module.multipliers["above"]) == pytest.approx(least + 1, rel=0.01)
