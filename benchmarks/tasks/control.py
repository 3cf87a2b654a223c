"""A network that plans 12 inputs of a cart: its speed and its inputs are limited at every step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pl_pointwise import Constraint

from .solvers import Array, quadratic_program
from .task import Parameters, Task, Terms, layers, network

HORIZON, STEP = 12, 0.4
SPEED, INPUT, EFFORT = 0.8, 1.0, 0.1


def rollout() -> tuple[Array, Array]:
    """Places and speeds after each step, (24, 2) of the start and (24, 12) of the inputs."""
    move = np.array([[1.0, STEP], [0.0, 1.0]])
    push = np.array([[STEP**2 / 2], [STEP]])
    of_start, of_inputs = [], []
    state, effect = np.eye(2), np.zeros((2, HORIZON))
    for step in range(HORIZON):
        state, effect = move @ state, move @ effect
        effect[:, [step]] += push
        of_start.append(state)
        of_inputs.append(effect.copy())
    # Places first, then speeds.
    order = np.concatenate([np.arange(0, 2 * HORIZON, 2), np.arange(1, 2 * HORIZON, 2)])
    return np.concatenate(of_start)[order], np.concatenate(of_inputs)[order]


def control(
    instances: int = 100,
    batch: int | None = None,
    lengths: tuple[int, ...] = (1, 10, 100),
) -> Task:
    """Starts up to 2 away, at up to 0.6; what is paid is the distance and the effort."""
    draw = np.random.default_rng(0)
    starts = draw.uniform(-1, 1, (instances + 1000, 2)) * np.array([2.0, 0.6])
    at = torch.tensor(starts, dtype=torch.float32)
    of_start, of_inputs = (
        torch.tensor(each, dtype=torch.float32) for each in rollout()
    )

    def terms(parameters: Parameters, index: Tensor) -> Terms:
        start = at[index]
        inputs = network(parameters, start)
        path = start @ of_start.T + inputs @ of_inputs.T
        paid = path[..., :HORIZON].square().mean(2) + EFFORT * inputs.square().mean(2)
        speed, force = path[..., HORIZON:].abs(), inputs.abs()
        return paid, {"speed": speed, "input": force}

    return Task(
        instances,
        lambda generator: layers(generator, 2, 32, 32, HORIZON),
        terms,
        {"speed": Constraint(at_most=SPEED), "input": Constraint(at_most=INPUT)},
        {"speed": 0.01, "input": 0.01},
        unseen=range(instances, len(starts)),
        optimum=lambda: float(
            np.mean([paid(start) for start in starts[: min(instances, 200)]])
        ),
        grid=({"speed": 10.0, "input": 10.0},),
        batch=batch,
        rate=0.01,
        lengths=lengths,
    )


def paid(start: Array) -> float:
    """The least that any plan pays from a start, by a quadratic program."""
    of_start, of_inputs = rollout()
    free = of_start @ start
    place = of_inputs[:HORIZON]
    quadratic = 2 * (place.T @ place + EFFORT * np.eye(HORIZON)) / HORIZON
    linear = 2 * place.T @ free[:HORIZON] / HORIZON
    limits = np.vstack([of_inputs[HORIZON:], np.eye(HORIZON)])
    at = np.append(free[HORIZON:], np.zeros(HORIZON))
    bounds = np.append(np.full(HORIZON, SPEED), np.full(HORIZON, INPUT))
    both = np.concatenate([bounds - at, bounds + at])
    inputs = quadratic_program(quadratic, linear, np.vstack([limits, -limits]), both)
    path = free[:HORIZON] + place @ inputs
    return float(np.mean(path**2) + EFFORT * np.mean(inputs**2))
