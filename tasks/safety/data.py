"""Safety data: where records come from, which are held out, and the data module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

from lightning.pytorch.utilities import rank_zero_warn

from pl_pointwise.data import SPLITS
from pl_pointwise.errors import DataError, one_of
from pl_pointwise.plain import from_plain
from pl_pointwise.tasks.common.data import (
    Needs,
    Parse,
    side_of_held_out,
    warn_of_shared,
)
from pl_pointwise.tasks.language_model.data import EncodedResponses, ResponseDataModule
from pl_pointwise.tasks.language_model.text.reasoning import (
    REFUSAL_TEXT,
    validate_refusals,
)
from pl_pointwise.tasks.language_model.text.records import Record, with_refusals

from .records import (
    ROLES,
    UNSAFE,
    longest,
    parse_instruction,
    parse_judgement,
    parse_labelled,
    parse_pair,
    parse_prompt,
    per_category,
    preference_pairs,
    unanimous,
    unsafe_prompts,
    without,
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


@dataclass(frozen=True)
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
        held_out = self.held_out_per_category
        count = self.per_category
        if not 0 <= held_out < count:
            raise DataError(
                f"held_out_per_category={held_out}, per_category={count}: leave some."
            )


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
        model_name: the model whose tokenizer and chat template to use; None takes the module's.
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
        options: ``preparation``, of skipping and holding out, and those of `PointwiseDataModule`;
            ``seed`` also of what is held out.
    """

    needs: ClassVar[Needs] = {**ResponseDataModule.needs, "test": TEST_SETS}
    beside = ("over_refusal", "alpaca_eval", "predict")
    trained = ("benign_train", "unsafe_train")
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
        selection: Selection = Selection(),
        refusals: Sequence[str] = (REFUSAL_TEXT,),
        unsafe_answers: Literal["leave", "take"] = "leave",
        **options: Any,
    ) -> None:
        files = {
            "benign_train": benign_file,
            "benign_val": benign_val_file,
            "benign_test": benign_test_file,
            "unsafe_train": unsafe_file,
            "unsafe_val": unsafe_val_file,
            "unsafe_test": unsafe_test_file,
            "pku": pku_file,
            "over_refusal": over_refusal_file,
            "alpaca_eval": alpaca_eval_file,
            "predict": predict_file,
        }
        super().__init__(model_name, source, files, **options)
        one_of("unsafe_answers", unsafe_answers, ("leave", "take"), DataError)
        one_of(
            "unsafe_schema", unsafe_schema, (*get_args(UnsafeSchema), None), DataError
        )
        if source == "hub" and unsafe_schema == "labelled":
            raise DataError(
                "unsafe_schema=labelled: there are none on the hub; give files."
            )
        self.unsafe_schema: UnsafeSchema | None = unsafe_schema
        self.selection = from_plain(Selection, selection)
        self.refusals = validate_refusals(refusals)
        self.unsafe_answers = unsafe_answers

    def read_splits(self) -> dict[str, list[Record]]:
        """For each split benign, then unsafe records."""
        kinds = [self._of_kind("benign")]
        # The warm start trains on benign prompts alone.
        if self.unsafe_schema is not None:
            kinds.append(self._of_kind("unsafe"))
        splits: dict[str, list[Record]] = {side: [] for side in SPLITS}
        for of_kind in kinds:
            for side, records in of_kind.items():
                splits[side] += records
        safe = {record.unit for record in splits["train"] if not record.unsafe}
        both = sum(record.unit in safe for record in splits["train"] if record.unsafe)
        # One λ for a refusal above its floor, one for the same text below a ceiling.
        if both:
            rank_zero_warn(
                f"train: {both:,} unsafe records have a prompt that is a benign one too, so it "
                "is to be answered and refused. Take it out of one."
            )
        return splits

    def _of_kind(self, kind: str) -> dict[str, list[Record]]:
        """All splits: of files one for each, or a share; else what ``selection`` holds out."""
        chosen = self.selection
        judged = kind == "unsafe" and self.unsafe_schema == "beavertails"
        files = {side: self.files[f"{kind}_{side}"] for side in SPLITS}
        read = {side: self.read(f"{kind}_{side}") for side in SPLITS}
        read = {side: records for side, records in read.items() if records}
        # Files have their own splits, or shares; the paper's selection is of the hub's sets.
        if self.source == "files" and not judged:
            return self.held_out(read, files)
        train = read.get("train", [])
        if judged:
            train, held = per_category(
                train, chosen.per_category, chosen.held_out_per_category, self.seed
            )
            # With a file of its own the selection is for validation alone.
            if "test" in read:
                return self.held_out(
                    {"train": train, "val": held, "test": read["test"]}, files
                )
        elif kind == "benign":
            train, held = longest(
                train, chosen.benign_count, chosen.benign_held_out, self.seed
            )
        else:
            # PKU-SafeRLHF's split "test", without the prompts that "train" has too.
            held = without(train, read.get("val", []))
        splits = {"train": train}
        for record, side in zip(
            held, side_of_held_out(held, self.shares, self.seed), strict=True
        ):
            splits.setdefault(side, []).append(record)
        return splits

    def read(self, name: str) -> list[Record]:
        """The records of a data set; of several judgements or answers what the schema makes."""
        rows: list[Any] = super().read(name)
        if name.startswith("unsafe"):
            records = self._of_schema(rows)
        elif name == "pku":
            records = unsafe_prompts(rows, once=True)
        # XSTest has unsafe contrasts beside its benign prompts.
        elif name == "over_refusal":
            records = [record for record in rows if not record.unsafe]
        else:
            records = rows
        # A prompt that was trained on says nothing of new ones.
        if name in TEST_SETS:
            splits = {"train": self._records.get("train", []), name: records}
            where = ", ".join(self.files[name]) or name
            warn_of_shared(splits, {"train": "the training set", name: where})
        return records

    def _of_schema(self, rows: list[Any]) -> list[Record]:
        """The unsafe records that judgements or pairs of answers make; "labelled" ones are some."""
        if self.unsafe_schema == "beavertails":
            return unanimous(rows, self.selection.categories)
        if self.unsafe_schema == "pku":
            return unsafe_prompts(rows)
        if self.unsafe_schema == "pku_pairs":
            return preference_pairs(rows)
        return rows

    def reader(self, name: str) -> Parse:
        """By kind of the records; those that are only tested on or predicted for are prompts."""
        kind = name.partition("_")[0]
        # Alpaca's schema, whichever split it is.
        if kind == "benign":
            return parse_instruction
        if kind == "pku":
            return parse_pair
        if kind != "unsafe":
            return parse_prompt
        if self.unsafe_schema == "labelled":
            return parse_labelled
        return parse_judgement if self.unsafe_schema == "beavertails" else parse_pair

    def on_hub(self, name: str) -> tuple[str, str | None, str] | None:
        """The hub's splits by kind and side, and PKU-SafeRLHF where it is only tested on."""
        chosen = self.selection
        if name == "benign_train":
            return chosen.alpaca_path, None, "train"
        judged = self.unsafe_schema == "beavertails"
        if name == "unsafe_train" and judged:
            return chosen.beavertails_path, None, "330k_train"
        if name == "unsafe_train":
            return chosen.pku_path, None, "train"
        # Its split "test" is held out where "train" is trained on, and else a data set of its own.
        if name == ("pku" if judged else "unsafe_val"):
            return chosen.pku_path, None, "test"
        return None

    def encoded(self, name: str, records: Sequence[Any]) -> EncodedResponses:
        """With a text for each refusal, and unsafe answers where they are asked for."""
        left_out = set[str]()
        if name == "predict":  # Prompts alone.
            left_out = set(ROLES)
        # Safe-DPO compares two answers, so its pairs need both.
        elif self.unsafe_answers == "leave" and self.unsafe_schema != "pku_pairs":
            left_out = {UNSAFE}
        kept = []
        for record in records:
            responses = tuple(r for r in record.responses if r.role not in left_out)
            kept.append(replace(record, responses=responses))
        return super().encoded(name, with_refusals(kept, self.refusals))
