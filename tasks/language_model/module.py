"""The base of the language tasks: a causal language model, and bounds on its responses by role.

With s̄(y) the mean log-likelihood of a response's tokens under the policy π,

    minimise   KL(π ‖ π_ref) per token, or −s̄, the mean over a sample's responses of the objective
    subject to s̄(y) ≥ ε, or s̄(y) ≤ ε, for every response y that a constraint is about

The reference π_ref is the same model without its adapters, so there is none where all weights are
trained. A task is a table of requirements (roles.py), and perhaps a loss, metrics and rates of
generated answers of its own; then its evaluation has ``answer_in``, the data sets of `test` whose
prompts are answered, and ``answers_at_most``, so many of each kind by a batch's "rank".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torchmetrics import MeanMetric
from transformers import PreTrainedTokenizerBase

from pl_pointwise import Constraint, Formulation, PointwiseModule, Training
from pl_pointwise.errors import DataError, TrainingError
from pl_pointwise.evaluation import BEFORE, MeanBySample
from pl_pointwise.plain import from_plain
from pl_pointwise.task import Batch, Metrics, notes_of
from pl_pointwise.tasks.common.adapters import saved_adapter

from .answers import EvaluationAnswers, Rate, real_samples
from .before import as_reference, remember_answers, sentence_of_changes
from .data import EncodedResponses
from .export import export_model
from .likelihood.scoring import (
    ReferenceCache,
    ResponseScorer,
    ResponseStatistics,
    inference,
    reference_problem,
)
from .model.adapters import Lora, lora_of
from .model.generation import Generation, generate_answers
from .model.loading import Policy, load_encoder, load_language_model
from .roles import Requirement, divergence, drop, lead, mean_over
from .text.conversations import ConversationEncoder
from .text.records import Record
from .trained_state import drop_frozen_base, require_trained


class LanguageModelModule(PointwiseModule):
    """A causal language model whose responses are held to be likely or unlikely.

    Args:
        policy: the model.
        formulation: how the constraints are enforced; None for the objective alone.
        tolerances: ε by constraint; None for no such constraint.
        evaluation: what is measured, with a field NAME_tolerance for each constraint, None for ε.
        objective: "kl", "cross_entropy", or a loss of the task's own.
        training: how it is trained.

    Attributes:
        lora, generation: the policy's, or the task's where it has "default".

    Raises:
        ValueError: a positive tolerance, which no mean log-likelihood reaches; or no policy.
    """

    host_keys: tuple[str, ...] = (
        *("index", "records", "prompt_lengths", "response_lengths"),
        *("roles", "shift", "relative", "rank"),
    )
    shared_objective = "kl"

    # A task's own ---------------------------------------------------------------------------------

    requirements: Mapping[str, Requirement]
    """What each constraint asks; those without a tolerance are left out."""
    roles: ClassVar[tuple[str, ...]]
    """What a response may be, in the order in which the data module numbers them."""
    objective_roles: Sequence[str]
    """The roles of the responses that the objective is taken over."""
    need_reference: ClassVar[tuple[str, ...]] = ("kl",)
    """The objectives that need the reference."""
    rates: ClassVar[Mapping[str, Rate]] = {}
    """Metrics of generated answers, and "cut" with any; with none, evaluations generate none."""
    kept_roles: Sequence[str] = ()
    """The roles of answers that are to stay as the starting model has them."""
    default_template: ClassVar[str | None] = None
    """The chat template of a model whose tokenizer brings none; None refuses such a model."""
    default_lora: ClassVar[Lora]
    """The task's adapters."""
    default_generation: ClassVar[Generation] = Generation()
    """How the task answers prompts."""

    def __init__(
        self,
        policy: Policy,
        formulation: Formulation | dict[str, Formulation] | None,
        tolerances: Mapping[str, float | None],
        evaluation: Any,
        objective: str,
        training: Training,
    ) -> None:
        asked = [name for name, value in tolerances.items() if value is not None]
        measured = {name: getattr(evaluation, f"{name}_tolerance") for name in asked}

        def constraints(
            prefix: str, by_name: Mapping[str, float | None]
        ) -> dict[str, Constraint]:
            made = {}
            for name, tolerance in by_name.items():
                if tolerance is not None:
                    option = f"{prefix}{name}_tolerance"
                    made[name] = self.requirements[name].constraint(option, tolerance)
            return made

        super().__init__(
            formulation=formulation,
            constraints=constraints("", tolerances),
            evaluation_constraints=constraints("evaluation.", measured),
            training=training,
        )
        roles = [requirement.role for requirement in self.requirements.values()]
        self.host_keys = tuple({*self.host_keys, *roles})
        self.trained_on = objective
        self.evaluation = evaluation
        self._evaluation_answers = EvaluationAnswers(self)
        self._at_start = False  # Whether the adapters are off, within starting_model().
        self._load_policy(from_plain(Policy, policy))

    def _load_policy(self, policy: Policy) -> None:
        self.policy = policy
        lora = self.default_lora if policy.lora == "default" else policy.lora
        start = saved_adapter(policy.model_name, policy.revision)
        # Its own rank and layers: those of the task would be another adapter.
        if policy.continue_adapter and start is not None:
            lora = lora_of(start.config)
        # Its base is another model than that of the adapters which are trained.
        self.merged_start = start is not None and not policy.continue_adapter
        self.lora = lora if isinstance(lora, Lora) else None
        self.generation = self.default_generation
        if isinstance(policy.generation, Generation):
            self.generation = policy.generation
        # The data module takes these over.
        self.model_name = policy.model_name
        self.revision = policy.revision
        self.chat_template = policy.chat_template
        self.template_arguments = policy.template_arguments
        # Adapters are in float32 on a base of any dtype; whole models are stepped as they are.
        if self.lora is None and policy.dtype == "auto":
            policy = replace(policy, dtype="float32")
        elif self.lora is None and policy.dtype != "float32":
            rank_zero_warn(
                f"policy.lora=null with dtype: {policy.dtype}: a step smaller than 1/256 of a "
                'weight is lost in rounding. Leave dtype "auto" for float32 weights, and set '
                "trainer.precision to bf16-mixed for the speed."
            )
        with torch.random.fork_rng(devices=[]):
            # What the model's files lack depends on the seed alone, not on what was drawn before.
            torch.default_generator.manual_seed(torch.initial_seed())
            model = load_language_model(policy, self.lora)
        # Loaded in evaluation mode, and Lightning keeps the mode it finds.
        self.model = model.train()
        self.scorer = ResponseScorer(model, policy.scoring_method)
        self.register_state_dict_post_hook(drop_frozen_base)

    # The terms ------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> ResponseStatistics:
        """Statistics of every response, with the reference where it is needed."""
        leads = any(self.requirements[name].value is lead for name in self.constraints)
        # The adapters are off: what is scored is the reference itself.
        if self._at_start:
            return as_reference(self.scorer(batch, reference=False, leads=leads))
        return self.scorer(batch, self.referred(batch), leads)

    def of_objective(self, batch: Batch) -> Tensor:
        """The responses that the objective is taken over, (B, R) bool."""
        return self.of_roles(batch, self.objective_roles)

    def referred(self, batch: Batch) -> Tensor:
        """The responses that need the reference, (B, R) bool.

        In evaluation those of the objective do, as the KL of adapters is always reported; and
        always those of a requirement measured from it, and those with a bound relative to it.
        """
        reported = self.lora is not None and not self.training
        needed = reported or self.trained_on in self.need_reference
        measured_from_it = set[str]()
        for name in self.constraints:
            if self.requirements[name].value in (divergence, drop):
                measured_from_it.add(self.requirements[name].role)
        referred = self.of_roles(batch, sorted(measured_from_it)) | batch["relative"]
        return referred | self.compared(batch) if needed else referred

    def compared(self, batch: Batch) -> Tensor:
        """The responses whose KL to the reference is minimised or reported, (B, R) bool."""
        return self.of_objective(batch)

    def of_roles(self, batch: Batch, roles: Sequence[str]) -> Tensor:
        """The responses of some roles, (B, R) bool."""
        numbers = torch.tensor(
            [self.roles.index(role) for role in roles], dtype=torch.long
        )
        return torch.isin(batch["roles"], numbers)

    def objective(self, outputs: ResponseStatistics, batch: Batch) -> Tensor:
        """The mean over the objective's responses of KL per token, or of −s̄; 0 of none, (B,)."""
        # Safe-DPO, preference losses, a task of one's own.
        if self.trained_on not in ("kl", "cross_entropy"):
            return self.own_loss(outputs, batch)
        if self.trained_on == "kl":
            responses = self.compared(batch)
            values = divergence(outputs)
        else:
            responses = self.of_objective(batch)
            values = -outputs.mean_log_likelihood
        return mean_over(values, responses.to(values.device, non_blocking=True))

    def own_loss(self, outputs: ResponseStatistics, batch: Batch) -> Tensor:
        """The loss of an objective of the task's own, (B,)."""
        raise TrainingError(
            f"{type(self).__name__} trains on {self.trained_on!r}: define own_loss(outputs, batch)."
        )

    def constraint_values(
        self, outputs: ResponseStatistics, batch: Batch
    ) -> dict[str, Tensor]:
        """By constraint the values of the responses it is about, (B,) or (B, K)."""
        of_constraints = {}
        own_bounds = not batch["shift"].isnan().all()
        for name in self.constraints:
            requirement = self.requirements[name]
            values = requirement.value(outputs)
            # Most data sets have none: then nothing has to be moved.
            if own_bounds and requirement.value not in (drop, lead):
                values = self._from_own_bounds(name, values, outputs, batch)
            # Where a sample has no such response any column will do: membership() leaves it out.
            columns = requirement.columns(batch).clamp(min=0)
            columns = columns.to(values.device, non_blocking=True)
            rows = columns.reshape(len(columns), -1)
            of_constraints[name] = values.gather(1, rows).view(columns.shape)
        return of_constraints

    def _from_own_bounds(
        self, name: str, values: Tensor, outputs: ResponseStatistics, batch: Batch
    ) -> Tensor:
        """Of each response ℓ, (B, R); of one with its own bound ℓ − own + ε.

        That meets the role's ε where ℓ meets its own; of a relative one it is ℓ − ℓ_ref + δ + ε.
        A band is around the own bound, so there ε is not added. A floor and a lead know none.
        """
        shift = batch["shift"].to(values, non_blocking=True)
        moved = values
        reference = outputs.reference_mean_log_likelihood
        if reference is not None:
            relative = batch["relative"].to(values.device, non_blocking=True)
            moved = moved - torch.where(relative, reference, 0.0)
        moved = moved + shift.nan_to_num()
        if self.requirements[name].bound != "within":
            constraints = (
                self.constraints if self.training else self.evaluation_constraints
            )
            bound = constraints[name]
            moved = moved + (bound.at_least if bound.at_most is None else bound.at_most)
        return torch.where(shift.isnan(), values, moved)

    def membership(self, batch: Batch) -> dict[str, Tensor]:
        """A constraint applies to the samples that have responses for it."""
        # −1 stands where a sample has no response of the role.
        terms = {
            name: self.requirements[name].columns(batch) >= 0
            for name in self.constraints
        }
        return {"objective": self.of_objective(batch).any(1), **terms}

    # Training -------------------------------------------------------------------------------------

    def check_training_records(self, records: Sequence[Any]) -> None:
        """Refuses a training set in which no constraint, or not the objective, has a sample."""
        roles = set[str]()
        for record in records:
            roles.update(record.roles)
        there = f"the training responses are of role {', '.join(sorted(roles))}"
        constrained = {self.requirements[name].role for name in self.constraints}
        # Without a formulation constraints are only measured.
        if self.formulations and roles.isdisjoint(constrained):
            raise DataError(
                f"No constraint applies to any record ({', '.join(self.constraints)}): {there}. "
                "Add some, change roles, or set formulation to null."
            )
        if roles.isdisjoint(self.needed_roles):
            needed = " or ".join(sorted(self.needed_roles))
            raise DataError(
                f"The objective {self.trained_on} applies to no record: it needs a response of "
                f"role {needed}: {there}. Add such a response to at least one record, an answer "
                "to stay close to or to learn; or change objective or objective_roles."
            )

    @property
    def needed_roles(self) -> set[str]:
        """The roles of which a record in the objective has a response."""
        return set(self.objective_roles)

    @property
    def learnt_roles(self) -> set[str]:
        """Roles of answers that the objective makes likely by cross-entropy."""
        return {*self.objective_roles} if self.trained_on == "cross_entropy" else set()

    def prepare_fit(self) -> None:
        """At the start: training mode, a new choice of the scoring method, the reference cache."""
        self.train()
        self.scorer.method = self.policy.scoring_method
        if self.policy.reference_cache is not None and self.scorer.cache is None:
            try:
                self.scorer.cache = ReferenceCache(self.model)
            except ValueError as problem:
                rank_zero_warn(str(problem))

    def prepare_training(self) -> None:
        samples = self._trained_samples
        if samples is None:
            return
        self.check_training_records(samples.records)
        if self._measures_before:
            remember_answers(self, samples, notes_of(self))

    @property
    def _trained_samples(self) -> EncodedResponses | None:
        """The samples of this fit; None of a loader that is no data module's of the package."""
        dataset = getattr(self.trainer.train_dataloader, "dataset", None)
        samples = getattr(dataset, "rows", None)
        return samples if isinstance(samples, EncodedResponses) else None

    # Before and after -----------------------------------------------------------------------------

    @property
    def _measures_before(self) -> bool:
        return bool(getattr(self.evaluation, "before", True))

    def starting_model(self) -> AbstractContextManager[None] | None:
        """The same weights with the adapters off; None without, or with ``evaluation.before`` off.

        The scorer has chosen its method by then, which it cannot within.
        """
        if not self._measures_before or reference_problem(self.model) is not None:
            return None
        return self._adapters_off()

    @contextmanager
    def _adapters_off(self) -> Iterator[None]:
        with inference(self.model, reference=True):
            self._at_start = True
            try:
                yield
            finally:
                self._at_start = False

    def closing_sentences(self) -> list[str]:
        """How many of some answers that are to stay are other texts now than before training."""
        samples = self._trained_samples
        if not self._measures_before or samples is None:
            return []
        sentence = sentence_of_changes(self, samples, notes_of(self))
        return [sentence] if sentence else []

    # Evaluation -----------------------------------------------------------------------------------

    @property
    def answers(self) -> dict[str, list[dict[str, Any]]]:
        """Generated in the last `test` or `validate` by this rank, by data set."""
        return self._evaluation_answers.by_data_set

    def evaluation_metrics(self) -> Metrics:
        """The KL of adapters, and rates of the generated answers."""
        rates = {name: MeanBySample() for name in self._evaluation_answers.rates}
        return {"kl": MeanMetric(), **rates}

    def update_evaluation_metrics(
        self,
        metrics: Metrics,
        outputs: ResponseStatistics,
        batch: Batch,
        real: Tensor,
        stage: str,
    ) -> None:
        """Adds the KL of a batch, and answers to its prompts where they are asked for."""
        compared = self.compared(batch).to(real.device)
        carries = compared.any(1) & real
        # A batch of prompts to refuse alone has no answer to stay close to.
        if outputs.kl is not None and carries.any():
            metrics["kl"].update(mean_over(outputs.kl, compared)[carries])
        if stage.removeprefix(BEFORE) in self._evaluation_answers.data_sets:
            self._evaluation_answers.add(metrics, batch, stage)

    def prompt_kind(self, record: Record) -> str:
        """The kind of a prompt, of which some rates are."""
        return record.kind

    def batch_answers(
        self, batch: Batch, samples: Sequence[tuple[int, int]], stage: str
    ) -> list[dict[str, Any]]:
        """{index, answer, refused, cut} of some samples, each (position in the batch, index)."""
        rows = [row for row, _ in samples]
        generated = self.generate(
            batch["prompt_ids"][rows], batch["prompt_lengths"][rows]
        )
        answers = []
        for (_, index), answer in zip(samples, generated, strict=True):
            answers.append({"index": index, **answer})
        return answers

    def report_answers(self, answers: Mapping[str, Sequence[dict[str, Any]]]) -> None:
        """Writes more of the answers of all ranks, by data set; called on every rank."""

    def finish_evaluation_metrics(self, metrics: dict[str, Metrics]) -> None:
        """Writes the answers to ``answers/<data set>.jsonl``; none of a confidential model."""
        if not self._evaluation_answers.finish(metrics):
            return
        if not notes_of(self).confidential:
            self.report_answers(self._evaluation_answers.write())

    def predict_step(
        self, batch: Batch, batch_idx: int = 0, dataloader_idx: int = 0
    ) -> list[dict[str, Any]]:
        """{index, answer, refused, cut} of each prompt; filling samples give none."""
        samples = real_samples(batch)
        return self.batch_answers(batch, samples, "predict") if samples else []

    # Answers and export ---------------------------------------------------------------------------

    @cached_property
    def encoder(self) -> ConversationEncoder:
        """The model's own tokenizer and chat template."""
        return load_encoder(
            self.model_name,
            self.revision,
            self.chat_template,
            self.template_arguments,
            self.default_template,
        )

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.encoder.tokenizer

    def generate(
        self, prompt_ids: Tensor, prompt_lengths: Tensor, *, reference: bool = False
    ) -> list[dict[str, Any]]:
        """An answer to each prompt, (B, P) padded on the right, of the policy or the reference.

        Returns: {"answer", "refused", "cut"} of each; see generation.py.
        """
        padded = zip(prompt_ids.tolist(), prompt_lengths.tolist(), strict=True)
        ids = [ids[:length] for ids, length in padded]
        return generate_answers(
            self.model, self.encoder, ids, self.generation, reference
        )

    def answers_to(
        self, prompts: Sequence[Mapping[str, Any]], *, reference: bool = False
    ) -> list[dict[str, Any]]:
        """Answers to conversations outside any data set, of the policy or the reference.

        prompts: {"messages": [{"role", "content"}], "tools": […]}, tools where there are any.
        Returns: {"answer", "refused", "cut"} of each.
        """
        where = "a prompt to answer"
        records = [
            Record(p["messages"], p.get("tools") or [], (), where) for p in prompts
        ]
        texts = [self.encoder.texts(record)[0] for record in records]
        ids = [ids for ids, _ in self.encoder.encode(texts, [[]] * len(texts))]
        return generate_answers(
            self.model, self.encoder, ids, self.generation, reference
        )

    def export(self, path: str | Path) -> Path:
        """Save model, tokenizer and model card as a folder.

        The adapter, which `peft.AutoPeftModelForCausalLM` loads; or with ``merge_on_export``,
        without adapters, and where the run began by merging one, the whole model, which
        `AutoModelForCausalLM` loads. A run takes both as `model_name`.
        """
        export_model(
            self,
            self.model,
            self.tokenizer,
            self.policy,
            Path(path),
            whole=self.policy.merge_on_export or self.merged_start,
        )
        return Path(path)

    # The state: what is trained, and nothing of the frozen base -----------------------------------

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Takes a checkpoint's state, which holds what is trained only, and a whole one.

        Raises:
            RuntimeError: with ``strict``, a trained weight that is missing, or one too many.
        """
        keys = super().load_state_dict(state_dict, strict=False, assign=assign)
        if strict:
            require_trained(self, keys)
        return keys
