"""A linear detector: every positive scores at least 1, and negatives as little as possible."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from pl_pointwise import Constraint

from .solvers import Array, Labels, smooth_program
from .task import Parameters, Task, Terms, affine, zeros

INPUTS = 20
RIDGE = 0.01


def draw(samples: int, positives: int, seed: int) -> tuple[Array, Labels]:
    """Inputs (samples, 20) and which are positive: of two clouds that overlap."""
    generator = np.random.default_rng(seed)
    centre = np.random.default_rng(99).normal(0, 0.45, INPUTS)
    x = generator.normal(size=(samples, INPUTS))
    positive = np.arange(samples) < positives
    x[positive] = 0.9 * x[positive] + centre * 1.3
    return x, positive


def recall(
    samples: int = 1000,
    positives: int = 100,
    batch: int | None = None,
    lengths: tuple[int, ...] = (1, 10, 100),
) -> Task:
    """The objective is that of the negatives, the requirement of the positives."""
    parts = [draw(samples, positives, 0), draw(4000, 400, 1)]
    x, positive = (np.concatenate(part) for part in zip(*parts, strict=True))
    rows, is_positive = torch.tensor(x, dtype=torch.float32), torch.tensor(positive)

    def terms(parameters: Parameters, index: Tensor) -> Terms:
        weight, bias = parameters["weight"], parameters["bias"]
        score = affine(weight[..., None], bias, rows[index])[..., 0]
        size = RIDGE * weight.square().sum(1, keepdim=True)
        return softplus(score) + size, {"score": score}

    return Task(
        samples,
        zeros(weight=(INPUTS,), bias=(1,)),
        terms,
        {"score": Constraint(at_least=1.0)},
        {"score": 0.02},
        membership={"objective": ~is_positive, "score": is_positive},
        unseen=range(samples, len(x)),
        optimum=lambda: cost(solution(*parts[0]), *parts[0])[0],
        batch=batch,
        rate=0.03,
        lengths=lengths,
    )


def cost(found: Array, x: Array, positive: Labels) -> tuple[float, Array]:
    """The mean objective of the weights and the bias, and its gradient."""
    negatives = _with_ones(x[~positive])
    score = negatives @ found
    size = np.append(found[:-1], 0.0)
    value = np.logaddexp(0, score).mean() + RIDGE * size @ size
    chance = 1 / (1 + np.exp(-score))
    return float(value), negatives.T @ chance / len(negatives) + 2 * RIDGE * size


def solution(x: Array, positive: Labels) -> Array:
    """The weights and the bias of the optimum."""
    required = _with_ones(x[positive])
    start = np.append(np.zeros(INPUTS), 1.0)
    return smooth_program(
        lambda found: cost(found, x, positive),
        start,
        lambda found: 1 - required @ found,
        lambda found: -required,
    )


def _with_ones(x: Array) -> Array:
    return np.hstack([x, np.ones((len(x), 1))])
