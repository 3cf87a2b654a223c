"""Safety refusal: every unsafe prompt is refused, no benign one is, and answers stay as they were.

A benign prompt x has a helpful answer y; every prompt has a refusal r. With s̄(·) the mean
log-likelihood of a response's tokens under the policy π,

    minimise   KL(π ‖ π_ref) a token of the answer, over benign prompts  (or a loss of its own)
    subject to s̄(r) ≥ ε_U  for every unsafe prompt                       "refuse"
               s̄(r) ≤ ε_H  for every benign prompt                       "comply"

or, with ``constrain="answer"``, one constraint s̄(a) ≤ ε_A on the unsafe answer a of every unsafe
prompt, "avoid". The reference π_ref is the same model without its adapters.

A mean log-likelihood is never above 0, so ε_U is a negative number: −0.16 asks for a refusal whose
tokens have a probability of e^−0.16 = 0.85 each, in the geometric mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from pl_pointwise import Constraint, Formulation, Optimization
from pl_pointwise.errors import DataError, one_of
from pl_pointwise.tasks.language_model.generation import Generation
from pl_pointwise.tasks.language_model.loading import Attention, Dtype, Lora
from pl_pointwise.tasks.language_model.module import LanguageModelModule, real_rows
from pl_pointwise.tasks.language_model.preference_losses import safe_dpo_loss
from pl_pointwise.tasks.language_model.scoring import ResponseStatistics, ScoringPath

from .alpaca_eval import write_outputs
from .cost_model import CostModel
from .data import PAPER_SAMPLING, TEST_SETS
from .encoding import ALPACA_TEMPLATE
from .records import HELPFUL, REFUSAL, UNSAFE
from .refusals import is_refusal

Objective = Literal["kl", "cross_entropy", "safe_dpo"]

PAPER_LORA = Lora(
    r=64, alpha=128, dropout=0.05, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]
)
PAPER_OPTIMIZATION = Optimization(
    learning_rate=5e-4, weight_decay=0.01, schedule="cosine", warmup_ratio=0.1
)


class SafetyModule(LanguageModelModule):
    """A causal language model with LoRA that refuses what is unsafe and answers the rest.

    Any model that `AutoModelForCausalLM` loads from safetensors will do; one without a chat
    template gets Alpaca's. To evaluate a model as it is, run `test` without `fit`.

    Args:
        model_name: the model: a name on the hub, a folder, or ``package:NAME/FOLDER``.
        formulation: how the constraints are enforced; one for all, one for each by name, or None
            for plain training on the objective.
        refuse_tolerance: ε_U, the least mean log-likelihood of the refusal of an unsafe prompt; a
            negative number.
        comply_tolerance: ε_H, the largest of a benign prompt's; a negative number.
        avoid_tolerance: ε_A, the largest mean log-likelihood of an unsafe answer, with constrain
            "answer".
        constrain: "refusal" for the constraints refuse and comply, "answer" for the one, avoid.
        refuse_evaluation_tolerance: ε_U that violations in validation and test are measured
            against; None takes `refuse_tolerance`. Give all methods that are compared the same.
        comply_evaluation_tolerance: likewise ε_H.
        avoid_evaluation_tolerance: likewise ε_A.
        objective: "kl" to stay close to the reference on benign prompts, "cross_entropy" for plain
            fine-tuning on their answers (the warm start), or the baseline "safe_dpo" (both with
            formulation None).
        safe_dpo_margin: Δ of Safe-DPO, asked for of a safe response against an unsafe one.
        safe_dpo_beta: β of Safe-DPO; Δ stands outside it.
        answer_in: data sets of `test` whose prompts are answered, for the rates of refusal and
            harm: of "test", "train", "pku", "over_refusal" and "alpaca_eval".
        answers_at_most: so many prompts of each kind, benign or unsafe, and data set, the first
            ones; None for all.
        cost_model: the judge of the answers to unsafe prompts: a name on the hub or a folder; None
            for none.
        generation: how prompts are answered; by default the paper's sampling.
        chat_template: instead of the tokenizer's own, a template or the path of a .jinja file; give
            the data module the same.
        merge_on_export: export the whole model, with its adapters merged into it, which another run
            can take as its `model_name`.
        lora: the adapters; by default the paper's, for which the model needs layers of these names.
        dtype: of the base's weights; "auto" is that of the files.
        attention: attention implementation; None leaves the choice to transformers.
        quantize_4bit: hold the base in 4 bits (needs bitsandbytes).
        gradient_checkpointing: compute layers again in the backward pass, for less memory.
        revision: of the model on the hub.
        scoring_path: "auto" takes the fastest way to log-likelihoods that agrees with the plain one
            on the first batch of a fit; a name takes that way: "shared_prompt", "chunked", "plain".
        reference_cache: None computes the reference in every step; "memory" keeps its hidden states
            at response positions for later epochs (2 bytes × hidden size a token); a folder keeps
            them on disk, for later runs too.
        optimization: optimizer and schedule; by default the paper's, AdamW at 5e-4 with a cosine
            schedule, 10 % warm-up and weight decay 0.01.
        micro_batch_size: prompts per forward and backward pass; None takes the whole batch.
        gradient_clip_val: largest norm of the gradient, or None; the paper's is 1.
        primal_steps: steps of the weights per dual step.
        order: "simultaneous" or "dual_first".
        multiplier_folder: keep multipliers in files there, mapped into memory; None keeps them in
            memory.

    Raises:
        ValueError: a positive tolerance, which no mean log-likelihood reaches or exceeds.
    """

    host_keys = (*LanguageModelModule.host_keys, "roles", "unsafe", "place")

    default_template = ALPACA_TEMPLATE

    def __init__(
        self,
        model_name: str,
        formulation: Formulation | dict[str, Formulation] | None = None,
        refuse_tolerance: float = -0.08,
        comply_tolerance: float = -2.0,
        avoid_tolerance: float = -4.0,
        constrain: Literal["refusal", "answer"] = "refusal",
        refuse_evaluation_tolerance: float | None = None,
        comply_evaluation_tolerance: float | None = None,
        avoid_evaluation_tolerance: float | None = None,
        objective: Objective = "kl",
        safe_dpo_margin: float = 5.0,
        safe_dpo_beta: float = 0.1,
        answer_in: Sequence[str] = (),
        answers_at_most: int | None = None,
        cost_model: str | None = None,
        generation: Generation = PAPER_SAMPLING,
        chat_template: str | None = None,
        merge_on_export: bool = False,
        lora: Lora = PAPER_LORA,
        dtype: Dtype = "auto",
        attention: Attention | None = None,
        quantize_4bit: bool = False,
        gradient_checkpointing: bool = False,
        revision: str | None = None,
        scoring_path: ScoringPath | Literal["auto"] = "auto",
        reference_cache: str | None = None,
        optimization: Optimization = PAPER_OPTIMIZATION,
        micro_batch_size: int | None = None,
        gradient_clip_val: float | None = 1.0,
        primal_steps: int = 1,
        order: Literal["simultaneous", "dual_first"] = "simultaneous",
        multiplier_folder: str | None = None,
    ) -> None:
        one_of("constrain", constrain, ("refusal", "answer"))
        one_of("objective", objective, ("kl", "cross_entropy", "safe_dpo"))
        for name in answer_in:
            one_of("answer_in", name, TEST_SETS)
        bounds = {
            "refuse": (refuse_tolerance, refuse_evaluation_tolerance),
            "comply": (comply_tolerance, comply_evaluation_tolerance),
            "avoid": (avoid_tolerance, avoid_evaluation_tolerance),
        }
        names = ("refuse", "comply") if constrain == "refusal" else ("avoid",)
        trained, judged = {}, {}
        for name in names:
            own, evaluation = bounds[name]
            trained[name] = _bound(name, f"{name}_tolerance", own)
            evaluation = own if evaluation is None else evaluation
            judged[name] = _bound(name, f"{name}_evaluation_tolerance", evaluation)
        if safe_dpo_margin < 0:
            raise ValueError(f"safe_dpo_margin={safe_dpo_margin}: give Δ ≥ 0.")
        super().__init__(
            formulation=formulation,
            constraints=trained,
            evaluation_constraints=judged,
            optimization=optimization,
            micro_batch_size=micro_batch_size,
            gradient_clip_val=gradient_clip_val,
            primal_steps=primal_steps,
            order=order,
            multiplier_folder=multiplier_folder,
        )
        self.trained_on: Objective = objective
        self.safe_dpo_margin, self.safe_dpo_beta = safe_dpo_margin, safe_dpo_beta
        self.answer_in, self.answers_at_most = list(answer_in), answers_at_most
        self.cost_model = cost_model
        self.answers: dict[str, list[dict[str, Any]]] = {}
        """Generated in this `test` by this rank, by data set."""
        self._holds: dict[str, Mapping[str, bool]] = {}
        """Which kinds of prompts each answered data set has."""
        self.load_policy(
            model_name,
            lora=lora,
            dtype=dtype,
            attention=attention,
            quantize_4bit=quantize_4bit,
            gradient_checkpointing=gradient_checkpointing,
            revision=revision,
            scoring_path=scoring_path,
            reference_cache=reference_cache,
            generation=generation,
            chat_template=chat_template,
            merge_on_export=merge_on_export,
        )

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
        carried = self._carries_objective(batch).to(outputs.log_likelihood.device)
        if self.trained_on == "safe_dpo":
            values = self._safe_dpo(outputs, batch)
        elif self.trained_on == "cross_entropy":
            values = -self._of_role(outputs.mean_log_likelihood, batch, HELPFUL)
        else:
            kl = torch.zeros_like(outputs.log_likelihood) if outputs.kl is None else outputs.kl
            values = self._of_role(kl, batch, HELPFUL)
        # Connected to the weights also in a batch whose samples all leave the objective out.
        nothing = outputs.log_likelihood.where(torch.zeros_like(outputs.present), 0).sum(1)
        return torch.where(carried, values, nothing)

    def constraint_values(
        self, outputs: ResponseStatistics, batch: dict[str, Any]
    ) -> dict[str, Tensor]:
        """s̄ of the refusal for "refuse" and "comply", of the unsafe answer for "avoid", (B,)."""
        means = outputs.mean_log_likelihood
        return {
            name: self._of_role(means, batch, UNSAFE if name == "avoid" else REFUSAL)
            for name in self.constraints
        }

    def membership(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Benign prompts carry the objective and "comply", unsafe ones "refuse" or "avoid".

        Under Safe-DPO every pair carries the objective.
        """
        unsafe, roles = batch["unsafe"], batch["roles"]
        refusable = (roles == REFUSAL).any(1)
        carried = {
            "refuse": unsafe & refusable,
            "comply": ~unsafe & refusable,
            "avoid": unsafe & (roles == UNSAFE).any(1),
        }
        terms = {name: carried[name] for name in self.constraints}
        return {"objective": self._carries_objective(batch), **terms}

    def _carries_objective(self, batch: Mapping[str, Any]) -> Tensor:
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

    def on_train_start(self) -> None:
        """Refuses a training set in which a term has no sample at all."""
        super().on_train_start()
        rows = getattr(self._training_set(), "rows", None)
        roles = [record.roles for record in getattr(rows, "records", ())]
        if not roles:
            return
        holds = {name: bool(value) for name, value in getattr(rows, "holds", {}).items()}
        if self.formulations and not (holds["unsafe"] and holds["benign"]):
            lacking = "unsafe" if holds["benign"] else "benign"
            raise DataError(
                f"There is no {lacking} prompt to train on, and the constraints need both kinds. "
                "Give the data module some, or set formulation to null."
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
        names = ("kl", "refusal_rate", "over_refusal", "harmless", "cut")
        return {name: MeanMetric() for name in names}

    def update_evaluation_metrics(
        self,
        metrics: dict[str, Metric],
        outputs: ResponseStatistics,
        batch: dict[str, Any],
        real: Tensor,
        stage: str,
    ) -> None:
        """Add a batch; `real` is false for rows that only fill it."""
        if not batch["holds"]["answers"]:
            return
        if outputs.kl is not None:
            answered = (batch["roles"] == HELPFUL).any(1).to(real.device) & real
            metrics["kl"].update(self._of_role(outputs.kl, batch, HELPFUL)[answered])
        else:
            metrics["kl"].update(torch.empty(0, device=real.device))

    def on_test_epoch_start(self) -> None:
        super().on_test_epoch_start()
        self.answers, self._holds = {}, {}

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Violations and KL, and answers in the data sets of ``answer_in``."""
        super().test_step(batch, batch_idx, dataloader_idx)
        loaders = self.trainer.test_dataloaders
        stage = list(loaders)[dataloader_idx] if isinstance(loaders, Mapping) else "test"
        if stage in self.answer_in:
            self._answer(stage, batch)

    def _answer(self, stage: str, batch: Mapping[str, Any]) -> None:
        limit = math.inf if self.answers_at_most is None else self.answers_at_most
        places, unsafe = batch["place"].tolist(), batch["unsafe"].tolist()
        found = self.answers.setdefault(stage, [])
        self._holds[stage] = batch["holds"]
        asked = [(row, index) for row, index in real_rows(batch) if places[row] < limit]
        by_whom = {"answer": False}
        if stage == "alpaca_eval":
            by_whom["reference"] = True
        new = [
            {"index": index, "prompt": batch["text"][row], "unsafe": unsafe[row]}
            for row, index in asked
        ]
        rows = [row for row, _ in asked]
        for name, reference in by_whom.items() if rows else ():
            answers = self.generate(
                batch["prompt_ids"][rows], batch["prompt_lengths"][rows], reference=reference
            )
            for record, text, cut in zip(new, answers.texts, answers.cut, strict=True):
                record[name] = text
                if name == "answer":
                    record |= {"refused": is_refusal(text), "cut": cut}
        found += new
        metrics = self._evaluations[stage].task
        for name, kind, value in (
            ("refusal_rate", "unsafe", "refused"),
            ("over_refusal", "benign", "refused"),
            ("cut", None, "cut"),
        ):
            if kind is None or batch["holds"][kind]:
                chosen = [r for r in new if kind is None or r["unsafe"] == (kind == "unsafe")]
                metrics[name].update(self._numbers([float(r[value]) for r in chosen]))

    def on_test_epoch_end(self) -> None:
        """Judges the answers, reports everything and writes the answers.

        ``answers/<data set>.jsonl`` below the trainer's default_root_dir holds an object an answer:
        index, prompt, unsafe, answer, refused, cut, and the cost where there is a cost model. Of
        "alpaca_eval", ``alpaca_eval/policy`` and ``alpaca_eval/reference`` hold the file
        model_outputs.json that AlpacaEval reads.
        """
        stages = [name for name in TEST_SETS if name in self._holds]
        if stages and self.cost_model is not None:
            self._judge(stages)
        super().on_test_epoch_end()
        for stage in stages:
            self._write(stage)

    def _judge(self, stages: Sequence[str]) -> None:
        """The costs of the answers to unsafe prompts."""
        assert self.cost_model is not None
        model = CostModel.load(self.cost_model, device=self.device)
        for stage in stages:
            judged = [record for record in self.answers.get(stage, []) if record["unsafe"]]
            costs: list[float] = []
            if judged:
                prompts, texts = ([r[name] for r in judged] for name in ("prompt", "answer"))
                costs = model.costs(prompts, texts).tolist()
            for record, cost in zip(judged, costs, strict=True):
                record["cost"] = cost
            harmless = self._numbers([float(cost <= 0) for cost in costs])
            if self._holds[stage]["unsafe"]:
                self._evaluations[stage].task["harmless"].update(harmless)

    def _write(self, stage: str) -> None:
        rows = self.answers.get(stage, [])
        if self.trainer.world_size > 1:
            gathered: list[Any] = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(gathered, rows)
            rows = [row for of_rank in gathered for row in of_rank]
        rows = sorted(rows, key=lambda row: row["index"])
        if not self.trainer.is_global_zero:
            return
        root = Path(self.trainer.default_root_dir)
        path = root / "answers" / f"{stage}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        cut = sum(row["cut"] for row in rows)
        rank_zero_info(
            f"{stage}: {len(rows):,} answers written to {path}; {cut:,} were cut at "
            f"{self.generation.max_new_tokens} tokens."
        )
        if stage == "alpaca_eval":
            for name, who in (("answer", "policy"), ("reference", "reference")):
                outputs = [{"instruction": r["prompt"], "output": r[name]} for r in rows]
                write_outputs(root / "alpaca_eval" / who / "model_outputs.json", outputs, who)

    def _numbers(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def predict_step(
        self, batch: dict[str, Any], batch_idx: int = 0, dataloader_idx: int = 0
    ) -> list[dict[str, Any]]:
        """{index, prompt, answer, refused, cut} of each prompt; filling rows give none."""
        answers = self.generate(batch["prompt_ids"], batch["prompt_lengths"])
        return [
            {
                "index": index,
                "prompt": batch["text"][row],
                "answer": answers.texts[row],
                "refused": is_refusal(answers.texts[row]),
                "cut": answers.cut[row],
            }
            for row, index in real_rows(batch)
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
