"""The matrix of least nuclear norm that meets each known entry within .2: as a product of factors.

½(‖U‖² + ‖V‖²) is at least the nuclear norm of UVᵀ, and equal to it at the best factors.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pl_pointwise import Constraint

from .solvers import Array, Labels
from .task import Parameters, Task, Terms

SIZE, RANK, WIDTH = 24, 2, 0.2


def entries() -> tuple[Array, Array, Labels]:
    """The true matrix, the noisy one, and which entries are known: a half."""
    draw = np.random.default_rng(0)
    true = (
        draw.normal(size=(SIZE, RANK)) @ draw.normal(size=(RANK, SIZE)) / np.sqrt(RANK)
    )
    noisy = true + 0.15 * (2 * draw.random((SIZE, SIZE)) - 1)
    return true, noisy, draw.random((SIZE, SIZE)) < 0.5


def completion() -> Task:
    """Unseen rows are the entries that are not known, of the true matrix."""
    true, noisy, known = entries()
    order = np.concatenate([np.flatnonzero(known), np.flatnonzero(~known)])
    value = torch.tensor(
        np.where(known, noisy, true).reshape(-1)[order], dtype=torch.float32
    )
    row, column = (torch.tensor(each) for each in np.divmod(order, SIZE))

    def start(generator: torch.Generator) -> Parameters:
        drawn = torch.randn(2, SIZE, SIZE, generator=generator)
        return {"left": 0.1 * drawn[0], "right": 0.1 * drawn[1]}

    def terms(parameters: Parameters, index: Tensor) -> Terms:
        left, right = parameters["left"], parameters["right"]
        whole = left @ right.transpose(1, 2)
        places = (row * SIZE + column)[index]
        found = whole.flatten(1).gather(1, places)
        norm = (left.square().sum((1, 2)) + right.square().sum((1, 2))) / (2 * SIZE)
        return norm[:, None].expand_as(found), {"entry": (found - value[index]).abs()}

    samples = int(known.sum())
    return Task(
        samples,
        start,
        terms,
        {"entry": Constraint(at_most=WIDTH)},
        {"entry": 0.01},
        unseen=range(samples, SIZE * SIZE),
        optimum=lambda: nuclear(solution(noisy, known)[0]) / SIZE,
        batch=samples // 10,
        rate=0.03,
    )


def nuclear(matrix: Array) -> float:
    return float(np.linalg.svd(matrix, compute_uv=False).sum())


def solution(noisy: Array, known: Labels) -> tuple[Array, float]:
    """The best matrix by splitting (ADMM), and a lower bound of its nuclear norm by duality."""
    low = np.where(known, noisy - WIDTH, -np.inf)
    high = np.where(known, noisy + WIDTH, np.inf)
    split, dual = np.where(known, noisy, 0.0), np.zeros_like(noisy)
    for _ in range(3000):
        left, size, right = np.linalg.svd(split - dual, full_matrices=False)
        low_rank = left * np.maximum(size - 1, 0) @ right
        split = np.clip(low_rank + dual, low, high)
        dual = dual + low_rank - split
    # −dual has a norm of at most 1 at the end; what it says of the box is the bound.
    price = -dual / max(1.0, float(np.linalg.norm(dual, 2)))
    edge = np.where(price > 0, low, high)
    bound = float(np.sum(np.where(known, price * np.where(known, edge, 0.0), 0.0)))
    return np.asarray(split), bound
