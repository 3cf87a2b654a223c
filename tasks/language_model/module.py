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

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from peft import PeftModel
from torch import Tensor
from torchmetrics import MeanMetric
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from pl_pointwise import Constraint, Formulation, PointwiseModule, Training
from pl_pointwise.errors import DataError, TrainingError
from pl_pointwise.evaluation import BEFORE, MeanBySample
from pl_pointwise.export.folder import replaced_folder
from pl_pointwise.lagrangian.terms import PADDING
from pl_pointwise.model_card import write_card
from pl_pointwise.plain import from_plain
from pl_pointwise.task import Batch, Metrics, notes_of, objects_of_all_ranks
from pl_pointwise.tasks.common.adapters import saved_adapter
from pl_pointwise.tasks.common.models import check_weights

from .before import Watched, as_reference, kept_role, place_of, wanted_columns
from .data import EncodedResponses
from .likelihood.scoring import (
    ReferenceCache,
    ResponseScorer,
    ResponseStatistics,
    inference,
    of_adapter,
    reference_problem,
)
from .model.adapters import Lora, lora_of, merged_model
from .model.generation import Generation, generate_answers, text_of_response
from .model.loading import Policy, load_encoder, load_language_model
from .roles import Requirement, divergence, drop, lead, mean_over
from .rounding import say_what_merging_changed
from .text.conversations import ConversationEncoder
from .text.records import Record

ANSWERS_BEFORE = "answers before"
"""What checkpoints keep of the starting model where all weights are trained, by prompt."""

USAGE = """
from {package} import {kind}
from transformers import AutoTokenizer

name = "PATH OR NAME OF THIS REPOSITORY"
model, tokenizer = {kind}.from_pretrained(name), AutoTokenizer.from_pretrained(name)
"""


OR = "\n\nor:\n\n"
"""Between several texts that are wanted as the answer to one prompt."""

COLUMNS = (
    "index",
    "prompt",
    "wanted",
    "before",
    "answer",
    "exact",
    "flipped",
    "file",
    "line",
)
"""What stands first in a line of a file of answers, in this order, as far as it has them."""


def in_order(answer: Mapping[str, Any]) -> dict[str, Any]:
    """An answer with what people read first in front."""
    first = {name: answer[name] for name in COLUMNS if name in answer}
    return first | {name: value for name, value in answer.items() if name not in first}


ADAPTER_NOTE = (
    "**This folder holds an adapter, and not the whole model**: it loads its base model too, from "
    "the name in `adapter_config.json`, which has to be there. One whole model is "
    "`model.merge_and_unload()`, saved, of the `model` below; or train with "
    "`--model.policy.merge_on_export true`."
)


@dataclass(frozen=True)
class Rate:
    """A metric: the mean over the answers of an entry of theirs.

    Args:
        entry: of an answer, such as "refused"; answers without it are not counted.
        value: what counts of it; of a flag 1 or 0.
        kind: of the prompts, as ``prompt_kind`` names it; None for all.
    """

    entry: str
    value: Callable[[Any], float] = float
    kind: str | None = None


def real_samples(batch: Batch) -> list[tuple[int, int]]:
    """(position in the batch, index) of the samples of a batch that do not only fill it."""
    samples = []
    for position, index in enumerate(batch["index"].tolist()):
        if index != PADDING:
            samples.append((position, index))
    return samples


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
        answers: generated in the last `test` or `validate` by this rank, by data set.

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
        self.answers: dict[str, list[dict[str, Any]]] = {}
        self._at_start = False  # Whether the adapters are off, within starting_model().
        self._load_policy(from_plain(Policy, policy))

    def _load_policy(self, policy: Policy) -> None:
        self.policy = policy
        lora = self.default_lora if policy.lora == "default" else policy.lora
        start = saved_adapter(policy.model_name, policy.revision)
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
        self.register_state_dict_post_hook(_drop_frozen_base)

    # The terms ------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> ResponseStatistics:
        """Statistics of every response, with the reference where it is needed."""
        leads = any(self.requirements[name].value is lead for name in self.constraints)
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
        samples = getattr(
            getattr(self.trainer.train_dataloader, "dataset", None), "rows", None
        )
        if isinstance(samples, EncodedResponses):
            self.check_training_records(samples.records)
            self._remember_answers(samples)

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

    def _remember_answers(self, samples: EncodedResponses) -> None:
        """Before the first step where no adapters are: later the starting model is gone."""
        first = not self.trainer.global_step and not self.trainer.fast_dev_run
        if (
            not first
            or not self._measures_before
            or reference_problem(self.model) is None
        ):
            return
        watched = Watched.chosen(samples, self.kept_roles)
        with self.trainer.precision_plugin.forward_context():
            answers = watched.answers(self.model, self.encoder, self.generation)
        prompts = [record.prompt for record in watched.records]
        notes_of(self).kept[ANSWERS_BEFORE] = dict(zip(prompts, answers, strict=True))

    def closing_sentences(self) -> list[str]:
        """How many of some answers that are to stay are other texts now than before training."""
        samples = getattr(
            getattr(self.trainer.train_dataloader, "dataset", None), "rows", None
        )
        if not self._measures_before or not isinstance(samples, EncodedResponses):
            return []
        watched = Watched.chosen(samples, self.kept_roles)
        remembered = notes_of(self).kept.get(ANSWERS_BEFORE, {})

        def answers(*, reference: bool = False) -> list[list[int]]:
            return watched.answers(
                self.model, self.encoder, self.generation, reference=reference
            )

        with self.trainer.precision_plugin.forward_context():
            if reference_problem(self.model) is None:
                before = answers(reference=True)
            elif all(record.prompt in remembered for record in watched.records):
                before = [remembered[record.prompt] for record in watched.records]
            else:  # Resumed from a checkpoint that does not have them.
                return []
            sentence = watched.changed(before, answers())
        return [sentence] if sentence else []

    # Evaluation -----------------------------------------------------------------------------------

    def evaluation_metrics(self) -> Metrics:
        """The KL of adapters, and rates of the generated answers."""
        rates = {name: MeanBySample() for name in self._rates}
        return {"kl": MeanMetric(), **rates}

    @property
    def _rates(self) -> dict[str, Rate]:
        """The task's, and with any the share of answers that stop only at the length limit."""
        return {**self.rates, "cut": Rate("cut")} if self.rates else {}

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
        if outputs.kl is not None and carries.any():
            metrics["kl"].update(mean_over(outputs.kl, compared)[carries])
        if stage.removeprefix(BEFORE) in self._answered:
            self._answer(metrics, batch, stage)

    @property
    def _answered(self) -> list[str]:
        """The data sets of this pass whose prompts are answered: none in validation in training."""
        wanted = self.evaluation.answer_in if self.rates else []
        if self.trainer.state.fn == TrainerFn.VALIDATING:
            return ["val"] if "test" in wanted else []
        return list(wanted) if self.trainer.testing else []

    def _answer(self, metrics: Metrics, batch: Batch, stage: str) -> None:
        """Answers the prompts of a batch that are among the first of their kind, and counts."""
        if not metrics["cut"].update_called:  # Fresh metrics: another pass.
            self.answers[stage] = []
        limit = self.evaluation.answers_at_most
        ranks = batch["rank"].tolist()
        asked = real_samples(batch)
        if limit is not None:
            asked = [(row, index) for row, index in asked if ranks[row] < limit]
        if not asked:
            return
        new = self.batch_answers(batch, asked, stage)
        records = [batch["records"][row] for row, _ in asked]
        for answer, (row, _), record in zip(new, asked, records, strict=True):
            answer |= self._about(batch, row, record)
        self.answers[stage] += new
        self._count(metrics, new, [self.prompt_kind(record) for record in records])

    def _about(self, batch: Batch, row: int, record: Record) -> dict[str, Any]:
        """What the file of answers has beside an answer: prompt, what is wanted, and its place."""
        about: dict[str, Any] = {"prompt": record.text}
        wanted = []
        for column in wanted_columns(record, self.kept_roles):
            wanted.append(text_of_response(self.encoder, batch, row, column).strip())
        if wanted:
            about["wanted"] = OR.join(wanted)
        about["kept"] = kept_role(record, self.kept_roles) != ""
        return about | place_of(record)

    def _count(
        self,
        metrics: Metrics,
        answers: Sequence[Mapping[str, Any]],
        kinds: Sequence[str],
    ) -> None:
        """Adds answers, to prompts of some kinds, to the rates that they have part in."""
        for name, rate in self._rates.items():
            if name not in metrics:
                continue
            index = []
            values = []
            for answer, kind in zip(answers, kinds, strict=True):
                if rate.kind in (None, kind) and rate.entry in answer:
                    index.append(answer["index"])
                    values.append(float(rate.value(answer[rate.entry])))
            if index:
                device = metrics[name].device
                metrics[name].update(
                    torch.tensor(index).to(device), torch.tensor(values).to(device)
                )

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
        answered = [name for name in metrics if name in self._answered]
        if not answered and not self.trainer.testing:  # A validation during training.
            return
        of_this_pass: dict[str, list[dict[str, Any]]] = {}
        for name in (*answered, *[f"{BEFORE}{name}" for name in answered]):
            if name in metrics:
                # Answers of an earlier pass are there still where this one asked for none.
                asked = metrics[name]["cut"].update_called
                of_this_pass[name] = self.answers[name] if asked else []
        self.answers = {name: of_this_pass[name] for name in answered}
        for name, answers in self.answers.items():
            before = of_this_pass.get(f"{BEFORE}{name}", [])
            self._join_before(answers, before, metrics[name])
        if not notes_of(self).confidential:
            self.report_answers({name: self._write_answers(name) for name in answered})

    def _join_before(
        self,
        answers: list[dict[str, Any]],
        others: Sequence[dict[str, Any]],
        metrics: Metrics,
    ) -> None:
        """Gives this rank's answers {before}, and those that are to stay {flipped}, and counts it.

        others: the starting model's answers to the same prompts.
        """
        before = {other["index"]: other["answer"] for other in others}
        for answer in answers:
            kept = answer.pop("kept")
            if answer["index"] in before:
                answer["before"] = before[answer["index"]]
                if kept:
                    answer["flipped"] = answer["answer"] != answer["before"]
        if "flipped" in metrics:
            flipped = [answer for answer in answers if "flipped" in answer]
            self._count({"flipped": metrics["flipped"]}, flipped, [""] * len(flipped))

    def _write_answers(self, stage: str) -> list[dict[str, Any]]:
        """Writes the answers of all ranks to one data set, and returns them by index."""
        gathered = chain.from_iterable(objects_of_all_ranks(self.answers[stage]))
        answers = sorted(gathered, key=lambda answer: int(answer["index"]))
        if self.trainer.is_global_zero:
            path = Path(self.trainer.default_root_dir) / "answers" / f"{stage}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = []
            for answer in answers:
                lines.append(json.dumps(in_order(answer), ensure_ascii=False) + "\n")
            path.write_text("".join(lines), encoding="utf-8")
            cut = sum(answer["cut"] for answer in answers)
            kept = [answer["flipped"] for answer in answers if "flipped" in answer]
            changed = ""
            if kept:
                changed = f"; {sum(kept):,} of {len(kept):,} that are to stay are other texts now"
            rank_zero_info(
                f"{stage}: {len(answers):,} answers, {cut:,} of them cut{changed}: read {path}."
            )
        return answers

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
        package = "transformers"
        kind = "AutoModelForCausalLM"
        with replaced_folder(Path(path)) as folder:
            apart = not (self.policy.merge_on_export or self.merged_start)
            if isinstance(self.model, PeftModel) and apart:
                package = "peft"
                kind = "AutoPeftModelForCausalLM"
                self._save_adapter(self.model, folder)
            else:
                self._save_whole(folder)
            self.tokenizer.save_pretrained(folder)
            write_card(
                self,
                folder,
                library_name=package,
                pipeline_tag="text-generation",
                base_model=self.model_name,
                note=ADAPTER_NOTE if package == "peft" else "",
                usage=USAGE.format(package=package, kind=kind),
            )
        return Path(path)

    def _save_adapter(self, model: PeftModel, folder: Path) -> None:
        if not self.policy.continue_adapter:  # Else it has that of its base.
            # Of the base: the branch may move on, the commit does not.
            commit = getattr(model.config, "_commit_hash", None)
            model.active_peft_config.revision = commit or self.revision
        model.save_pretrained(folder, selected_adapters=[model.active_adapter])

    def _save_whole(self, folder: Path) -> None:
        """Saves the model, adapters merged into it."""
        whole = self.model
        if isinstance(whole, PeftModel):
            whole = merged_model(whole)
            say_what_merging_changed(self, whole)
        whole.save_pretrained(folder)
        check_weights(AutoModelForCausalLM, folder)

    # The state: what is trained, and nothing of the frozen base -----------------------------------

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Takes a checkpoint's state, which holds what is trained only, and a whole one.

        Raises:
            RuntimeError: with ``strict``, a trained weight that is missing, or one too many.
        """
        keys = super().load_state_dict(state_dict, strict=False, assign=assign)
        missing = sorted(self._trained_names().intersection(keys.missing_keys))
        problems = [f"missing {name}" for name in missing]
        problems += [f"unexpected {name}" for name in keys.unexpected_keys]
        if strict and problems:
            raise RuntimeError(
                f"The checkpoint does not fit what this model trains ({len(problems)} weights, as "
                f"{problems[0]}). Load it with the model and the lora settings it was trained with."
            )
        return keys

    def _trained_names(self) -> set[str]:
        """Names, in the state, of what is trained or belongs to the adapters."""
        names = {
            name for name, weight in self.named_parameters() if weight.requires_grad
        }
        for name in self.model.state_dict():
            if of_adapter(self.model, name):
                names.add(f"model.{name}")
        return names


def _drop_frozen_base(
    module: LanguageModelModule, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """Leaves what is trained in the state: a hook, which no method of a subclass can replace."""
    names = {prefix + name for name in module._trained_names()}
    for name in [
        name for name in state if name.startswith(prefix) and name not in names
    ]:
        del state[name]
