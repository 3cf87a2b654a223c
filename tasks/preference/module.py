"""Preference pairs: a loss that raises a margin, and bounds on what each answer may become.

A prompt x has a chosen answer y_w and rejected ones y_l. With s̄(y) the mean log-likelihood of an
answer's tokens under the policy π, and π_ref the model before training,

    minimise   DPO, SimPO, CPO or Cal-DPO over the pairs of a prompt     (preference_losses.py)
    subject to s̄_ref(y_w) − s̄(y_w) ≤ δ   for every prompt                            "floor"
               s̄(y_w) ≥ ε                for every prompt                            "chosen"
               s̄(y_l) ≤ ε                for every prompt and each rejected answer   "rejected"
               s̄(y_w) − s̄(y_l) ≥ ε       for every pair                              "ratio"

Each of these losses may fall while both answers become less likely, as long as the rejected one
falls faster. The floor, which is on by default wherever there is a formulation, forbids it for
every chosen answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from torch import Tensor
from torchmetrics import MeanMetric

from pl_pointwise import Formulation, Optimization, Training
from pl_pointwise.errors import one_of
from pl_pointwise.plain import from_plain
from pl_pointwise.task import Batch, Metrics
from pl_pointwise.tasks.language_model.likelihood.preference_losses import (
    Objective,
    PreferenceLosses,
)
from pl_pointwise.tasks.language_model.likelihood.scoring import ResponseStatistics
from pl_pointwise.tasks.language_model.model.adapters import Lora
from pl_pointwise.tasks.language_model.model.loading import Policy
from pl_pointwise.tasks.language_model.pairs import PairsModule
from pl_pointwise.tasks.language_model.roles import Requirement, drop, log_ratio

DEFAULT_LOSSES = PreferenceLosses()
DEFAULT_TRAINING = Training(
    optimization=Optimization(
        learning_rate=5e-5, weight_decay=0.0, schedule="cosine", warmup_ratio=0.1
    ),
    gradient_clip_val=1.0,
)


@dataclass(frozen=True)
class PreferenceEvaluation:
    """What `validate` and `test` measure. Give all methods that are compared the same.

    Args:
        floor_tolerance, chosen_tolerance, rejected_tolerance, ratio_tolerance: what violations are
            measured against; None takes that of training.

    .. versionadded:: 0.3.0
    """

    floor_tolerance: float | None = None
    chosen_tolerance: float | None = None
    rejected_tolerance: float | None = None
    ratio_tolerance: float | None = None


class PreferenceModule(PairsModule):
    """A causal language model with LoRA, trained on preference pairs subject to bounds.

    Args:
        policy: the model. Its adapters are by default of rank 16 on every linear layer.
        formulation: how the constraints are enforced, all or each by name; None: the loss alone,
            while evaluations measure the constraints all the same.
        floor_tolerance: δ, by which a chosen answer may become less likely per token, in nats;
            below 0 it has to become so much likelier. None for no such constraint, here and below;
            without adapters there is no reference, so None is needed.
        chosen_tolerance: ε, the least mean log-likelihood of a chosen answer.
        rejected_tolerance: ε, the largest of a rejected one.
        ratio_tolerance: ε of s̄(y_w) − s̄(y_l).
        objective: "dpo", "simpo", "cpo", "cal_dpo", or "kl" to stay close to the reference.
        losses: hyper-parameters of the losses.
        evaluation: tolerances of the evaluation.
        training: how it is trained; by default AdamW at 5e-5 with a warm-up over a tenth and a
            cosine schedule, gradients clipped at 1.

    Raises:
        ValueError: a positive tolerance of a mean log-likelihood, which none reaches.

    .. versionadded:: 0.3.0
    """

    requirements: Mapping[str, Requirement] = {
        "floor": Requirement("prefer", "at_most", value=drop),
        "chosen": Requirement("prefer", "at_least"),
        "rejected": Requirement("avoid", "at_most", several=True),
        "ratio": Requirement("avoid", "at_least", several=True, value=log_ratio),
    }
    default_lora = Lora(
        r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear"
    )

    def __init__(
        self,
        policy: Policy,
        formulation: Formulation | dict[str, Formulation] | None = None,
        floor_tolerance: float | None = 0.0,
        chosen_tolerance: float | None = None,
        rejected_tolerance: float | None = None,
        ratio_tolerance: float | None = None,
        objective: Objective = "dpo",
        losses: PreferenceLosses = DEFAULT_LOSSES,
        evaluation: PreferenceEvaluation = PreferenceEvaluation(),
        training: Training = DEFAULT_TRAINING,
    ) -> None:
        one_of("objective", objective, get_args(Objective))
        evaluation = from_plain(PreferenceEvaluation, evaluation)
        tolerances = {
            "floor": floor_tolerance,
            "chosen": chosen_tolerance,
            "rejected": rejected_tolerance,
            "ratio": ratio_tolerance,
        }
        super().__init__(
            policy, formulation, tolerances, evaluation, objective, training
        )
        self.losses = from_plain(PreferenceLosses, losses)

    def evaluation_metrics(self) -> Metrics:
        """Those of all pairs, and how often the chosen answer has gained more than the other."""
        return {**super().evaluation_metrics(), "reward_accuracy": MeanMetric()}

    def update_evaluation_metrics(
        self,
        metrics: Metrics,
        outputs: ResponseStatistics,
        batch: Batch,
        real: Tensor,
        stage: str,
    ) -> None:
        """Adds a batch; real: bool (B,), False for samples that only fill it."""
        super().update_evaluation_metrics(metrics, outputs, batch, real, stage)
        known = outputs.reference_log_likelihood
        # Without adapters there is no reference: the metric stays NaN.
        if known is not None:
            gains = outputs.log_likelihood - known
            # Response 0 is the chosen one.
            gained_more = gains[:, :1] > gains[:, 1:]
            right = gained_more[self.real_pairs(outputs, real)]
            metrics["reward_accuracy"].update(right.float())
