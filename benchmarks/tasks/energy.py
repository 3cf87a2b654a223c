"""A network that moves a pendulum on by half a second, from noisy data: its energy stays."""

from __future__ import annotations

import torch
from torch import Tensor

from pl_pointwise import Constraint

from .task import Parameters, Task, Terms, layers, network

SAMPLES, NEW, TIME, FINE = 200, 2000, 0.5, 100


def energy_of(state: Tensor) -> Tensor:
    """(…, 2), angle and speed, ↦ (…)."""
    return state[..., 1].square() / 2 + 1 - state[..., 0].cos()


def moved(state: Tensor) -> Tensor:
    """The state after half a second, by steps that keep the energy to 1e-5 (leapfrog)."""
    angle, speed = state.double().unbind(-1)
    step = TIME / FINE
    for _ in range(FINE):
        half = speed - step / 2 * angle.sin()
        angle = angle + step * half
        speed = half - step / 2 * angle.sin()
    return torch.stack([angle, speed], -1).float()


def energy() -> Task:
    """An equality at each sample; unseen rows are without noise."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(SAMPLES + NEW, 2, generator=generator)
    state = (2 * drawn - 1) * torch.tensor([2.0, 1.0])
    target = moved(state)
    target[:SAMPLES] += 0.1 * torch.randn(SAMPLES, 2, generator=generator)
    before = energy_of(state)

    def terms(parameters: Parameters, index: Tensor) -> Terms:
        found = state[index] + network(parameters, state[index])
        error = (found - target[index]).square().sum(2)
        return error, {"energy": energy_of(found) - before[index]}

    return Task(
        SAMPLES,
        lambda generator: layers(generator, 2, 32, 32, 2),
        terms,
        {"energy": Constraint(equals=0.0)},
        {"energy": 0.01},
        unseen=range(SAMPLES, len(state)),
        lengths=(1, 10, 100, 1000),
    )
