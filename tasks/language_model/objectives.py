"""What is minimised: closeness to the reference, or one of the preference losses.

All are functions of the response statistics of a batch; a sample's loss is the mean over its pairs
of a chosen and a rejected response. Result (B,).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from .preference_losses import cal_dpo_loss, cpo_loss, dpo_loss, simpo_loss
from .roles import mean_over
from .scoring import ResponseStatistics

Objective = Literal["kl", "dpo", "simpo", "cpo", "cal_dpo"]

NEED_REFERENCE = ("kl", "dpo", "cal_dpo")
"""Objectives that cannot do without the reference policy."""


@dataclass
class PreferenceLosses:
    """Hyper-parameters of the preference losses; preference_losses.py has the formulas.

    Args:
        dpo_beta: β of DPO.
        simpo_beta: β of SimPO.
        simpo_gamma: γ of SimPO, the margin asked for, outside β.
        cpo_beta: β of CPO.
        cpo_likelihood_weight: λ₀ of CPO, of the chosen response's own likelihood.
        cal_dpo_beta: β of Cal-DPO, whose targets are ±1/2β.
        cal_dpo_calibration_weight: c of Cal-DPO; the authors' code has ½.
    """

    dpo_beta: float = 0.1
    simpo_beta: float = 2.0
    simpo_gamma: float = 0.0
    cpo_beta: float = 0.25
    cpo_likelihood_weight: float = 1.0
    cal_dpo_beta: float = 0.1
    cal_dpo_calibration_weight: float = 1.0


def preference_loss(
    objective: str,
    statistics: ResponseStatistics,
    settings: PreferenceLosses,
    chosen: Tensor,
    rejected: Tensor,
) -> Tensor:
    """The named loss of each sample, (B,); 0 where it has no pair.

    objective: of :data:`Objective`, without "kl".
    chosen, rejected: (B, R) bool, disjoint.
    """

    def pairs(values: Tensor) -> tuple[Tensor, Tensor]:  # Of the chosen, of the rejected.
        return values[:, :, None], values[:, None, :]

    sums, means = pairs(statistics.log_likelihood), pairs(statistics.mean_log_likelihood)
    if objective == "simpo":
        losses = simpo_loss(*means, beta=settings.simpo_beta, gamma=settings.simpo_gamma)
    elif objective == "cpo":
        losses = cpo_loss(
            *sums,
            means[0],
            beta=settings.cpo_beta,
            likelihood_weight=settings.cpo_likelihood_weight,
        )
    else:
        reference = statistics.reference_log_likelihood
        # None where the batch has no pair: then every loss is masked.
        known = statistics.log_likelihood.detach() if reference is None else reference
        four = *sums, *pairs(known)
        if objective == "dpo":
            losses = dpo_loss(*four, beta=settings.dpo_beta)
        else:
            losses = cal_dpo_loss(
                *four,
                beta=settings.cal_dpo_beta,
                calibration_weight=settings.cal_dpo_calibration_weight,
            )
    mask = chosen[:, :, None] & rejected[:, None, :]
    return mean_over(losses.flatten(1), mask.flatten(1))
