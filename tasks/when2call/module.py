"""When2Call: each prompt's right behaviour has to stay likely, each wrong one to become unlikely.

A prompt x, with tools, has a chosen response y_w and rejected ones y_l. With s̄(y) the mean
log-likelihood of a response's tokens under the policy π,

    minimise   KL(π ‖ π_ref) per token, over all responses       (or a preference loss)
    subject to s̄(y_w) ≥ ε_win   for every prompt                                    "chosen"
               s̄(y_l) ≤ ε_lose  for every prompt and each of its rejected responses "rejected"

or, with ``constrain="ratio"``, to s̄(y_w) − s̄(y_l) ≥ ε for each pair, "ratio"; or, with
``constrain="floor"``, to s̄_ref(y_w) − s̄(y_w) ≤ δ for every prompt, "floor": under a preference loss
no chosen response becomes less likely by more than δ. The reference π_ref is the same model without
its adapters. In a multiple-choice record the right answer is chosen, and the others are rejected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import BinaryF1Score, MulticlassF1Score

from pl_pointwise import Formulation, Optimization, Training
from pl_pointwise.errors import one_of
from pl_pointwise.evaluation import MeanBySample
from pl_pointwise.plain import from_plain
from pl_pointwise.task import Batch, Metrics
from pl_pointwise.tasks.language_model.likelihood.batch import collate_columns
from pl_pointwise.tasks.language_model.likelihood.preference_losses import (
    Objective,
    PreferenceLosses,
)
from pl_pointwise.tasks.language_model.likelihood.scoring import ResponseStatistics
from pl_pointwise.tasks.language_model.model.adapters import Lora
from pl_pointwise.tasks.language_model.model.loading import Policy
from pl_pointwise.tasks.language_model.pairs import PairsModule
from pl_pointwise.tasks.language_model.roles import Requirement, drop, log_ratio
from pl_pointwise.tasks.language_model.text.records import Record

from .data import CATEGORIES, choices_of

NORMALISATIONS = ("sum", "characters", "tokens")
DIRECT = CATEGORIES.index("direct")

PAPER_LOSSES = PreferenceLosses()
PAPER_TRAINING = Training(
    optimization=Optimization(learning_rate=5e-5, weight_decay=0.0, schedule="cosine")
)


@dataclass(frozen=True)
class When2CallEvaluation:
    """What `validate` and `test` measure. Give all methods that are compared the same.

    Args:
        chosen_tolerance, rejected_tolerance, ratio_tolerance, floor_tolerance: what violations are
            measured against; None takes that of training.
        before: measure the starting model too, in columns ``before_…``.
    """

    chosen_tolerance: float | None = None
    rejected_tolerance: float | None = None
    ratio_tolerance: float | None = None
    floor_tolerance: float | None = None
    before: bool = True


class When2CallModule(PairsModule):
    """A causal language model with LoRA, constrained in what it makes likely and unlikely.

    Any model that `AutoModelForCausalLM` loads from safetensors will do, with a chat template that
    shows tools. To evaluate it before training, run `test` without `fit`.

    Args:
        policy: the model. Its adapters are by default of rank 8 on PEFT's default layers; `predict`
            answers questions, by default with the likeliest tokens.
        formulation: how the constraints are enforced, all or each by name; None: objective alone.
        chosen_tolerance: ε_win, the least mean log-likelihood of a chosen response.
        rejected_tolerance: ε_lose, the largest of a rejected one. The paper's −20 is far below what
            a fluent model gives to wrong answers (−2 to −4), and costs 7 to 8 nats of KL per token.
        ratio_tolerance: ε of s̄(y_w) − s̄(y_l), with constrain "ratio".
        floor_tolerance: δ, by which a chosen response may become less likely per token, with
            constrain "floor"; below 0 it has to become so much likelier.
        constrain: "likelihood" for the constraints chosen and rejected; "ratio" or "floor" for
            that one.
        objective: "kl" to stay close to the reference, or the preference losses "dpo", "simpo",
            "cpo" and "cal_dpo": baselines with formulation None, or subject to a floor.
        losses: hyper-parameters of the preference losses.
        evaluation: tolerances of the evaluation.
        training: how it is trained; by default as in the paper, AdamW at 5e-5 with a cosine
            schedule, no warm-up and no weight decay.
    """

    requirements: Mapping[str, Requirement] = {
        "chosen": Requirement("prefer", "at_least"),
        "rejected": Requirement("avoid", "at_most", several=True),
        "ratio": Requirement("avoid", "at_least", several=True, value=log_ratio),
        "floor": Requirement("prefer", "at_most", value=drop),
    }
    default_lora = Lora(r=8, lora_alpha=16, lora_dropout=0.05)

    def __init__(
        self,
        policy: Policy,
        formulation: Formulation | dict[str, Formulation] | None = None,
        chosen_tolerance: float = -2.0,
        rejected_tolerance: float = -6.0,
        ratio_tolerance: float = 0.0,
        floor_tolerance: float = 0.0,
        constrain: Literal["likelihood", "ratio", "floor"] = "likelihood",
        objective: Objective = "kl",
        losses: PreferenceLosses = PAPER_LOSSES,
        evaluation: When2CallEvaluation = When2CallEvaluation(),
        training: Training = PAPER_TRAINING,
    ) -> None:
        one_of("constrain", constrain, ("likelihood", "ratio", "floor"))
        one_of("objective", objective, ("kl", "dpo", "simpo", "cpo", "cal_dpo"))
        evaluation = from_plain(When2CallEvaluation, evaluation)
        tolerances = {"chosen": chosen_tolerance, "rejected": rejected_tolerance}
        # One constraint in place of the two, as they ask for the same in another way.
        if constrain != "likelihood":
            tolerances = {
                constrain: ratio_tolerance if constrain == "ratio" else floor_tolerance
            }
        super().__init__(
            policy, formulation, tolerances, evaluation, objective, training
        )
        self.losses = from_plain(PreferenceLosses, losses)

    def evaluation_metrics(self) -> Metrics:
        """Divergence and order of the responses; of multiple choice, the When2Call table too."""
        return super().evaluation_metrics() | choice_metrics()

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
        records: Sequence[Record] = batch["records"]
        # Preference records have no four behaviours to choose from.
        if any(record.choice for record in records):
            choices = collate_columns(
                [*map(choices_of, records)], outputs.present.shape[1]
            )
            choices = choices.to(real.device)[real]
            predicted = chosen_categories(
                outputs.log_likelihood[real],
                outputs.lengths[real],
                batch["characters"].to(real.device)[real],
                choices,
            )
            index = batch["index"].to(real.device)[real]
            update_choice_metrics(metrics, index, predicted, choices[:, 0])


# The table of multiple choice --------------------------------------------------------------------


def chosen_categories(
    log_likelihood: Tensor, tokens: Tensor, characters: Tensor, choices: Tensor
) -> dict[str, Tensor]:
    """By normalisation the category of the largest score, (B,) long, a position in CATEGORIES.

    The score is s, or s by the candidate's characters (``acc_norm`` of the usual harness) or tokens
    (what training constrains). Among equal ones the first category is chosen; NaN is the lowest.

    All (B, R): log_likelihood s; tokens, 0 where there is no candidate; choices, categories.
    """
    present = (tokens > 0) & (choices >= 0)
    # Absent candidates go to a column of their own, which is cut off again.
    columns = torch.where(present, choices, len(CATEGORIES))
    chosen, divisors = {}, (torch.ones_like(tokens), characters, tokens)
    for name, divisor in zip(NORMALISATIONS, divisors, strict=True):
        # An absent candidate has length 0; its score goes to the column that is cut off.
        scores = log_likelihood / divisor.clamp(min=1)
        scores = scores.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        table = scores.new_full((len(scores), len(CATEGORIES) + 1), -math.inf)
        chosen[name] = table.scatter(1, columns, scores)[:, :-1].argmax(dim=1)
    return chosen


class MacroF1(MulticlassF1Score):
    """The mean F1 over the categories that occur as gold; NaN of nothing.

    In the published data ``direct`` never does. torchmetrics' and sklearn's macro average would
    count it in as soon as it is predicted once.
    """

    def __init__(self) -> None:
        super().__init__(num_classes=len(CATEGORIES), average="none")

    def compute(self) -> Tensor:
        hits, missed = torch.as_tensor(self.tp), torch.as_tensor(self.fn)
        return super().compute()[hits + missed > 0].mean()


def choice_metrics() -> dict[str, Metric]:
    """Fresh metrics of one multiple-choice data set; see :func:`update_choice_metrics`."""
    return {
        **{f"accuracy_{name}": MeanBySample() for name in NORMALISATIONS},
        "macro_f1": MacroF1(),
        **{f"f1_{name}": BinaryF1Score() for name in CATEGORIES},
        "hallucination": MeanBySample(),
    }


def update_choice_metrics(
    metrics: Mapping[str, Metric],
    index: Tensor,
    predicted: Mapping[str, Tensor],
    gold: Tensor,
) -> None:
    """Adds a batch: index, predicted by normalisation, and gold, all (B,).

    The accuracies choose by their own normalisation, all else by characters, as published:
    ``hallucination`` is the share of ``direct``.
    """
    for normalisation, categories in predicted.items():
        metrics[f"accuracy_{normalisation}"].update(index, (categories == gold).float())
    chosen = predicted["characters"]
    metrics["macro_f1"].update(chosen, gold)
    for category, name in enumerate(CATEGORIES):
        metrics[f"f1_{name}"].update(
            (chosen == category).long(), (gold == category).long()
        )
    metrics["hallucination"].update(index, (chosen == DIRECT).float())
