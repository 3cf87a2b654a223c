"""What a correction leaves violated, what it leaves unchanged, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from pl_pointwise.correction import Corrected, NewtonCorrected, projector

EQUAL = torch.tensor([[1.0, 1.0, 1.0, 0.0], [0.0, 1.0, -1.0, 2.0]])
NULL = torch.linalg.svd(EQUAL)[2][2:].T


class Answer(nn.Module):
    """The identity: a model whose answers are what a test gives it."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def inside(y: Tensor, x: Tensor) -> Tensor:
    """A ball, and a half-space that holds a part of it."""
    return torch.stack([y.square().sum(1) - 1, y[:, 0] - 0.2], 1)


def answers() -> Tensor:
    return 3 * torch.randn(50, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "basis", [NULL, NULL @ torch.tensor([[2.0, 1.0], [0.0, 3.0]]), NULL @ NULL.T]
)
@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, torch.enable_grad]
)
def test_nothing_is_violated_and_the_equalities_stay(basis: Tensor, mode: type) -> None:
    y = 0.3 * answers() @ NULL @ NULL.T
    assert (inside(y, y) > 0.1).any(0).all()
    with mode():
        found = Corrected(Answer(), inside, within=basis)(y.clone())
    assert inside(found, y).max() <= 1e-4
    assert not found.requires_grad
    torch.testing.assert_close(found @ EQUAL.T, y @ EQUAL.T, rtol=0, atol=1e-6)


def test_a_half_space_is_met_by_the_nearest_point() -> None:
    y, normal = answers(), torch.tensor([[1.0, 2.0, 0.0, -1.0]])
    found = Corrected(Answer(), lambda y, x: y @ normal.T - 0.5, steps=1)(y)
    excess = (y @ normal.T - 0.5).clamp(min=0)
    torch.testing.assert_close(found, y - excess * normal / normal.square().sum())


def test_what_is_within_the_tolerance_is_left_alone_and_nothing_gets_worse() -> None:
    y = answers()

    # No y meets it; far steps make it worse.
    def unreachable(y: Tensor, x: Tensor) -> Tensor:
        return torch.stack([y[:, 0].sin() + 1.5, 0.1 - y[:, 0]], 1)

    found = Corrected(Answer(), unreachable, steps=7)(y)
    assert (unreachable(found, y).amax(1) <= unreachable(y, y).amax(1)).all()
    assert (found != y).any()
    kept = inside(y, y).amax(1) <= 5.0
    assert (Corrected(Answer(), inside, tolerance=5.0)(y)[kept] == y[kept]).all()
    assert (Corrected(Answer(), inside, steps=0)(y) == y).all()


def test_its_state_has_the_directions() -> None:
    one = Corrected(nn.Linear(4, 4), inside, within=NULL)
    other = Corrected(nn.Linear(4, 4), inside, within=torch.eye(4))
    other.load_state_dict(one.state_dict())
    torch.testing.assert_close(other.within, NULL @ NULL.T)
    x = answers()
    torch.testing.assert_close(one(x), other(x))


@pytest.mark.parametrize("wrong", [NULL.T, torch.ones(4)])
def test_other_directions_are_refused(wrong: Tensor) -> None:
    with pytest.raises(ValueError, match="within is"):
        projector(wrong)


# Newton -----------------------------------------------------------------------------------------


class Wide(nn.Module):
    """A model of x in float64: x itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x.double()


def nearest(y: Tensor, start: Tensor, constraints: list[dict[str, Any]]) -> Tensor:
    """The nearest feasible point to each y, by scipy, which begins at the points of start."""
    rows = []
    for row, begin in zip(y.numpy(), start.numpy(), strict=True):
        found = minimize(
            lambda u, row=row: ((u - row) ** 2).sum() / 2,
            begin,
            jac=lambda u, row=row: u - row,
            constraints=constraints,
            method="SLSQP",
            options={"ftol": 1e-12, "maxiter": 500},
        )
        assert found.success
        rows.append(found.x)
    return torch.tensor(np.array(rows))


def test_one_newton_step_is_the_projection_onto_linear_constraints() -> None:
    draw = torch.Generator().manual_seed(1)
    matrix = torch.randn(6, 4, generator=draw).double()
    equal = torch.randn(1, 4, generator=draw).double()
    y = 3 * torch.randn(20, 4, generator=draw).double()
    solver = NewtonCorrected(
        Wide(),
        lambda y, x: y @ matrix.T - 1,
        # Of each row's own x.
        equalities=lambda y, x: y @ equal.T - 0.5 + 0 * x[:, :1],
        steps=1,
    )
    found = solver(y)
    assert (found @ matrix.T - 1).max() <= 1e-8
    assert (found @ equal.T - 0.5).abs().max() <= 1e-8
    inside = (0.5 * equal / equal.square().sum()).expand_as(y)
    assert (inside @ matrix.T <= 1).all()
    below = {"type": "ineq", "fun": lambda u: 1 - matrix.numpy() @ u}
    exact = {"type": "eq", "fun": lambda u: equal.numpy() @ u - 0.5}
    best = nearest(y, inside, [below, exact])
    torch.testing.assert_close(found, best, atol=1e-6, rtol=0)


def circles(y: Tensor) -> Tensor:
    """Outside of a circle, which is not convex."""
    return 1 - y[:, :2].square().sum(1, keepdim=True)


def sphere(y: Tensor) -> Tensor:
    return y.square().sum(1, keepdim=True) - 4


def test_newton_meets_curved_equalities_and_is_near_the_nearest_point() -> None:
    draw = torch.Generator().manual_seed(2)
    y = torch.randn(30, 3, generator=draw).double()
    y = y[circles(y)[:, 0] > 0]
    found = NewtonCorrected(
        Wide(), lambda y, x: circles(y), equalities=lambda y, x: sphere(y)
    )(y)
    assert circles(found).max() <= 1e-8
    assert sphere(found).abs().max() <= 1e-8
    outside = {"type": "ineq", "fun": lambda u: (u[:2] ** 2).sum() - 1}
    on = {"type": "eq", "fun": lambda u: (u**2).sum() - 4}
    best = nearest(y, y, [outside, on])
    far, least = (found - y).norm(dim=1), (best - y).norm(dim=1)
    assert (far <= 1.3 * least + 1e-6).all()


def test_a_newton_step_that_leads_away_is_not_taken() -> None:
    """A full step from where atan is flat goes further away each time."""
    y = torch.tensor([[3.0], [1.0], [-40.0]]).double()

    def flat(y: Tensor, x: Tensor) -> Tensor:
        return y.atan()

    nothing = lambda y, x: y[:, :0]  # noqa: E731
    found = NewtonCorrected(Wide(), nothing, equalities=flat, steps=30)(y)
    assert found.abs().max() <= 1e-8


PLAN = 10


def drive(y: Tensor, x: Tensor) -> Tensor:
    """What a plan of a unicycle misses its dynamics by: states, then speeds and turns."""
    states = y[:, : 3 * PLAN].reshape(-1, PLAN, 3)
    inputs = y[:, 3 * PLAN :].reshape(-1, PLAN, 2)
    start = torch.tensor([-1.5, 0.0, 0.0]).to(y).expand(len(y), 1, 3)
    before = torch.cat([start, states[:, :-1]], 1)
    angle, speed = before[:, :, 2], inputs[:, :, 0]
    moves = [speed * angle.cos(), speed * angle.sin(), inputs[:, :, 1]]
    return (states - before - 0.2 * torch.stack(moves, 2)).flatten(1)


def room(y: Tensor, x: Tensor) -> Tensor:
    """An obstacle, a ball around 0, and bounds of the inputs."""
    places = y[:, : 3 * PLAN].reshape(-1, PLAN, 3)[:, :, :2]
    inputs = y[:, 3 * PLAN :]
    return torch.cat([1 - places.square().sum(2), inputs.abs() - 2], 1)


def test_plans_through_an_obstacle_whose_linearisation_cannot_be_met_are_led_around() -> (
    None
):
    draw = torch.Generator().manual_seed(1)
    inputs = torch.tensor([1.5, 0.0]).repeat(PLAN).double()
    places = torch.arange(1, PLAN + 1).double() * 0.3 - 1.5
    straight = torch.stack([places, 0 * places, 0 * places], 1).flatten()
    y = torch.cat([straight, inputs]) + 0.1 * torch.randn(20, 50, generator=draw)
    assert (room(y, y).amax(1) > 0.5).all()
    found = NewtonCorrected(Wide(), room, equalities=drive, steps=30)(y)
    assert room(found, y).max() <= 1e-8
    assert drive(found, y).abs().max() <= 1e-8
