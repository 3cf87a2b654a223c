"""Safety data: where records come from, which are held out, and the data module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import ClassVar, Literal, get_args

from pl_pointwise.checkpoints import from_plain
from pl_pointwise.data import SPLITS
from pl_pointwise.errors import DataError, one_of
from pl_pointwise.tasks.common.splits import stratified_ranks
from pl_pointwise.tasks.language_model.data import (
    DEFAULT_PREPARATION,
    Needs,
    Preparation,
)
from pl_pointwise.tasks.language_model.encoded import EncodedResponses
from pl_pointwise.tasks.language_model.messages import answer_text
from pl_pointwise.tasks.language_model.records import with_refusals
from pl_pointwise.tasks.language_model.refusals import REFUSAL_TEXT, validate_refusals

from .records import (
    KINDS,
    REFUSAL,
    ROLES,
    UNSAFE,
    Record,
    Selection,
    without_role,
)
from .sources import BORDERLINE, SafetySources

WITH_ANY_SOURCE = (*BORDERLINE, "over_refusal", "alpaca_eval", "predict")
"""Options of files, without ``_file``, that go with the hub too."""

UnsafeSchema = Literal["beavertails", "labelled", "pku", "pku_pairs"]

TEST_SETS = ("test", "train", "pku", "over_refusal", "contrast", "alpaca_eval")
"""The data sets that ``test`` runs on, as far as there are any."""

DEFAULT_SELECTION = Selection()

ALPACA_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}### Response:
{{ message.content }}{{ eos_token }}{% else %}Below is an instruction that describes a task. \
Write a response that appropriately completes the request.

### Instruction:
{{ message.content }}

{% endif %}{% endfor %}{% if add_generation_prompt %}### Response:
{% endif %}"""
"""Alpaca's prompt as a chat template, for a base model whose tokenizer brings none."""


class SafetyDataset(EncodedResponses):
    """Prompts and responses as token ids; ``rank`` is by kind, its categories in turn."""

    @cached_property
    def strata(self) -> list[int]:
        """Of each sample the position of its kind in :data:`KINDS`."""
        return [KINDS.index(record.kind) for record in self.records]

    @cached_property
    def ranks(self) -> list[int]:
        """Of each sample, how many of its kind come before it, its categories in turn."""
        return stratified_ranks(self.strata, [record.category for record in self.records])


class SafetyDataModule(SafetySources):
    """Benign instructions with their answers, and unsafe prompts with a refusal, tokenised once.

    A raw benign record, other fields ignored::

        {"instruction": "Name a tree.", "input": "", "output": "The oak."}

    Unsafe ones by ``unsafe_schema``::

        "beavertails"  {"prompt": ..., "response": ..., "is_safe": false,
                        "category": {"privacy_violation": true, ...}}, a row for each annotator
        "labelled"     {"prompt": ...}, or with {"response": ..., "is_safe": ...}
        "pku"          {"prompt": ..., "response_0": ..., "response_1": ...,
                        "is_response_0_safe": ..., "is_response_1_safe": ...,
                        "better_response_id": 0, "safer_response_id": 1}
        "pku_pairs"    the same rows, for Safe-DPO

    A borderline one, safe though it looks unsafe, of which only the prompt is needed::

        {"prompt": "How do I kill a process?", "type": "homonyms", "answer": ..., "refusal": ...}

    In place of "instruction" or "prompt", "messages" give a conversation that ends with the user.

    The training set is the benign prompts, then the unsafe, then the borderline ones; batches have
    all in the proportion of the whole. A prompt's refusal is its own, or else one of ``refusals``,
    the same wherever the prompt stands.

    Batches are those of language_model/roles.py; the kind of a record is "benign", "unsafe" or
    "borderline", its category BeaverTails' category, XSTest's type, or the kind.

    Responses are [answer, refusal] of a benign prompt, and of a borderline one that has an answer;
    [refusal] of an unsafe one, with
    ``unsafe_answers`` [refusal, unsafe answer]; [preferred, other, refusal] of a pair of
    "pku_pairs".

    ``test`` runs: "test", held-out records; "train", one full pass over the training data;
    "pku", the unsafe prompts of PKU-SafeRLHF; "over_refusal", safe prompts; "contrast", XSTest's
    unsafe ones; "alpaca_eval", AlpacaEval's instructions. It leaves out what there is none of.

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
        borderline_file: borderline records, as XSTest's CSV, whose unsafe rows are left out. With
            any source.
        borderline_val_file: those held out. Without one, a part of borderline_file's prompts is, of
            each type the same part.
        borderline_test_file: those that certify, likewise.
        over_refusal_file: safe prompts to test on, {"prompt"}, as XSTest's CSV, whose unsafe rows
            are the data set "contrast". They carry ``comply``, as benign ones. With any source.
        alpaca_eval_file: {"instruction"} to answer; AlpacaEval's alpaca_eval.json. With any source.
        predict_file: {"prompt"} or {"instruction"} to answer in `predict`; with any source.
        selection: the data sets on the hub, and how many records are taken of which kind.
        refusals: what the model is to say to an unsafe prompt.
        own_refusals: whether a record's own refusal is taken in its place: of schema "labelled" a
            safe response that refuses by the keyword rule, and a borderline record's.
        unsafe_answers: "leave" the data's unsafe answers out, or "take" them along, which Safe-DPO
            and the constraint on them need.
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
        borderline_file: str | None = None,
        borderline_val_file: str | None = None,
        borderline_test_file: str | None = None,
        over_refusal_file: str | None = None,
        alpaca_eval_file: str | None = None,
        predict_file: str | None = None,
        selection: Selection = DEFAULT_SELECTION,
        refusals: Sequence[str] = (REFUSAL_TEXT,),
        own_refusals: bool = True,
        unsafe_answers: Literal["leave", "take"] = "leave",
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
        one_of("unsafe_answers", unsafe_answers, ("leave", "take"), DataError)
        files = {
            "benign": benign_file,
            "benign_val": benign_val_file,
            "benign_test": benign_test_file,
            "unsafe": unsafe_file,
            "unsafe_val": unsafe_val_file,
            "unsafe_test": unsafe_test_file,
            "pku": pku_file,
            "borderline": borderline_file,
            "borderline_val": borderline_val_file,
            "borderline_test": borderline_test_file,
            "over_refusal": over_refusal_file,
            "alpaca_eval": alpaca_eval_file,
            "predict": predict_file,
        }
        _check_files(source, unsafe_schema, files)
        self.unsafe_schema: UnsafeSchema | None = unsafe_schema
        self.selection = from_plain(Selection, selection)
        self.files = files
        self.refusals, self.own_refusals = validate_refusals(refusals), own_refusals
        self.unsafe_answers = unsafe_answers

    def describe(self, index: int) -> dict[str, str]:
        """The texts of training sample ``index``: prompt, its kind, and the responses."""
        record = self._training_record(index)
        texts = {"record": record.where, "prompt": record.text, "kind": record.kind}
        return texts | {each.role: answer_text(each.answer) for each in record.responses}

    def remedy(self, stage: str) -> str:
        """The files that a stage needs."""
        files = {"fit": "benign_file and unsafe_file", "predict": "predict_file"}
        return files.get(stage, "benign_file and unsafe_file, and preparation.val_fraction above 0")

    def task_records(self, name: str) -> list[Record]:
        """The records of a data set with the responses that belong to them."""
        if name == "predict":
            return without_role(REFUSAL, self._read(name))
        if name in SPLITS:
            self._read_splits()
            records = self._records.get(name, [])
        else:
            records = self._read(name)
        if self.unsafe_answers == "leave" and self.unsafe_schema != "pku_pairs":
            records = without_role(UNSAFE, records)
        return with_refusals(records, self.refusals, self.own_refusals)


def _check_files(source: str, schema: str | None, files: Mapping[str, str | None]) -> None:
    one_of("unsafe_schema", schema, (*get_args(UnsafeSchema), None), DataError)
    given = [name for name, path in files.items() if path]
    instead = [f"{name}_file" for name in given if name not in WITH_ANY_SOURCE]
    if source == "hub" and instead:
        raise DataError(f"source=hub: it takes no {', '.join(instead)}. Set source to files.")
    if source == "hub" and schema == "labelled":
        raise DataError("unsafe_schema=labelled: there are none on the hub; give files.")
    if source == "files" and not given:
        raise DataError("source=files: it needs benign_file and unsafe_file.")
