"""Records tokenised once: a prompt that is cut to fit, responses that never are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from lightning.pytorch.utilities import rank_zero_info

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.records import CHOICE, CHUNK, report_skipped

from .conversations import Answer, ConversationEncoder, cut_left


class Conversation(Protocol):
    """What a task's record has to have: a conversation and answers to it."""

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """Ending before the assistant's turn."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Descriptions, as objects."""

    @property
    def answers(self) -> Sequence[Answer]:
        """Texts or lists of tool calls."""

    @property
    def prompt(self) -> str:
        """What records of one prompt have in common, and no others."""

    @property
    def where(self) -> str:
        """File and line, or source and record, for messages."""


C = TypeVar("C", bound=Conversation)


class EncodedResponses(Generic[C]):
    """Prompts and responses as token ids, in flat arrays.

    Row i is {"prompt": (P,), "responses": R arrays (T,), "columns": the most responses of a row}; a
    task's subclass adds what its batches need besides.

    Args:
        records: in the order of the data set.
        encoder: renders and tokenises.
        max_prompt_length: longer prompts lose their beginning.
        max_length: the most tokens of a prompt, so cut, and a response together.
        name: of the data set, for messages.
        skip_invalid: leave out a record that cannot be rendered, or a response of which does not
            fit, and say how many. None is False where the user has no choice.

    Attributes:
        records: those that were kept.
        truncated: how many prompts lost their beginning.
        characters: of every response, one after the other, without what ends the turn.

    Raises:
        DataError: such a record, or none at all.
    """

    def __init__(
        self,
        records: Sequence[C],
        encoder: ConversationEncoder,
        *,
        max_prompt_length: int,
        max_length: int,
        name: str = "data",
        skip_invalid: bool | None = None,
    ) -> None:
        self.records: list[C] = []
        self.truncated = 0
        self.characters: list[int] = []
        prompts: list[np.ndarray] = []
        responses: list[np.ndarray] = []
        skipped: list[str] = []
        bos = encoder.tokenizer.bos_token_id
        for start in range(0, len(records), CHUNK):
            kept, texts, answers = [], [], []
            for record in records[start : start + CHUNK]:
                try:
                    prompt, rendered = render(record, encoder)
                    self.check(record, rendered)
                except DataError as error:
                    skipped.append(_refused(error, skip_invalid))
                    continue
                kept.append(record)
                texts.append(prompt)
                answers.append(rendered)
            for record, rendered, (ids, tokens) in zip(
                kept, answers, encoder.encode(texts, answers), strict=True
            ):
                cut = cut_left(ids, max_prompt_length, bos)
                longest = max(map(len, tokens), default=0)
                if len(cut) + longest > max_length:
                    too_long = DataError(
                        f"{record.where}: a response of {longest:,} tokens does not fit behind a "
                        f"prompt of {len(cut):,} in max_length={max_length:,}, and responses are "
                        "never cut. Raise max_length, lower max_prompt_length, or take it out."
                    )
                    skipped.append(_refused(too_long, skip_invalid))
                    continue
                self.truncated += len(cut) < len(ids)
                self.records.append(record)
                prompts.append(np.asarray(cut, np.int32))
                responses += [np.asarray(each, np.int32) for each in tokens]
                self.characters += [encoder.characters(each) for each in rendered]
        report_skipped(name, skipped, len(self.records))
        if not self.records:
            raise DataError(f"{name}: no usable record. Give at least one.")
        if self.truncated:
            rank_zero_info(
                f"{name}: {self.truncated:,} of {len(self.records):,} prompts are longer than "
                f"max_prompt_length={max_prompt_length:,} tokens and lost their beginning."
            )
        self.columns = max(len(record.answers) for record in self.records)
        self._prompts, self._prompt_ends = _flat(prompts)
        self._responses, self._response_ends = _flat(responses)
        self._owners = np.cumsum([0, *(len(record.answers) for record in self.records)])

    def check(self, record: C, rendered: Sequence[str]) -> None:
        """A task's own demands on a record rendered so; a DataError refuses it."""

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, position: int) -> dict[str, Any]:
        first, last = self.span(position)
        start, end = self._prompt_ends[position : position + 2]
        return {
            "prompt": self._prompts[start:end],
            "responses": [
                self._responses[a:b] for a, b in pairwise(self._response_ends[first : last + 1])
            ],
            "columns": self.columns,
        }

    def span(self, position: int) -> tuple[int, int]:
        """The places of a row's responses among all, from and up to."""
        if not 0 <= position < len(self):
            raise IndexError(f"{position} of {len(self)} records")
        first, last = self._owners[position : position + 2].tolist()
        return first, last

    def record(self, position: int) -> C:
        """The texts of a row, for reports."""
        return self.records[position]

    @cached_property
    def units(self) -> list[str]:
        """The prompt of each sample, as a digest: samples of one prompt depend on each other."""
        return [record.prompt for record in self.records]

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the tokens and their order, so of texts, chat template and limits."""
        found = hashlib.sha256()
        for values in (
            self._prompts,
            self._prompt_ends,
            self._responses,
            self._response_ends,
            self._owners,
        ):
            found.update(np.ascontiguousarray(values).tobytes())
        return found.hexdigest()


def render(record: Conversation, encoder: ConversationEncoder) -> tuple[str, list[str]]:
    """The prompt and each response as the model reads them.

    Raises:
        DataError: the template refuses them.
    """
    prompt = encoder.prompt(record.messages, record.tools, record.where)
    rendered = [
        encoder.response(record.messages, record.tools, answer, prompt, record.where)
        for answer in record.answers
    ]
    return prompt, rendered


def _refused(error: DataError, skip_invalid: bool | None) -> str:
    """The message of a record to leave out; raises it where that is not wanted."""
    if skip_invalid is False:
        raise DataError(f"{error} {CHOICE}") from error.__cause__
    if not skip_invalid:
        raise error
    return str(error)


def _flat(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """One array of all, and where each ends."""
    whole = np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
    return whole, np.cumsum([0, *map(len, arrays)])
