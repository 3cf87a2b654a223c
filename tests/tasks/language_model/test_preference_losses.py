"""Each preference loss is its formula: value and slopes against float64, written independently."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pl_pointwise.tasks.language_model.preference_losses import (
    cal_dpo_loss,
    cpo_loss,
    dpo_loss,
    safe_dpo_loss,
    safe_dpo_pairs,
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
BETAS = [0.05, 0.25, 2.0]


def negative_log_sigmoid(x: float) -> float:
    """−log(1 / (1 + e^−x)), without overflow."""
    return math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x)) - x


def tensors(*columns: int) -> list[Tensor]:
    return [torch.tensor([pair[i] for pair in PAIRS], dtype=torch.float64) for i in columns]


def check(loss: Callable[[Tensor, Tensor], Tensor], reference: Callable[..., float]) -> None:
    """Values and both slopes of loss(s_w, s_l), (B,), against a scalar function of a pair."""
    chosen, rejected = (column.requires_grad_() for column in tensors(0, 1))
    values = loss(chosen, rejected)
    assert values.shape == (len(PAIRS),)
    slopes = torch.autograd.grad(values.sum(), (chosen, rejected))
    step = 1e-5
    for i, (s_w, s_l, *rest) in enumerate(PAIRS):
        expected = reference(s_w, s_l, *rest)
        assert values[i].item() == pytest.approx(expected, rel=1e-12, abs=1e-12)
        for side, slope in enumerate(slopes):
            up, down = [s_w, s_l], [s_w, s_l]
            up[side] += step
            down[side] -= step
            difference = (reference(*up, *rest) - reference(*down, *rest)) / (2 * step)
            assert slope[i].item() == pytest.approx(difference, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_dpo(beta: float) -> None:
    ref_w, ref_l = tensors(2, 3)

    def reference(s_w: float, s_l: float, r_w: float, r_l: float, *_: int) -> float:
        return negative_log_sigmoid(beta * ((s_w - r_w) - (s_l - r_l)))

    check(lambda w, x: dpo_loss(w, x, ref_w, ref_l, beta=beta), reference)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("gamma", [0.0, 1.3])
def test_simpo(beta: float, gamma: float) -> None:
    n_w, n_l = tensors(4, 5)

    def reference(s_w: float, s_l: float, _r: float, _q: float, k_w: int, k_l: int) -> float:
        return negative_log_sigmoid(beta * (s_w / k_w - s_l / k_l) - gamma)

    check(lambda w, x: simpo_loss(w / n_w, x / n_l, beta=beta, gamma=gamma), reference)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("weight", [0.0, 1.0, 2.5])
def test_cpo(beta: float, weight: float) -> None:
    (n_w,) = tensors(4)

    def reference(s_w: float, s_l: float, _r: float, _q: float, k_w: int, _k: int) -> float:
        return negative_log_sigmoid(beta * (s_w - s_l)) - weight * s_w / k_w

    check(lambda w, x: cpo_loss(w, x, w / n_w, beta=beta, likelihood_weight=weight), reference)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_cal_dpo(beta: float, weight: float) -> None:
    ref_w, ref_l = tensors(2, 3)

    def reference(s_w: float, s_l: float, r_w: float, r_l: float, *_: int) -> float:
        a, b = s_w - r_w, s_l - r_l
        calibration = (a - 0.5 / beta) ** 2 + (b + 0.5 / beta) ** 2
        return negative_log_sigmoid(a - b) + weight * calibration

    check(
        lambda w, x: cal_dpo_loss(w, x, ref_w, ref_l, beta=beta, calibration_weight=weight),
        reference,
    )


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("margin", [0.0, 2.0, 10.0])
@pytest.mark.parametrize("unsafe", [(False, False), (False, True)])
def test_safe_dpo(beta: float, margin: float, unsafe: tuple[bool, bool]) -> None:
    ref_w, ref_l = tensors(2, 3)
    h_w, h_l = (torch.full((len(PAIRS),), flag) for flag in unsafe)

    def reference(s_w: float, s_l: float, r_w: float, r_l: float, *_: int) -> float:
        delta = margin if unsafe == (False, True) else 0.0
        return negative_log_sigmoid(beta * ((s_w - r_w) - (s_l - r_l)) - delta)

    check(
        lambda w, x: safe_dpo_loss(w, x, ref_w, ref_l, h_w, h_l, beta=beta, margin=margin),
        reference,
    )


def all_losses() -> list[Callable[[Tensor, Tensor], Tensor]]:
    """Each as a function of the two log-likelihoods alone, β .1, references 0, ten tokens."""
    safe, unsafe = torch.tensor([False]), torch.tensor([True])
    zero = torch.zeros(1, dtype=torch.float64)
    return [
        lambda w, x: dpo_loss(w, x, zero, zero, beta=0.1),
        lambda w, x: simpo_loss(w / 10, x / 10, beta=2.0, gamma=0.5),
        lambda w, x: cpo_loss(w, x, w / 10, beta=0.1),
        lambda w, x: cal_dpo_loss(w, x, zero, zero, beta=0.1),  # short of its targets, ±5
        lambda w, x: safe_dpo_loss(w, x, zero, zero, safe, unsafe, margin=5.0),
    ]


@pytest.mark.parametrize("loss", all_losses())
def test_likelihoods_far_apart_stay_finite_in_float32(
    loss: Callable[[Tensor, Tensor], Tensor],
) -> None:
    far, near = torch.tensor([-3000.0]), torch.tensor([-1.0])
    for chosen, rejected in ((far, near), (near, far)):
        chosen, rejected = chosen.clone().requires_grad_(), rejected.clone().requires_grad_()
        value = loss(chosen, rejected).sum()
        value.backward()
        assert value.isfinite()
        assert chosen.grad is not None
        assert chosen.grad.isfinite().all()


def test_safe_dpo_drops_two_unsafe_responses_and_turns_round_an_unsafe_winner() -> None:
    chosen_unsafe = torch.tensor([False, False, True, True])
    rejected_unsafe = torch.tensor([False, True, False, True])
    keep, swap = safe_dpo_pairs(chosen_unsafe, rejected_unsafe)
    assert keep.tolist() == [True, True, True, False]
    assert swap.tolist() == [False, False, True, False]
