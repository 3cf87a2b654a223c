"""Losses on preference pairs: DPO, SimPO, CPO, Cal-DPO and Safe-DPO, one value per pair.

They are functions of log-likelihoods, or of log-ratios to the reference. For a preferred response w
(chosen) and a dispreferred one l (rejected), each argument has the same shape, such as (B,), as has
the result:

    s       sum of log π(y_t | x, y_<t) over the response's tokens, end token included
    s̄       s divided by the number of tokens
    s_ref   s under the reference policy
    r       s − s_ref, the log-ratio

Every loss falls as the chosen response becomes more and the rejected one less likely; Cal-DPO only
until its targets are met.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn.functional import logsigmoid

from ..roles import mean_over
from .scoring import ResponseStatistics

Objective = Literal["kl", "dpo", "simpo", "cpo", "cal_dpo"]

NEED_REFERENCE = ("kl", "dpo", "cal_dpo")
"""Objectives that cannot do without the reference policy."""


def dpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float = 0.1) -> Tensor:
    """−log σ(β(r_w − r_l)), of log-ratios.  Rafailov et al., DPO, 2023."""
    return -logsigmoid(beta * (chosen - rejected))


def simpo_loss(
    mean_chosen: Tensor, mean_rejected: Tensor, *, beta: float = 2.0, gamma: float = 0.0
) -> Tensor:
    """−log σ(β(s̄_w − s̄_l) − γ).  Meng et al., SimPO, 2024; there γ stands outside β as well."""
    return -logsigmoid(beta * (mean_chosen - mean_rejected) - gamma)


def cpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    mean_chosen: Tensor,
    *,
    beta: float = 0.25,
    likelihood_weight: float = 1.0,
) -> Tensor:
    """−log σ(β(s_w − s_l)) − λ₀·s̄_w.  Xu et al., Contrastive Preference Optimization, 2024."""
    return -logsigmoid(beta * (chosen - rejected)) - likelihood_weight * mean_chosen


def cal_dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float = 0.1,
    calibration_weight: float = 1.0,
) -> Tensor:
    """−log σ(r_w − r_l) + c[(r_w − 1/2β)² + (r_l + 1/2β)²].  Xiao et al., Cal-DPO, 2024.

    No β in the first term; the second gives the log-ratios targets, ±1/2β.
    """
    target = 1 / (2 * beta)
    calibration = (chosen - target) ** 2 + (rejected + target) ** 2
    return -logsigmoid(chosen - rejected) + calibration_weight * calibration


def safe_dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    chosen_unsafe: Tensor,
    rejected_unsafe: Tensor,
    *,
    margin: float,
    beta: float = 0.1,
) -> Tensor:
    """−log σ(β(r_w − r_l) − (h_l − h_w)Δ), of log-ratios.  Kim et al., SafeDPO, 2025.

    On pairs put in order as the paper does (``preference_pairs`` of safety/records.py). h, bool,
    marks an unsafe response: the margin Δ ≥ 0 counts only where a safe response stands against an
    unsafe one.
    """
    offset = rejected_unsafe.to(chosen.dtype) - chosen_unsafe.to(chosen.dtype)
    return -logsigmoid(beta * (chosen - rejected) - margin * offset)


@dataclass
class PreferenceLosses:
    """Hyper-parameters of the preference losses.

    Args:
        dpo_beta: β of DPO, how much a log-ratio counts; small lets the policy move further.
        simpo_beta: β of SimPO.
        simpo_gamma: γ of SimPO, the margin asked for, outside β.
        cpo_beta: β of CPO.
        cpo_likelihood_weight: λ₀ of CPO, of the chosen response's own likelihood.
        cal_dpo_beta: β of Cal-DPO, whose targets are ±1/2β.
        cal_dpo_calibration_weight: c of Cal-DPO; the authors' code has ½.

    >>> from pl_pointwise.tasks.language_model.likelihood.preference_losses import PreferenceLosses
    >>> PreferenceLosses(dpo_beta=0.05).dpo_beta
    0.05
    """

    dpo_beta: float = 0.1
    simpo_beta: float = 2.0
    simpo_gamma: float = 0.0
    cpo_beta: float = 0.25
    cpo_likelihood_weight: float = 1.0
    cal_dpo_beta: float = 0.1
    cal_dpo_calibration_weight: float = 1.0


def preference_loss(
    objective: str, statistics: ResponseStatistics, settings: PreferenceLosses
) -> Tensor:
    """The named loss of each sample, (B,), the mean over its pairs; 0 where it has none.

    Response 0 is the chosen one of each sample, the others are rejected.
    """

    # Of the chosen (B, 1), of the rejected.
    def pairs(values: Tensor) -> tuple[Tensor, Tensor]:
        return values[:, :1], values[:, 1:]

    likelihoods, known = statistics.log_likelihood, statistics.reference_log_likelihood
    sums, means = pairs(likelihoods), pairs(statistics.mean_log_likelihood)
    # None where the batch has no pair: then every loss is masked.
    ratios = pairs(likelihoods - (likelihoods.detach() if known is None else known))
    # SimPO and CPO need no reference, DPO and Cal-DPO the ratio to it.
    if objective == "simpo":
        losses = simpo_loss(
            *means, beta=settings.simpo_beta, gamma=settings.simpo_gamma
        )
    elif objective == "cpo":
        weight = settings.cpo_likelihood_weight
        losses = cpo_loss(
            *sums, means[0], beta=settings.cpo_beta, likelihood_weight=weight
        )
    elif objective == "dpo":
        losses = dpo_loss(*ratios, beta=settings.dpo_beta)
    else:
        beta, weight = settings.cal_dpo_beta, settings.cal_dpo_calibration_weight
        losses = cal_dpo_loss(*ratios, beta=beta, calibration_weight=weight)
    return mean_over(losses, pairs_of(statistics))


def pairs_of(statistics: ResponseStatistics) -> Tensor:
    """Which rejected responses there are beside a chosen one, bool (B, R − 1)."""
    return statistics.present[:, :1] & statistics.present[:, 1:]
