"""Weights of 20 assets: in no scenario may more than a limit be lost. A linear program."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pl_pointwise import Constraint

from .solvers import Array, linear_program
from .task import Parameters, Task, Terms, zeros

ASSETS = 20


def returns(scenarios: int, seed: int) -> Array:
    """(scenarios, assets), in percent: who earns more loses more, with fat tails."""
    draw = np.random.default_rng(seed)
    risk = np.linspace(0.3, 2.0, ASSETS)
    market = draw.standard_t(4, (scenarios, 1)) / np.sqrt(2)
    own = draw.standard_t(4, (scenarios, ASSETS)) / np.sqrt(2)
    mean = 0.05 + 0.12 * risk * np.linspace(0.7, 1.3, ASSETS)[::-1]
    return mean + risk * (0.5 * market + 0.8 * own)


def portfolio(scenarios: int = 400, lengths: tuple[int, ...] = (1, 10, 100)) -> Task:
    """Each scenario loses at most a limit, between the least that is possible and the most."""
    table = returns(scenarios, 0)
    limit = _limit(table)
    rows = torch.tensor(np.vstack([table, returns(2000, 1)]), dtype=torch.float32)

    def terms(parameters: Parameters, index: Tensor) -> Terms:
        held = parameters["weight"].softmax(1)
        earned = torch.einsum("mba,ma->mb", rows[index], held)
        return -earned, {"loss": -earned}

    def optimum() -> float:
        weights = linear_program(-table.mean(0), -table, *_budget(limit, scenarios))
        return float(-table.mean(0) @ weights)

    batch = 40 if scenarios == 400 else 20
    return Task(
        scenarios,
        zeros(weight=(ASSETS,)),
        terms,
        {"loss": Constraint(at_most=limit)},
        {"loss": 0.01 * limit},
        unseen=range(scenarios, len(rows)),
        optimum=optimum,
        batch=batch,
        rate=0.3,
        lengths=lengths,
    )


def _budget(limit: float, scenarios: int) -> tuple[Array, Array, float]:
    return np.full(scenarios, limit), np.ones(ASSETS), 1.0


def _limit(table: Array) -> float:
    """The least that the worst scenario can lose, and an eighth of the way to the best asset."""
    scenarios = len(table)
    # x: the weights, then the worst loss, moved so that it is at least 0.
    cost = np.append(np.zeros(ASSETS), 1.0)
    matrix = np.hstack([-table, -np.ones((scenarios, 1))])
    equal = np.append(np.ones(ASSETS), 0.0)
    least = float(linear_program(cost, matrix, np.zeros(scenarios), equal, 1.0)[-1])
    most = float(-table[:, table.mean(0).argmax()].min())
    return least + (most - least) / 8
