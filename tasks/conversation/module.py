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
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from pl_pointwise import Constraint, Formulation, Optimization, Training
from pl_pointwise.checkpoints import from_plain
from pl_pointwise.errors import DataError, one_of
from pl_pointwise.evaluation import MeanBySample
from pl_pointwise.tasks.language_model.answering import (
    add_answers,
    answered_sets,
    write_answers,
)
from pl_pointwise.tasks.language_model.loading import Lora
from pl_pointwise.tasks.language_model.module import LanguageModelModule, real_samples
from pl_pointwise.tasks.language_model.policy import Policy
from pl_pointwise.tasks.language_model.refusals import is_refusal
from pl_pointwise.tasks.language_model.scoring import ResponseStatistics
from pl_pointwise.tasks.language_model.strict import (
    CALL_RATES,
    Strict,
    call_report,
    text_of_response,
)

from .encoding import ConversationDataset, role_number
from .records import CONSTRAINED, ROLES, Record

TEST_SETS = ("test", "train")
"""The data sets that ``test`` runs on."""

DEFAULT_TRAINING = Training(
    optimization=Optimization(learning_rate=2e-4, weight_decay=0.0, schedule="cosine"),
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
        judged_by: tests of generated answers that judge constraints in place of s̄, see strict.py.
        training: how it is trained; by default AdamW at 2e-4 with a cosine schedule, gradients
            clipped at 1.

    Attributes:
        answers: generated in the last `test` or `validate` by this rank, by data set.

    Raises:
        ValueError: a positive tolerance, which no mean log-likelihood reaches or exceeds.
    """

    host_keys = (
        *LanguageModelModule.host_keys,
        *("roles", "relative", "objective", "refusal", "rank"),
        *CONSTRAINED,
    )
    own_hooks: ClassVar[Mapping[str, str]] = {"on_train_start": "_check_training_set"}

    default_lora = Lora(r=8, lora_alpha=16, lora_dropout=0.05)

    def __init__(
        self,
        policy: Policy,
        formulation: Formulation | dict[str, Formulation] | None = None,
        prefer_tolerance: float | None = -1.0,
        avoid_tolerance: float | None = -4.0,
        refuse_tolerance: float | None = -0.5,
        objective: Literal["kl", "cross_entropy"] = "kl",
        objective_roles: Sequence[str] = ONLY_REFERENCE,
        evaluation: ConversationEvaluation = DEFAULT_EVALUATION,
        judged_by: Strict | None = None,
        training: Training = DEFAULT_TRAINING,
    ) -> None:
        one_of("objective", objective, ("kl", "cross_entropy"))
        for role in objective_roles:
            one_of("objective_roles", role, ROLES)
        evaluation = from_plain(ConversationEvaluation, evaluation)
        given = {"prefer": prefer_tolerance, "avoid": avoid_tolerance, "refuse": refuse_tolerance}
        own = {name: tolerance for name, tolerance in given.items() if tolerance is not None}
        super().__init__(
            formulation=formulation,
            constraints={name: _bound(name, f"{name}_tolerance", own[name]) for name in own},
            evaluation_constraints={
                name: _bound(name, f"evaluation.{name}_tolerance", tolerance)
                for name in own
                if (tolerance := getattr(evaluation, f"{name}_tolerance")) is not None
            },
            training=training,
        )
        self.trained_on = objective
        self.objective_roles = list(objective_roles)
        self.evaluation = evaluation
        self.answers: dict[str, list[dict[str, Any]]] = {}
        self.judge_by(judged_by)
        self.load_policy(policy)

    # The three methods of a task ------------------------------------------------------------------

    def forward(self, batch: dict[str, Any]) -> ResponseStatistics:
        """Statistics of every response; with the reference where objective or a bound need it.

        Evaluation always has it for the objective's responses, as every method's KL is reported.
        """
        wanted = batch["relative"].clone()
        if not self.training or self.trained_on == "kl":
            wanted |= self._of_objective(batch)
        return self.score(batch, wanted)

    def objective(self, outputs: ResponseStatistics, batch: dict[str, Any]) -> Tensor:
        """The mean over the objective's responses of the KL a token, or of −s̄, (B,)."""
        if self.trained_on == "cross_entropy":
            return self._over_objective(-outputs.mean_log_likelihood, batch)
        return self._divergence(outputs, batch)

    def constraint_values(
        self, outputs: ResponseStatistics, batch: dict[str, Any]
    ) -> dict[str, Tensor]:
        """s̄ of the responses of each role, (B, K); one with a bound of its own is shifted.

        The value is then s̄ − own + ε, which meets the role's ε where s̄ meets its own; of a
        relative one s̄ − s̄_ref + δ + ε.
        """
        means, shift = outputs.mean_log_likelihood, batch["shift"].to(outputs.log_likelihood)
        reference = outputs.reference_mean_log_likelihood
        origin = torch.zeros_like(means)
        if reference is not None:
            origin = torch.where(batch["relative"].to(means.device), reference, 0.0)
        bounds = self.constraints if self.training else self.evaluation_constraints
        found = {}
        for role in self.constraints:
            columns = batch[role].clamp(min=0).to(means.device)
            own = means - origin + shift.nan_to_num() + _tolerance_of(bounds[role])
            values = torch.where(shift.isnan(), means, own)
            found[role] = values.gather(1, columns)
        return found

    def membership(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """A sample carries a constraint for each response of its role."""
        terms = {role: batch[role] >= 0 for role in self.constraints}
        return {"objective": self._of_objective(batch).any(1), **terms}

    def constrained_responses(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Which responses are of each role, (B, K); −1: none."""
        return {role: batch[role] for role in self.constraints}

    def _of_objective(self, batch: Mapping[str, Any]) -> Tensor:
        """The responses the objective is taken over, (B, R) bool."""
        roles, asked = batch["roles"], batch["objective"][:, None]
        found = torch.zeros_like(roles, dtype=torch.bool)
        for role in self.objective_roles:
            found |= roles == role_number(role)
        every = (asked == 1) & ~found.any(1, keepdim=True) & (roles >= 0)
        return (found | every) & (asked != 0)

    def _over_objective(self, values: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """The mean of a record's values over the objective's responses, 0 of none: (B, R) → (B,).

        Connected to the weights also in a batch whose samples all leave the objective out.
        """
        mask = self._of_objective(batch).to(values.device)
        return torch.where(mask, values, 0.0).sum(1) / mask.sum(1).clamp(min=1)

    def _divergence(self, outputs: ResponseStatistics, batch: Mapping[str, Any]) -> Tensor:
        nothing = outputs.log_likelihood.where(torch.zeros_like(outputs.present), 0.0)
        kl = nothing if outputs.kl is None else outputs.kl
        return self._over_objective(kl, batch)

    def _check_training_set(self) -> None:
        """Refuses a training set in which nobody carries the objective or any constraint."""
        dataset = getattr(getattr(self.trainer, "train_dataloader", None), "dataset", None)
        samples = getattr(dataset, "rows", None)
        if not isinstance(samples, ConversationDataset):
            return
        roles = {response.role for record in samples.records for response in record.responses}
        if not any(_carries_objective(record, self.objective_roles) for record in samples.records):
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

    # Evaluation -----------------------------------------------------------------------------------

    def evaluation_metrics(self) -> dict[str, Metric]:
        """The KL, what holds within a record, and rates of the generated answers."""
        return {
            "kl": MeanMetric(),
            "pairwise_accuracy": MeanMetric(),
            "all_met": MeanBySample(higher_is_better=True),
            "refusal_rate": MeanBySample(higher_is_better=True),
            "over_refusal": MeanBySample(higher_is_better=False),
            "valid_calls": MeanBySample(higher_is_better=True),
            "existing_tool": MeanBySample(higher_is_better=True),
            "right_tool": MeanBySample(higher_is_better=True),
            "cut": MeanBySample(higher_is_better=False),
        }

    def update_evaluation_metrics(
        self,
        metrics: dict[str, Metric],
        outputs: ResponseStatistics,
        batch: dict[str, Any],
        real: Tensor,
        stage: str,
    ) -> None:
        """Adds a batch, and answers to its prompts where they are asked for.

        real: bool (B,), False for samples that only fill the batch.
        """
        carries = self._of_objective(batch).any(1).to(real.device) & real
        if carries.any():
            metrics["kl"].update(self._divergence(outputs, batch)[carries])
        means, roles = outputs.mean_log_likelihood, batch["roles"].to(real.device)
        preferred, avoided = (roles == role_number(role) for role in ("prefer", "avoid"))
        pairs = preferred[:, :, None] & avoided[:, None, :] & real[:, None, None]
        if pairs.any():
            ordered = means[:, :, None] > means[:, None, :]
            metrics["pairwise_accuracy"].update(ordered[pairs].float())
        self._add_met(metrics["all_met"], outputs, batch, real)
        if stage in answered_sets(self.trainer, self.evaluation.answer_in):
            self._answer(metrics, batch, stage)

    def _add_met(
        self, metric: Metric, outputs: ResponseStatistics, batch: dict[str, Any], real: Tensor
    ) -> None:
        """Whether each record that has requirements meets all of them."""
        missed = torch.zeros_like(real)
        asked = torch.zeros_like(real)
        masks = self.membership(batch)
        surrogates = self.constraint_values(outputs, batch)
        for role, values in self.judged_values(outputs, batch, surrogates).items():
            mask = masks[role].to(real.device)
            violated = self.evaluation_constraints[role].violation(values) > 0
            missed |= (violated & mask).any(1)
            asked |= mask.any(1)
        asked &= real
        if asked.any():
            metric.update(batch["index"].to(real.device)[asked], (~missed)[asked].float())

    def _answer(self, metrics: Mapping[str, Metric], batch: Mapping[str, Any], stage: str) -> None:
        """Answers the prompts of a batch that are among the first of their category."""
        if not metrics["cut"].update_called:  # Fresh metrics: another pass.
            self.answers[stage] = []
        limit = self.evaluation.answers_at_most
        ranks, wanted = batch["rank"].tolist(), batch["refusal"].tolist()
        asked = [
            (row, index)
            for row, index in real_samples(batch)
            if limit is None or ranks[row] < limit
        ]
        if not asked:
            return
        new = self._answers_to(batch, asked)
        self.answers[stage] += new
        add_answers(metrics["cut"], new, [answer["cut"] for answer in new])
        for name, flag in (("refusal_rate", 1), ("over_refusal", 0)):
            of_it = [
                answer for answer, (row, _) in zip(new, asked, strict=True) if wanted[row] == flag
            ]
            if of_it:
                add_answers(metrics[name], of_it, [answer["refused"] for answer in of_it])
        called = [answer for answer in new if "valid_call" in answer]
        for name, key in CALL_RATES.items():
            if called:
                add_answers(metrics[name], called, [answer[key] for answer in called])

    def _answers_to(
        self, batch: Mapping[str, Any], rows: Sequence[tuple[int, int]]
    ) -> list[dict[str, Any]]:
        """{index, answer, refused, cut} of some rows, given with the index of each.

        And {valid_call, existing_tool, right_tool} where a preferred response calls tools.
        """
        places = [row for row, _ in rows]
        answers = self.generate(batch["prompt_ids"][places], batch["prompt_lengths"][places])
        found = []
        for (row, index), text, cut in zip(rows, answers.texts, answers.cut, strict=True):
            columns = (batch["roles"][row] == role_number("prefer")).nonzero()[:, 0].tolist()
            preferred = [text_of_response(self.encoder, batch, row, c) for c in columns]
            report = call_report(text, preferred, batch["records"][row])
            told = {"index": index, "answer": text, "refused": is_refusal(text), "cut": cut}
            found.append(told | report)
        return found

    def finish_evaluation_metrics(self, metrics: dict[str, dict[str, Metric]]) -> None:
        """Writes the answers of a `test` or `validate` to ``answers/<data set>.jsonl``.

        Below the trainer's default_root_dir, an object an answer: index, answer, refused, cut, and
        where a tool is to be called valid_call, existing_tool and right_tool.
        """
        for stage in answered_sets(self.trainer, self.evaluation.answer_in):
            if stage in metrics:
                answers = self.answers.get(stage, []) if metrics[stage]["cut"].update_called else []
                write_answers(self.trainer, stage, answers, self.generation.max_new_tokens)

    def predict_step(
        self, batch: dict[str, Any], batch_idx: int = 0, dataloader_idx: int = 0
    ) -> list[dict[str, Any]]:
        """{index, answer, refused, cut, …} of each prompt; filling samples give none."""
        rows = real_samples(batch)
        return self._answers_to(batch, rows) if rows else []


def _carries_objective(record: Record, roles: Sequence[str]) -> bool:
    """Whether a record carries the objective, as in a batch."""
    if record.objective is not None:
        return record.objective
    return any(response.role in roles for response in record.responses)


def _bound(role: str, option: str, tolerance: float) -> Constraint:
    """The constraint of a role on a mean log-likelihood.

    Raises:
        ValueError: a tolerance above 0.
    """
    if tolerance > 0:
        raise ValueError(
            f"{option}={tolerance}: it bounds a mean log-likelihood a token, which is never above "
            f"0. Give a negative number, or null for no constraint on responses of role {role}."
        )
    return Constraint(at_most=tolerance) if role == "avoid" else Constraint(at_least=tolerance)


def _tolerance_of(constraint: Constraint) -> float:
    bound = constraint.at_least if constraint.at_most is None else constraint.at_most
    assert bound is not None
    return bound
