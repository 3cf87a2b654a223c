"""Conversations of your own, under requirements: learn this, keep that, and never say the other.

A record has a prompt and any number of responses, each with a role. With s̄(y) the mean
log-likelihood of a response's tokens under the policy π,

    minimise   −s̄(y) over the responses of role learn
               + KL(π ‖ π_ref) a token over those of role reference   (or −s̄, or DPO, or SimPO)
    subject to KL(π ‖ π_ref) ≤ ε_keep a token  for every response of role keep      "keep"
               s̄(y) ≥ ε_prefer                 for every response of role prefer    "prefer"
               s̄(y) ≥ s̄_ref(y) − δ             for every response of role prefer    "floor"
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
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.functional import logsigmoid
from torchmetrics import MeanMetric, Metric

from pl_pointwise import Formulation, Optimization, Training
from pl_pointwise.checkpoints import from_plain
from pl_pointwise.errors import DataError, one_of
from pl_pointwise.evaluation import MeanBySample
from pl_pointwise.step import judged_values
from pl_pointwise.tasks.language_model.adapters import Lora
from pl_pointwise.tasks.language_model.answering import Rate
from pl_pointwise.tasks.language_model.calls import call_report, text_of_response
from pl_pointwise.tasks.language_model.module import LanguageModelModule
from pl_pointwise.tasks.language_model.policy import Policy
from pl_pointwise.tasks.language_model.preference_losses import PreferenceLosses, preference_loss
from pl_pointwise.tasks.language_model.records import Record
from pl_pointwise.tasks.language_model.roles import Requirement, divergence, drop, mean_over
from pl_pointwise.tasks.language_model.scoring import ResponseStatistics

from .forgetting import ForgetQuality
from .records import ROLES

Objective = Literal["kl", "cross_entropy", "dpo", "simpo"]
PAIRED = ("dpo", "simpo")
"""Objectives over pairs of a preferred and an avoided response of a record."""

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
        keep_tolerance: likewise ε_keep.
        floor_tolerance: likewise δ of the floor.
        forget_tolerance: likewise ε_forget.
        answer_in: data sets of `test` whose prompts are answered, of "test" and "train". With
            "test" the command `validate` answers "val" too; the validation within a fit never does.
        answers_at_most: so many prompts of each category and data set, in an order that has nothing
            to do with the file's; None for all.
    """

    prefer_tolerance: float | None = None
    avoid_tolerance: float | None = None
    refuse_tolerance: float | None = None
    keep_tolerance: float | None = None
    floor_tolerance: float | None = None
    forget_tolerance: float | None = None
    answer_in: list[str] = field(default_factory=list)
    answers_at_most: int | None = None

    def __post_init__(self) -> None:
        for name in self.answer_in:
            one_of("answer_in", name, TEST_SETS)


@dataclass
class Baselines:
    """What others do in place of constraints on answers to keep and to forget.

    They are terms of the objective; set ``formulation`` to null beside them. A weight on the KL of
    the answers to keep is the formulation :class:`~pl_pointwise.Penalty` of linear shape.

    Args:
        replay: learn this share of the answers to keep again, by cross-entropy, rounded up.
        forget_loss: "ascent" is s̄ of the answers to forget (gradient difference), "npo" is
            −2/β·log σ(−β(s − s_ref)) of them (negative preference optimization); None for neither.
        forget_weight: of that loss.
        npo_beta: β of NPO.

    Raises:
        ValueError: a share outside [0, 1], or a weight or β that is not above 0.
    """

    replay: float = 0.0
    forget_loss: Literal["ascent", "npo"] | None = None
    forget_weight: float = 1.0
    npo_beta: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.replay <= 1:
            raise ValueError(f"baselines.replay={self.replay}: give a share between 0 and 1.")
        one_of("baselines.forget_loss", self.forget_loss, (None, "ascent", "npo"))
        for name in ("forget_weight", "npo_beta"):
            if not getattr(self, name) > 0:
                raise ValueError(f"baselines.{name}={getattr(self, name)}: give a number above 0.")


DEFAULT_EVALUATION = ConversationEvaluation()
NO_BASELINES = Baselines()
PREFERENCE_LOSSES = PreferenceLosses()
LEARN_AND_REFERENCE = ("learn", "reference")


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
        keep_tolerance: ε_keep, the largest KL a token of one of role keep, in nats.
        floor_tolerance: δ, by which one of role prefer may become less likely a token; None for no
            such constraint.
        forget_tolerance: ε_forget, how far one of role forget may be from what it is to be.
        objective: of responses of other roles than learn, "kl" to stay close to the reference or
            "cross_entropy" to learn them; or "dpo" or "simpo" over the pairs of a preferred and an
            avoided response of a record. Responses of role learn are learnt by cross-entropy.
        objective_roles: the responses the objective is taken over, the mean of a record's. A record
            that says ``"objective": true`` and has none of these takes all of its responses.
        losses: hyper-parameters of DPO and SimPO.
        baselines: rivals of the constraints on what is kept and forgotten.
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
        "keep": Requirement("keep", "at_most", several=True, value=divergence),
        "floor": Requirement("prefer", "at_most", several=True, value=drop),
        "forget": Requirement("forget", "within", several=True),
    }
    need_reference = ("kl", "dpo")
    roles = ROLES
    rates: ClassVar[Mapping[str, Rate]] = {
        "refusal_rate": Rate("refused", kind="unsafe"),
        "over_refusal": Rate("refused", kind="benign", higher_is_better=False),
        "exact_answers": Rate("exact"),
        "valid_calls": Rate("valid_call"),
        "existing_tool": Rate("existing_tool"),
        "right_tool": Rate("right_tool"),
        "flipped": Rate("flipped", higher_is_better=False),
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
        floor_tolerance: float | None = None,
        forget_tolerance: float | None = None,
        objective: Objective = "kl",
        objective_roles: Sequence[str] = LEARN_AND_REFERENCE,
        losses: PreferenceLosses = PREFERENCE_LOSSES,
        baselines: Baselines = NO_BASELINES,
        evaluation: ConversationEvaluation = DEFAULT_EVALUATION,
        training: Training = DEFAULT_TRAINING,
    ) -> None:
        one_of("objective", objective, get_args(Objective))
        for role in objective_roles:
            one_of("objective_roles", role, ROLES)
        evaluation = from_plain(ConversationEvaluation, evaluation)
        own = {
            "prefer": prefer_tolerance,
            "avoid": avoid_tolerance,
            "refuse": refuse_tolerance,
            "keep": keep_tolerance,
            "floor": floor_tolerance,
            "forget": forget_tolerance,
        }
        super().__init__(policy, formulation, own, evaluation, objective, training)
        self.objective_roles = list(objective_roles)
        self.losses = from_plain(PreferenceLosses, losses)
        self.baselines = from_plain(Baselines, baselines)
        if self.objective_roles == ["learn"]:
            self.shared_objective = "nll"

    # The terms ------------------------------------------------------------------------------------

    def of_objective(self, batch: Mapping[str, Any]) -> Tensor:
        """The responses of the objective, (B, R) bool: learnt, compared, in pairs, forgotten."""
        found = self._rest(batch) | self._learnt(batch)
        if self.baselines.forget_loss is not None:
            found = found | self.of_roles(batch, ["forget"])
        return found

    def compared(self, batch: Mapping[str, Any]) -> Tensor:
        """Besides, in evaluation, the responses to keep, whoever keeps them and how."""
        found = self._rest(batch)
        return found if self.training else found | self.of_roles(batch, ["keep"])

    def _rest(self, batch: Mapping[str, Any]) -> Tensor:
        """What ``objective`` names is taken over these, (B, R) bool."""
        found = super().of_objective(batch)
        if self.trained_on in PAIRED:
            chosen, rejected = (self.of_roles(batch, [role]) for role in ("prefer", "avoid"))
            both = chosen.any(1, keepdim=True) & rejected.any(1, keepdim=True)
            found = (chosen | rejected) & both & (batch["objective"] != 0)[:, None]
        return found & ~self.of_roles(batch, ["learn"])

    def _learnt(self, batch: Mapping[str, Any]) -> Tensor:
        """Cross-entropy is taken over these, (B, R) bool: to learn, and to keep by replay."""
        # Evenly, and the first of a category always.
        rank, share = batch["rank"], self.baselines.replay
        replayed = ((rank + 1) * share).ceil() > (rank * share).ceil()
        again = self.of_roles(batch, ["keep"]) & replayed[:, None]
        return (super().of_objective(batch) & self.of_roles(batch, ["learn"])) | again

    def referred(self, batch: Mapping[str, Any]) -> Tensor:
        """Besides, what NPO compares."""
        found = super().referred(batch)
        npo = self.baselines.forget_loss == "npo"
        return found | self.of_roles(batch, ["forget"]) if npo else found

    def objective(self, outputs: ResponseStatistics, batch: dict[str, Any]) -> Tensor:
        """The sum of what a sample has: learnt, as before or in order, and forgotten, (B,)."""

        def mean(values: Tensor, mask: Tensor) -> Tensor:
            return mean_over(values, mask.to(values.device, non_blocking=True))

        rest, unlikely = self._rest(batch), -outputs.mean_log_likelihood
        found = mean(unlikely, self._learnt(batch))
        if self.trained_on in PAIRED:
            chosen, rejected = (
                (self.of_roles(batch, [role]) & rest).to(found.device, non_blocking=True)
                for role in ("prefer", "avoid")
            )
            found = found + preference_loss(self.trained_on, outputs, self.losses, chosen, rejected)
        else:
            kl = self.trained_on == "kl"
            found = found + mean(divergence(outputs) if kl else unlikely, rest)
        if self.baselines.forget_loss is not None:
            lost = mean(self._forget_loss(outputs), self.of_roles(batch, ["forget"]))
            found = found + self.baselines.forget_weight * lost
        return found

    def _forget_loss(self, outputs: ResponseStatistics) -> Tensor:
        """Of each response, (B, R)."""
        if self.baselines.forget_loss == "ascent":
            return outputs.mean_log_likelihood
        beta, reference = self.baselines.npo_beta, outputs.reference_log_likelihood
        before = outputs.log_likelihood.detach() if reference is None else reference
        return -2 / beta * logsigmoid(-beta * (outputs.log_likelihood - before))

    # Training -------------------------------------------------------------------------------------

    def check_training_records(self, records: Sequence[Record]) -> None:
        """Refuses a training set in which nobody carries the objective or any constraint.

        And warns where an epoch has few optimizer steps, though there are records for more.
        """
        roles = {role for record in records for role in record.roles}
        for role in ("keep", "forget"):
            unused = role not in self.constraints and self.formulations
            if role in roles and unused:
                raise DataError(
                    f"There are training responses of role {role}, and {role}_tolerance is null. "
                    f"Set model.{role}_tolerance, or formulation to null."
                )
        takes_part = [*self.objective_roles, *(["forget"] if self.baselines.forget_loss else [])]
        takes_part += ["keep"] if self.baselines.replay else []
        if self.trained_on in PAIRED:
            pairs = any({"prefer", "avoid"} <= set(record.roles) for record in records)
            if not pairs:
                raise DataError(
                    f"objective={self.trained_on}: no training record has a response of role "
                    "prefer and one of role avoid. Give pairs, or set another objective."
                )
        elif not any(_carries_objective(record, takes_part) for record in records):
            raise DataError(
                f"No training record carries the objective: there is no response of role "
                f"{' or '.join(self.objective_roles)}, only of {', '.join(sorted(roles))}. Add "
                "conversations that are to stay as they are, or name roles in objective_roles."
            )
        required = {self.requirements[name].role for name in self.constraints}
        if self.formulations and not roles & required:
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
        of_roles = {"nll": MeanMetric(), "forget_quality": ForgetQuality()}
        return {"kl": MeanMetric(), **within, **of_roles} | super().evaluation_metrics()

    def update_evaluation_metrics(
        self,
        metrics: dict[str, Metric],
        outputs: ResponseStatistics,
        batch: dict[str, Any],
        real: Tensor,
        stage: str,
    ) -> None:
        """Besides, what is learnt, forgotten and met, and the order of preferred and avoided."""
        super().update_evaluation_metrics(metrics, outputs, batch, real, stage)
        means, roles = outputs.mean_log_likelihood, batch["roles"].to(real.device)
        learnt, forgotten = (
            (roles == ROLES.index(role)) & real[:, None] for role in ("learn", "forget")
        )
        if learnt.any():
            metrics["nll"].update(-means[learnt])
        if forgotten.any():
            targets = means - self._response_values("forget", outputs, batch)
            metrics["forget_quality"].update(means[forgotten], targets[forgotten])
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

        And {exact}, whether it is a response of role prefer, learn or refuse word for word, where
        there is one, {valid_call, existing_tool, right_tool} where a preferred response calls
        tools, and {before, flipped} where a response is to be kept: the reference's answer, and
        whether it was another.
        """
        answers = super().batch_answers(batch, samples, stage)
        self._add_answers_before(answers, batch, samples)
        for answer, (row, _) in zip(answers, samples, strict=True):
            texts: dict[str, list[str]] = {"prefer": [], "learn": [], "refuse": []}
            for role, found in texts.items():
                columns = (batch["roles"][row] == ROLES.index(role)).nonzero()[:, 0].tolist()
                found += [text_of_response(self.encoder, batch, row, c) for c in columns]
            if wanted := [text.strip() for found in texts.values() for text in found]:
                answer["exact"] = answer["answer"].strip() in wanted
            calls = texts["prefer"] + texts["learn"]
            answer |= call_report(answer["answer"], calls, batch["records"][row])
        return answers

    def _add_answers_before(
        self,
        answers: list[dict[str, Any]],
        batch: Mapping[str, Any],
        samples: Sequence[tuple[int, int]],
    ) -> None:
        kept = self.of_roles(batch, ["keep"]).any(1).tolist()
        places = [place for place, (row, _) in enumerate(samples) if kept[row]]
        if not places:
            return
        rows = [samples[place][0] for place in places]
        before = self.generate(
            batch["prompt_ids"][rows], batch["prompt_lengths"][rows], reference=True
        )
        for place, text in zip(places, before.texts, strict=True):
            flipped = answers[place]["answer"] != text
            answers[place] |= {"before": text, "flipped": flipped}


def _carries_objective(record: Record, roles: Sequence[str]) -> bool:
    """Whether a record carries the objective, as in a batch."""
    if record.objective is not None:
        return record.objective
    return any(role in roles for role in record.roles)
