"""Conversations of your own, under requirements: learn this, keep that, and never say the other.

A record has a prompt and any number of responses, each with a role. With s̄(y) the mean
log-likelihood of a response's tokens under the policy π,

    minimise   −s̄(y) over the responses of role learn
               + KL(π ‖ π_ref) per token over those of role reference   (or −s̄)
    subject to KL(π ‖ π_ref) ≤ ε_keep per token  for every response of role keep      "keep"
               s̄(y) ≥ ε_prefer                 for every response of role prefer    "prefer"
               π(y_t) ≥ eᵋ π(v)  for every token y_t and v ≠ y_t of role keep       "greedy"
               s̄(y) ≤ ε_avoid                  for every response of role avoid     "avoid"
               s̄(y) ≥ ε_refuse                 for every response of role refuse    "refuse"
               |s̄(y) − c(y)| ≤ ε_forget        for every response of role forget    "forget"

Where a response has a bound of its own, that one holds; it may be relative to the reference,
s̄ ≥ s̄_ref − δ or s̄ ≤ s̄_ref − δ. The reference π_ref is the same model without its adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor
from torchmetrics import MeanMetric

from pl_pointwise import Formulation, Optimization, Training
from pl_pointwise.errors import DataError, one_of
from pl_pointwise.evaluation import MeanBySample
from pl_pointwise.plain import from_plain
from pl_pointwise.task import Batch, Metrics
from pl_pointwise.tasks.language_model.answers import Rate
from pl_pointwise.tasks.language_model.before import WANTED
from pl_pointwise.tasks.language_model.likelihood.scoring import ResponseStatistics
from pl_pointwise.tasks.language_model.model.adapters import Lora
from pl_pointwise.tasks.language_model.model.generation import text_of_response
from pl_pointwise.tasks.language_model.model.loading import Policy
from pl_pointwise.tasks.language_model.module import LanguageModelModule
from pl_pointwise.tasks.language_model.roles import (
    Requirement,
    divergence,
    lead,
    mean_over,
)
from pl_pointwise.tasks.language_model.text.records import Record
from pl_pointwise.training.micro_batches import judged_values

from .records import ROLES

Objective = Literal["kl", "cross_entropy"]

DEFAULT_TRAINING = Training(
    optimization=Optimization(learning_rate=5e-4, weight_decay=0.0, schedule="cosine"),
    gradient_clip_val=1.0,
)


@dataclass(frozen=True)
class ConversationEvaluation:
    """What `validate` and `test` measure. Give all methods that are compared the same.

    Args:
        prefer_tolerance: what violations are measured against, as avoid_tolerance,
            refuse_tolerance, keep_tolerance, greedy_tolerance and forget_tolerance; None takes that
            of training. A response's own bound holds in both.
        answer_in: data sets of `test` whose prompts are answered, of "test" and "train". With
            "test" the command `validate` answers "val" too; validation in training never does.
        answers_at_most: so many prompts of each category and data set, in an order that has nothing
            to do with the file's; None for all.
        before: measure the starting model too: columns ``before_…`` of `test`, its answers, and how
            many answers that are to stay have become others, at the end of a fit too.
    """

    prefer_tolerance: float | None = None
    avoid_tolerance: float | None = None
    refuse_tolerance: float | None = None
    keep_tolerance: float | None = None
    greedy_tolerance: float | None = None
    forget_tolerance: float | None = None
    answer_in: list[str] = field(default_factory=list)
    answers_at_most: int | None = None
    before: bool = True

    def __post_init__(self) -> None:
        for name in self.answer_in:
            one_of("answer_in", name, ("test", "train"))


class ConversationModule(LanguageModelModule):
    """A causal language model with LoRA, held to what a file of conversations asks.

    Args:
        policy: the model. Its adapters are by default of rank 8 on PEFT's default layers.
        formulation: how the constraints are enforced, all or each by name; None: objective alone.
        prefer_tolerance: ε_prefer, the least mean log-likelihood of a response of role prefer; None
            for no such constraint, here and below.
        avoid_tolerance: ε_avoid, the largest of one of role avoid.
        refuse_tolerance: ε_refuse, the least of one of role refuse.
        keep_tolerance: ε_keep, the largest KL per token of one of role keep, in nats.
        greedy_tolerance: the least lead, in nats, of each token of one of role keep over any other
            token: from 0 on greedy decoding writes it (with data.own_answers, as before training).
        forget_tolerance: ε_forget, how far one of role forget may be from what it is to be.
        objective: of responses of other roles than learn, "kl" to stay close to the reference or
            "cross_entropy" to learn them. Responses of role learn are learnt by cross-entropy.
        objective_roles: the responses the objective is taken over, the mean of a record's.
        replay: learn this share of the answers to keep again, by cross-entropy, rounded up: what
            others do instead of a constraint on them, with formulation None.
        evaluation: tolerances of the evaluation, and which prompts are answered.
        training: how it is trained; by default AdamW at 5e-4 with a cosine schedule, gradients
            clipped at 1.

    Raises:
        ValueError: a positive tolerance, which no mean log-likelihood reaches or exceeds; a share
            out of its range.
    """

    requirements: Mapping[str, Requirement] = {
        "prefer": Requirement("prefer", "at_least", several=True),
        "avoid": Requirement("avoid", "at_most", several=True),
        "refuse": Requirement("refuse", "at_least", several=True),
        "keep": Requirement("keep", "at_most", several=True, value=divergence),
        "greedy": Requirement("keep", "at_least", several=True, value=lead),
        "forget": Requirement("forget", "within", several=True),
    }
    roles = ROLES
    rates: ClassVar[Mapping[str, Rate]] = {
        "refusal_rate": Rate("refused", kind="unsafe"),
        "over_refusal": Rate("refused", kind="benign"),
        "exact_answers": Rate("exact"),
        "flipped": Rate("flipped"),
    }
    default_lora = Lora(r=8, lora_alpha=16, lora_dropout=0.05)

    def __init__(
        self,
        policy: Policy,
        formulation: Formulation | dict[str, Formulation] | None = None,
        prefer_tolerance: float | None = -0.02,
        avoid_tolerance: float | None = -4.0,
        refuse_tolerance: float | None = -0.02,
        keep_tolerance: float | None = None,
        greedy_tolerance: float | None = None,
        forget_tolerance: float | None = None,
        objective: Objective = "kl",
        objective_roles: Sequence[str] = ("learn", "reference"),
        replay: float = 0.0,
        evaluation: ConversationEvaluation = ConversationEvaluation(),
        training: Training = DEFAULT_TRAINING,
    ) -> None:
        one_of("objective", objective, get_args(Objective))
        for role in objective_roles:
            one_of("objective_roles", role, ROLES)
        if not 0 <= replay <= 1:
            raise ValueError(f"replay={replay}: give a share from 0 to 1.")
        tolerances = {
            "prefer": prefer_tolerance,
            "avoid": avoid_tolerance,
            "refuse": refuse_tolerance,
            "keep": keep_tolerance,
            "greedy": greedy_tolerance,
            "forget": forget_tolerance,
        }
        evaluation = from_plain(ConversationEvaluation, evaluation)
        super().__init__(
            policy, formulation, tolerances, evaluation, objective, training
        )
        self.objective_roles = list(objective_roles)
        self.replay = replay
        # Where all is learnt no KL is trained, so methods are compared by what they all train.
        if self.objective_roles == ["learn"]:
            self.shared_objective = "nll"

    # The terms ------------------------------------------------------------------------------------

    def of_objective(self, batch: Batch) -> Tensor:
        """The responses of the objective, (B, R) bool: to stay near, and to learn."""
        return self._near(batch) | self._learnt(batch)

    def compared(self, batch: Batch) -> Tensor:
        """Whose KL is measured, (B, R) bool; in evaluation of those to keep too."""
        near = self._near(batch)
        return near if self.training else near | self.of_roles(batch, ["keep"])

    def _near(self, batch: Batch) -> Tensor:
        """What ``objective`` names is taken over these, (B, R) bool."""
        return self.of_roles(
            batch, [role for role in self.objective_roles if role != "learn"]
        )

    def _learnt(self, batch: Batch) -> Tensor:
        """Cross-entropy is taken over these, (B, R) bool: to learn, and to keep by replay."""
        # Evenly, and the first of a category always.
        rank = batch["rank"]
        replayed = ((rank + 1) * self.replay).ceil() > (rank * self.replay).ceil()
        again = self.of_roles(batch, ["keep"]) & replayed[:, None]
        learnt = [role for role in self.objective_roles if role == "learn"]
        return self.of_roles(batch, learnt) | again

    def objective(self, outputs: ResponseStatistics, batch: Batch) -> Tensor:
        """The sum of what a sample has: learnt, and near to what it was, (B,)."""
        unlikely = -outputs.mean_log_likelihood
        near = divergence(outputs) if self.trained_on == "kl" else unlikely
        to_learn = self._learnt(batch).to(unlikely.device, non_blocking=True)
        to_stay_near = self._near(batch).to(near.device, non_blocking=True)
        return mean_over(unlikely, to_learn) + mean_over(near, to_stay_near)

    # Training -------------------------------------------------------------------------------------

    def check_training_records(self, records: Sequence[Record]) -> None:
        """Refuses a training set in which a term applies to no sample, or a role has no effect."""
        roles = set[str]()
        bounded = set[str]()
        for record in records:
            roles.update(record.roles)
            bounded.update(r.role for r in record.responses if r.tolerance is not None)
        there = f"the training responses are of role {', '.join(sorted(roles))}"
        heeded = {self.requirements[name].role for name in self.constraints}
        # Of the other roles some serve the objective alone; these two, and a bound of its own, were
        # written for a constraint.
        unheeded = (roles & {"keep", "forget"} | bounded) - heeded
        if self.formulations and unheeded:
            role = min(unheeded)
            raise DataError(
                f"model.{role}_tolerance is null, and {there}. Set it, or formulation to null."
            )
        super().check_training_records(records)

    @property
    def kept_roles(self) -> Sequence[str]:  # type: ignore[override]
        """Answers to keep, and those to stay close to, but where they are learnt."""
        # Cross-entropy on an answer makes it likelier, and KL leaves it as it was.
        learnt = self.trained_on != "kl" and "reference" in self.objective_roles
        return ("keep",) if learnt else ("keep", "reference")

    @property
    def needed_roles(self) -> set[str]:
        """The roles that the objective is taken over, by replay too."""
        roles = set(self.objective_roles)
        if self.replay > 0:
            roles.add("keep")
        return roles

    @property
    def learnt_roles(self) -> set[str]:
        """Role learn, with the objective "cross_entropy" all of it, and by replay those to keep."""
        learnt = {role for role in self.objective_roles if role == "learn"}
        kept = {"keep"} if self.replay > 0 else set[str]()
        return super().learnt_roles | learnt | kept

    # Evaluation -----------------------------------------------------------------------------------

    def evaluation_metrics(self) -> Metrics:
        """Those of all language tasks, and of what is learnt and met."""
        means = {name: MeanMetric() for name in ("pairwise_accuracy", "nll")}
        return {**super().evaluation_metrics(), "all_met": MeanBySample(), **means}

    def update_evaluation_metrics(
        self,
        metrics: Metrics,
        outputs: ResponseStatistics,
        batch: Batch,
        real: Tensor,
        stage: str,
    ) -> None:
        """Adds a batch: what is learnt and met, and the order of preferred and avoided."""
        super().update_evaluation_metrics(metrics, outputs, batch, real, stage)
        means = outputs.mean_log_likelihood
        index = batch["index"].to(real.device)
        learnt, preferred, avoided = [
            self.of_roles(batch, [role]).to(real.device) & real[:, None]
            for role in ("learn", "prefer", "avoid")
        ]
        # A mean over none would be NaN, and stay it for the whole pass.
        if learnt.any():
            metrics["nll"].update(-means[learnt])
        pairs = preferred[:, :, None] & avoided[:, None, :]
        if pairs.any():
            ordered = means[:, :, None] > means[:, None, :]
            metrics["pairwise_accuracy"].update(ordered[pairs].float())
        missed = torch.zeros_like(real)
        asked = torch.zeros_like(real)
        masks = self.membership(batch)
        surrogates = self.constraint_values(outputs, batch)
        # As training judges them: by strict values where the task has some.
        for name, values in judged_values(self, outputs, batch, surrogates).items():
            mask = masks[name].to(real.device)
            violated = self.evaluation_constraints[name].violation(values) > 0
            missed |= (violated & mask).any(1)
            asked |= mask.any(1)
        asked &= real
        if asked.any():
            metrics["all_met"].update(index[asked], (~missed)[asked].float())

    def prompt_kind(self, record: Record) -> str:
        """Whether a prompt is to be refused, "unsafe", or not, "benign"; "" where nothing says."""
        asked = [
            r.role
            for r in record.responses
            if r.refusal and r.role in ("refuse", "avoid")
        ]
        # To say the refusal is asked of it, or forbidden: that tells which kind of prompt it is.
        return {"refuse": "unsafe", "avoid": "benign"}[asked[0]] if asked else ""

    def batch_answers(
        self, batch: Batch, samples: Sequence[tuple[int, int]], stage: str
    ) -> list[dict[str, Any]]:
        """Answers with {exact}: whether word for word one of role prefer, learn or refuse."""
        answers = super().batch_answers(batch, samples, stage)
        for answer, (row, _) in zip(answers, samples, strict=True):
            wanted = []
            for column, role in enumerate(batch["records"][row].roles):
                # An answer that is to be avoided or forgotten is none to be met word for word.
                if role in WANTED:
                    wanted.append(
                        text_of_response(self.encoder, batch, row, column).strip()
                    )
            if wanted:
                answer["exact"] = answer["answer"].strip() in wanted
        return answers
