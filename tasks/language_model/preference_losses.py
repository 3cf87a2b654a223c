"""Losses on preference pairs: DPO, SimPO, CPO, Cal-DPO and Safe-DPO, one value per pair.

They are functions of log-likelihoods only. For a preferred response w (chosen) and a dispreferred
one l (rejected), each argument has shape (B,):

    s       sum of log π(y_t | x, y_<t) over the response's tokens, end token included
    s̄       s divided by the number of tokens
    s_ref   s under the reference policy
    r       s − s_ref, the log-ratio

Every loss falls as the chosen response becomes more and the rejected one less likely; Cal-DPO only
until its targets are met. Nothing is reduced: the result has shape (B,).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
) -> Tensor:
    """−log σ(β(r_w − r_l)).  Rafailov et al., Direct Preference Optimization, 2023.

    Args:
        chosen, rejected: (B,) sums s_w, s_l.
        reference_chosen, reference_rejected: (B,) the same under the reference policy.
        beta: β, how much a log-ratio counts; small lets the policy move further.
    """
    margin = (chosen - reference_chosen) - (rejected - reference_rejected)
    return -logsigmoid(beta * margin)


def simpo_loss(
    mean_chosen: Tensor, mean_rejected: Tensor, *, beta: float = 2.0, gamma: float = 0.0
) -> Tensor:
    """−log σ(β(s̄_w − s̄_l) − γ).  Meng et al., SimPO, 2024; there γ stands outside β as well.

    Args:
        mean_chosen, mean_rejected: (B,) token means s̄_w, s̄_l.
        beta: β.
        gamma: γ, the margin asked for, in units of β·s̄.
    """
    return -logsigmoid(beta * (mean_chosen - mean_rejected) - gamma)


def cpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    mean_chosen: Tensor,
    *,
    beta: float = 0.25,
    likelihood_weight: float = 1.0,
) -> Tensor:
    """−log σ(β(s_w − s_l)) − λ₀·s̄_w.  Xu et al., Contrastive Preference Optimization, 2024.

    Args:
        chosen, rejected: (B,) sums s_w, s_l.
        mean_chosen: (B,) token mean s̄_w.
        beta: β.
        likelihood_weight: λ₀, of the chosen response's own likelihood.
    """
    return -logsigmoid(beta * (chosen - rejected)) - likelihood_weight * mean_chosen


def cal_dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
    calibration_weight: float = 1.0,
) -> Tensor:
    """−log σ(r_w − r_l) + c[(r_w − 1/2β)² + (r_l + 1/2β)²].  Xiao et al., Cal-DPO, 2024.

    No β in the first term; the second gives the log-ratios targets, ±1/2β.

    Args:
        chosen, rejected: (B,) sums s_w, s_l.
        reference_chosen, reference_rejected: (B,) the same under the reference policy.
        beta: β.
        calibration_weight: c; the authors' code has ½.
    """
    ratio_chosen = chosen - reference_chosen
    ratio_rejected = rejected - reference_rejected
    target = 1 / (2 * beta)
    calibration = (ratio_chosen - target) ** 2 + (ratio_rejected + target) ** 2
    return -logsigmoid(ratio_chosen - ratio_rejected) + calibration_weight * calibration


def safe_dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    chosen_unsafe: Tensor,
    rejected_unsafe: Tensor,
    *,
    margin: float,
    beta: float = 0.1,
) -> Tensor:
    """−log σ(β(r_w − r_l) − (h_l − h_w)Δ).  Kim et al., SafeDPO, 2025.

    On pairs that :func:`safe_dpo_pairs` has put in order. The margin counts only where a safe
    response stands against an unsafe one.

    Args:
        chosen, rejected: (B,) sums s_w, s_l.
        reference_chosen, reference_rejected: (B,) the same under the reference policy.
        chosen_unsafe, rejected_unsafe: (B,) bool, h_w and h_l.
        margin: Δ ≥ 0, outside β.
        beta: β.
    """
    ratio = (chosen - reference_chosen) - (rejected - reference_rejected)
    offset = rejected_unsafe.to(ratio.dtype) - chosen_unsafe.to(ratio.dtype)
    return -logsigmoid(beta * ratio - margin * offset)


def safe_dpo_pairs(chosen_unsafe: Tensor, rejected_unsafe: Tensor) -> tuple[Tensor, Tensor]:
    """Which pairs Safe-DPO keeps, and which of them it turns round.

    A pair of two unsafe responses is dropped; where only the chosen one is unsafe the two change
    places; the others stay.

    Args:
        chosen_unsafe, rejected_unsafe: (B,) bool.

    Returns:
        keep (B,) bool, swap (B,) bool.
    """
    keep = ~(chosen_unsafe & rejected_unsafe)
    return keep, torch.logical_and(chosen_unsafe, ~rejected_unsafe)
