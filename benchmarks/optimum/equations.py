"""Differential equations by collocation: a network of x, its residual inside, its values outside.

Edges and starts are in another unit than the residual. References are by formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from pl_pointwise import Optimization

from .problems import Problem, Terms, layers

INSIDE = 1000


def _gradient(values: Tensor, at: Tensor) -> Tensor:
    """Of each value with respect to its own point: (B,), (B, D) ↦ (B, D)."""
    return torch.autograd.grad(values.sum(), at, create_graph=True)[0]


def field_equation() -> Problem:
    """u″ = −π² sin πx at 64 points, u = 0 at both edges, near six noisy data; one step an epoch."""
    generator = torch.Generator().manual_seed(0)
    data = torch.rand(6, generator=generator)
    noise = torch.randn(6, generator=generator)
    x = torch.cat([data, torch.linspace(0, 1, 64), torch.tensor([0.0, 1.0])])
    y = torch.sin(math.pi * x)
    y[:6] += 0.3 * noise
    kind = torch.tensor([0] * 6 + [1] * 64 + [2] * 2)

    def terms(net: nn.Module, i: Tensor) -> Terms:
        with torch.enable_grad():
            at = x[i][:, None].requires_grad_()
            u = net(at)[:, 0]
            curvature = _gradient(_gradient(u, at)[:, 0], at)[:, 0]
        residual = (curvature + math.pi**2 * torch.sin(math.pi * x[i])).abs()
        return (u - y[i]).square(), {"residual": residual, "edge": u}

    def error(net: nn.Module) -> Tensor:
        grid = torch.linspace(0, 1, 101)
        return (net(grid[:, None])[:, 0] - torch.sin(math.pi * grid)).abs().amax()

    net = partial(layers, 1, 32, 32, 1)
    bounds, slack = {"residual": 0.1, "edge": 0.0}, {"residual": 0.0, "edge": 0.01}
    kinds = ("objective", "residual", "edge")
    how = {"membership": lambda i: {name: kind[i] == k for k, name in enumerate(kinds)}}
    how |= {
        "training": Optimization(3e-3, 0.0, "cosine"),
        "batch": len(x),
        "lengths": (1000,),
    }
    return Problem(len(x), net, terms, bounds, slack, ("edge",), error=error, **how)


def helmholtz(in_loss: bool) -> Problem:
    """Δu + u = q on [−1, 1]², u = 0 at its edge, with the solution sin πx · sin 4πy of SA-PINN
    (McClenny and Braga-Neto 2020); one step an epoch. q is 170 times as large as u.
    """

    def solution(at: Tensor) -> Tensor:
        return torch.sin(math.pi * at[:, 0]) * torch.sin(4 * math.pi * at[:, 1])

    def terms(net: nn.Module, at: Tensor) -> tuple[Tensor, Tensor]:
        u, slope = _slope(net, at)
        bent = sum(_gradient(slope[:, k], at)[:, k] for k in (0, 1))
        return bent + u - (1 - 17 * math.pi**2) * solution(at), u

    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(INSIDE + 200, 2, generator=generator) - 1
    side, line = torch.arange(200), torch.linspace(-1, 1, 51)
    x[INSIDE + side, side % 2] = torch.where(side % 4 < 2, -1.0, 1.0)
    grid, found = torch.cartesian_prod(line, line), _equation(x, terms, 1.0, in_loss)
    return replace(
        found, batch=len(x), lengths=(2000,), error=_relative(solution, grid)
    )


def convection(in_loss: bool) -> Problem:
    """u_t + 5u_x = 0, u(x, 0) = sin x, periodic on [0, 2π]: sin(x − 5t); ten steps an epoch."""

    def solution(at: Tensor) -> Tensor:
        return torch.sin(at[:, 0] - 5 * at[:, 1])

    def terms(net: nn.Module, at: Tensor) -> tuple[Tensor, Tensor]:
        u, slope = _slope(net, at)
        beyond = net(at + torch.tensor([2 * math.pi, 0.0]))[:, 0]
        off = torch.where(at[:, 1] == 0, u - torch.sin(at[:, 0]), u - beyond)
        return slope[:, 1] + 5 * slope[:, 0], off

    generator = torch.Generator().manual_seed(0)
    x = torch.rand(INSIDE + 200, 2, generator=generator) * torch.tensor(
        [2 * math.pi, 1.0]
    )
    x[INSIDE : INSIDE + 100, 1], x[INSIDE + 100 :, 0] = 0.0, 0.0
    grid = torch.cartesian_prod(
        torch.linspace(0, 2 * math.pi, 64), torch.linspace(0, 1, 32)
    )
    found = _equation(x, terms, 0.1, in_loss)
    return replace(found, lengths=(300,), error=_relative(solution, grid))


def _slope(net: nn.Module, at: Tensor) -> tuple[Tensor, Tensor]:
    """u, (B,), and its gradient, (B, D)."""
    u = net(at)[:, 0]
    return u, _gradient(u, at)


def _relative(
    solution: Callable[[Tensor], Tensor], grid: Tensor
) -> Callable[[nn.Module], Tensor]:
    """The error of a network in L2, relative to the solution."""
    exact = solution(grid)
    return lambda net: (net(grid)[:, 0] - exact).norm() / exact.norm()


def _equation(
    x: Tensor, terms: Callable[..., tuple[Tensor, Tensor]], most: float, in_loss: bool
) -> Problem:
    """|residual| ≤ ``most`` at the first points, |u − the value at its edge| ≤ .01 at the others.

    in_loss: the square of the residual is the objective instead, as in a PINN's loss; a penalty of
    shape "squared" then has the one weight of that loss. Otherwise there is no objective.
    """

    def values(net: nn.Module, i: Tensor) -> Terms:
        with torch.enable_grad():
            residual, off = terms(net, x[i].clone().requires_grad_())
        edge = {"edge": off.abs()}
        return (
            (residual.square(), edge)
            if in_loss
            else (0 * off, {"residual": residual.abs()} | edge)
        )

    def membership(i: Tensor) -> dict[str, Tensor]:
        return {"objective" if in_loss else "residual": i < INSIDE, "edge": i >= INSIDE}

    bounds = {"edge": 0.01} | ({} if in_loss else {"residual": most})
    slack, training = (
        {name: b / 10 for name, b in bounds.items()},
        Optimization(3e-3, 0.0, "cosine"),
    )
    net, how = (
        partial(layers, 2, 50, 50, 50, 1),
        {"membership": membership, "training": training},
    )
    return Problem(len(x), net, values, bounds, slack, **how)
