"""Equations whose numbers are all known: only u is looked for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.tasks.task import Parameters, slope

from .equation import EQUATION, Equation, inside, on_side, twice

PI = math.pi
INSIDE, SIDE = 500, 15
ON_A_LINE = 64
DAMPING, STIFFNESS = 4.0, 400.0
DIFFUSIVITY = 0.1
VISCOSITY = 0.01 / PI


def box(*ends: tuple[float, float]) -> tuple[Tensor, Tensor]:
    low, high = torch.tensor(ends, dtype=torch.get_default_dtype()).T
    return low, high


def line(count: int, low: float, high: float) -> Tensor:
    return torch.linspace(low, high, count)[:, None]


def swing(at: Tensor) -> Tensor:
    """u″ + 4u′ + 400u = 0 from 1, at rest."""
    t, decay = at[..., 0], DAMPING / 2
    frequency = math.sqrt(STIFFNESS - decay**2)
    return torch.exp(-decay * t) * (
        torch.cos(frequency * t) + decay / frequency * torch.sin(frequency * t)
    )


def oscillator() -> Equation:
    """The workshop's: u″ + 4u′ + 400u = 0 on [0, 1], u(0) = 1, u′(0) = 0."""

    def conditions(of: Parameters, at: Tensor, u: Tensor) -> dict[str, Tensor]:
        speed = slope(u, at)[..., 0]
        pull = slope(speed, at)[..., 0] + DAMPING * speed + STIFFNESS * u
        return {EQUATION: pull, "start": u - 1, "speed": speed}

    low, high = box((0, 1))
    start = low[None]
    points = {EQUATION: line(ON_A_LINE, 0, 1), "start": start, "speed": start}
    units = {EQUATION: STIFFNESS, "start": 1.0, "speed": math.sqrt(STIFFNESS)}
    return Equation(low, high, points, conditions, units, swing)


def beam() -> Equation:
    """u⁗ = π⁴ sin πx on [0, 1]: a beam that lies on both ends, so u = 0 and u″ = 0 there."""

    def solution(at: Tensor) -> Tensor:
        return torch.sin(PI * at[..., 0])

    def conditions(of: Parameters, at: Tensor, u: Tensor) -> dict[str, Tensor]:
        moment = twice(u, at, 0)
        load = twice(moment, at, 0) - PI**4 * solution(at)
        return {EQUATION: load, "ends": u, "moment": moment}

    low, high = box((0, 1))
    ends = torch.stack([low, high])
    points = {EQUATION: line(ON_A_LINE, 0, 1), "ends": ends, "moment": ends}
    units = {EQUATION: PI**4, "ends": 1.0, "moment": PI**2}
    return Equation(low, high, points, conditions, units, solution)


def helmholtz() -> Equation:
    """Δu + u = q on [−1, 1]², u = 0 at the edge: sin πx · sin 4πy, of SA-PINN."""

    def solution(at: Tensor) -> Tensor:
        return torch.sin(PI * at[..., 0]) * torch.sin(4 * PI * at[..., 1])

    def conditions(of: Parameters, at: Tensor, u: Tensor) -> dict[str, Tensor]:
        bent = twice(u, at, 0) + twice(u, at, 1)
        return {EQUATION: bent + u - (1 - 17 * PI**2) * solution(at), "edge": u}

    low, high = box((-1, 1), (-1, 1))
    points = {EQUATION: inside(INSIDE, low, high), "edge": edge(low, high)}
    units = {EQUATION: 17 * PI**2, "edge": 1.0}
    return Equation(low, high, points, conditions, units, solution)


def poisson() -> Equation:
    """−Δu = 2π² sin πx · sin πy on [0, 1]², u = 0 at the edge."""

    def solution(at: Tensor) -> Tensor:
        return torch.sin(PI * at[..., 0]) * torch.sin(PI * at[..., 1])

    def conditions(of: Parameters, at: Tensor, u: Tensor) -> dict[str, Tensor]:
        bent = twice(u, at, 0) + twice(u, at, 1)
        return {EQUATION: -bent - 2 * PI**2 * solution(at), "edge": u}

    low, high = box((0, 1), (0, 1))
    points = {EQUATION: inside(INSIDE, low, high), "edge": edge(low, high)}
    units = {EQUATION: 2 * PI**2, "edge": 1.0}
    return Equation(low, high, points, conditions, units, solution)


def klein_gordon() -> Equation:
    """u_tt − u_xx + u³ = f on [0, 1]², with x cos 5πt + (xt)³."""

    def solution(at: Tensor) -> Tensor:
        x, t = at[..., 0], at[..., 1]
        return x * torch.cos(5 * PI * t) + (x * t) ** 3

    def source(at: Tensor) -> Tensor:
        x, t = at[..., 0], at[..., 1]
        in_time = -25 * PI**2 * x * torch.cos(5 * PI * t) + 6 * x**3 * t
        return in_time - 6 * x * t**3 + solution(at) ** 3

    def conditions(of: Parameters, at: Tensor, u: Tensor) -> dict[str, Tensor]:
        waves = twice(u, at, 1) - twice(u, at, 0) + u**3 - source(at)
        off = u - solution(at)
        return {
            EQUATION: waves,
            "start": off,
            "speed": slope(u, at)[..., 1],
            "sides": off,
        }

    low, high = box((0, 1), (0, 1))
    start = on_side(SIDE, low, high, 1, low[1])
    points = {EQUATION: inside(INSIDE, low, high), "start": start, "speed": start}
    points["sides"] = sides(low, high)
    units = {EQUATION: 25 * PI**2, "start": 1.0, "speed": 5 * PI, "sides": 1.0}
    return Equation(low, high, points, conditions, units, solution)


def wave() -> Equation:
    """u_tt = u_xx on [0, 1]²: a string that swings as sin πx · cos πt."""

    def solution(at: Tensor) -> Tensor:
        return torch.sin(PI * at[..., 0]) * torch.cos(PI * at[..., 1])

    def conditions(of: Parameters, at: Tensor, u: Tensor) -> dict[str, Tensor]:
        waves = twice(u, at, 1) - twice(u, at, 0)
        off = u - solution(at)
        return {
            EQUATION: waves,
            "start": off,
            "speed": slope(u, at)[..., 1],
            "sides": u,
        }

    low, high = box((0, 1), (0, 1))
    start = on_side(SIDE, low, high, 1, low[1])
    points = {EQUATION: inside(INSIDE, low, high), "start": start, "speed": start}
    points["sides"] = sides(low, high)
    units = {EQUATION: PI**2, "start": 1.0, "speed": PI, "sides": 1.0}
    return Equation(low, high, points, conditions, units, solution)


def warmth(at: Tensor) -> Tensor:
    """Of u_t = u_xx / 10 from sin πx, 0 at both ends."""
    cooled = torch.exp(-DIFFUSIVITY * PI**2 * at[..., 1])
    return cooled * torch.sin(PI * at[..., 0])


def heat() -> Equation:
    """u_t = u_xx / 10 on [0, 1]², from sin πx."""

    def conditions(of: Parameters, at: Tensor, u: Tensor) -> dict[str, Tensor]:
        flow = slope(u, at)[..., 1] - DIFFUSIVITY * twice(u, at, 0)
        return {EQUATION: flow, "start": u - warmth(at), "sides": u}

    low, high = box((0, 1), (0, 1))
    start = on_side(SIDE, low, high, 1, low[1])
    points = {EQUATION: inside(INSIDE, low, high), "start": start}
    points["sides"] = sides(low, high)
    units = {EQUATION: DIFFUSIVITY * PI**2, "start": 1.0, "sides": 1.0}
    return Equation(low, high, points, conditions, units, warmth)


def shock(at: Tensor) -> Tensor:
    """Of u_t + u u_x = ν u_xx from −sin πx: the formula of Cole and Hopf, by Gauss and Hermite."""
    import numpy as np

    nodes, weights = np.polynomial.hermite.hermgauss(100)
    z = torch.tensor(nodes, dtype=torch.float64)
    w = torch.tensor(weights, dtype=torch.float64)
    x, t = (at[..., k, None].double() for k in (0, 1))
    y = PI * (x - z * torch.sqrt(4 * VISCOSITY * t))
    # Of exponents as large as 1 / 2πν, less the largest.
    exponent = -torch.cos(y) / (2 * PI * VISCOSITY)
    size = w * torch.exp(exponent - exponent.amax(-1, keepdim=True))
    return (-(torch.sin(y) * size).sum(-1) / size.sum(-1)).to(at.dtype)


def burgers() -> Equation:
    """u_t + u u_x = ν u_xx on [−1, 1] × [0, 1] from −sin πx, 0 at both ends; ν = .01/π."""

    def conditions(of: Parameters, at: Tensor, u: Tensor) -> dict[str, Tensor]:
        slopes = slope(u, at)
        flow = slopes[..., 1] + u * slopes[..., 0] - VISCOSITY * twice(u, at, 0)
        return {EQUATION: flow, "start": u + torch.sin(PI * at[..., 0]), "sides": u}

    low, high = box((-1, 1), (0, 1))
    start = on_side(SIDE, low, high, 1, low[1])
    points = {EQUATION: inside(2 * INSIDE, low, high), "start": start}
    points["sides"] = sides(low, high)
    # At the start u u_x is π/2 at most; within the shock a term is many times that.
    units = {EQUATION: PI / 2, "start": 1.0, "sides": 1.0}
    return Equation(low, high, points, conditions, units, shock)


def convection() -> Equation:
    """u_t + 10 u_x = 0 on [0, 1]², from sin 2πx, given at the side it comes from: for trials."""

    def solution(at: Tensor) -> Tensor:
        return torch.sin(2 * PI * (at[..., 0] - at[..., 1]))

    def conditions(of: Parameters, at: Tensor, u: Tensor) -> dict[str, Tensor]:
        slopes, off = slope(u, at), u - solution(at)
        flow = 10 * (slopes[..., 1] + slopes[..., 0])
        return {EQUATION: flow, "start": off, "sides": off}

    low, high = box((0, 1), (0, 1))
    points = {EQUATION: inside(INSIDE, low, high)}
    points["start"] = on_side(SIDE, low, high, 1, low[1])
    points["sides"] = on_side(SIDE, low, high, 0, low[0])
    units = {EQUATION: 20 * PI, "start": 1.0, "sides": 1.0}
    return Equation(low, high, points, conditions, units, solution)


def sides(low: Tensor, high: Tensor) -> Tensor:
    """Points at both ends of the first coordinate."""
    ends = [on_side(SIDE, low, high, 0, end[0]) for end in (low, high)]
    return torch.cat(ends)


def edge(low: Tensor, high: Tensor) -> Tensor:
    """Points at the four sides of a square."""
    ends = [on_side(SIDE, low, high, 1, end[1]) for end in (low, high)]
    return torch.cat([sides(low, high), *ends])
