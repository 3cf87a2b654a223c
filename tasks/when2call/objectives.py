"""What is minimised: closeness to the reference, or one of the preference losses.

All are functions of the response statistics of a batch, response 0 chosen and the others rejected;
a loss on several rejected responses is the mean over its pairs. Result (B,).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from pl_pointwise.tasks.language_model.preference_losses import (
    cal_dpo_loss,
    cpo_loss,
    dpo_loss,
    simpo_loss,
)
from pl_pointwise.tasks.language_model.roles import mean_over
from pl_pointwise.tasks.language_model.scoring import ResponseStatistics

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
    objective: Objective, statistics: ResponseStatistics, settings: PreferenceLosses
) -> Tensor:
    """The named loss of each sample, (B,)."""
    present = statistics.present[:, 1:]
    sums, means = statistics.log_likelihood, statistics.mean_log_likelihood
    chosen, rejected = sums[:, :1], sums[:, 1:]
    if objective == "simpo":
        losses = simpo_loss(
            means[:, :1], means[:, 1:], beta=settings.simpo_beta, gamma=settings.simpo_gamma
        )
    elif objective == "cpo":
        losses = cpo_loss(
            chosen,
            rejected,
            means[:, :1],
            beta=settings.cpo_beta,
            likelihood_weight=settings.cpo_likelihood_weight,
        )
    else:
        reference = statistics.reference_log_likelihood
        assert reference is not None
        four = chosen, rejected, reference[:, :1], reference[:, 1:]
        if objective == "dpo":
            losses = dpo_loss(*four, beta=settings.dpo_beta)
        else:
            losses = cal_dpo_loss(
                *four,
                beta=settings.cal_dpo_beta,
                calibration_weight=settings.cal_dpo_calibration_weight,
            )
    return mean_over(losses, present)
