"""A data module of prompts and responses: options, stages, splits and tokenising.

Where records come from and what a batch holds is the task's.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pl_pointwise.data import SPLITS, PointwiseDataModule, ResumableDataLoader
from pl_pointwise.errors import DataError, one_of
from pl_pointwise.plain import from_plain
from pl_pointwise.task import Batch
from pl_pointwise.tasks.common.models import limits_of_model
from pl_pointwise.tasks.common.records import hub_split, numbered, records_of, rows_of
from pl_pointwise.tasks.common.splits import check_fractions, with_held_out

from .model.loading import load_tokenizer
from .roles import collate_rows
from .text.conversations import ConversationEncoder
from .text.encoded import EncodedResponses
from .text.messages import answer_text, turn_text

Needs = Mapping[str, tuple[str, ...]]
"""Data sets by stage."""


@dataclass
class Preparation:
    """How records become samples, and which are held out.

    Args:
        max_prompt_length: the most tokens of a prompt. Longer ones lose whole turns, oldest first;
            tools, system turns and the last user's turn stay.
        max_length: the most tokens of prompt and response; a response is never cut.
        invalid: what to do with a record that cannot be used, or does not fit: "error" or "skip".
            None is "skip" for the hub and "error" for files. Records to predict for are never
            skipped.
        val_fraction: the part of a file's records to hold out as "val"; of each category the same
            part, and no prompt stands on two sides.
        test_fraction: the same as "test", the split that is used once, for a certificate of the
            model that was chosen by "val". At 0 and without a file of them "test" is "val".

    Raises:
        DataError: a value out of its range.
    """

    max_prompt_length: int = 1024
    max_length: int = 2048
    invalid: Literal["error", "skip"] | None = None
    val_fraction: float = 0.05
    test_fraction: float = 0.0

    def __post_init__(self) -> None:
        one_of("invalid", self.invalid, ("error", "skip", None), DataError)
        check_fractions(self.val_fraction, self.test_fraction)
        if not 1 <= self.max_prompt_length < self.max_length:
            raise DataError(
                f"max_prompt_length={self.max_prompt_length}, max_length={self.max_length}: "
                "need 1 ≤ max_prompt_length < max_length."
            )


DEFAULT_PREPARATION = Preparation()


class ResponseDataModule(PointwiseDataModule):
    """Records of prompts and responses from files or the hub, tokenised once.

    A subclass sets the class attributes and defines :meth:`read_splits` and :meth:`read`. Its
    docstring has the arguments. Batches are those of roles.py.

    The model is that of the module it is used with, or given; revision, chat template and its
    arguments are the module's.
    """

    needs: ClassVar[Needs] = {
        "fit": ("train", "val"),
        "validate": ("val",),
        "test": ("test", "train"),
        "predict": ("predict",),
    }
    """Where no records are held out as "test", it is "val" under another name."""
    remedies: ClassVar[Mapping[str, str]]
    """By stage the options to set where there are no data for it."""
    roles: ClassVar[tuple[str, ...]]
    """What a response may be, in the order that a batch numbers them."""
    sources: ClassVar[tuple[str, ...]] = ("hub", "files")
    dataset_class: ClassVar[type[EncodedResponses]] = EncodedResponses
    default_template: ClassVar[str | None] = None
    """The chat template of a model whose tokenizer brings none; None refuses such a model."""

    def __init__(
        self,
        model_name: str | None,
        source: str,
        preparation: Preparation,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        one_of("source", source, self.sources, DataError)
        preparation = from_plain(Preparation, preparation)
        self.given_name, self.preparation, self.source = model_name, preparation, source
        invalid = preparation.invalid
        self.skip_invalid = invalid == "skip" or (invalid is None and source == "hub")
        self._records: dict[str, list[Any]] = {}
        self._encoder: ConversationEncoder
        self._encoded_for: tuple[Any, ...] | None = None

    @property
    def model_name(self) -> str:
        """The model whose tokenizer it is; a DataError where none is given, or two are."""
        name = self.shared_option("model_name", self.given_name)
        if name is None:
            raise DataError(
                f"{type(self).__name__}: which model's tokenizer? Use it with a module, whose "
                "policy.model_name it takes, or give it model_name."
            )
        return str(name)

    # A task's own ---------------------------------------------------------------------------------

    @abstractmethod
    def read_splits(self) -> Mapping[str, list[Any]]:
        """The records of "train", "val" and "test", as far as there are any."""

    @abstractmethod
    def read(self, name: str) -> list[Any]:
        """The records of another data set; none where its source has none."""

    def task_records(self, name: str) -> list[Any]:
        """The records of a data set, read once."""
        if name not in self._records:
            splits = name in SPLITS
            found = self.read_splits() if splits else {name: self.read(name)}
            self._records |= {each: found.get(each, []) for each in (SPLITS if splits else (name,))}
        return self._records[name]

    def describe(self, index: int) -> dict[str, str]:
        """The texts of training sample ``index``: conversation, tools, kind, and each response."""
        dataset = self.datasets["train"]
        assert isinstance(dataset, EncodedResponses)
        record = dataset.records[index]
        texts = {"record": record.where, "prompt": "\n".join(map(turn_text, record.messages))}
        if record.tools:
            texts["tools"] = json.dumps(record.tools, ensure_ascii=False)
        if record.kind:
            texts["kind"] = record.kind
        seen: Counter[str] = Counter()
        for each in record.responses:
            seen[each.role] += 1
            about = [each.behaviour] if each.behaviour else []
            if each.tolerance is not None:
                about.append(f"{'s̄_ref − ' if each.relative else ''}{each.tolerance:g}")
            name = " ".join([each.role, str(seen[each.role]), *(f"({what})" for what in about)])
            texts[name] = "" if each.answer is None else answer_text(each.answer)
        return texts

    # Lightning's hooks ----------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Fill the hub's caches, once a node."""
        self._take_model()
        stage = self.trainer.state.fn if self.trainer else None
        if self.source == "hub" and stage != "predict":
            for name in self.needs.get(stage or "fit", ()):
                self.task_records(name)

    def setup(self, stage: str | None = None) -> None:
        """Read, split and tokenise what ``stage`` needs and is not there yet."""
        self._take_model()
        for each in self.needs if stage is None else [stage]:
            for name in self.needs[each]:
                self._add(name)
        if stage is None:
            return
        needed = self.needs[stage][: None if stage == "test" else 1]
        if self.datasets.keys().isdisjoint(needed):
            raise DataError(
                f"There are no data to {stage} with source={self.source}. "
                f"Set {self.remedies[stage]}."
            )

    def test_dataloader(self) -> dict[str, ResumableDataLoader]:
        """One by data set that there is."""
        return {name: self._loader(name) for name in self.needs["test"] if name in self.datasets}

    def collate(self, rows: list[dict[str, Any]]) -> Batch:
        """See roles.py."""
        return collate_rows(rows, self.roles)

    # For subclasses -------------------------------------------------------------------------------

    def _add(self, name: str) -> None:
        """Put the data set ``name`` into ``datasets``, if its source has it."""
        if name in self.datasets:
            return
        records = self.task_records(name)
        if name == "test" and not records:
            self._add("val")
            if "val" in self.datasets:
                self.datasets["test"] = self.datasets["val"]
        elif records:
            self.datasets[name] = self._encoded(name, records)

    def _encoded(self, name: str, records: Sequence[Any]) -> EncodedResponses:
        """The data set of records; where the model is known, of what it has rows for."""
        most, rows = limits_of_model(self.trainer)
        return self.dataset_class(
            records,
            self._encoder,
            name=name,
            max_prompt_length=self.preparation.max_prompt_length,
            max_length=int(min(most, self.preparation.max_length)),
            rows=rows,
            skip_invalid=self._skips(name),
        )

    def _split(
        self, read: Mapping[str, list[Any]], files: Mapping[str, str | None]
    ) -> dict[str, list[Any]]:
        """All splits: those that were read, and those held out of the training records."""
        shares = {"val": self.preparation.val_fraction, "test": self.preparation.test_fraction}
        return with_held_out(read, shares, self.seed, files)

    def _read_files(
        self,
        files: Mapping[str, str | None],
        parse: Callable[[Any, str], Any],
        select: Callable[[list[Any]], list[Any]] = list,
    ) -> dict[str, list[Any]]:
        """All splits of records from a file for each, held out where "val" or "test" has none."""
        given = {side: path for side, path in files.items() if path is not None}
        read = {side: select(self._from_file(side, path, parse)) for side, path in given.items()}
        return self._split(read, files)

    def _skips(self, name: str) -> bool | None:
        """Whether bad records of a data set are left out; None: there is no choice."""
        return None if name == "predict" else self.skip_invalid

    def _from_file(self, name: str, path: str, parse: Callable[[Any, str], Any]) -> list[Any]:
        """The records of a file, for the data set ``name``."""
        return records_of(rows_of(path), path, parse, self._skips(name))

    def _from_hub(
        self, path: str, config: str | None, split: str, parse: Callable[[Any, str], Any]
    ) -> list[Any]:
        """The records of a split of a data set on the hub."""
        source = f"{path}, {split}"
        rows = numbered(hub_split(path, config, split), source)
        return records_of(rows, source, parse, self.skip_invalid)

    def _take_model(self) -> None:
        """Encodes for the model it is used with now; data sets of another model are dropped."""
        self.shared_option("roles", self.roles)
        options = ("revision", "chat_template", "template_arguments")
        revision, template, arguments = (self.shared_option(name, None) for name in options)
        model = (self.model_name, revision, template, arguments)
        if model == self._encoded_for:
            return
        tokenizer = load_tokenizer(
            self.model_name,
            revision=revision,
            chat_template=template,
            default_template=self.default_template,
        )
        self._encoder = ConversationEncoder(tokenizer, template_arguments=arguments)
        if self._encoded_for is not None:
            self.datasets = {}
        self._encoded_for = model
