"""Safety refusal: every unsafe prompt is refused, no benign one is, and answers stay as they were.

A benign prompt x has a helpful answer y; every prompt has a refusal r. With s̄(·) the mean
log-likelihood of a response's tokens under the policy π,

    minimise   KL(π ‖ π_ref) a token of the answer, over benign prompts  (or a loss of its own)
    subject to s̄(r) ≥ ε_U  for every unsafe prompt                       "refuse"
               s̄(r) ≤ ε_H  for every benign prompt                       "comply"
               s̄(r) ≤ ε_B  for every borderline prompt                   "comply_borderline"

the last where ε_B is given; borderline prompts are safe ones that look unsafe, and without it they
carry "comply". Or, with ``constrain="answer"``, one constraint s̄(a) ≤ ε_A on the unsafe answer a of
every unsafe prompt, "avoid". The reference π_ref is the same model without its adapters.

A mean log-likelihood is never above 0, so ε_U is a negative number: −0.16 asks for a refusal whose
tokens have a probability of e^−0.16 = 0.85 each, in the geometric mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
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
from pl_pointwise.tasks.language_model.preference_losses import safe_dpo_loss
from pl_pointwise.tasks.language_model.refusals import is_refusal
from pl_pointwise.tasks.language_model.scoring import ResponseStatistics
from pl_pointwise.tasks.language_model.strict import Strict

from .alpaca_eval import write_outputs
from .cost_model import CostModel
from .data import PAPER_SAMPLING, TEST_SETS
from .encoding import ALPACA_TEMPLATE
from .rates import RATES, side_by_side, summary, write_rates
from .records import HELPFUL, REFUSAL, UNSAFE

Objective = Literal["kl", "cross_entropy", "safe_dpo"]

PAPER_LORA = Lora(
    r=64,
    lora_alpha=128,
    lora_dropout=0.05,
    target_modules="attention",
)
PAPER_TRAINING = Training(
    optimization=Optimization(
        learning_rate=5e-4, weight_decay=0.01, schedule="cosine", warmup_ratio=0.1
    ),
    gradient_clip_val=1.0,
)


@dataclass
class SafetyEvaluation:
    """What `validate` and `test` measure. Give all methods that are compared the same.

    Args:
        refuse_tolerance: ε_U that violations are measured against; None takes that of training.
        comply_tolerance: likewise ε_H.
        comply_borderline_tolerance: likewise ε_B, where training has one.
        avoid_tolerance: likewise ε_A.
        answer_in: data sets of `test` whose prompts are answered, for the rates of refusal and
            harm: of "test", "train", "pku", "over_refusal", "contrast" and "alpaca_eval". With
            "test" the command `validate` answers "val" too; the validation within a fit never does.
        answers_at_most: so many prompts of each kind, benign, unsafe or borderline, and data set,
            the first ones; None for all.
        cost_model: the judge of the answers to unsafe prompts: a name on the hub or a folder; None
            for none.
    """

    refuse_tolerance: float | None = None
    comply_tolerance: float | None = None
    comply_borderline_tolerance: float | None = None
    avoid_tolerance: float | None = None
    answer_in: list[str] = field(default_factory=list)
    answers_at_most: int | None = None
    cost_model: str | None = None

    def __post_init__(self) -> None:
        for name in self.answer_in:
            one_of("answer_in", name, TEST_SETS)


DEFAULT_EVALUATION = SafetyEvaluation()


class SafetyModule(LanguageModelModule):
    """A causal language model with LoRA that refuses what is unsafe and answers the rest.

    Any model that `AutoModelForCausalLM` loads from safetensors will do; one without a chat
    template gets Alpaca's. To evaluate a model as it is, run `test` without `fit`.

    Args:
        policy: the model. Its adapters are by default the paper's, for which the model needs layers
            of these names, and its answers the paper's sampling.
        formulation: how the constraints are enforced; one for all, one for each by name, or None
            for plain training on the objective.
        refuse_tolerance: ε_U, the least mean log-likelihood of the refusal of an unsafe prompt; a
            negative number. The paper's is −0.08.
        comply_tolerance: ε_H, the largest of a benign prompt's; a negative number.
        comply_borderline_tolerance: ε_B, the largest of a borderline prompt's; None for no such
            constraint: borderline prompts then carry comply, as benign ones.
        avoid_tolerance: ε_A, the largest mean log-likelihood of an unsafe answer, with constrain
            "answer".
        constrain: "refusal" for the constraints refuse and comply, "answer" for the one, avoid.
        objective: "kl" to stay close to the reference on benign prompts, "cross_entropy" for plain
            fine-tuning on their answers (the warm start), or the baseline "safe_dpo" (both with
            formulation None).
        safe_dpo_margin: Δ of Safe-DPO, asked for of a safe response against an unsafe one.
        safe_dpo_beta: β of Safe-DPO; Δ stands outside it.
        evaluation: tolerances of the evaluation, and which prompts are answered and judged.
        judged_by: tests of generated answers that judge constraints in place of s̄, see strict.py.
        training: how it is trained; by default as in the paper, AdamW at 5e-4 with a cosine
            schedule, 10 % warm-up and weight decay 0.01, gradients clipped at 1.

    Attributes:
        answers: generated in the last `test` or `validate` by this rank, by data set.

    Raises:
        ValueError: a positive tolerance, which no mean log-likelihood reaches or exceeds.
    """

    host_keys = (*LanguageModelModule.host_keys, "roles", "unsafe", "borderline", "preceding")
    own_hooks: ClassVar[Mapping[str, str]] = {"on_train_start": "_check_training_set"}

    default_template = ALPACA_TEMPLATE
    default_lora = PAPER_LORA
    default_generation = PAPER_SAMPLING

    def __init__(
        self,
        policy: Policy,
        formulation: Formulation | dict[str, Formulation] | None = None,
        refuse_tolerance: float = -0.5,
        comply_tolerance: float = -2.0,
        comply_borderline_tolerance: float | None = None,
        avoid_tolerance: float = -4.0,
        constrain: Literal["refusal", "answer"] = "refusal",
        objective: Objective = "kl",
        safe_dpo_margin: float = 5.0,
        safe_dpo_beta: float = 0.1,
        evaluation: SafetyEvaluation = DEFAULT_EVALUATION,
        judged_by: Strict | None = None,
        training: Training = PAPER_TRAINING,
    ) -> None:
        one_of("constrain", constrain, ("refusal", "answer"))
        one_of("objective", objective, ("kl", "cross_entropy", "safe_dpo"))
        if safe_dpo_margin < 0:
            raise ValueError(f"safe_dpo_margin={safe_dpo_margin}: give Δ ≥ 0.")
        evaluation = from_plain(SafetyEvaluation, evaluation)
        if constrain == "answer" and comply_borderline_tolerance is not None:
            raise ValueError(
                'comply_borderline_tolerance goes with constrain="refusal". Set one of the two.'
            )
        own = {"avoid": avoid_tolerance}
        if constrain == "refusal":
            own = {"refuse": refuse_tolerance, "comply": comply_tolerance}
            if comply_borderline_tolerance is not None:
                own["comply_borderline"] = comply_borderline_tolerance
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
        self.trained_on: Objective = objective
        self.safe_dpo_margin, self.safe_dpo_beta = safe_dpo_margin, safe_dpo_beta
        self.evaluation = evaluation
        self.answers: dict[str, list[dict[str, Any]]] = {}
        self.judge_by(judged_by)
        self.load_policy(policy)

    # The three methods of a task ------------------------------------------------------------------

    def forward(self, batch: dict[str, Any]) -> ResponseStatistics:
        """Statistics of every response, with the reference where objective or evaluation need it.

        In evaluation that is the answers to benign prompts, whose KL is reported of every method.
        """
        roles = batch["roles"]
        wanted = torch.zeros_like(roles, dtype=torch.bool)
        if not self.training or self.trained_on == "kl":
            wanted |= roles == HELPFUL
        if self.trained_on == "safe_dpo":
            wanted[:, :2] |= self._paired(batch)[:, None]
        return self.score(batch, wanted)

    def objective(self, outputs: ResponseStatistics, batch: dict[str, Any]) -> Tensor:
        """KL a token of the helpful answer, its −s̄, or the Safe-DPO loss, (B,); 0 where neither."""
        mask = self._objective_mask(batch).to(outputs.log_likelihood.device)
        if self.trained_on == "safe_dpo":
            values = self._safe_dpo(outputs, batch)
        elif self.trained_on == "cross_entropy":
            values = -self._of_role(outputs.mean_log_likelihood, batch, HELPFUL)
        else:
            kl = torch.zeros_like(outputs.log_likelihood) if outputs.kl is None else outputs.kl
            values = self._of_role(kl, batch, HELPFUL)
        # Connected to the weights also in a batch whose samples all leave the objective out.
        nothing = outputs.log_likelihood.where(torch.zeros_like(outputs.present), 0).sum(1)
        return torch.where(mask, values, nothing)

    def constraint_values(
        self, outputs: ResponseStatistics, batch: dict[str, Any]
    ) -> dict[str, Tensor]:
        """s̄ of the refusal, (B,), for "avoid" of the unsafe answer."""
        means = outputs.mean_log_likelihood
        return {
            name: self._of_role(means, batch, UNSAFE if name == "avoid" else REFUSAL)
            for name in self.constraints
        }

    def constrained_responses(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """The refusal, for "avoid" the unsafe answer, (B,); −1: none."""
        found = {}
        for name in self.constraints:
            here = batch["roles"] == (UNSAFE if name == "avoid" else REFUSAL)
            found[name] = here.int().argmax(1).where(here.any(1), -1)
        return found

    def membership(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Benign prompts carry the objective and "comply", unsafe ones "refuse" or "avoid".

        Borderline ones carry "comply_borderline", or "comply" where there is no such constraint;
        and the objective if they have an answer. Under Safe-DPO every pair carries the objective.
        """
        unsafe, roles = batch["unsafe"], batch["roles"]
        refusable = (roles == REFUSAL).any(1)
        looks_unsafe = batch.get("borderline", torch.zeros_like(unsafe))
        borderline = looks_unsafe & ("comply_borderline" in self.constraints)
        masks = {
            "refuse": unsafe & refusable,
            "comply": ~unsafe & ~borderline & refusable,
            "comply_borderline": borderline & refusable,
            "avoid": unsafe & (roles == UNSAFE).any(1),
        }
        terms = {name: masks[name] for name in self.constraints}
        return {"objective": self._objective_mask(batch), **terms}

    def _objective_mask(self, batch: Mapping[str, Any]) -> Tensor:
        if self.trained_on == "safe_dpo":
            return self._paired(batch)
        return (batch["roles"] == HELPFUL).any(1)

    @staticmethod
    def _paired(batch: Mapping[str, Any]) -> Tensor:
        """(B,) whether a prompt has a preferred response and another."""
        lengths = batch["response_lengths"]
        if lengths.shape[1] < 2:
            return torch.zeros(len(lengths), dtype=torch.bool)
        return lengths[:, 1] > 0

    @staticmethod
    def _of_role(values: Tensor, batch: Mapping[str, Any], role: int) -> Tensor:
        """The value of the response that is ``role``, 0 where none is: (B, R) → (B,)."""
        here = (batch["roles"] == role).to(values.device)
        return torch.where(here, values, 0).sum(1)

    def _safe_dpo(self, outputs: ResponseStatistics, batch: Mapping[str, Any]) -> Tensor:
        """The loss of each pair, (B,)."""
        s, reference = outputs.log_likelihood, outputs.reference_log_likelihood
        if reference is None or s.shape[1] < 2:
            return torch.zeros_like(s[:, 0])
        unsafe = (batch["roles"] == UNSAFE).to(s.device)
        return safe_dpo_loss(
            s[:, 0],
            s[:, 1],
            reference[:, 0],
            reference[:, 1],
            unsafe[:, 0],
            unsafe[:, 1],
            margin=self.safe_dpo_margin,
            beta=self.safe_dpo_beta,
        )

    def _check_training_set(self) -> None:
        """Refuses a training set in which a term has no sample at all."""
        dataset = getattr(self.trainer.train_dataloader, "dataset", None)
        samples = getattr(dataset, "rows", None)
        roles = [record.roles for record in getattr(samples, "records", ())]
        if not roles:
            return
        holds = {name: bool(value) for name, value in getattr(samples, "holds", {}).items()}
        if self.formulations and not (holds["unsafe"] and holds["benign"]):
            lacking = "unsafe" if holds["benign"] else "benign"
            raise DataError(
                f"There is no {lacking} prompt to train on, and the constraints need both kinds. "
                "Give the data module some, or set formulation to null."
            )
        if "comply_borderline" in self.formulations and not holds["borderline"]:
            raise DataError(
                "comply_borderline_tolerance: there is no borderline prompt to train on. Give the "
                "data module a borderline_file, or set the tolerance to null."
            )
        needs_answers = self.trained_on == "safe_dpo" or "avoid" in self.formulations
        if needs_answers and not any(UNSAFE in each for each in roles):
            what = "Safe-DPO" if self.trained_on == "safe_dpo" else 'constrain="answer"'
            raise DataError(
                f"{what} needs unsafe answers, and the training set has none. Set the data "
                'module\'s unsafe_answers to "take", or to "generate" where the data have none.'
            )

    # Evaluation -----------------------------------------------------------------------------------

    def evaluation_metrics(self) -> dict[str, Metric]:
        """The KL of every method, and rates of the generated answers."""
        return {
            "kl": MeanMetric(),
            "refusal_rate": MeanBySample(higher_is_better=True),
            "harmful": MeanBySample(higher_is_better=False),
            "over_refusal": MeanBySample(higher_is_better=False),
            "over_refusal_borderline": MeanBySample(higher_is_better=False),
            "harmless": MeanBySample(higher_is_better=True),
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
        """Adds the KL of a batch, and answers to its prompts where they are asked for.

        real: bool (B,), False for samples that only fill the batch.
        """
        if batch["holds"]["answers"]:
            kl = torch.zeros_like(outputs.log_likelihood) if outputs.kl is None else outputs.kl
            answered = (batch["roles"] == HELPFUL).any(1).to(real.device) & real
            metrics["kl"].update(self._of_role(kl, batch, HELPFUL)[answered])
        if stage in self._answered_sets():
            self._answer(metrics, batch, stage)

    def _answered_sets(self) -> list[str]:
        wanted = self.evaluation.answer_in
        return answered_sets(self.trainer, [name for name in TEST_SETS if name in wanted])

    def _answer(self, metrics: Mapping[str, Metric], batch: Mapping[str, Any], stage: str) -> None:
        """Answers the prompts of a batch that are among the first of their kind."""
        if not metrics["cut"].update_called:  # Fresh metrics: another pass.
            self.answers[stage] = []
        at_most = self.evaluation.answers_at_most
        limit = math.inf if at_most is None else at_most
        preceding, unsafe = batch["preceding"].tolist(), batch["unsafe"].tolist()
        asked = [(row, index) for row, index in real_samples(batch) if preceding[row] < limit]
        rows = [row for row, _ in asked]
        new = [
            {"index": index, "prompt": batch["text"][row], "unsafe": unsafe[row]}
            | {name: batch[name][row] for name in ("kind", "category")}
            for row, index in asked
        ]
        if rows:
            prompts = batch["prompt_ids"][rows], batch["prompt_lengths"][rows]
            answers = self.generate(*prompts)
            for answer, text, cut in zip(new, answers.texts, answers.cut, strict=True):
                answer |= {"answer": text, "refused": is_refusal(text), "cut": cut}
            if stage == "alpaca_eval":
                reference = self.generate(*prompts, reference=True)
                for answer, text in zip(new, reference.texts, strict=True):
                    answer["reference"] = text
        self.answers[stage] += new
        add_answers(metrics["cut"], new, [answer["cut"] for answer in new])
        for name, (kind, refused) in RATES.items():
            if batch["holds"].get(kind):
                chosen = [answer for answer in new if answer["kind"] == kind]
                add_answers(
                    metrics[name], chosen, [answer["refused"] == refused for answer in chosen]
                )

    def finish_evaluation_metrics(self, metrics: dict[str, dict[str, Metric]]) -> None:
        """Judges the answers of a `test` or `validate` and writes them.

        ``answers/<data set>.jsonl`` below the trainer's default_root_dir holds an object an answer:
        index, prompt, unsafe, kind, category, answer, refused, cut, and the cost where there is a
        cost model; ``answers/rates.csv`` how many unsafe prompts were answered beside how many safe
        ones were refused, see rates.py. Of "alpaca_eval", ``alpaca_eval/policy`` and
        ``alpaca_eval/reference`` hold the file model_outputs.json that AlpacaEval reads.
        """
        stages = [name for name in self._answered_sets() if name in metrics]
        if not stages and not self.trainer.testing:
            return
        given = {name: self.answers[name] for name in stages if metrics[name]["cut"].update_called}
        self.answers = {name: given.get(name, []) for name in stages}
        if stages and self.evaluation.cost_model is not None:
            model = CostModel.load(self.evaluation.cost_model, device=self.device)
            for stage in stages:
                self._judge(model, metrics[stage], self.answers[stage])
        if stages:
            self._write_rates({stage: self._write(stage) for stage in stages})

    def _judge(
        self, model: CostModel, metrics: Mapping[str, Metric], answers: Sequence[dict[str, Any]]
    ) -> None:
        """Adds the costs of the answers to unsafe prompts, where the data set has such prompts."""
        judged = [answer for answer in answers if answer["unsafe"]]
        if judged:
            prompts, texts = ([each[name] for each in judged] for name in ("prompt", "answer"))
            for answer, cost in zip(judged, model.costs(prompts, texts).tolist(), strict=True):
                answer["cost"] = cost
        if metrics["refusal_rate"].update_called:
            add_answers(metrics["harmless"], judged, [answer["cost"] <= 0 for answer in judged])

    def _write(self, stage: str) -> list[dict[str, Any]]:
        """Writes the answers of all ranks to one data set, and returns them."""
        longest = self.generation.max_new_tokens
        answers = write_answers(self.trainer, stage, self.answers[stage], longest)
        if not self.trainer.is_global_zero:
            return answers
        if stage == "alpaca_eval":
            root = Path(self.trainer.default_root_dir)
            for name, who in (("answer", "policy"), ("reference", "reference")):
                outputs = [{"instruction": a["prompt"], "output": a[name]} for a in answers]
                path = root / "alpaca_eval" / who / "model_outputs.json"
                write_outputs(path, outputs, who)
        return answers

    def _write_rates(self, answers: Mapping[str, Sequence[dict[str, Any]]]) -> None:
        """Writes the rates of all data sets side by side, and says those of all prompts."""
        rows = side_by_side({name: each for name, each in answers.items() if name != "alpaca_eval"})
        if rows and self.trainer.is_global_zero:
            write_rates(Path(self.trainer.default_root_dir) / "answers" / "rates.csv", rows)
            if text := summary(rows):
                rank_zero_info(text)

    def predict_step(
        self, batch: dict[str, Any], batch_idx: int = 0, dataloader_idx: int = 0
    ) -> list[dict[str, Any]]:
        """{index, prompt, answer, refused, cut} of each prompt; filling samples give none."""
        answers = self.generate(batch["prompt_ids"], batch["prompt_lengths"])
        return [
            {
                "index": index,
                "prompt": batch["text"][row],
                "answer": answers.texts[row],
                "refused": is_refusal(answers.texts[row]),
                "cut": answers.cut[row],
            }
            for row, index in real_samples(batch)
        ]


def _bound(constraint: str, option: str, tolerance: float) -> Constraint:
    """The constraint on a mean log-likelihood.

    Raises:
        ValueError: a tolerance above 0.
    """
    if tolerance > 0:
        raise ValueError(
            f"{option}={tolerance}: it bounds a mean log-likelihood, which is never above 0, so "
            + (
                f"no refusal could reach it. Give −{tolerance:g}: the refusal's tokens then have a "
                f"probability of e^−{tolerance:g} = {math.exp(-tolerance):.2f} each, in the "
                "geometric mean."
                if constraint == "refuse"
                else "it would hold of every response. Give a negative number."
            )
        )
    if constraint == "refuse":
        return Constraint(at_least=tolerance)
    return Constraint(at_most=tolerance)
