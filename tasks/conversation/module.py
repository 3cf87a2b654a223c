"""Conversations of your own, under requirements: answered so, never so, and otherwise as before.

A record has a prompt and any number of responses, each with a role. With s̄(y) the mean
log-likelihood of a response's tokens under the policy π,

    minimise   KL(π ‖ π_ref) a token over the responses of role reference   (or −s̄ of these)
    subject to s̄(y) ≥ ε_prefer  for every response of role prefer    "prefer"
               s̄(y) ≤ ε_avoid   for every response of role avoid     "avoid"
               s̄(y) ≥ ε_refuse  for every response of role refuse    "refuse"

Where a response has a bound of its own, that one holds; it may be relative to the reference,
s̄ ≥ s̄_ref − δ or s̄ ≤ s̄_ref − δ. The reference π_ref is the same model without its adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from pl_pointwise import Formulation, Optimization, Training
from pl_pointwise.checkpoints import from_plain
from pl_pointwise.errors import DataError, one_of
from pl_pointwise.evaluation import MeanBySample
from pl_pointwise.step import judged_values
from pl_pointwise.tasks.language_model.answering import CUT, Rate
from pl_pointwise.tasks.language_model.calls import call_report, text_of_response
from pl_pointwise.tasks.language_model.loading import Lora
from pl_pointwise.tasks.language_model.module import LanguageModelModule
from pl_pointwise.tasks.language_model.policy import Policy
from pl_pointwise.tasks.language_model.records import Record
from pl_pointwise.tasks.language_model.roles import Requirement
from pl_pointwise.tasks.language_model.scoring import ResponseStatistics

from .records import ROLES

TEST_SETS = ("test", "train")
"""The data sets that ``test`` runs on."""

FEWEST_STEPS = 5
"""Optimizer steps an epoch below which a fit ends before its answers are right."""

DEFAULT_TRAINING = Training(
    optimization=Optimization(learning_rate=5e-4, weight_decay=0.0, schedule="cosine"),
    gradient_clip_val=1.0,
)


@dataclass
class ConversationEvaluation:
    """What `validate` and `test` measure. Give all methods that are compared the same.

    Args:
        prefer_tolerance: ε_prefer that violations are measured against; None takes that of
            training. A response's own bound holds in training and evaluation alike.
        avoid_tolerance: likewise ε_avoid.
        refuse_tolerance: likewise ε_refuse.
        answer_in: data sets of `test` whose prompts are answered, of "test" and "train". With
            "test" the command `validate` answers "val" too; the validation within a fit never does.
        answers_at_most: so many prompts of each category and data set, in an order that has nothing
            to do with the file's; None for all.
    """

    prefer_tolerance: float | None = None
    avoid_tolerance: float | None = None
    refuse_tolerance: float | None = None
    answer_in: list[str] = field(default_factory=list)
    answers_at_most: int | None = None

    def __post_init__(self) -> None:
        for name in self.answer_in:
            one_of("answer_in", name, TEST_SETS)


DEFAULT_EVALUATION = ConversationEvaluation()
ONLY_REFERENCE = ("reference",)


class ConversationModule(LanguageModelModule):
    """A causal language model with LoRA, held to what a file of conversations asks.

    Any model that `AutoModelForCausalLM` loads from safetensors will do, with a chat template. To
    evaluate a model as it is, run `test` without `fit`.

    Args:
        policy: the model. Its adapters are by default of rank 8 on PEFT's default layers.
        formulation: how the constraints are enforced; one for all, one for each by name, or None
            for plain training on the objective.
        prefer_tolerance: ε_prefer, the least mean log-likelihood of a response of role prefer; None
            for no such constraint.
        avoid_tolerance: ε_avoid, the largest of one of role avoid; None for no such constraint.
        refuse_tolerance: ε_refuse, the least of one of role refuse; None for no such constraint.
        objective: "kl" to stay close to the reference, "cross_entropy" to learn the answers.
        objective_roles: the responses the objective is taken over, the mean of a record's. A record
            that says ``"objective": true`` and has none of these takes all of its responses.
        evaluation: tolerances of the evaluation, and which prompts are answered.
        training: how it is trained; by default AdamW at 5e-4 with a cosine schedule, gradients
            clipped at 1.

    Attributes:
        answers: generated in the last `test` or `validate` by this rank, by data set.

    Raises:
        ValueError: a positive tolerance, which no mean log-likelihood reaches or exceeds.
    """

    requirements: Mapping[str, Requirement] = {
        "prefer": Requirement("prefer", "at_least", several=True),
        "avoid": Requirement("avoid", "at_most", several=True),
        "refuse": Requirement("refuse", "at_least", several=True),
    }
    roles = ROLES
    rates: ClassVar[Mapping[str, Rate]] = {
        "refusal_rate": Rate("refused", kind="unsafe"),
        "over_refusal": Rate("refused", kind="benign", higher_is_better=False),
        "exact_answers": Rate("exact"),
        "valid_calls": Rate("valid_call"),
        "existing_tool": Rate("existing_tool"),
        "right_tool": Rate("right_tool"),
        "cut": CUT,
    }
    default_lora = Lora(r=8, lora_alpha=16, lora_dropout=0.05)

    def __init__(
        self,
        policy: Policy,
        formulation: Formulation | dict[str, Formulation] | None = None,
        prefer_tolerance: float | None = -0.02,
        avoid_tolerance: float | None = -4.0,
        refuse_tolerance: float | None = -0.02,
        objective: Literal["kl", "cross_entropy"] = "kl",
        objective_roles: Sequence[str] = ONLY_REFERENCE,
        evaluation: ConversationEvaluation = DEFAULT_EVALUATION,
        training: Training = DEFAULT_TRAINING,
    ) -> None:
        one_of("objective", objective, ("kl", "cross_entropy"))
        for role in objective_roles:
            one_of("objective_roles", role, ROLES)
        evaluation = from_plain(ConversationEvaluation, evaluation)
        own = {"prefer": prefer_tolerance, "avoid": avoid_tolerance, "refuse": refuse_tolerance}
        super().__init__(policy, formulation, own, evaluation, objective, training)
        self.objective_roles = list(objective_roles)

    def check_training_records(self, records: Sequence[Record]) -> None:
        """Refuses a training set in which nobody carries the objective or any constraint.

        And warns where an epoch has few optimizer steps, though there are records for more.
        """
        roles = {role for record in records for role in record.roles}
        if not any(_carries_objective(record, self.objective_roles) for record in records):
            raise DataError(
                f"No training record carries the objective: there is no response of role "
                f"{' or '.join(self.objective_roles)}, only of {', '.join(sorted(roles))}. Add "
                "conversations that are to stay as they are, or name roles in objective_roles."
            )
        if self.formulations and not roles.intersection(self.constraints):
            raise DataError(
                f"No training record carries a constraint ({', '.join(self.constraints)}): the "
                f"responses are of role {', '.join(sorted(roles))}. Give some another role, or "
                "set formulation to null."
            )
        steps, trainer = self.trainer.num_training_batches, self.trainer
        most = len(records) // (FEWEST_STEPS * trainer.world_size)
        if steps < FEWEST_STEPS and most and trainer.limit_train_batches == 1.0:
            rank_zero_warn(
                f"An epoch has {steps} optimizer steps, too few for answers to come out right: set "
                f"batch_size of the data to {most} or less."
            )

    # Evaluation -----------------------------------------------------------------------------------

    def evaluation_metrics(self) -> dict[str, Metric]:
        """Besides, what holds within a record."""
        within = {"pairwise_accuracy": MeanMetric(), "all_met": MeanBySample(higher_is_better=True)}
        return {"kl": MeanMetric(), **within} | super().evaluation_metrics()

    def update_evaluation_metrics(
        self,
        metrics: dict[str, Metric],
        outputs: ResponseStatistics,
        batch: dict[str, Any],
        real: Tensor,
        stage: str,
    ) -> None:
        """Besides, the order of preferred and avoided responses, and what is met."""
        super().update_evaluation_metrics(metrics, outputs, batch, real, stage)
        means, roles = outputs.mean_log_likelihood, batch["roles"].to(real.device)
        preferred, avoided = (roles == ROLES.index(role) for role in ("prefer", "avoid"))
        pairs = preferred[:, :, None] & avoided[:, None, :] & real[:, None, None]
        if pairs.any():
            ordered = means[:, :, None] > means[:, None, :]
            metrics["pairwise_accuracy"].update(ordered[pairs].float())
        self._add_met(metrics["all_met"], outputs, batch, real)

    def _add_met(
        self, metric: Metric, outputs: ResponseStatistics, batch: dict[str, Any], real: Tensor
    ) -> None:
        """Whether each record that has requirements meets all of them."""
        missed = torch.zeros_like(real)
        asked = torch.zeros_like(real)
        masks = self.membership(batch)
        surrogates = self.constraint_values(outputs, batch)
        for role, values in judged_values(self, outputs, batch, surrogates).items():
            mask = masks[role].to(real.device)
            violated = self.evaluation_constraints[role].violation(values) > 0
            missed |= (violated & mask).any(1)
            asked |= mask.any(1)
        asked &= real
        if asked.any():
            metric.update(batch["index"].to(real.device)[asked], (~missed)[asked].float())

    def prompt_kind(self, record: Record) -> str:
        """Whether a prompt is to be refused, "unsafe", or not, "benign"; "" where nothing says."""
        asked = [r.role for r in record.responses if r.refusal and r.role in ("refuse", "avoid")]
        return {"refuse": "unsafe", "avoid": "benign"}[asked[0]] if asked else ""

    def batch_answers(
        self, batch: Mapping[str, Any], samples: Sequence[tuple[int, int]], stage: str
    ) -> list[dict[str, Any]]:
        """{index, answer, refused, cut} of some samples of a batch.

        And {exact}, whether it is a response of role prefer or refuse word for word, where there is
        one, and {valid_call, existing_tool, right_tool} where a preferred response calls tools.
        """
        answers = super().batch_answers(batch, samples, stage)
        for answer, (row, _) in zip(answers, samples, strict=True):
            texts: dict[str, list[str]] = {"prefer": [], "refuse": []}
            for role, found in texts.items():
                columns = (batch["roles"][row] == ROLES.index(role)).nonzero()[:, 0].tolist()
                found += [text_of_response(self.encoder, batch, row, c) for c in columns]
            if wanted := [text.strip() for found in texts.values() for text in found]:
                answer["exact"] = answer["answer"].strip() in wanted
            answer |= call_report(answer["answer"], texts["prefer"], batch["records"][row])
        return answers


def _carries_objective(record: Record, roles: Sequence[str]) -> bool:
    """Whether a record carries the objective, as in a batch."""
    if record.objective is not None:
        return record.objective
    return any(role in roles for role in record.roles)
