"""The smallest weights that separate two clouds by a margin of 1 at each sample."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pl_pointwise import Constraint

from .solvers import Array, quadratic_program
from .task import Parameters, Task, Terms, affine, zeros

INPUTS = 40


def draw(samples: int, seed: int) -> tuple[Array, Array]:
    """Inputs and labels ±1; the clouds nearly touch in one direction."""
    generator = np.random.default_rng(seed)
    label = np.where(np.arange(samples) % 2 == 0, 1.0, -1.0)
    x = generator.normal(0, 0.3, (samples, INPUTS))
    depth = 0.15 + generator.exponential(0.5, samples)
    x[:, 0] = label * depth + 0.1 * x[:, 1]
    turned, _ = np.linalg.qr(np.random.default_rng(5).normal(size=(INPUTS, INPUTS)))
    return x @ turned, label


def margins() -> Task:
    """300 samples; λ* is many times Λ, as few samples carry the whole solution."""
    parts = [draw(300, 0), draw(2000, 1)]
    x, label = (np.concatenate(part) for part in zip(*parts, strict=True))
    rows, sign = (torch.tensor(each, dtype=torch.float32) for each in (x, label))

    def terms(parameters: Parameters, index: Tensor) -> Terms:
        weight = parameters["weight"]
        score = affine(weight[..., None], parameters["bias"], rows[index])[..., 0]
        size = weight.square().sum(1, keepdim=True).expand_as(score)
        return size, {"margin": sign[index] * score}

    return Task(
        300,
        zeros(weight=(INPUTS,), bias=(1,)),
        terms,
        {"margin": Constraint(at_least=1.0)},
        {"margin": 0.02},
        unseen=range(300, len(x)),
        optimum=lambda: float(np.sum(solution(*parts[0])[:-1] ** 2)),
        rate=0.03,
    )


def solution(x: Array, label: Array) -> Array:
    """The weights and the bias of the optimum; 1e-9 of its square makes the bias's cost convex."""
    signed = label[:, None] * np.hstack([x, np.ones((len(x), 1))])
    quadratic = 2 * np.diag(np.append(np.ones(INPUTS), 1e-9))
    linear = np.zeros(INPUTS + 1)
    return quadratic_program(quadratic, linear, -signed, -np.ones(len(x)))
