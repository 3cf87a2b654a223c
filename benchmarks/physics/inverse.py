"""A number of the equation is looked for too, in noisy data."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.tasks.task import Parameters, slope

from .equation import DATA, EQUATION, Equation, inside, on_side, twice
from .forward import (
    DAMPING,
    DIFFUSIVITY,
    INSIDE,
    ON_A_LINE,
    SIDE,
    STIFFNESS,
    box,
    line,
    sides,
    swing,
    warmth,
)


def noisy(exact: Tensor, deviation: float) -> Tensor:
    drawn = torch.randn(exact.shape, generator=torch.Generator().manual_seed(0))
    return exact + deviation * drawn.to(exact.dtype)


def damping() -> Equation:
    """The workshop's: u″ + μu′ + 400u = 0, with 40 data of noise .04; μ = 4 is looked for."""
    low, high = box((0, 1))
    measured_at = inside(40, low, high)
    noise = 0.04
    measured = noisy(swing(measured_at), noise)

    def conditions(of: Parameters, at: Tensor, u: Tensor) -> dict[str, Tensor]:
        speed = slope(u, at)[..., 0]
        found = of["damping"][:, None]
        pull = slope(speed, at)[..., 0] + found * speed + STIFFNESS * u
        return {EQUATION: pull}

    points = {EQUATION: line(ON_A_LINE, 0, 1), DATA: measured_at}
    units = {EQUATION: STIFFNESS, DATA: 1.0}
    unknown = {"damping": (0.0, DAMPING)}
    return Equation(
        low, high, points, conditions, units, swing, measured, noise, unknown
    )


def diffusivity() -> Equation:
    """AnyPINN's: u_t = αu_xx from sin πx, with 60 data of noise .02; α = .1 is looked for."""
    low, high = box((0, 1), (0, 1))
    measured_at = inside(60, low, high)
    noise = 0.02
    measured = noisy(warmth(measured_at), noise)

    def conditions(of: Parameters, at: Tensor, u: Tensor) -> dict[str, Tensor]:
        found = of["diffusivity"][:, None]
        flow = slope(u, at)[..., 1] - found * twice(u, at, 0)
        return {
            EQUATION: flow,
            "start": u - torch.sin(math.pi * at[..., 0]),
            "sides": u,
        }

    points = {EQUATION: inside(INSIDE, low, high), DATA: measured_at}
    points["start"] = on_side(SIDE, low, high, 1, low[1])
    points["sides"] = sides(low, high)
    units = {EQUATION: DIFFUSIVITY * math.pi**2, DATA: 1.0, "start": 1.0, "sides": 1.0}
    unknown = {"diffusivity": (1.0, DIFFUSIVITY)}
    return Equation(
        low, high, points, conditions, units, warmth, measured, noise, unknown
    )
