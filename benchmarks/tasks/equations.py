"""Heat and convection: a network of place and time, in two forms each.

The residual is a requirement at each point, without any objective, or its square is the objective.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pl_pointwise import Constraint

from .task import Parameters, Task, Terms, layers, network, slope

INSIDE, START, SIDES = 300, 50, 50
EDGE = 0.01
Solution = Callable[[Tensor], Tensor]
Equation = Callable[[Parameters, Tensor], tuple[Tensor, Tensor]]
"""Residual and u of each point (M, B, 2): place, time."""


def convection(in_loss: bool) -> Task:
    """u_t + 4 u_x = 0 on a circle, from a bump; place is given by the network's own coordinate."""
    speed = 4.0

    def solution(at: Tensor) -> Tensor:
        return torch.exp(torch.cos(at[..., 0] - speed * at[..., 1]) - 1)

    def equation(parameters: Parameters, at: Tensor) -> tuple[Tensor, Tensor]:
        u = network(parameters, at)[..., 0]
        rate = slope(u, at)
        return rate[..., 1] + speed * rate[..., 0], u

    return _task(solution, equation, 2 * math.pi, True, 0.05, in_loss)


def heat(in_loss: bool) -> Task:
    """u_t = u_xx / 10 on [0, 1], 0 at both ends, from two waves."""
    kept = 0.1

    def solution(at: Tensor) -> Tensor:
        x, t = math.pi * at[..., 0], kept * math.pi**2 * at[..., 1]
        return torch.sin(x) * torch.exp(-t) + 0.5 * torch.sin(3 * x) * torch.exp(-9 * t)

    def equation(parameters: Parameters, at: Tensor) -> tuple[Tensor, Tensor]:
        u = network(parameters, at)[..., 0]
        rate = slope(u, at)
        return rate[..., 1] - kept * slope(rate[..., 0], at)[..., 0], u

    return _task(solution, equation, 1.0, False, 0.05, in_loss)


def _task(
    solution: Solution,
    equation: Equation,
    width: float,
    periodic: bool,
    most: float,
    in_loss: bool,
) -> Task:
    """|residual| ≤ ``most`` inside, |u − what it is there| ≤ .01 at the start and at the sides."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(INSIDE + START + SIDES, 2, generator=generator) * torch.tensor(
        [width, 1.0]
    )
    x[INSIDE : INSIDE + START, 1] = 0.0
    x[INSIDE + START :, 0] = 0.0
    if not periodic:
        x[INSIDE + START :: 2, 0] = width
    known = solution(x)
    inside = torch.arange(len(x)) < INSIDE
    at_side = torch.arange(len(x)) >= INSIDE + START
    across = torch.tensor([width, 0.0])

    def terms(parameters: Parameters, index: Tensor) -> Terms:
        with torch.enable_grad():
            at = x[index].clone().requires_grad_()
            residual, u = equation(parameters, at)
            off = u - known[index]
            if periodic:
                beyond = network(parameters, x[index] + across)[..., 0]
                off = torch.where(at_side[index], u - beyond, off)
        if in_loss:
            return residual.square(), {"edge": off.abs()}
        return 0 * off, {"residual": residual.abs(), "edge": off.abs()}

    line = torch.linspace(0, 1, 41)
    grid = torch.cartesian_prod(width * line, line)
    exact = solution(grid)

    def error(parameters: Parameters) -> Tensor:
        members = len(next(iter(parameters.values())))
        with torch.no_grad():
            found = network(parameters, grid.expand(members, -1, -1))[..., 0]
        return (found - exact).norm(dim=1) / exact.norm()

    constraints = {"edge": Constraint(at_most=EDGE)}
    membership = {"edge": ~inside, "objective" if in_loss else "residual": inside}
    if not in_loss:
        constraints = {"residual": Constraint(at_most=most)} | constraints
    return Task(
        len(x),
        lambda generator: layers(generator, 2, 32, 32, 1),
        terms,
        constraints,
        {name: 0.5 * float(of.at_most or 0) for name, of in constraints.items()},
        membership=membership,
        error=error,
        grid=() if in_loss else ({"residual": 1.0, "edge": 1.0},),
        batch=100,
        rate=5e-3,
        lengths=(10, 100, 800),
    )
