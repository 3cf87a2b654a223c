"""Conversations: where records come from, which are held out, and the data module."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from pl_pointwise.data import SPLITS
from pl_pointwise.errors import DataError, one_of
from pl_pointwise.tasks.common.records import hub_split, records_of, rows_of
from pl_pointwise.tasks.language_model.batch import collate_rows
from pl_pointwise.tasks.language_model.data import (
    DEFAULT_PREPARATION,
    Columns,
    Needs,
    Preparation,
    ResponseDataModule,
    conversation_texts,
)
from pl_pointwise.tasks.language_model.messages import answer_text
from pl_pointwise.tasks.language_model.records import Record, Response, with_refusals
from pl_pointwise.tasks.language_model.refusals import REFUSAL_TEXT, validate_refusals

from .records import CONSTRAINED, ROLES, grouped, role_number
from .schemas import COLUMNS, SCHEMAS, Reading

EXAMPLE = Path(__file__).parent / "example.jsonl"
"""Forty records that ship with the package."""

ABSENT = -1


class ConversationDataModule(ResponseDataModule):
    """Conversations and responses with roles, tokenised once.

    One record, see records.py; each response has a role, and perhaps a bound of its own::

        {"messages": [{"role": "system", "content": "You are the desk of a library."},
                      {"role": "user", "content": "Until when can I keep it?"}],
         "tools": [{"name": "due_date", "description": "...", "parameters": {...}}],
         "responses": [
            {"role": "prefer", "tool_calls": [{"name": "due_date", "arguments": {}}]},
            {"role": "avoid", "content": "Until Friday.", "tolerance": -6},
            {"role": "reference", "content": "...", }],
         "category": "loans"}

    The hub's usual schemas are told by their columns (schemas.py), others by ``columns``.

    The batch of B records, R responses to each at most, K_r of role r::

        index, prompt_ids, prompt_lengths, response_ids, response_lengths, records   batch.py
        roles     (B, R)    long   what each response is, a position in ROLES; −1 where absent
        shift     (B, R)    float  what its own bound adds to s̄; NaN where the role's applies
        relative  (B, R)    bool   whether that bound is measured from the reference's s̄
        prefer, avoid, refuse  (B, K_r)  long  which responses are of the role; −1 where absent
        objective (B,)      long   1 carries the objective, 0 does not, −1 its roles decide
        refusal   (B,)      long   1 the prompt is to be refused, 0 a refusal is to be avoided,
                                   −1 neither
        rank      (B,)      long   place among the samples of the same category, in a random order

    ``test`` runs "test", held-out records, and "train", one full pass over the training data.

    Args:
        model_name: the model whose tokenizer and chat template to use; None takes that of the
            module it is used with.
        source: "files", "hub", or "example" for the forty records that ship with the package.
        train_file: records, or several files of them: JSON lines, or by its ending Parquet, CSV or
            a JSON list.
        val_file: those held out. Without one, a part of the training prompts is.
        test_file: those that certify. Without one, preparation.test_fraction of the training
            prompts; without either, "test" is "val".
        predict_file: records to answer in `predict`, with or without responses; with any source.
        hub_path: the data set on the hub, or a folder of the same layout.
        hub_config: its configuration.
        hub_split: its split, of which a part is held out.
        schema: of the records, a name in schemas.py; "auto" tells it by the columns.
        columns: of our name of a column the data's, as {messages: conversation, prefer: good}.
        role: of the response of schemas that give it none, "messages" and "instruction".
        group: make one sample of all records of one prompt, with all their responses.
        refusals: texts for refusals that have none; a record's own refusal is kept.
        preparation: how records become samples: cutting, skipping, holding out.
        batch_size: prompts per rank in one optimisation step.
        eval_batch_size: prompts per rank and evaluation batch; None is ``batch_size``.
        num_workers: loader processes.
        seed: of the order of training samples, and of what is held out.

    Raises:
        DataError: options that contradict each other.
    """

    needs: ClassVar[Needs] = {
        "fit": ("train", "val"),
        "validate": ("val",),
        "test": ("test", "train"),
        "predict": ("predict",),
    }
    columns: ClassVar[Columns] = {}  # by schema: see Reading

    def __init__(
        self,
        model_name: str | None = None,
        *,
        source: Literal["files", "hub", "example"] = "files",
        train_file: str | list[str] | None = None,
        val_file: str | None = None,
        test_file: str | None = None,
        predict_file: str | None = None,
        hub_path: str | None = None,
        hub_config: str | None = None,
        hub_split: str = "train",
        schema: str = "auto",
        columns: dict[str, str] | None = None,
        role: str = "reference",
        group: bool = False,
        refusals: Sequence[str] = (REFUSAL_TEXT,),
        preparation: Preparation = DEFAULT_PREPARATION,
        batch_size: int = 8,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        one_of("source", source, ("files", "hub", "example"), DataError)
        super().__init__(
            model_name,
            source="hub" if source == "hub" else "files",
            preparation=preparation,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            seed=seed,
        )
        one_of("schema", schema, ("auto", *SCHEMAS), DataError)
        one_of("role", role, ROLES, DataError)
        for name in columns or {}:
            one_of("columns", name, COLUMNS, DataError)
        train = [train_file] if isinstance(train_file, str) else list(train_file or [])
        labelled = bool(train or val_file or test_file)
        if source != "files" and labelled:
            raise DataError(f"source={source}: it takes no files. Set source to files.")
        if source == "files" and not (labelled or predict_file):
            raise DataError("source=files: it needs train_file, val_file or test_file.")
        if (source == "hub") != (hub_path is not None):
            raise DataError(
                f"source={source}, hub_path={hub_path}: hub_path names the data set of source=hub, "
                "which needs one. Set both, or neither."
            )
        self.train_files = [str(EXAMPLE)] if source == "example" else train
        self.files = {"val": val_file, "test": test_file, "predict": predict_file}
        self.hub_path, self.hub_config, self.hub_split = hub_path, hub_config, hub_split
        self.reading = Reading(schema, columns, role)
        self.group, self.refusals = group, validate_refusals(refusals)

    # Lightning's hooks ----------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Fill the hub's caches, once a node."""
        self._take_model()

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The batch of the class docstring, of rows of the data set with an index."""
        records: list[Record] = [row["record"] for row in rows]
        batch = collate_rows(rows)
        shape = batch["response_lengths"].shape
        batch["roles"] = torch.full(shape, ABSENT)
        batch["shift"] = torch.full(shape, math.nan)
        batch["relative"] = torch.zeros(shape, dtype=torch.bool)
        for role in CONSTRAINED:
            width = max(1, rows[0]["widths"].get(role, 0))
            batch[role] = torch.full((len(rows), width), ABSENT)
        for row, record in enumerate(records):
            _describe_responses(batch, row, record.responses)
        batch["objective"] = _numbers(
            ABSENT if record.objective is None else int(record.objective) for record in records
        )
        batch["refusal"] = _numbers(_refusal_wanted(record) for record in records)
        batch["rank"] = _numbers(row["rank"] for row in rows)
        return batch

    def describe(self, index: int) -> dict[str, str]:
        """The texts of training sample ``index``: conversation, tools, and the responses."""
        record = self._training_record(index)
        texts = {**conversation_texts(record), "kind": record.kind}
        seen: dict[str, int] = {}
        for response in record.responses:
            place = seen[response.role] = seen.get(response.role, 0) + 1
            bound = "" if response.tolerance is None else f" ({_bound(response)})"
            text = "" if response.answer is None else answer_text(response.answer)
            texts[f"{response.role} {place}{bound}"] = text
        return texts

    # Data sets ------------------------------------------------------------------------------------

    @property
    def needs_tools(self) -> bool:
        """Whether some record has tools; reads the records."""
        stage = self.trainer.state.fn if self.trainer else None
        if stage != "predict":
            self._read_splits()
        if self.files["predict"] is not None:
            self.task_records("predict")
        return any(record.tools for records in self._records.values() for record in records)

    def remedy(self, stage: str) -> str:
        """The file that a stage needs."""
        options = {"fit": "train_file", "predict": "predict_file"}
        return options.get(stage, "test_file, val_file, or preparation.val_fraction above 0")

    def task_records(self, name: str) -> list[Record]:
        """The records of a data set, with a text for each refusal."""
        if name == "predict":
            path = self.files[name]
            if path is not None and name not in self._records:
                self._records[name] = self._from_files(name, [path])
        else:
            self._read_splits()
        return self._records.get(name, [])

    def _read_splits(self) -> None:
        """The records of all splits, once."""
        if any(side in self._records for side in SPLITS):
            return
        read: dict[str, list[Record]] = {}
        if self.source == "hub":
            assert self.hub_path is not None
            rows = hub_split(self.hub_path, self.hub_config, self.hub_split)
            named = f"{self.hub_path}, {self.hub_split}"
            read["train"] = self._finished(self._from_hub(rows, named, self.reading))
        else:
            paths = {"train": self.train_files}
            paths |= {side: [path] for side in ("val", "test") if (path := self.files[side])}
            read |= {side: self._from_files(side, of) for side, of in paths.items() if of}
        train = ", ".join(self.train_files)
        self._records |= self._split(read, {"train": train, **self.files})

    def _from_files(self, name: str, paths: Sequence[str]) -> list[Record]:
        reading = self.reading
        if name == "predict":
            reading = Reading(reading.schema, reading.columns, reading.role, responses=False)
        found: list[Record] = []
        for path in paths:
            rows = rows_of(path, (), reading.names)
            found += records_of(rows, path, reading, self._skips(name))
        return self._finished(found)

    def _finished(self, records: list[Record]) -> list[Record]:
        records = grouped(records) if self.group else records
        return with_refusals(records, self.refusals)


def _describe_responses(batch: dict[str, Tensor], row: int, responses: Sequence[Response]) -> None:
    """Fills a row of the batch with what is asked of its responses."""
    places = dict.fromkeys(CONSTRAINED, 0)
    for column, response in enumerate(responses):
        batch["roles"][row, column] = role_number(response.role)
        if response.tolerance is not None:
            # s̄ ≥ ε becomes s̄ − ε ≥ 0, and s̄ ≥ s̄_ref − δ becomes s̄ − s̄_ref + δ ≥ 0.
            own = response.tolerance
            batch["shift"][row, column] = own if response.relative else -own
            batch["relative"][row, column] = response.relative
        if response.role in places:
            batch[response.role][row, places[response.role]] = column
            places[response.role] += 1


def _refusal_wanted(record: Record) -> int:
    """Whether a prompt is to be refused, 1, or not, 0; −1 where no response says."""
    for response in record.responses:
        if response.refusal and response.role in ("refuse", "avoid"):
            return int(response.role == "refuse")
    return ABSENT


def _numbers(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.long)


def _bound(response: Response) -> str:
    sign = "≤" if response.role == "avoid" else "≥"
    if response.relative:
        return f"s̄ {sign} s̄_ref − {response.tolerance:g}"
    return f"s̄ {sign} {response.tolerance:g}"
