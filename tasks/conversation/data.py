"""Conversations: the data module, and what models say of records to keep and to forget."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from pl_pointwise.data import SPLITS
from pl_pointwise.errors import DataError, one_of
from pl_pointwise.tasks.common.data import Parse
from pl_pointwise.tasks.common.records import json_object, report_skipped
from pl_pointwise.tasks.language_model.data import EncodedResponses, ResponseDataModule
from pl_pointwise.tasks.language_model.likelihood.scoring import ResponseScorer
from pl_pointwise.tasks.language_model.model.loading import (
    load_language_model,
    load_tokenizer,
)
from pl_pointwise.tasks.language_model.module import LanguageModelModule
from pl_pointwise.tasks.language_model.roles import collate_rows
from pl_pointwise.tasks.language_model.text.conversations import ConversationEncoder
from pl_pointwise.tasks.language_model.text.reasoning import (
    REFUSAL_TEXT,
    validate_refusals,
)
from pl_pointwise.tasks.language_model.text.records import (
    ANSWERS,
    Record,
    Response,
    with_refusals,
)
from pl_pointwise.tasks.language_model.text.turns import every_turn, only_read

from .records import ROLES, check_together, read_record

TOGETHER = 8
"""Prompts that are answered in one batch."""
TRAINED = ("train", "learn", "keep", "forget")
"""Files of training records, by their option; answers of all but the first are of that role."""
TAUGHT = frozenset({"learn", "forget"})
"""Roles of what is never held out of the training records."""


class ConversationDataModule(ResponseDataModule):
    """Conversations and responses with roles, tokenised once.

    A record is a prompt and an answer, of the role of its file: {"prompt": "…", "answer": "…"}; or
    a conversation and responses, each with its role and perhaps a bound of its own (records.py).
    The hub's usual schemas are recognised by their columns. Batches are those of
    language_model/roles.py. ``test`` runs "test", held-out records, and "train", one full pass over
    the training data.

    Args:
        model_name: the model whose tokenizer and chat template to use; None takes the module's.
        source: "files", "hub", or "example" for records that ship with the package.
        example: which of them: "library", forty of all roles; "keep", new facts to learn and
            general answers to keep; "forget", some of these facts to forget and the others to keep.
        train_file: one or several: JSON lines, JSON, CSV, TSV, Parquet or Arrow, by their endings.
        learn_file: more of them, whose answers are of role learn where they say no other.
        keep_file: the same, of role keep.
        forget_file: the same, of role forget.
        own_answers: put the model's own greedy answers, from before training, in the place of those
            of role keep; then lines of keep_file may be prompts alone.
        forget_like: a model of the same kind that never learned the answers to forget, and says how
            likely one without ``around`` is to be.
        val_file: those held out. Without one, a part of the training prompts is, none of them with
            an answer to learn or to forget.
        test_file: those that certify; without one preparation.test_fraction, else "val".
        predict_file: records to answer in `predict`, with or without responses; with any source.
        hub_path: the data set on the hub, or a folder of the same layout.
        hub_config: its configuration.
        hub_split: its split, of which a part is held out.
        role: of the response of schemas that give it none, "answer", "messages" and "instruction".
        turns: "last" trains the last answer of a conversation; "all" makes a record of each turn of
            the assistant, with a multiplier of its own, but for those that a "weight" of 0, a mask
            or their like leave out. Records of several responses stay as they are.
        refusals: texts for refusals that have none; a record's own refusal is kept.
        options: ``preparation``, of skipping and holding out, and those of `PointwiseDataModule`;
            ``seed`` also of what is held out.

    Raises:
        DataError: options that contradict each other.
    """

    roles = ROLES
    sources = ("files", "hub", "example")
    trained = TRAINED

    def __init__(
        self,
        model_name: str | None = None,
        *,
        source: Literal["files", "hub", "example"] = "files",
        example: Literal["library", "keep", "forget"] = "library",
        train_file: str | list[str] | None = None,
        learn_file: str | None = None,
        keep_file: str | None = None,
        forget_file: str | None = None,
        own_answers: bool = False,
        forget_like: str | None = None,
        val_file: str | None = None,
        test_file: str | None = None,
        predict_file: str | None = None,
        hub_path: str | None = None,
        hub_config: str | None = None,
        hub_split: str = "train",
        role: str = "reference",
        turns: Literal["last", "all"] = "last",
        refusals: Sequence[str] = (REFUSAL_TEXT,),
        **options: Any,
    ) -> None:
        files = {
            "train": train_file,
            "learn": learn_file,
            "keep": keep_file,
            "forget": forget_file,
            "val": val_file,
            "test": test_file,
            "predict": predict_file,
        }
        super().__init__(model_name, source, files, **options)
        one_of("example", example, ("library", "keep", "forget"), DataError)
        one_of("role", role, ROLES, DataError)
        one_of("turns", turns, ("last", "all"), DataError)
        if (source == "hub") != (hub_path is not None):
            raise DataError(
                f"source={source}, hub_path={hub_path}: set both, or neither."
            )
        # Files of the package, for the pages and a first try.
        if source == "example":
            self.files["train"] = [
                str(Path(__file__).parent / "examples" / f"{example}.jsonl")
            ]
        self.own_answers = own_answers
        self.forget_like = forget_like
        self._own_left_out = 0
        self.hub = hub_path, hub_config, hub_split
        self.role = role
        self.turns = turns
        self.refusals = validate_refusals(refusals)

    def on_hub(self, name: str) -> Any:
        """One split, to train on."""
        return self.hub if name == "train" else None

    def reader(self, name: str) -> Parse:
        """With the role of a file that has one."""
        # Prompts alone will do: the model answers them before the first step.
        if name == "keep" and self.own_answers:
            return read_prompt_to_keep
        role = name if name in TRAINED[1:] else self.role
        answered = name != "predict"
        every = answered and self.turns == "all"
        return partial(read_record, role=role, responses=answered, all_turns=every)

    def read_splits(self) -> dict[str, list[Record]]:
        """The splits with a text for each refusal."""
        read = {side: self.read(side) for side in SPLITS}
        read = {side: records for side, records in read.items() if records}
        check_together([*chain.from_iterable(read.values())])
        splits = self.held_out(read)
        counts = ", ".join(
            f"{side} {len(records):,}" for side, records in splits.items()
        )
        held_out = ", held out by data.preparation" if len(splits) > len(read) else ""
        rank_zero_info(f"Records: {counts}{held_out}.")
        trained = _roles_of(splits.get("train", []))
        for side, records in splits.items():
            # Answers that were held out without a role: they would be measured as a role nobody
            # trains.
            if trained and trained.isdisjoint(_roles_of(records)):
                rank_zero_warn(
                    f"{records[0].where}: the answers held out as {side} are of role "
                    f"{records[0].roles[0]}, of which none is trained on. What is learnt and kept "
                    'is measured on its own roles: give each record one, as "role": "keep".'
                )
        return splits

    def held_out(
        self,
        read: Mapping[str, list[Any]],
        files: Mapping[str, Sequence[str]] | None = None,
    ) -> dict[str, list[Any]]:
        """All splits. What is to be learnt or forgotten stays in training.

        A fact is no sample of others: what is held out of it would be taught to nobody.
        """
        train = read.get("train", [])
        taught = {
            record.unit for record in train if not TAUGHT.isdisjoint(record.roles)
        }
        rest = [record for record in train if record.unit not in taught]
        paths = list(chain.from_iterable(self.files[name] for name in TRAINED))
        splits = super().held_out(
            {**read, "train": rest}, {**self.files, "train": paths}
        )
        left = {id(record) for record in splits["train"]}
        # In the order of the files.
        splits["train"] = [r for r in train if r.unit in taught or id(r) in left]
        return splits

    def read(self, name: str) -> list[Record]:
        """The records with a text for each refusal, those to train on of several files."""
        records: list[Record] = []
        for part in TRAINED if name == "train" else (name,):
            records += super().read(part)
        if name != "predict" and self.turns == "all":
            records = every_turn(records)
        elif name == "train":
            self._note_turns(records)
        return with_refusals(records, self.refusals)

    def _note_turns(self, records: Sequence[Record]) -> None:
        """Says how many answers of the assistant stand in prompts alone."""
        earlier, whole = only_read(records)
        if earlier:
            rank_zero_info(
                f"{earlier:,} of {whole:,} answers of the assistant are only read, as earlier turns"
                " of a conversation: data.turns all makes a record of each (docs/conversation.md)."
            )

    def encoded(self, name: str, records: Sequence[Any]) -> EncodedResponses:
        """Records as tokens, with the model's own answers, and how likely to be those to forget."""
        # The answers are made when the model is there, at the start of a fit.
        if self.own_answers and name != "predict":
            module = getattr(self.trainer, "lightning_module", None)
            # Data set up by hand, in a notebook.
            if not isinstance(module, LanguageModelModule):
                raise DataError(
                    "own_answers needs the model: call trainer.fit(module, data)."
                )
            with _as_in_evaluation(module):
                answered = with_own_answers(records, module)
            if name == "train":
                self._note_own_answers(
                    records, answered, module.generation.max_new_tokens
                )
            records = answered
        encoded = super().encoded(name, records)
        # Nothing is asked of what is predicted.
        if name != "predict":
            add_targets(encoded, self.forget_like, self._encoder, self.model_name)
        return encoded

    def _note_own_answers(
        self, records: Sequence[Record], answered: Sequence[Record], longest: int
    ) -> None:
        """Of the answers to keep those that the model itself does not end, or leaves empty."""
        whole = sum("keep" in record.roles for record in records)
        self._own_left_out = len(records) - len(answered)
        self.note_left_out(
            "own answers",
            self._own_left_out,
            whole,
            "kept answers",
            f"the model's own is longer than {longest:,} tokens (raise "
            "model.policy.generation.max_new_tokens), empty, or goes on with another turn",
        )

    def _not_trained_in_encoding(self) -> int:
        return self._own_left_out


@contextmanager
def _as_in_evaluation(module: LanguageModelModule) -> Iterator[None]:
    """The model where and in the precision in which the trainer is to run it.

    Data are set up before Lightning does either, and before a checkpoint is loaded.
    """
    plugin = module.trainer.precision_plugin
    module.to(module.trainer.strategy.root_device)
    # Of bf16-true and its like, which convert the weights themselves.
    if isinstance(plugin, (HalfPrecision, DoublePrecision)):
        plugin.convert_module(module)
    with plugin.forward_context():
        yield


def read_prompt_to_keep(row: Any, where: str) -> Record:
    """A record of an answer to keep, or of a prompt alone, which the model is to answer itself."""
    row = json_object(row, where)
    # With an answer it is one to keep as it stands there.
    if not {"responses", "messages", *ANSWERS}.isdisjoint(row):
        return read_record(row, where, role="keep")
    record: Record = read_record(row, where, responses=False)
    return replace(record, responses=(Response("keep", ""),))


def with_own_answers(
    records: Sequence[Record], module: LanguageModelModule
) -> list[Record]:
    """The records, each answer of role keep as the module's reference writes it now.

    A record whose own answer is empty, does not end within ``max_new_tokens``, or goes on with
    another turn is left out with a warning: nobody knows how it ends.
    """
    asked = [place for place, record in enumerate(records) if "keep" in record.roles]
    answered: list[Record | None] = list(records)
    problems = list[str]()
    for start in range(0, len(asked), TOGETHER):
        places = asked[start : start + TOGETHER]
        prompts = []
        for place in places:
            prompts.append(
                {"messages": records[place].messages, "tools": records[place].tools}
            )
        answers = module.answers_to(prompts, reference=True)
        for place, answer in zip(places, answers, strict=True):
            # A cut answer has no end: to keep it would teach the model to go on for ever.
            if answer["cut"] or not answer["answer"].strip():
                problems.append(
                    f"{records[place].where}: the model's own answer is empty or does not end "
                    f"within {module.generation.max_new_tokens:,} tokens: raise "
                    "policy.generation.max_new_tokens."
                )
                answered[place] = None
                continue
            record = _with_kept_answer(records[place], answer["answer"])
            answered[place] = record
            try:  # A model may go on with a turn of somebody else before it ends.
                module.encoder.texts(record)
            except DataError as error:
                problems.append(f"the model's own answer cannot be kept: {error}")
                answered[place] = None
    kept = len(asked) - len(problems)
    rank_zero_info(
        f"The model's own answers are kept of {kept:,} prompts.{_of_half(module)}"
    )
    # All are cut: max_new_tokens is too small, and the reason is worth more than a count.
    if problems and not kept:
        raise DataError(problems[0])
    if problems:
        report_skipped("own_answers", problems, kept)
    return [record for record in answered if record is not None]


def _of_half(module: LanguageModelModule) -> str:
    """That answers depend on their batch, where weights are in half precision; else ""."""
    dtype = getattr(module.model, "dtype", torch.float32)
    if dtype not in (torch.bfloat16, torch.float16):
        return ""
    return (
        f" The weights are in {str(dtype).removeprefix('torch.')}: some answers may be other texts "
        "in other batches, as of `test`. --model.init_args.policy.dtype float32 avoids it, with "
        "--trainer.precision bf16-mixed or 32-true."
    )


def _with_kept_answer(record: Record, answer: str) -> Record:
    """The record with this answer where one is to be kept."""
    responses = []
    for response in record.responses:
        is_kept = response.role == "keep"
        responses.append(replace(response, answer=answer) if is_kept else response)
    return replace(record, responses=tuple(responses))


def _roles_of(records: Iterable[Record]) -> set[str]:
    """What the records' responses are."""
    roles = set[str]()
    for record in records:
        roles.update(record.roles)
    return roles


def add_targets(
    encoded: EncodedResponses, like: str | None, encoder: ConversationEncoder, name: str
) -> None:
    """Gives every answer to forget without ``around`` the s̄ that the model ``like`` has of it.

    name: the model that is trained.
    """

    def is_open(response: Response) -> bool:
        return response.role == "forget" and response.tolerance is None

    places = []
    for place, record in enumerate(encoded.records):
        if any(map(is_open, record.responses)):
            places.append(place)
    # Every answer to forget has its number.
    if not places:
        return
    if like is None:
        raise DataError(
            f"{encoded.records[places[0]].where}: an answer to forget has no around, how likely a "
            "token of it is to be (mean log-likelihood). Give the number, or a model that never "
            "learned the answer as data.forget_like; to make it unlikely and no more, role avoid."
        )
    if like == name or Path(like).resolve() == Path(name).resolve():
        raise DataError(
            f"forget_like={like}: it is the model that is trained, so there is nothing to forget. "
            "Name the one that has learned the answers: --model.init_args.policy.model_name "
            "results/keep/export."
        )
    theirs = load_tokenizer(like).get_vocab()
    # Its tokens would be other words here, and s̄ of other tokens.
    if theirs != encoder.tokenizer.get_vocab():
        raise DataError(
            f"forget_like={like}: it has another vocabulary than {name}. Name a model of the same "
            "kind, as it was before it learned the answers."
        )
    rank_zero_info(f"Records to forget as likely as {like} has them: {len(places):,}.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_language_model(like, lora=None).eval().requires_grad_(False).to(device)
    scorer = ResponseScorer(model, "plain")
    for start in range(0, len(places), 4):
        some = places[start : start + 4]
        batch = collate_rows(
            [encoded[place] | {"index": place} for place in some], ROLES
        )
        tensors = {}
        for key, value in batch.items():
            if isinstance(value, Tensor):
                tensors[key] = value.to(device)
        with torch.no_grad():
            means = scorer(tensors, reference=False).mean_log_likelihood.tolist()
        for place, of_record in zip(some, means, strict=True):
            record = encoded.records[place]
            responses = []
            for response, mean in zip(record.responses, of_record, strict=False):
                if is_open(response):
                    response = replace(response, tolerance=round(mean, 4))
                responses.append(response)
            encoded.records[place] = replace(record, responses=tuple(responses))
