"""Safety data: where records come from, which are held out, and the data module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, ClassVar, Literal, get_args

import torch
from lightning.pytorch.utilities import rank_zero_warn

from pl_pointwise.data import SPLITS
from pl_pointwise.errors import DataError, one_of
from pl_pointwise.plain import from_plain
from pl_pointwise.tasks.common.data import Needs, Parse
from pl_pointwise.tasks.common.records import largest
from pl_pointwise.tasks.common.splits import side_of_held_out, warn_of_shared
from pl_pointwise.tasks.language_model.data import (
    DEFAULT_PREPARATION,
    Preparation,
    ResponseDataModule,
)
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

TEST_SETS = ("test", "train", "pku", "over_refusal", "alpaca_eval")

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
            None on all; source hub, and so the next.
        benign_held_out: so many others are held out.
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
    "alpaca_eval", AlpacaEval's instructions.

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
        over_refusal_file: safe prompts to test on, {"prompt"}; of XSTest's CSV those labelled so;
            this and what follows with any source.
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
    beside = ("over_refusal", "alpaca_eval", "predict")
    roles = ROLES
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
        files = {"benign_train": benign_file, "benign_val": benign_val_file}
        files |= {"benign_test": benign_test_file, "unsafe_train": unsafe_file}
        files |= {"unsafe_val": unsafe_val_file, "unsafe_test": unsafe_test_file, "pku": pku_file}
        files |= {"over_refusal": over_refusal_file, "alpaca_eval": alpaca_eval_file}
        files["predict"] = predict_file
        super().__init__(model_name, source, files, preparation, **options)
        one_of("unsafe_answers", unsafe_answers, ("leave", "take"), DataError)
        one_of("unsafe_schema", unsafe_schema, (*get_args(UnsafeSchema), None), DataError)
        if source == "hub" and unsafe_schema == "labelled":
            raise DataError("unsafe_schema=labelled: there are none on the hub; give files.")
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
        found = super().read(name)
        if name == "predict":
            return [replace(record, responses=()) for record in found]
        if name == "pku":
            found = unsafe_prompts(found, once=True)
        elif name == "over_refusal":
            found = [record for record in found if not record.unsafe]
        splits = {"train": self._records.get("train", []), name: found}
        where = ", ".join(self.files[name]) or name
        warn_of_shared(splits, {"train": "the training set", name: where})
        return self._finished(found)

    def on_hub(self, name: str) -> tuple[str, str | None, str] | None:
        """The hub's splits by kind and side, and PKU-SafeRLHF where it is only tested on."""
        pku, chosen = self.selection.pku_path, self.selection
        found = {"benign_train": (chosen.alpaca_path, None, "train")}
        if self.unsafe_schema == "beavertails":
            found["unsafe_train"] = chosen.beavertails_path, None, "330k_train"
            found["pku"] = pku, None, "test"
        elif self.unsafe_schema is not None:
            found |= {"unsafe_train": (pku, None, "train"), "unsafe_val": (pku, None, "test")}
        return found.get(name)

    def reader(self, name: str) -> Parse:
        """By kind of the records; those that are only tested on or predicted for are prompts."""
        readers = {"labelled": parse_labelled, "beavertails": parse_judgement}
        of_kind = {"unsafe": readers.get(self.unsafe_schema or "", parse_pair), "pku": parse_pair}
        return (of_kind | {"benign": parse_instruction}).get(name.partition("_")[0], parse_prompt)

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
        """Of the hub those with the longest answers; what is held out is not chosen by length."""
        if self.source == "files":
            return self._of_files("benign")
        records = super().read("benign_train")
        lengths = [len(answer_text(record.answers[0])) for record in records]
        train = [records[i] for i in largest(lengths, self.selection.benign_count)]
        others = _without(train, records)
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randperm(len(others), generator=generator)[: self.selection.benign_held_out]
        return {"train": train, **self._divided([others[i] for i in sorted(drawn.tolist())])}

    def _unsafe(self) -> dict[str, list[Record]]:
        """By ``unsafe_schema``."""
        if self.unsafe_schema is None:
            return {}
        if self.unsafe_schema == "beavertails":
            return self._by_category()
        selects = {"pku": unsafe_prompts, "pku_pairs": preference_pairs}
        select = selects.get(self.unsafe_schema, list)
        if self.source == "files":
            return self._of_files("unsafe", select)
        train, held = select(super().read("unsafe_train")), select(super().read("unsafe_val"))
        return {"train": train, **self._divided(_without(train, held))}

    def _by_category(self) -> dict[str, list[Record]]:
        """So many BeaverTails records of each category, and others held out."""
        chosen = self.selection
        judged = unanimous(super().read("unsafe_train"), chosen.categories)
        limits = chosen.per_category, chosen.held_out_per_category
        train, held = per_category(judged, *limits, self.seed)
        if not self.files["unsafe_test"]:
            return {"train": train, **self._divided(held)}
        judged = unanimous(super().read("unsafe_test"), chosen.categories)
        splits = {"train": train, "val": held, "test": [*chain(*judged.values())]}
        return self.held_out(splits, self._files("unsafe"))

    def _of_files(
        self, kind: str, select: Callable[[list[Any]], list[Any]] = list
    ) -> dict[str, list[Any]]:
        """All splits of a kind from a file for each, held out where "val" or "test" has none."""
        files = self._files(kind)
        given = [side for side, paths in files.items() if paths]
        read = super().read
        return self.held_out({side: select(read(f"{kind}_{side}")) for side in given}, files)

    def _files(self, kind: str) -> dict[str, list[str]]:
        return {side: self.files[f"{kind}_{side}"] for side in SPLITS}

    def _divided(self, held: Sequence[Record]) -> dict[str, list[Record]]:
        """Records that are held out already, divided into "val" and "test"."""
        found: dict[str, list[Record]] = {}
        for record, side in zip(held, side_of_held_out(held, self.shares, self.seed), strict=True):
            found.setdefault(side, []).append(record)
        return found


def _without(known: Sequence[Record], records: Sequence[Record]) -> list[Record]:
    """The records whose prompts are none of the known ones."""
    units = {record.unit for record in known}
    return [record for record in records if record.unit not in units]
