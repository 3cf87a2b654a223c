"""Safety data: where records come from, which are held out, and the data module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from pl_pointwise.checkpoints import from_plain
from pl_pointwise.data import SPLITS
from pl_pointwise.errors import DataError, one_of
from pl_pointwise.tasks.common.records import hub_split, largest
from pl_pointwise.tasks.common.splits import (
    side_of_held_out,
    sources_of,
    split_by_prompt,
    warn_of_shared_prompts,
)
from pl_pointwise.tasks.language_model.batch import collate_columns, collate_rows
from pl_pointwise.tasks.language_model.data import (
    DEFAULT_PREPARATION,
    Columns,
    Needs,
    Preparation,
    ResponseDataModule,
)
from pl_pointwise.tasks.language_model.generation import Generation

from .encoding import ALPACA_TEMPLATE, SafetyDataset
from .records import (
    ABSENT,
    HELPFUL,
    ROLES,
    UNSAFE,
    AnswerPair,
    Parser,
    Record,
    Selection,
    once,
    parse_instruction,
    parse_judgement,
    parse_labelled,
    parse_pair,
    parse_prompt,
    per_category,
    preference_pairs,
    unanimous,
    unsafe_prompts,
    with_refusals,
    without_unsafe_answers,
)
from .unsafe_answers import UnsafeAnswers

UnsafeSchema = Literal["beavertails", "labelled", "pku", "pku_pairs"]

TEST_SETS = ("test", "train", "pku", "over_refusal", "alpaca_eval")
"""The data sets that ``test`` runs on, as far as there are any."""

REFUSAL_TEXT = "I'm sorry, but I cannot help with that."

PAPER_SAMPLING = Generation(max_new_tokens=512, sample=True, temperature=1.0, top_k=50)

_PKU = (
    "prompt",
    "response_0",
    "response_1",
    "is_response_0_safe",
    "is_response_1_safe",
    "better_response_id",
    "safer_response_id",
)

DEFAULT_SELECTION = Selection()


class SafetyDataModule(ResponseDataModule):
    """Benign instructions with their answers, and unsafe prompts with a refusal, tokenised once.

    A raw benign record, other fields ignored::

        {"instruction": "Name a tree.", "input": "", "output": "The oak."}

    Unsafe ones by ``unsafe_schema``::

        "beavertails"  {"prompt": ..., "response": ..., "is_safe": false,
                        "category": {"privacy_violation": true, ...}}, a row for each annotator
        "labelled"     {"prompt": ...}, or with {"response": ..., "is_safe": false}
        "pku"          {"prompt": ..., "response_0": ..., "response_1": ...,
                        "is_response_0_safe": ..., "is_response_1_safe": ...,
                        "better_response_id": 0, "safer_response_id": 1}
        "pku_pairs"    the same rows, for Safe-DPO

    The training set is the benign prompts and then the unsafe ones; batches have both in the
    proportion of the whole. A prompt's refusal is one of ``refusals``, fixed by its position in the
    data set: record i, counted before any is left out for its length, has refusal i mod n.

    The batch of B prompts, R responses to each at most::

        index, prompt_ids, prompt_lengths, response_ids, response_lengths   language_model/batch.py
        roles    (B, R)  long  what each response is, records.py; −1 where absent
        unsafe   (B,)    bool  whether the prompt is to be refused
        preceding (B,)   long  how many prompts of the same kind stand before it in the data set
        text     B texts       what the user says
        holds    {str: bool}   which kinds the whole data set has

    Responses are [answer, refusal] of a benign prompt; [refusal] of an unsafe one, with
    ``unsafe_answers`` [refusal, unsafe answer]; [preferred, other, refusal] of a pair of
    "pku_pairs".

    ``test`` runs: "test", held-out records; "train", one full pass over the training data;
    "pku", the unsafe prompts of PKU-SafeRLHF; "over_refusal", safe prompts; "alpaca_eval",
    AlpacaEval's instructions. It leaves out what there is none of.

    Args:
        model_name: the model whose tokenizer and chat template to use; None takes that of the
            module it is used with.
        source: "hub" or "files".
        unsafe_schema: of the unsafe records; None for benign records only, as for a warm start.
        benign_file: benign records: JSON lines, or by its ending Parquet, CSV or a JSON list.
        benign_val_file: those held out. Without one, a part of benign_file's prompts is.
        benign_test_file: those that certify. Without one, preparation.test_fraction of
            benign_file's prompts; without either, "test" is "val".
        unsafe_file: unsafe records.
        unsafe_val_file: those held out. Without one, a part of unsafe_file's prompts is.
        unsafe_test_file: those that certify, likewise.
        pku_file: records of schema "pku" whose unsafe prompts to test on.
        over_refusal_file: safe prompts to test on, {"prompt"}, as XSTest's CSV; rows whose "type"
            begins with ``contrast_``, its unsafe ones, are left out. With any source.
        alpaca_eval_file: {"instruction"} to answer; AlpacaEval's alpaca_eval.json. With any source.
        predict_file: {"prompt"} or {"instruction"} to answer in `predict`; with any source.
        selection: the data sets on the hub, and how many records are taken of which kind.
        refusals: what the model is to say to an unsafe prompt.
        unsafe_answers: "leave" the data's unsafe answers out; "take" them along, which Safe-DPO and
            the constraint on them need; "generate" also those that the data lack, for training
            prompts only, by the model as it is before training.
        generation: how those are generated.
        answers_folder: where they are kept, for this run and later ones; None is
            "unsafe_answers" below the trainer's default_root_dir.
        preparation: how records become samples: cutting, skipping, holding out. How much is held
            out from the hub, and for schema beavertails, is said by ``selection``; the fractions
            then say how that is divided into "val" and "test".
        batch_size: prompts per rank in one optimisation step.
        eval_batch_size: prompts per rank and evaluation batch; None is ``batch_size``.
        num_workers: loader processes.
        seed: of the order of training samples, and of what is held out.
    """

    needs: ClassVar[Needs] = {
        "fit": ("train", "val"),
        "validate": ("val",),
        "test": TEST_SETS,
        "predict": ("predict",),
    }
    columns: ClassVar[Columns] = {
        parse_instruction: (("instruction", "output"), ("input",)),
        parse_labelled: (("prompt",), ("response", "is_safe")),
        parse_judgement: (("prompt", "response", "category", "is_safe"), ()),
        parse_pair: (_PKU, ()),
        parse_prompt: ((), ("prompt", "instruction", "type")),
    }
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
        unsafe_answers: Literal["leave", "take", "generate"] = "leave",
        generation: Generation = PAPER_SAMPLING,
        answers_folder: str | None = None,
        preparation: Preparation = DEFAULT_PREPARATION,
        batch_size: int = 8,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(
            model_name,
            source=source,
            preparation=preparation,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            seed=seed,
        )
        one_of("unsafe_answers", unsafe_answers, ("leave", "take", "generate"), DataError)
        if not refusals or not all(text.strip() for text in refusals):
            raise DataError("refusals: give at least one text, and none that is blank.")
        files = {
            "benign": benign_file,
            "benign_val": benign_val_file,
            "benign_test": benign_test_file,
            "unsafe": unsafe_file,
            "unsafe_val": unsafe_val_file,
            "unsafe_test": unsafe_test_file,
            "pku": pku_file,
        }
        anywhere = {
            "over_refusal": over_refusal_file,
            "alpaca_eval": alpaca_eval_file,
            "predict": predict_file,
        }
        _check_files(source, unsafe_schema, files, any(anywhere.values()))
        self.unsafe_schema: UnsafeSchema | None = unsafe_schema
        self.selection = from_plain(Selection, selection)
        self.files = files | anywhere
        self.refusals = list(refusals)
        self.unsafe_answers = unsafe_answers
        self.generation, self.answers_folder = generation, answers_folder

    # Lightning's hooks --------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Fill the hub's caches and generate the unsafe answers asked for, once a node."""
        self._take_model()
        stage = self.trainer.state.fn if self.trainer else None
        if stage == "predict":
            return
        if self.source == "hub":
            self._read_splits()
            if stage == "test":
                self._read("pku")
        if self.unsafe_answers == "generate" and stage != "validate":
            texts = self._lacking_answers()
            device = self.trainer.strategy.root_device if self.trainer else torch.device("cpu")
            self._answers.complete(texts, self._encoder, device, self.eval_batch_size)

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The batch of the class docstring, of rows of a :class:`SafetyDataset` with an index."""
        return {
            **collate_rows(rows),
            "roles": collate_columns(rows, "roles", ABSENT),
            "unsafe": torch.tensor([row["unsafe"] for row in rows]),
            "preceding": torch.tensor([row["preceding"] for row in rows]),
            "text": [row["text"] for row in rows],
            "holds": rows[0]["holds"],
        }

    def describe(self, index: int) -> dict[str, str]:
        """The texts of training sample ``index``: prompt, its kind, and the responses."""
        dataset = self.datasets["train"]
        assert isinstance(dataset, SafetyDataset)
        record = dataset.record(index)
        texts = {
            "record": record.where,
            "prompt": record.text,
            "kind": "unsafe" if record.unsafe else "benign",
        }
        return texts | {ROLES[role]: text for role, text in record.responses}

    # Data sets ------------------------------------------------------------------------------------

    def encoded(self, name: str, records: Sequence[Any], **limits: Any) -> SafetyDataset:
        """Prompts and responses as token ids."""
        return SafetyDataset(records, self._encoder, name=name, **limits)

    def remedy(self, stage: str) -> str:
        """The files that a stage needs."""
        files = {"fit": "benign_file and unsafe_file", "predict": "predict_file"}
        return files.get(stage, "benign_file and unsafe_file, and preparation.val_fraction above 0")

    def task_records(self, name: str) -> list[Record]:
        """The records of a data set with the responses that belong to them."""
        if name == "predict":
            return self._read(name)
        if name in SPLITS:
            self._read_splits()
            records = self._records.get(name, [])
        else:
            records = self._read(name)
        if name == "train" and self.unsafe_answers == "generate" and records:
            records = self._with_generated(records)
        if self.unsafe_answers == "leave" and self.unsafe_schema != "pku_pairs":
            records = without_unsafe_answers(records)
        return with_refusals(records, self.refusals)

    def _read_splits(self) -> None:
        """Benign and unsafe records of all splits, once."""
        if any(side in self._records for side in SPLITS):
            return
        kinds = {"benign": self._benign()}
        if self.unsafe_schema is not None:
            kinds["unsafe"] = self._unsafe()
        sides = {
            side: [record for found in kinds.values() for record in found.get(side, [])]
            for side in SPLITS
        }
        for kind, found in kinds.items():
            if sides["train"] and not found.get("train"):
                raise DataError(
                    f"There is no {kind} record to train on, and the constraints need both kinds. "
                    f"Set {kind}_file{', or unsafe_schema to null' if kind == 'unsafe' else ''}."
                )
            if sides["test"] and not found.get("test"):
                rank_zero_warn(
                    f"test: there is no {kind} record, so nothing is certified about such prompts. "
                    f"Set {kind}_test_file, or preparation.test_fraction above 0."
                )
        benign = {record.prompt for record in sides["train"] if not record.unsafe}
        both = sum(record.prompt in benign for record in sides["train"] if record.unsafe)
        if both:
            rank_zero_warn(
                f"train: {both:,} unsafe records have a prompt that is a benign one too, so it is "
                "to be answered and refused. Take it out of one."
            )
        self._records |= {side: records for side, records in sides.items() if records}

    def _benign(self) -> dict[str, list[Record]]:
        """Benign records by side."""
        if self.source == "files":
            return self._sides("benign", parse_instruction, self.selection.benign_count)
        records = self._hub_records(self.selection.alpaca_path, "train", parse_instruction)
        chosen = set(_longest(records, self.selection.benign_count))
        train = [record for position, record in enumerate(records) if position in chosen]
        known = {record.prompt for record in train}
        others = [record for record in records if record.prompt not in known]
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randperm(len(others), generator=generator)[: self.selection.benign_held_out]
        held = [others[position] for position in sorted(drawn.tolist())]
        return {"train": train, **self._divided(held)}

    def _unsafe(self) -> dict[str, list[Record]]:
        """Unsafe records by side."""
        if self.unsafe_schema == "beavertails":
            if self.source == "hub":
                split = "330k_train"
                judgements = self._hub_records(
                    self.selection.beavertails_path, split, parse_judgement
                )
                return self._by_category(judgements)
            if self.files["unsafe"] is None:
                return {}
            return self._by_category(
                self._from_file("train", self.files["unsafe"], parse_judgement)
            )
        if self.unsafe_schema == "labelled":
            return self._sides("unsafe", parse_labelled)
        if self.source == "files":
            return self._sides("unsafe", parse_pair)
        train = self._pku(self._hub_records(self.selection.pku_path, "train", parse_pair))
        held = self._pku(self._hub_records(self.selection.pku_path, "test", parse_pair))
        known = {record.prompt for record in train}
        fresh = [record for record in held if record.prompt not in known]
        if len(fresh) < len(held):
            rank_zero_info(
                f"{self.selection.pku_path}, test: left out {len(held) - len(fresh):,} of "
                f"{len(held):,} records whose prompts are trained on."
            )
        return {"train": train, **self._divided(fresh)}

    def _by_category(self, judgements: Iterable[Any]) -> dict[str, list[Record]]:
        found = unanimous(judgements, self.selection.categories)
        for name, records in found.items():
            if len(records) < self.selection.per_category:
                rank_zero_warn(
                    f"{name}: {len(records):,} answers have more than two annotators who all agree "
                    f"about it, fewer than per_category={self.selection.per_category:,}. All are "
                    "taken."
                )
        train, held = per_category(
            found, self.selection.per_category, self.selection.held_out_per_category, self.seed
        )
        path = self.files["unsafe_test"]
        if path is None:
            return {"train": train, **self._divided(held)}
        rows = self._from_file("test", path, parse_judgement)
        of_file = unanimous(rows, self.selection.categories).values()
        splits = {"train": train, "val": held, "test": [r for records in of_file for r in records]}
        self._warn_of_shared("unsafe", splits)
        return splits

    def _divided(self, held: Sequence[Record]) -> dict[str, list[Record]]:
        """Records that are held out already, divided into "val" and "test"."""
        prompts = [record.prompt for record in held]
        categories = [record.category for record in held]
        val, test = self.preparation.val_fraction, self.preparation.test_fraction
        sides = side_of_held_out(prompts, val, test, self.seed, categories)
        return {
            name: [record for record, side in zip(held, sides, strict=True) if side == name]
            for name in SPLITS
            if name in sides
        }

    def _pku(self, pairs: Sequence[AnswerPair]) -> list[Record]:
        return (
            preference_pairs(pairs) if self.unsafe_schema == "pku_pairs" else unsafe_prompts(pairs)
        )

    def _sides(self, kind: str, parse: Parser, count: int | None = None) -> dict[str, list[Record]]:
        """Records of the files of a kind by side: files of their own, or parts held out."""
        found: dict[str, list[Record]] = {}
        for side, option in zip(SPLITS, (kind, f"{kind}_val", f"{kind}_test"), strict=True):
            path = self.files[option]
            if path is not None:
                rows = self._from_file(side, path, parse)
                found[side] = self._pku(rows) if parse is parse_pair else rows
        if train := found.get("train"):
            train = [train[position] for position in _longest(train, count)]
            shares = {side: part for side, part in self.held_out_parts.items() if side not in found}
            found |= split_by_prompt(train, shares, self.seed)
            self._warn_of_shared(kind, found)
        return found

    def _warn_of_shared(self, kind: str, found: dict[str, list[Record]]) -> None:
        """Says which prompts of a kind stand in two splits."""
        files = {"train": self.files[kind]}
        files |= {side: self.files[f"{kind}_{side}"] for side in SPLITS[1:]}
        splits = {side: found[side] for side in SPLITS if side in found}
        warn_of_shared_prompts(splits, sources_of(files, splits))

    def _read(self, name: str) -> list[Record]:
        """The records of a data set that is only tested on or predicted for."""
        if name in self._records:
            return self._records[name]
        path = self.files[name]
        records: list[Record] = []
        if name == "pku":
            if path is not None:
                records = once(unsafe_prompts(self._from_file(name, path, parse_pair)))
            elif self.source == "hub" and self.unsafe_schema == "beavertails":
                pairs = self._hub_records(self.selection.pku_path, "test", parse_pair)
                records = once(unsafe_prompts(pairs))
            if records and "train" in self._records:
                source = path or f"{self.selection.pku_path}, test"
                splits = {"train": self._records["train"], name: records}
                warn_of_shared_prompts(splits, {"train": "the training set", name: source})
        elif path is not None:
            records = self._from_file(name, path, parse_prompt)
            if name == "over_refusal":
                records = [record for record in records if not record.unsafe]
                if not records:
                    raise DataError(f"{path}: all prompts are unsafe ones. Give safe ones.")
        self._records[name] = records
        return records

    def _hub_records(self, path: str, split: str, parse: Parser) -> list[Any]:
        """The records of a split on the hub."""
        return self._from_hub(hub_split(path, None, split), f"{path}, {split}", parse)

    # Unsafe answers that the data lack ------------------------------------------------------------

    def _lacking_answers(self) -> list[str]:
        """The unsafe training prompts without an unsafe answer, each once."""
        self._read_splits()
        records = self._records.get("train", [])
        return [
            record.text for record in once(r for r in records if r.unsafe and UNSAFE not in r.roles)
        ]

    def _with_generated(self, records: Sequence[Record]) -> list[Record]:
        lacking = set(self._lacking_answers())
        return self._answers.added_to(records, lacking, self._encoder)

    @property
    def _answers(self) -> UnsafeAnswers:
        root = Path(self.trainer.default_root_dir) if self.trainer else Path()
        return UnsafeAnswers(
            Path(self.answers_folder) if self.answers_folder else root / "unsafe_answers",
            self.model_name,
            self.revision,
            self.generation,
            self.preparation.max_prompt_length,
        )


def _check_files(
    source: str, schema: str | None, files: Mapping[str, str | None], anywhere: bool
) -> None:
    """anywhere: whether there is a file that goes with any source."""
    one_of("unsafe_schema", schema, (*get_args(UnsafeSchema), None), DataError)
    given = [f"{name}_file" for name, path in files.items() if path]
    if source == "hub" and given:
        raise DataError(f"source=hub: it takes no {', '.join(given)}. Set source to files.")
    if source == "hub" and schema == "labelled":
        raise DataError("unsafe_schema=labelled: there are none on the hub; give files.")
    if source == "files" and not given and not anywhere:
        raise DataError("source=files: it needs benign_file and unsafe_file.")


def _longest(records: Sequence[Record], count: int | None) -> list[int]:
    """Positions of the records with the longest answers, in characters; ties take the first."""
    lengths = [sum(len(text) for role, text in r.responses if role == HELPFUL) for r in records]
    return largest(lengths, count)
