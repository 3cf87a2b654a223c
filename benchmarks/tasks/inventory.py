"""Stock of 60 items over 30 days: of each item at most a share of the demand is missed, on average.

The order of an item is its mean demand times exp of its parameter. What is left costs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pl_pointwise import Constraint

from .solvers import Array, bisection
from .task import Parameters, Task, Terms, zeros

ITEMS, DAYS, NEW = 60, 30, 200
MISSED = 0.05


def demand(days: int, seed: int) -> Array:
    """(items, days), the mean of each item 1, and each of its own spread."""
    draw = np.random.default_rng(seed)
    # Of a gamma: few large orders to many small.
    shape = np.linspace(0.5, 4.0, ITEMS)[:, None]
    return draw.gamma(np.broadcast_to(shape, (ITEMS, days))) / shape


def inventory(pieces: bool = False) -> Task:
    """pieces: what is missed is given in pieces, of which an item sells 1 to 1,000 a day."""
    of_days, of_new = demand(DAYS, 0), demand(NEW, 1)
    sold = np.concatenate([of_days.reshape(-1), of_new.reshape(-1)])
    items = [np.repeat(np.arange(ITEMS), days) for days in (DAYS, NEW)]
    wanted, item = (
        torch.tensor(sold, dtype=torch.float32),
        torch.tensor(np.concatenate(items)),
    )
    unit = torch.logspace(0, 3, ITEMS)[torch.randperm(ITEMS, generator=_generator())]
    mean = torch.tensor(of_days.mean(1), dtype=torch.float32)

    def terms(parameters: Parameters, index: Tensor) -> Terms:
        own = item[index]
        order = parameters["log"].exp().gather(1, own)
        missed = (wanted[index] - order).relu() - MISSED * mean[own]
        in_unit = unit[own] if pieces else 1.0
        return (order - wanted[index]).relu(), {"missed": missed * in_unit}

    return Task(
        ITEMS * DAYS,
        zeros(log=(ITEMS,)),
        terms,
        {"missed": Constraint(at_most=0.0)},
        {"missed": 1e-3},
        groups=item,
        unseen=range(ITEMS * DAYS, len(sold)),
        optimum=lambda: left_over(orders(of_days), of_days),
        rate=0.03,
        scale={"missed": unit} if pieces else {},
    )


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def orders(of_days: Array) -> Array:
    """The least order of each item that misses no more than it may: at a bound each by itself."""
    most = MISSED * of_days.mean(1)
    high = of_days.max(1)
    return bisection(lambda q: missed(q, of_days) > most, np.zeros(ITEMS), high)


def missed(order: Array, of_days: Array) -> Array:
    return np.maximum(of_days - order[:, None], 0).mean(1)


def left_over(order: Array, of_days: Array) -> float:
    return float(np.maximum(order[:, None] - of_days, 0).mean())
