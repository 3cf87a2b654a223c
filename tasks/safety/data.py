"""Safety data: where records come from, which are held out, and the data module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

import torch
from lightning.pytorch.utilities import rank_zero_warn

from pl_pointwise.data import SPLITS
from pl_pointwise.errors import DataError, one_of
from pl_pointwise.plain import from_plain
from pl_pointwise.tasks.common.records import check_source, largest
from pl_pointwise.tasks.common.splits import (
    prompt_groups,
    side_of_held_out,
    sources_of,
    stratified_ranks,
    warn_of_shared,
)
from pl_pointwise.tasks.language_model.data import (
    DEFAULT_PREPARATION,
    Needs,
    Preparation,
    ResponseDataModule,
)
from pl_pointwise.tasks.language_model.text.encoded import EncodedResponses
from pl_pointwise.tasks.language_model.text.messages import answer_text
from pl_pointwise.tasks.language_model.text.records import Record, with_refusals
from pl_pointwise.tasks.language_model.text.refusals import REFUSAL_TEXT, validate_refusals

from .records import (
    ROLES,
    UNSAFE,
    parse_instruction,
    parse_judgement,
    parse_labelled,
    parse_pair,
    parse_prompt,
    per_category,
    preference_pairs,
    unanimous,
    unsafe_prompts,
)

PAPER_CATEGORIES = (
    "violence,aiding_and_abetting,incitement",
    "financial_crime,property_crime,theft",
    "privacy_violation",
)
"""Names of BeaverTails' kinds of harm."""

UnsafeSchema = Literal["beavertails", "labelled", "pku", "pku_pairs"]

TEST_SETS = ("test", "train", "pku", "over_refusal", "contrast", "alpaca_eval")

ALPACA_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}### Response:
{{ message.content }}{{ eos_token }}{% else %}Below is an instruction that describes a task. \
Write a response that appropriately completes the request.

### Instruction:
{{ message.content }}

{% endif %}{% endfor %}{% if add_generation_prompt %}### Response:
{% endif %}"""
"""Alpaca's prompt as a chat template, for a base model whose tokenizer brings none."""


@dataclass
class Selection:
    """The data sets on the hub, and how many records are taken of which kind.

    Where ``preparation.test_fraction`` is above 0, what is held out here, and PKU-SafeRLHF's split
    "test", is divided into "val" and "test" in the proportion of the two fractions.

    Args:
        alpaca_path: Alpaca on the hub, or a folder of the same layout.
        beavertails_path: the same for BeaverTails.
        pku_path: the same for PKU-SafeRLHF-30K.
        benign_count: train on so many benign records, those with the longest answers in characters;
            None on all.
        benign_held_out: so many others are held out; source hub.
        categories: of BeaverTails, to train on.
        per_category: at most so many of each, the held-out ones included.
        held_out_per_category: so many of them are held out, of fewer the same share.

    Raises:
        DataError: no more of a category than are held out.
    """

    alpaca_path: str = "tatsu-lab/alpaca"
    beavertails_path: str = "PKU-Alignment/BeaverTails"
    pku_path: str = "PKU-Alignment/PKU-SafeRLHF-30K"
    benign_count: int | None = 1000
    benign_held_out: int = 4000
    categories: list[str] = field(default_factory=lambda: list(PAPER_CATEGORIES))
    per_category: int = 4200
    held_out_per_category: int = 200

    def __post_init__(self) -> None:
        held_out, count = self.held_out_per_category, self.per_category
        if not 0 <= held_out < count:
            raise DataError(f"held_out_per_category={held_out}, per_category={count}: leave some.")


DEFAULT_SELECTION = Selection()


class SafetyDataset(EncodedResponses):
    """Whose ``rank`` is by kind, its categories in turn."""

    @cached_property
    def ranks(self) -> list[int]:
        kinds = [record.kind for record in self.records]
        return stratified_ranks(kinds, [record.category for record in self.records])


class SafetyDataModule(ResponseDataModule):
    """Benign instructions with their answers, and unsafe prompts with a refusal, tokenised once.

    Benign records are {"instruction", "input", "output"}, unsafe ones as ``unsafe_schema`` says: of
    "beavertails", a row for each annotator; "labelled", {"prompt"} and perhaps {"response",
    "is_safe"}; "pku", or "pku_pairs" for Safe-DPO. In place of "instruction" or "prompt",
    "messages" give a conversation that ends with the user. A prompt's refusal is its own, or else
    one of ``refusals``, the same wherever the prompt stands.

    Batches are those of language_model/roles.py. Responses are [answer, refusal] of a benign
    prompt; [refusal] of an unsafe one, with ``unsafe_answers`` [refusal, unsafe answer];
    [preferred, other, refusal] of "pku_pairs".

    ``test`` runs, as far as there are any: "test", held-out records; "train", one full pass over
    the training data; "pku", the unsafe prompts of PKU-SafeRLHF; "over_refusal", safe prompts;
    "contrast", XSTest's unsafe ones; "alpaca_eval", AlpacaEval's instructions.

    Args:
        model_name: the model whose tokenizer and chat template to use; None takes that of the
            module it is used with.
        source: "hub" or "files".
        unsafe_schema: of the unsafe records; None for benign records only, as for a warm start.
        benign_file: benign records: JSON lines, JSON, CSV, TSV, Parquet or Arrow, by its ending.
        benign_val_file: those held out; without one a part of benign_file's prompts.
        benign_test_file: those that certify; without one preparation.test_fraction, else "val".
        unsafe_file: unsafe records.
        unsafe_val_file: those held out, read the same way.
        unsafe_test_file: those that certify, read the same way.
        pku_file: records of schema "pku" whose unsafe prompts to test on.
        over_refusal_file: safe prompts to test on, {"prompt"}, as XSTest's CSV, whose unsafe rows
            are the data set "contrast"; this and what follows with any source.
        alpaca_eval_file: {"instruction"} to answer; AlpacaEval's alpaca_eval.json.
        predict_file: {"prompt"} or {"instruction"} to answer in `predict`.
        selection: the data sets on the hub, and how many records are taken of which kind.
        refusals: what the model is to say to an unsafe prompt.
        unsafe_answers: "leave" the data's unsafe answers out, or "take" them along, which Safe-DPO
            and the constraint on them need.
        preparation: skipping, holding out; of hub and "beavertails", what ``selection`` holds out.
        options: of `PointwiseDataModule`; ``seed`` also of what is held out.
    """

    needs: ClassVar[Needs] = {**ResponseDataModule.needs, "test": TEST_SETS}
    remedies: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("validate", "test"), "benign_file and unsafe_file, and preparation.val_fraction above 0"
    ) | {"fit": "benign_file and unsafe_file", "predict": "predict_file"}
    roles = ROLES
    dataset_class = SafetyDataset
    default_template = ALPACA_TEMPLATE

    def __init__(
        self,
        model_name: str | None = None,
        *,
        source: Literal["hub", "files"] = "hub",
        unsafe_schema: UnsafeSchema | None = "beavertails",
        benign_file: str | None = None,
        benign_val_file: str | None = None,
        benign_test_file: str | None = None,
        unsafe_file: str | None = None,
        unsafe_val_file: str | None = None,
        unsafe_test_file: str | None = None,
        pku_file: str | None = None,
        over_refusal_file: str | None = None,
        alpaca_eval_file: str | None = None,
        predict_file: str | None = None,
        selection: Selection = DEFAULT_SELECTION,
        refusals: Sequence[str] = (REFUSAL_TEXT,),
        unsafe_answers: Literal["leave", "take"] = "leave",
        preparation: Preparation = DEFAULT_PREPARATION,
        **options: Any,
    ) -> None:
        super().__init__(model_name, source, preparation, **options)
        one_of("unsafe_answers", unsafe_answers, ("leave", "take"), DataError)
        one_of("unsafe_schema", unsafe_schema, (*get_args(UnsafeSchema), None), DataError)
        if source == "hub" and unsafe_schema == "labelled":
            raise DataError("unsafe_schema=labelled: there are none on the hub; give files.")
        self.benign = {"train": benign_file, "val": benign_val_file, "test": benign_test_file}
        self.unsafe = {"train": unsafe_file, "val": unsafe_val_file, "test": unsafe_test_file}
        self.other_files = {"over_refusal": over_refusal_file, "contrast": over_refusal_file}
        self.other_files |= {"alpaca_eval": alpaca_eval_file, "predict": predict_file}
        labelled = any((*self.benign.values(), *self.unsafe.values(), pku_file))
        beside = any(self.other_files.values())
        check_source(source, labelled, beside, "benign_file and unsafe_file")
        self.other_files["pku"] = pku_file
        self.unsafe_schema: UnsafeSchema | None = unsafe_schema
        self.selection = from_plain(Selection, selection)
        self.refusals = validate_refusals(refusals)
        self.unsafe_answers = unsafe_answers

    def read_splits(self) -> dict[str, list[Record]]:
        """For each split benign, then unsafe records."""
        kinds = self._benign(), self._unsafe()
        splits = {side: [r for kind in kinds for r in kind.get(side, [])] for side in SPLITS}
        safe = {record.unit for record in splits["train"] if not record.unsafe}
        if both := sum(record.unit in safe for record in splits["train"] if record.unsafe):
            rank_zero_warn(
                f"train: {both:,} unsafe records have a prompt that is a benign one too, so it "
                "is to be answered and refused. Take it out of one."
            )
        return {side: self._finished(records) for side, records in splits.items()}

    def read(self, name: str) -> list[Record]:
        """The records of a data set that is only tested on or predicted for."""
        path, found = self.other_files[name], list[Any]()
        if path is not None:
            found = self._from_file(name, path, parse_pair if name == "pku" else parse_prompt)
        elif name == "pku" and self.source == "hub" and self.unsafe_schema == "beavertails":
            path = f"{self.selection.pku_path}, test"
            found = self._from_hub(self.selection.pku_path, None, "test", parse_pair)
        if name == "predict":
            return [replace(record, responses=()) for record in found]
        if name == "pku":
            found = unsafe_prompts(found, once=True)
        elif name in ("over_refusal", "contrast"):
            found = _half(found, unsafe=name == "contrast")
        splits = {"train": self._records.get("train", []), name: found}
        warn_of_shared(splits, {"train": "the training set", name: str(path)})
        return self._finished(found)

    def _finished(self, records: Iterable[Record]) -> list[Record]:
        """With a text for each refusal, and unsafe answers where they are asked for."""
        if self.unsafe_answers == "leave" and self.unsafe_schema != "pku_pairs":
            records = [
                replace(each, responses=tuple(r for r in each.responses if r.role != UNSAFE))
                for each in records
            ]
        return with_refusals(records, self.refusals)

    # Sources --------------------------------------------------------------------------------------

    def _benign(self) -> dict[str, list[Record]]:
        """Those with the longest answers to train on; what is held out is not chosen by length."""
        if self.source == "files":
            found = self._read_files(self.benign, parse_instruction)
            return found | {"train": self._longest(found.get("train", []))}
        records = self._from_hub(self.selection.alpaca_path, None, "train", parse_instruction)
        train = self._longest(records)
        others = _without(train, records)
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randperm(len(others), generator=generator)[: self.selection.benign_held_out]
        return {"train": train, **self._divided([others[i] for i in sorted(drawn.tolist())])}

    def _longest(self, records: Sequence[Record]) -> list[Record]:
        lengths = [len(answer_text(record.answers[0])) for record in records]
        kept = largest(lengths, self.selection.benign_count)
        if self.source == "files" and len(kept) < len(records):
            rank_zero_warn(
                f"benign_file: kept {len(kept):,} of {len(records):,} records, those with the "
                "longest answers. Set selection.benign_count to null to train on all."
            )
        return [records[position] for position in kept]

    def _unsafe(self) -> dict[str, list[Record]]:
        """By ``unsafe_schema``."""
        schema, path = self.unsafe_schema, self.selection.pku_path
        if schema == "labelled":
            return self._read_files(self.unsafe, parse_labelled)
        if schema == "beavertails":
            return self._by_category()
        if schema is None:
            return {}
        select = preference_pairs if schema == "pku_pairs" else unsafe_prompts
        if self.source == "files":
            return self._read_files(self.unsafe, parse_pair, select)
        read = (self._from_hub(path, None, split, parse_pair) for split in ("train", "test"))
        train, held = map(select, read)
        return {"train": train, **self._divided(_without(train, held))}

    def _by_category(self) -> dict[str, list[Record]]:
        """So many BeaverTails records of each category, and others held out."""
        chosen, paths = self.selection, self.unsafe
        if self.source == "hub":
            judged = self._from_hub(chosen.beavertails_path, None, "330k_train", parse_judgement)
        elif paths["train"] is not None:
            judged = self._from_file("train", paths["train"], parse_judgement)
        else:
            return {}
        limits = chosen.per_category, chosen.held_out_per_category
        train, held = per_category(unanimous(judged, chosen.categories), *limits, self.seed)
        if paths["test"] is None:
            return {"train": train, **self._divided(held)}
        judged = self._from_file("test", paths["test"], parse_judgement)
        test = [r for found in unanimous(judged, chosen.categories).values() for r in found]
        splits = {"train": train, "val": held, "test": test}
        warn_of_shared(splits, sources_of(paths, splits))
        return splits

    def _divided(self, held: Sequence[Record]) -> dict[str, list[Record]]:
        """Records that are held out already, divided into "val" and "test"."""
        fractions = self.preparation.val_fraction, self.preparation.test_fraction
        categories = [record.category for record in held]
        found: dict[str, list[Record]] = {}
        sides = side_of_held_out(prompt_groups(held), *fractions, self.seed, categories)
        for record, side in zip(held, sides, strict=True):
            found.setdefault(side, []).append(record)
        return found


def _half(records: Iterable[Record], unsafe: bool) -> list[Record]:
    """The unsafe half, as of XSTest, or the other."""
    return [record for record in records if record.unsafe == unsafe]


def _without(known: Sequence[Record], records: Sequence[Record]) -> list[Record]:
    """The records whose prompts are none of the known ones."""
    units = {record.unit for record in known}
    return [record for record in records if record.unit not in units]
