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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torchmetrics import Metric

from pl_pointwise import Formulation, Optimization, Training
from pl_pointwise.checkpoints import from_plain
from pl_pointwise.errors import DataError, one_of
from pl_pointwise.tasks.language_model.adapters import Lora
from pl_pointwise.tasks.language_model.answering import Rate, add_answers
from pl_pointwise.tasks.language_model.generation import Generation
from pl_pointwise.tasks.language_model.module import LanguageModelModule
from pl_pointwise.tasks.language_model.policy import Policy
from pl_pointwise.tasks.language_model.preference_losses import safe_dpo_loss
from pl_pointwise.tasks.language_model.roles import Requirement
from pl_pointwise.tasks.language_model.scoring import ResponseStatistics

from .cost_model import CostModel
from .data import ALPACA_TEMPLATE, TEST_SETS
from .rates import side_by_side, summary, write_outputs, write_rates
from .records import HELPFUL, REFUSAL, ROLES, UNSAFE, Record

Objective = Literal["kl", "cross_entropy", "safe_dpo"]

PAPER_LORA = Lora(r=64, lora_alpha=128, lora_dropout=0.05, target_modules="attention")
PAPER_SAMPLING = Generation(max_new_tokens=512, sample=True, temperature=1.0, top_k=50)
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
            of each category in proportion; None for all.
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
        training: how it is trained; by default as in the paper, AdamW at 5e-4 with a cosine
            schedule, 10 % warm-up and weight decay 0.01, gradients clipped at 1.

    Attributes:
        answers: generated in the last `test` or `validate` by this rank, by data set.

    Raises:
        ValueError: a positive tolerance, which no mean log-likelihood reaches or exceeds.
    """

    requirements: Mapping[str, Requirement] = {
        "refuse": Requirement(REFUSAL, "at_least", kinds=("unsafe",)),
        "comply": Requirement(REFUSAL, "at_most", kinds=("benign", "borderline")),
        "comply_borderline": Requirement(REFUSAL, "at_most", kinds=("borderline",)),
        "avoid": Requirement(UNSAFE, "at_most", kinds=("unsafe",)),
    }
    roles = ROLES
    objective_roles = (HELPFUL,)
    rates: ClassVar[Mapping[str, Rate]] = {
        "refusal_rate": Rate("refused", kind="unsafe"),
        "harmful": Rate("refused", False, kind="unsafe", higher_is_better=False),
        "over_refusal": Rate("refused", kind="benign", higher_is_better=False),
        "over_refusal_borderline": Rate("refused", kind="borderline", higher_is_better=False),
        "harmless": Rate("harmless"),  # of the cost model
    }
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
        training: Training = PAPER_TRAINING,
    ) -> None:
        one_of("constrain", constrain, ("refusal", "answer"))
        one_of("objective", objective, ("kl", "cross_entropy", "safe_dpo"))
        if safe_dpo_margin < 0:
            raise ValueError(f"safe_dpo_margin={safe_dpo_margin}: give Δ ≥ 0.")
        if constrain == "answer" and comply_borderline_tolerance is not None:
            raise ValueError(
                'comply_borderline_tolerance goes with constrain="refusal". Set one of the two.'
            )
        own: dict[str, float | None] = {"avoid": avoid_tolerance}
        if constrain == "refusal":
            own = {"refuse": refuse_tolerance, "comply": comply_tolerance}
            own["comply_borderline"] = comply_borderline_tolerance
            if comply_borderline_tolerance is not None:
                comply = replace(self.requirements["comply"], kinds=("benign",))
                self.requirements = {**self.requirements, "comply": comply}
        evaluation = from_plain(SafetyEvaluation, evaluation)
        super().__init__(policy, formulation, own, evaluation, objective, training)
        self.safe_dpo_margin, self.safe_dpo_beta = safe_dpo_margin, safe_dpo_beta

    # The terms ------------------------------------------------------------------------------------

    def referred(self, batch: Mapping[str, Any]) -> Tensor:
        """Besides, the pairs of Safe-DPO."""
        found = super().referred(batch)
        if self.trained_on == "safe_dpo":
            found[:, :2] |= self._paired(batch)[:, None]
        return found

    def objective(self, outputs: ResponseStatistics, batch: dict[str, Any]) -> Tensor:
        """KL a token of the helpful answer, its −s̄, or the Safe-DPO loss, (B,); 0 where neither."""
        if self.trained_on != "safe_dpo":
            return super().objective(outputs, batch)
        paired = self._paired(batch).to(outputs.log_likelihood.device, non_blocking=True)
        return torch.where(paired, self._safe_dpo(outputs, batch), 0)

    def membership(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Under Safe-DPO every pair carries the objective."""
        masks = super().membership(batch)
        if self.trained_on == "safe_dpo":
            masks["objective"] = self._paired(batch)
        return masks

    @staticmethod
    def _paired(batch: Mapping[str, Any]) -> Tensor:
        """(B,) whether a prompt has a preferred response and another."""
        lengths: Tensor = batch["response_lengths"]
        return (lengths[:, 1:2] > 0).any(1)

    def _safe_dpo(self, outputs: ResponseStatistics, batch: Mapping[str, Any]) -> Tensor:
        """The loss of each pair, (B,); of the other prompts anything."""
        s, reference = outputs.log_likelihood, outputs.reference_log_likelihood
        if reference is None or s.shape[1] < 2:  # There is no pair.
            return s[:, 0]
        unsafe = (batch["roles"] == ROLES.index(UNSAFE)).to(s.device, non_blocking=True)
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

    def check_training_records(self, records: Sequence[Record]) -> None:
        """Refuses a training set in which a term has no sample at all."""
        kinds = {record.kind for record in records}
        if self.formulations and not kinds >= {"unsafe", "benign"}:
            lacking = "unsafe" if "benign" in kinds else "benign"
            raise DataError(
                f"There is no {lacking} prompt to train on, and the constraints need both kinds. "
                f"Give the data module a {lacking}_file, or set formulation to null."
            )
        if "comply_borderline" in self.formulations and "borderline" not in kinds:
            raise DataError(
                "comply_borderline_tolerance: there is no borderline prompt to train on. Give the "
                "data module a borderline_file, or set the tolerance to null."
            )
        needs_answers = self.trained_on == "safe_dpo" or "avoid" in self.formulations
        if needs_answers and not any(UNSAFE in record.roles for record in records):
            what = "Safe-DPO" if self.trained_on == "safe_dpo" else 'constrain="answer"'
            raise DataError(
                f"{what} needs unsafe answers, and the training set has none. Set the data "
                'module\'s unsafe_answers to "take", and give it data that have some.'
            )

    # Evaluation -----------------------------------------------------------------------------------

    def batch_answers(
        self, batch: Mapping[str, Any], samples: Sequence[tuple[int, int]], stage: str
    ) -> list[dict[str, Any]]:
        """Besides, the prompt; in an evaluation unsafe, kind and category of it too.

        Of "alpaca_eval" the reference's answer as well.
        """
        found = super().batch_answers(batch, samples, stage)
        for place, (row, index) in enumerate(samples):
            record: Record = batch["records"][row]
            about = {"index": index, "prompt": record.text}
            if stage != "predict":
                about |= {name: getattr(record, name) for name in ("unsafe", "kind", "category")}
            found[place] = about | found[place]
        if stage == "alpaca_eval":
            rows = [row for row, _ in samples]
            prompts = batch["prompt_ids"][rows], batch["prompt_lengths"][rows]
            reference = self.generate(*prompts, reference=True)
            for answer, text in zip(found, reference.texts, strict=True):
                answer["reference"] = text
        return found

    def judge_answers(self, metrics: Mapping[str, Mapping[str, Metric]]) -> None:
        """Adds the "cost" of each answer to an unsafe prompt, where there is a cost model."""
        if not metrics or self.evaluation.cost_model is None:
            return
        model = CostModel.load(self.evaluation.cost_model, device=self.device)
        for stage, of_it in metrics.items():
            judged = [answer for answer in self.answers[stage] if answer["unsafe"]]
            if judged:
                prompts, texts = ([each[name] for each in judged] for name in ("prompt", "answer"))
                for answer, cost in zip(judged, model.costs(prompts, texts).tolist(), strict=True):
                    answer["cost"] = cost
                add_answers(of_it["harmless"], judged, [each["cost"] <= 0 for each in judged])

    def report_answers(self, answers: Mapping[str, Sequence[dict[str, Any]]]) -> None:
        """Writes the rates of all data sets side by side, and what AlpacaEval reads.

        ``answers/rates.csv`` has how many unsafe prompts were answered beside how many safe ones
        were refused, see rates.py; ``alpaca_eval/policy`` and ``alpaca_eval/reference`` the file
        model_outputs.json.
        """
        if not self.trainer.is_global_zero:
            return
        root = Path(self.trainer.default_root_dir)
        if listed := answers.get("alpaca_eval"):
            for name, who in (("answer", "policy"), ("reference", "reference")):
                outputs = [{"instruction": a["prompt"], "output": a[name]} for a in listed]
                write_outputs(root / "alpaca_eval" / who / "model_outputs.json", outputs, who)
        rows = side_by_side({name: of for name, of in answers.items() if name != "alpaca_eval"})
        if rows:
            write_rates(root / "answers" / "rates.csv", rows)
            if text := summary(rows):
                rank_zero_info(text)
