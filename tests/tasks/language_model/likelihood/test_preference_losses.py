"""Each preference loss is its formula: value and slopes against float64, written independently."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pl_pointwise.tasks.language_model.likelihood.preference_losses import (
    cal_dpo_loss,
    cpo_loss,
    dpo_loss,
    safe_dpo_loss,
    simpo_loss,
)

# sums of chosen and rejected, the same under the reference, tokens of chosen and rejected
PAIRS = [
    (-12.0, -15.0, -13.0, -14.0, 4, 6),
    (-40.0, -22.0, -30.0, -25.0, 20, 5),
    (-3.0, -3.0, -3.0, -3.0, 1, 2),
    (-0.5, -900.0, -350.0, -2.0, 7, 300),
    (-700.0, -1.0, -2.0, -600.0, 90, 3),
]
FAR = [(-3000.0, -1.0, 0.0, 0.0, 10, 10), (-1.0, -3000.0, 0.0, 0.0, 10, 10)]
BETAS = [0.05, 0.25, 2.0]


def negative_log_sigmoid(x: float) -> float:
    """−log(1 / (1 + e^−x)), without overflow."""
    return math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x)) - x


def tensors(*columns: int) -> list[Tensor]:
    return [
        torch.tensor([pair[i] for pair in PAIRS], dtype=torch.float64) for i in columns
    ]


LOSSES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "dpo": (
        lambda b, w, x, q, r, m, n: dpo_loss(w - q, x - r, beta=b),
        lambda b, w, x, q, r, m, n: negative_log_sigmoid(b * ((w - q) - (x - r))),
    ),
    "simpo": (
        lambda b, w, x, q, r, m, n: simpo_loss(w / m, x / n, beta=b, gamma=1.3),
        lambda b, w, x, q, r, m, n: negative_log_sigmoid(b * (w / m - x / n) - 1.3),
    ),
    "cpo": (
        lambda b, w, x, q, r, m, n: cpo_loss(
            w, x, w / m, beta=b, likelihood_weight=2.5
        ),
        lambda b, w, x, q, r, m, n: negative_log_sigmoid(b * (w - x)) - 2.5 * w / m,
    ),
    "cal_dpo": (
        lambda b, w, x, q, r, m, n: cal_dpo_loss(
            w - q, x - r, beta=b, calibration_weight=0.5
        ),
        lambda b, w, x, q, r, m, n: (
            negative_log_sigmoid((w - q) - (x - r))
            + 0.5 * ((w - q - 0.5 / b) ** 2 + (x - r + 0.5 / b) ** 2)
        ),
    ),
    "safe_dpo, both safe": (
        lambda b, w, x, q, r, m, n: safe_dpo_loss(
            w - q, x - r, m < 0, m < 0, beta=b, margin=2.0
        ),
        lambda b, w, x, q, r, m, n: negative_log_sigmoid(b * ((w - q) - (x - r))),
    ),
    "safe_dpo, one unsafe": (
        lambda b, w, x, q, r, m, n: safe_dpo_loss(
            w - q, x - r, m < 0, m > 0, beta=b, margin=2.0
        ),
        lambda b, w, x, q, r, m, n: negative_log_sigmoid(b * ((w - q) - (x - r)) - 2.0),
    ),
}
"""By name ours and the formula of one pair, of β and a pair's columns."""


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("name", LOSSES)
def test_values_and_slopes_are_those_of_the_formula(name: str, beta: float) -> None:
    loss, formula = LOSSES[name]
    chosen, rejected, *rest = tensors(*range(6))
    values = loss(beta, chosen.requires_grad_(), rejected.requires_grad_(), *rest)
    assert values.shape == (len(PAIRS),)
    slopes = torch.autograd.grad(values.sum(), (chosen, rejected))
    step = 1e-5
    for i, pair in enumerate(PAIRS):
        expected = formula(beta, *pair)
        assert values[i].item() == pytest.approx(expected, rel=1e-12, abs=1e-12)
        for side, slope in enumerate(slopes):
            up, down = list(pair), list(pair)
            up[side] += step
            down[side] -= step
            difference = (formula(beta, *up) - formula(beta, *down)) / (2 * step)
            assert slope[i].item() == pytest.approx(difference, rel=1e-5, abs=1e-6)
    # In float32, log-likelihoods far apart leave nothing infinite.
    low, high, *others = torch.tensor(FAR).unbind(1)
    found = loss(beta, low.requires_grad_(), high.requires_grad_(), *others)
    for each in (found, *torch.autograd.grad(found.sum(), (low, high))):
        assert each.isfinite().all()
