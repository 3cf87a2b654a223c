"""Bounds of convex problems that are given as functions, against another solver's optima."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from pl_pointwise.bounds import (
    Certified,
    ConvexProgram,
    DualNetwork,
    gap_of,
    train_bound,
)
from pl_pointwise.errors import DataError

N = 10


@dataclass(frozen=True)
class Kind:
    """A family of problems of x (N, E), and where it is feasible."""

    objective: Callable[[Tensor, Tensor], Tensor]
    inequalities: Callable[[Tensor, Tensor], Tensor]
    lower: float
    upper: float
    variables: int
    constraints: int
    inputs: int
    total: bool = False
    """Whether the variables have the sum x₀."""

    def program(self) -> ConvexProgram:
        ones = torch.ones(1, self.variables)
        return ConvexProgram(
            self.objective,
            self.inequalities,
            torch.full((self.variables,), self.lower),
            torch.full((self.variables,), self.upper),
            A=ones if self.total else None,
            b=(lambda x: x[:, :1]) if self.total else None,
        )


WEIGHTS = torch.linspace(0.5, 2.0, 4, dtype=torch.float64)


def entropy(y: Tensor, x: Tensor) -> Tensor:
    return (y * (y / WEIGHTS).log()).sum(1)


KINDS = {
    # Shares near given ones, whose cost and largest share are limited: defined for y > 0 only.
    "entropy": Kind(
        entropy,
        lambda y, x: torch.cat(
            [y[:, :2] - 0.1, y @ WEIGHTS[:, None] - 1 - x[:, 1:]], 1
        ),
        lower=1e-6,
        upper=2.0,
        variables=4,
        constraints=3,
        inputs=2,
        total=True,
    ),
    # A supply of demand x by sources of growing cost, with cones as limits.
    "cones": Kind(
        lambda y, x: (y.exp() - y).sum(1) + 0.1 * (y - x).square().sum(1),
        lambda y, x: torch.stack(
            [
                (y[:, :2].square().sum(1) + 1e-4).sqrt() - 0.3,
                (y - x).pow(4).sum(1) - 0.5,
            ],
            1,
        ),
        lower=-4.0,
        upper=4.0,
        variables=3,
        constraints=2,
        inputs=3,
    ),
    # A logistic loss with a budget, whose bound moves with x; no strong convexity from f itself.
    "logistic": Kind(
        lambda y, x: nn.functional.softplus(y * torch.tensor([1.0, -1.0, 2.0]) - x).sum(
            1
        ),
        lambda y, x: y.square().sum(1, keepdim=True) - 0.5 - x[:, :1].square(),
        lower=-3.0,
        upper=3.0,
        variables=3,
        constraints=1,
        inputs=3,
    ),
}


def instances(kind: Kind) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    x = torch.rand(N, kind.inputs, generator=draw, dtype=torch.float64)
    return x / 4 + 0.9 if kind.total else 2 * x - 1


def solved(kind: Kind, x: Tensor) -> Tensor:
    """The optima (N,) by SLSQP, which shares nothing with the package but the functions."""

    def number(
        function: Callable[[Tensor, Tensor], Tensor], row: Tensor
    ) -> Callable[[Any], Any]:
        return lambda y: function(torch.tensor(y)[None], row[None])[0].numpy()

    def slope(
        function: Callable[[Tensor, Tensor], Tensor], row: Tensor
    ) -> Callable[[Any], Any]:
        single = lambda y: function(y[None], row[None])[0]  # noqa: E731
        return lambda y: torch.autograd.functional.jacobian(
            single, torch.tensor(y)
        ).numpy()

    optima = []
    for row in x:
        conditions: list[dict[str, Any]] = [
            {
                "type": "ineq",
                "fun": lambda y, row=row: -number(kind.inequalities, row)(y),
                "jac": lambda y, row=row: -slope(kind.inequalities, row)(y),
            }
        ]
        if kind.total:
            conditions.append(
                {"type": "eq", "fun": lambda y, row=row: y.sum() - float(row[0])}
            )
        start = np.full(
            kind.variables, float(row[0]) / kind.variables if kind.total else 0.0
        )
        answer = minimize(
            number(kind.objective, row),
            start,
            jac=slope(kind.objective, row),
            constraints=conditions,
            bounds=[(kind.lower, kind.upper)] * kind.variables,
            options={"ftol": 1e-9, "maxiter": 500},
        )
        assert answer.success, answer.message
        optima.append(answer.fun)
    return torch.tensor(np.array(optima, dtype=float))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bound_is_below_the_optimum_and_reaches_it(
    name: str, dtype: torch.dtype
) -> None:
    kind = KINDS[name]
    x = instances(kind).to(dtype)
    program, best = kind.program().to(dtype), solved(kind, x.double())
    assert program.lower.dtype == torch.float64
    none = torch.zeros(N, kind.constraints)
    assert (program.dual(x, none) < best - 1e-3).any()  # Some constraint has a price.
    draw = torch.Generator().manual_seed(0)
    for size in (0.0, 0.1, 1.0, 10.0):
        multipliers = size * torch.rand(N, kind.constraints, generator=draw)
        bound = program.dual(x, multipliers)
        assert bound.isfinite().all()
        assert (bound <= best + 1e-6).all()
    tight = program.dual(x, program.ascend(x, none, 20))
    assert (tight <= best + 1e-6).all()
    torch.testing.assert_close(tight, best, atol=1e-5, rtol=1e-5)


def test_the_bound_of_an_inexact_minimum_is_lowered() -> None:
    """Where the least Lagrangian is outside of the box, its tangent bounds it within."""
    kind = KINDS["logistic"]
    x, program = instances(kind), kind.program()
    # softplus has no minimum: y runs to the edge.
    bound = program.dual(x, torch.zeros(N, 1))
    y = program.minimiser(x, torch.zeros(N, 1))
    assert (y.abs() <= 3).all()
    assert (bound < program.objective(y, x) - 1e-3).any()
    assert (bound <= solved(kind, x) + 1e-6).all()


@pytest.mark.parametrize("name", KINDS)
def test_every_answer_is_feasible_and_its_gap_is_proved(name: str) -> None:
    kind = KINDS[name]
    x, program = instances(kind), kind.program()
    torch.manual_seed(0)
    network = DualNetwork(kind.inputs, torch.ones(kind.constraints), width=16)
    train_bound(network, program, x.float(), epochs=20, batch=N, learning_rate=1e-2)

    class Poor(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full((len(x), kind.variables), 0.25)

    answers = Certified(Poor(), program, network, ascents=10)(x)
    best = solved(kind, x)
    assert (answers.violation <= 1e-7).all()
    assert (answers.bound <= best + 1e-6).all()
    assert (answers.objective >= best - 1e-6).all()
    true = gap_of(answers.objective, best).clamp(min=0)
    assert (answers.gap >= true - 1e-6).all()
    assert float(answers.gap.median()) < 1e-3


def test_the_bound_has_a_slope_in_the_multipliers() -> None:
    kind = KINDS["cones"]
    x, program = instances(kind), kind.program()
    multipliers = torch.full(
        (N, kind.constraints), 0.3, dtype=torch.float64, requires_grad=True
    )
    slope = torch.autograd.grad(program.dual(x, multipliers).sum(), multipliers)[0]
    step = 1e-5 * torch.ones_like(multipliers)
    step[:, 1] = 0
    with torch.no_grad():
        ahead = program.dual(x, multipliers + step) - program.dual(
            x, multipliers - step
        )
    torch.testing.assert_close(slope[:, 0], ahead / 2e-5, atol=1e-5, rtol=1e-4)


def test_functions_that_are_not_convex_are_refused() -> None:
    ends = torch.full((2,), -2.0), torch.full((2,), 2.0)
    x = torch.zeros(4, 2)

    def square(y: Tensor, x: Tensor) -> Tensor:
        return y.square().sum(1)

    def limits(y: Tensor, x: Tensor) -> Tensor:
        # Outside of a circle.
        return torch.stack([y[:, 0] - 1, 1 - y.square().sum(1)], 1)

    network = DualNetwork(2, torch.ones(2))
    with pytest.raises(DataError, match="inequalities 1 is not convex"):
        train_bound(network, ConvexProgram(square, limits, *ends), x)
    with pytest.raises(DataError, match="objective is not convex"):
        ConvexProgram(lambda y, x: y.sin().sum(1), limits, *ends).require_convex(x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"upper": torch.ones(3)}, "one number"),
        ({"upper": torch.full((2,), torch.inf)}, "finite"),
        ({"lower": torch.full((2,), 5.0)}, "below upper"),
        ({"A": torch.ones(1, 3)}, r"should be \(F, 2\)"),
        ({"A": torch.ones(2, 2)}, "rank 1"),
        ({"b": lambda x: x}, "without A"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"lower": -torch.ones(2), "upper": torch.ones(2)} | change
    with pytest.raises(DataError, match=message):
        ConvexProgram(lambda y, x: y.sum(1), lambda y, x: y, **given)


def test_a_function_that_reduces_over_the_batch_is_refused() -> None:
    program = ConvexProgram(
        lambda y, x: y.sum(), lambda y, x: y, -torch.ones(2), torch.ones(2)
    )
    with pytest.raises(DataError, match="one value per row"):
        program.dual(torch.zeros(3, 2), torch.zeros(3, 2))
