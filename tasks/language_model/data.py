"""A data module of prompts and responses: what both language tasks share.

Options, stages, the held-out records that are tested, and tokenising. Where records come from and
what a batch holds is the task's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

from transformers import PreTrainedTokenizerBase

from pl_pointwise.data import PointwiseDataModule, ResumableDataLoader
from pl_pointwise.errors import DataError, one_of
from pl_pointwise.tasks.common.records import numbered, records_of, rows_of

from .conversations import ConversationEncoder
from .encoded import EncodedResponses
from .loading import load_tokenizer

Columns = Mapping[Callable[[Any, str], Any], tuple[tuple[str, ...], tuple[str, ...]]]
"""Columns of a Parquet file by what reads it: those it must have, those it may have."""

Needs = Mapping[str, tuple[str, ...]]
"""Data sets by stage."""


class ResponseDataModule(PointwiseDataModule):
    """Records of prompts and responses from files or the hub, tokenised once.

    A subclass sets the class attributes and defines :meth:`finished`, :meth:`encoded`,
    :meth:`remedy` and ``collate``. Its docstring has the arguments.
    """

    needs: ClassVar[Needs]
    """The data set "test" is the held-out records, "val", under another name."""

    columns: ClassVar[Columns]

    default_template: ClassVar[str | None] = None
    """The chat template of a model whose tokenizer brings none; None refuses such a model."""

    def __init__(
        self,
        model_name: str,
        *,
        source: Literal["hub", "files"],
        val_fraction: float,
        invalid: Literal["error", "skip"] | None,
        max_prompt_length: int,
        max_length: int,
        revision: str | None,
        batch_size: int,
        eval_batch_size: int | None,
        num_workers: int,
        seed: int,
        chat_template: str | None = None,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            seed=seed,
        )
        one_of("source", source, ("hub", "files"), DataError)
        one_of("invalid", invalid, ("error", "skip", None), DataError)
        if not 0 <= val_fraction < 1:
            raise DataError(f"val_fraction={val_fraction}: give a number from 0 to below 1.")
        if not 1 <= max_prompt_length < max_length:
            raise DataError(
                f"max_prompt_length={max_prompt_length}, max_length={max_length}: "
                "need 1 ≤ max_prompt_length < max_length."
            )
        self.model_name, self.revision, self.chat_template = model_name, revision, chat_template
        self.source = source
        self.val_fraction = val_fraction
        self.skip_invalid = invalid == "skip" or (invalid is None and source == "hub")
        self.max_prompt_length, self.max_length = max_prompt_length, max_length
        self._records: dict[str, list[Any]] = {}

    # A task's own ---------------------------------------------------------------------------------

    @abstractmethod
    def finished(self, name: str) -> Sequence[Any]:
        """The records of a data set; none where its source has none."""

    @abstractmethod
    def encoded(self, name: str, records: Sequence[Any], **limits: Any) -> EncodedResponses[Any]:
        """The data set of such records; ``limits`` are :class:`EncodedResponses`'s options."""

    @abstractmethod
    def remedy(self, stage: str) -> str:
        """Which options to set where there are no data for a stage."""

    # Lightning's hooks ----------------------------------------------------------------------------

    def setup(self, stage: str | None = None) -> None:
        """Read, split and tokenise what ``stage`` needs and is not there yet."""
        for each in self.needs if stage is None else [stage]:
            for name in self.needs[each]:
                self._add(name)
        if stage is None:
            return
        needed = self.needs[stage] if stage == "test" else self.needs[stage][:1]
        if not any(name in self.datasets for name in needed):
            raise DataError(
                f"There are no data to {stage} with source={self.source}. Set {self.remedy(stage)}."
            )

    def test_dataloader(self) -> dict[str, ResumableDataLoader]:
        """The data sets to test on that there are, in the order of ``needs``."""
        return {name: self._loader(name) for name in self.needs["test"] if name in self.datasets}

    # For subclasses -------------------------------------------------------------------------------

    def _add(self, name: str) -> None:
        """Put the data set ``name`` into ``datasets``, if its source has it."""
        if name in self.datasets:
            return
        if name == "test":
            self._add("val")
            if "val" in self.datasets:
                self.datasets["test"] = self.datasets["val"]
            return
        records = self.finished(name)
        if records:
            self.datasets[name] = self.encoded(
                name,
                records,
                max_prompt_length=self.max_prompt_length,
                max_length=self.max_length,
                skip_invalid=self._skips(name),
            )

    def _skips(self, name: str) -> bool | None:
        """Whether bad records of a data set are left out; None: there is no choice."""
        return None if name == "predict" else self.skip_invalid

    def _from_file(self, name: str, path: str, parse: Callable[[Any, str], Any]) -> list[Any]:
        """The records of a file, for the data set ``name``."""
        required, optional = self.columns[parse]
        return records_of(rows_of(path, required, optional), path, parse, self._skips(name))

    def _from_hub(self, rows: Any, source: str, parse: Callable[[Any, str], Any]) -> list[Any]:
        """The records of a split; ``source`` is its name, for messages."""
        return records_of(numbered(rows, source), source, parse, self.skip_invalid)

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(
            self.model_name,
            revision=self.revision,
            chat_template=self.chat_template,
            default_template=self.default_template,
        )

    @cached_property
    def _encoder(self) -> ConversationEncoder:
        return ConversationEncoder(self._tokenizer())
