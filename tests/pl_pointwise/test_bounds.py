"""A bound is below the optimum that another solver finds, and its network makes it tight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from pl_pointwise.bounds import (
    Certified,
    DualNetwork,
    QuadraticProgram,
    Stationary,
    gap_of,
    stationarity,
    train_bound,
)
from pl_pointwise.correction import least_move, newton_corrected
from pl_pointwise.errors import DataError

V, E, K, N = 7, 3, 5, 12


def numbers(quadratic: bool) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    root = normal(V, V)
    found = {"Q": root @ root.T / V + 0.2 * torch.eye(V), "p": 2 * normal(V)}
    found |= {"A": normal(E, V), "G": normal(K, V)}
    found["h"] = (found["G"] @ torch.linalg.pinv(found["A"])).abs().sum(1) * 0.7 + 0.3
    if quadratic:
        roots = normal(K, V, 2) / 4
        found["H"] = roots @ roots.transpose(1, 2)
        found["h"] = found["h"] + 0.5
    return found


def instances() -> Tensor:
    draw = torch.Generator().manual_seed(4)
    return 2 * torch.rand(N, E, generator=draw, dtype=torch.float64) - 1


def solved(of: dict[str, Tensor], x: Tensor) -> Tensor:
    """The optima (n,) by SLSQP, which shares nothing with the package."""
    array = {name: value.numpy() for name, value in of.items()}

    def below(y: Any) -> Any:
        found = array["h"] - array["G"] @ y
        return found - (0.5 * (array["H"] @ y) @ y if "H" in array else 0)

    optima = []
    for each in x.numpy():
        equal = {"type": "eq", "fun": lambda y, each=each: array["A"] @ y - each}
        found = minimize(
            lambda y: y @ array["Q"] @ y / 2 + array["p"] @ y,
            torch.linalg.pinv(of["A"]).numpy() @ each,
            constraints=[equal, {"type": "ineq", "fun": below}],
            options={"ftol": 1e-13, "maxiter": 500},
        )
        assert found.success, found.message
        optima.append(found.fun)
    return torch.tensor(optima)


@pytest.mark.parametrize("quadratic", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_a_bound_is_below_the_optimum_of_another_solver(
    quadratic: bool, kind: torch.dtype
) -> None:
    of, x = numbers(quadratic), instances().to(kind)
    program = QuadraticProgram(**of).to(kind)
    assert program.Q.dtype == torch.float64
    best = solved(of, x.double())
    # Some constraint has a price.
    assert (program.dual(x, torch.zeros(N, K)) < best - 1e-2).any()
    draw = torch.Generator().manual_seed(0)
    for size in (0.0, 0.1, 1.0, 10.0):
        multipliers = size * torch.rand(N, K, generator=draw)
        assert (program.dual(x, multipliers.to(kind)) <= best + 1e-9).all()
        # Below 0 counts as 0.
        assert (program.dual(x, -multipliers) <= best + 1e-9).all()
    tight = program.dual(x, program.ascend(x, torch.zeros(N, K), 20))
    assert (tight <= best + 1e-8).all()
    torch.testing.assert_close(tight, best, atol=1e-6, rtol=1e-6)


def test_a_bound_is_lowered_by_what_an_inexact_minimum_amounts_to() -> None:
    """‖∇‖²/2m: of a point that is not the minimiser the Lagrangian itself is above the bound."""
    program, x = QuadraticProgram(**numbers(False)), instances()
    multipliers = torch.ones(N, K, dtype=torch.float64)
    exact = program.dual(x, multipliers)
    least = program.minimiser(x, multipliers)
    shifts = torch.randn(N, V - E, generator=torch.Generator().manual_seed(0)).double()
    y = least + shifts @ program.null.T
    value = program.objective(y) + (multipliers * program.inequalities(y)).sum(1)
    assert (value > exact + 1e-3).all()
    assert (value - program._error(y, multipliers) <= exact + 1e-12).all()


def test_a_network_trained_by_the_bound_alone_comes_near_the_optimum() -> None:
    of, x = numbers(False), instances()
    program, best = QuadraticProgram(**of), solved(of, x)
    torch.manual_seed(0)
    start = program.ascend(x, torch.zeros(N, K), 20).mean(0)
    network = DualNetwork(E, start, width=32).requires_grad_(False)
    torch.testing.assert_close(
        network(x.float()),
        start.float().clamp(min=0.02 * float(start.max())).expand(N, -1),
    )
    before = gap_of(best, program.dual(x, network(x.float()))).mean()
    train_bound(network, program, x, epochs=300, batch=N, learning_rate=1e-2)
    after = gap_of(best, program.dual(x, network(x.float()))).mean()
    assert after < before / 3
    assert not any(weight.requires_grad for weight in network.parameters())


@pytest.mark.parametrize("quadratic", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_every_answer_is_feasible_and_its_gap_is_proved(
    quadratic: bool, kind: torch.dtype
) -> None:
    of, x = numbers(quadratic), instances().to(kind)
    best = solved(of, x.double())
    torch.manual_seed(0)
    poor = nn.Linear(E, V)
    network = DualNetwork(E, torch.ones(K))
    for ascents, proves in ((0, False), (None, True)):
        found = Certified(poor, QuadraticProgram(**of), network, ascents).to(kind)(x)
        assert found.y.dtype == kind
        assert found.violation.max() <= (1e-7 if kind == torch.float64 else 1e-5)
        assert (found.bound <= best + 1e-8).all()
        assert (found.objective >= best - 1e-5).all()
        true = (found.objective - best) / best.abs()
        assert (found.gap >= true - 1e-7).all()
        assert (found.gap.max() <= 1e-4) == proves


def test_a_gap_around_0_is_unknown() -> None:
    objective, bound = torch.tensor([-1.0, 0.5, 2.0]), torch.tensor([-1.1, -0.1, 1.0])
    torch.testing.assert_close(
        gap_of(objective, bound), torch.tensor([0.1, float("inf"), 1.0])
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("Q", -torch.eye(V), "has to be positive definite"),
        ("H", -torch.ones(K, V), "not convex"),
        ("G", torch.ones(K, V + 1), "G is"),
        ("Q", torch.eye(V) + torch.triu(torch.ones(V, V), 1), "not symmetric"),
        ("h", torch.full((K,), float("inf")), "leave such a constraint out"),
        ("p", torch.full((V,), float("nan")), "not finite"),
    ],
)
def test_where_no_bound_can_be_given_it_is_refused(
    name: str, value: Tensor, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        QuadraticProgram(**{**numbers(False), name: value})


# The correction ---------------------------------------------------------------------------------


def test_the_least_move_is_that_of_another_solver() -> None:
    draw = torch.Generator().manual_seed(0)
    slopes = torch.randn(30, 6, 4, generator=draw, dtype=torch.float64)
    inside = torch.randn(30, 4, generator=draw, dtype=torch.float64)
    v = -(slopes @ inside[:, :, None])[:, :, 0] - 0.1  # At u = inside all hold.
    assert (v > 0).any(1).sum() > 20
    found = least_move(slopes, v)
    for each, at, of in zip(found, v.numpy(), slopes.numpy(), strict=True):
        other = minimize(
            lambda u: u @ u / 2,
            torch.zeros(4).double().numpy(),
            jac=lambda u: u,
            constraints={"type": "ineq", "fun": lambda u, at=at, of=of: -(at + of @ u)},
            options={"ftol": 1e-14, "maxiter": 300},
        )
        torch.testing.assert_close(
            each, torch.from_numpy(other.x), atol=1e-5, rtol=1e-4
        )


def curved(y: Tensor) -> Tensor:
    """A ball, and the outside of another one: not convex."""
    return torch.stack([y.square().sum(1) - 1, 0.25 - (y - 0.4).square().sum(1)], 1)


def test_newton_reaches_a_tight_tolerance_in_a_few_steps_and_keeps_equalities() -> None:
    draw = torch.Generator().manual_seed(0)
    y = torch.randn(60, 4, generator=draw, dtype=torch.float64)
    equal = torch.tensor([[1.0, 1.0, -1.0, 0.0]], dtype=torch.float64)
    null = torch.linalg.svd(equal)[2][1:].T
    y = y @ null @ null.T
    assert (curved(y) > 0.1).any(0).all()
    found = newton_corrected(y, curved, steps=8, within=null)
    assert curved(found).max() <= 1e-8
    torch.testing.assert_close(found @ equal.T, y @ equal.T, atol=1e-12, rtol=0)
    met = (curved(y) <= 0).all(1)
    assert torch.equal(found[met], y[met])


def test_newton_does_not_worsen_what_cannot_be_met() -> None:
    y = torch.randn(
        20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )

    def unreachable(y: Tensor) -> Tensor:
        return torch.stack([y[:, 0] + 1, 1 - y[:, 0]], 1)

    found = newton_corrected(y, unreachable)
    assert (unreachable(found).amax(1) <= unreachable(y).amax(1)).all()


# Not convex -------------------------------------------------------------------------------------


def test_stationarity_is_0_at_an_optimum_and_large_elsewhere() -> None:
    of, x = numbers(True), instances()
    program = QuadraticProgram(**of)
    y = program.minimiser(x, program.ascend(x, torch.zeros(N, K), 20))
    assert (program.inequalities(y).amax(1) > -1e-6).any()
    given = program.objective, program.inequalities, program.null
    assert stationarity(y, *given).max() < 1e-5
    inside = x @ program.plus.T
    assert stationarity(inside, *given).min() > 0.3


def test_a_solver_of_a_problem_that_is_not_convex_says_nothing_of_a_gap() -> None:
    program, x = QuadraticProgram(**numbers(False)), instances()
    solver = Stationary(nn.Linear(E, V), program, lambda y: y.sin().sum(1))
    found = solver(x.float())
    assert "gap" not in found._fields
    assert found.violation.max() <= 1e-5
    assert (found.stationarity <= 1 + 1e-9).all()
