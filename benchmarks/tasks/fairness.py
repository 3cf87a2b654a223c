"""A linear classifier of six groups, whose mean log loss in each group is bounded."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from pl_pointwise import Constraint

from .solvers import Array, Labels, smooth_program
from .task import Parameters, Task, Terms, affine, zeros

INPUTS, RIDGE, BOUND = 8, 0.002, 0.36
SIZES = (300, 150, 60, 40, 30, 20)


def draw(times: int, seed: int) -> tuple[Array, Array, Labels]:
    """Inputs, labels ±1 and groups: the rule of a small group is not quite that of the large."""
    generator, fixed = np.random.default_rng(seed), np.random.default_rng(7)
    common, own = fixed.normal(size=INPUTS), fixed.normal(size=(len(SIZES), INPUTS))
    group = np.repeat(np.arange(len(SIZES)), [times * size for size in SIZES])
    x = generator.normal(size=(len(group), INPUTS))
    score = x @ common + 0.55 * np.einsum("bi,bi->b", x, own[group])
    label = np.where(score + 0.6 * generator.normal(size=len(group)) > 0, 1.0, -1.0)
    return x, label, group


def fairness() -> Task:
    """600 samples in groups of 300 to 20; 2,400 unseen ones."""
    parts = [draw(1, 0), draw(4, 1)]
    x, label, group = (np.concatenate(part) for part in zip(*parts, strict=True))
    rows, sign = (torch.tensor(each, dtype=torch.float32) for each in (x, label))

    def terms(parameters: Parameters, index: Tensor) -> Terms:
        weight = parameters["weight"]
        score = affine(weight[..., None], parameters["bias"], rows[index])[..., 0]
        loss = softplus(-sign[index] * score)
        return loss + RIDGE * weight.square().sum(1, keepdim=True), {"loss": loss}

    return Task(
        sum(SIZES),
        zeros(weight=(INPUTS,), bias=(1,)),
        terms,
        {"loss": Constraint(at_most=BOUND)},
        {"loss": 1e-3},
        groups=torch.tensor(group),
        unseen=range(sum(SIZES), len(x)),
        optimum=lambda: _cost(solution(*parts[0]), *parts[0][:2])[0],
        rate=0.03,
    )


def solution(x: Array, label: Array, group: Labels) -> Array:
    """The weights and the bias of the optimum."""
    signed = label[:, None] * np.hstack([x, np.ones((len(x), 1))])
    parts = [signed[group == each] for each in range(len(SIZES))]
    start = np.zeros(INPUTS + 1)
    return smooth_program(
        lambda found: _cost(found, x, label),
        start,
        lambda found: np.array([_loss(found, part)[0] for part in parts]) - BOUND,
        lambda found: np.stack([_loss(found, part)[1] for part in parts]),
    )


def _loss(found: Array, signed: Array) -> tuple[float, Array]:
    score = signed @ found
    chance = 1 / (1 + np.exp(score))
    return float(np.logaddexp(0, -score).mean()), -signed.T @ chance / len(signed)


def _cost(found: Array, x: Array, label: Array) -> tuple[float, Array]:
    loss, slope = _loss(found, label[:, None] * np.hstack([x, np.ones((len(x), 1))]))
    size = np.append(found[:-1], 0.0)
    return loss + RIDGE * float(size @ size), slope + 2 * RIDGE * size
