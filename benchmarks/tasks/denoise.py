"""A network that smooths images: the least variation, no further from each image than its noise."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pl_pointwise import Constraint

from .solvers import Array
from .task import Parameters, Task, Terms, layers, network

SIZE, IMAGES, NEW, NOISE = 10, 100, 500, 0.25


def images(count: int, seed: int) -> Array:
    """(count, SIZE, SIZE): two rectangles of their own brightness each, and noise."""
    draw = np.random.default_rng(seed)
    clean = np.zeros((count, SIZE, SIZE))
    for image in clean:
        for _ in range(2):
            top, left = draw.integers(0, SIZE - 3, 2)
            high, wide = draw.integers(3, SIZE - 2, 2)
            image[top : top + high, left : left + wide] = draw.uniform(-1, 1)
    return clean + NOISE * draw.normal(size=clean.shape)


def denoise() -> Task:
    """The mean of |differences| of neighbours; the mean square that is taken away is bounded."""
    noisy = np.concatenate([images(IMAGES, 0), images(NEW, 1)])
    rows = torch.tensor(noisy.reshape(len(noisy), -1), dtype=torch.float32)
    pixels = SIZE * SIZE

    def terms(parameters: Parameters, index: Tensor) -> Terms:
        removed = network(parameters, rows[index])
        image = (rows[index] - removed).unflatten(2, (SIZE, SIZE))
        down, across = image.diff(dim=2).abs(), image.diff(dim=3).abs()
        variation = (down.sum((2, 3)) + across.sum((2, 3))) / pixels
        return variation, {"removed": removed.square().mean(2)}

    return Task(
        IMAGES,
        lambda generator: layers(generator, pixels, 64, pixels),
        terms,
        {"removed": Constraint(at_most=NOISE**2)},
        {"removed": 0.01},
        scale={"removed": NOISE**2},
        unseen=range(IMAGES, len(noisy)),
        optimum=lambda: float(solution(noisy[:IMAGES])[0].mean()),
    )


def variation(image: Array) -> Array:
    """(…, SIZE, SIZE) ↦ (…)."""
    down, across = np.diff(image, axis=-2), np.diff(image, axis=-1)
    return (np.abs(down).sum((-1, -2)) + np.abs(across).sum((-1, -2))) / SIZE**2


def solution(noisy: Array, steps: int = 3000) -> tuple[Array, Array]:
    """The least variation of each image and a lower bound of it, by a primal-dual method.

    Chambolle and Pock 2011: x within a ball about the image, the dual of each difference in ±1.
    """
    reach = NOISE * SIZE
    found, ahead = noisy.copy(), noisy.copy()
    down = np.zeros((len(noisy), SIZE - 1, SIZE))
    across = np.zeros((len(noisy), SIZE, SIZE - 1))
    rate = 1 / np.sqrt(8)
    for _ in range(steps):
        down = np.clip(down + rate * np.diff(ahead, axis=1), -1, 1)
        across = np.clip(across + rate * np.diff(ahead, axis=2), -1, 1)
        moved = found - rate * _adjoint(down, across)
        away = moved - noisy
        norm = np.linalg.norm(away, axis=(1, 2), keepdims=True)
        new = noisy + away * np.minimum(1, reach / np.maximum(norm, 1e-12))
        found, ahead = new, 2 * new - found
    pull = _adjoint(down, across)
    bound = (pull * noisy).sum((1, 2)) - reach * np.linalg.norm(pull, axis=(1, 2))
    return variation(found), bound / SIZE**2


def _adjoint(down: Array, across: Array) -> Array:
    """Of the differences, by their duals."""
    below = np.pad(down, ((0, 0), (1, 1), (0, 0)))
    beside = np.pad(across, ((0, 0), (0, 0), (1, 1)))
    return np.asarray(-np.diff(below, axis=1) - np.diff(beside, axis=2))
