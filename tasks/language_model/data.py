"""A data module of prompts and responses: their preparation, and tokenising for a language model.

Where records come from is the task's, and tasks/common/data.py's.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pl_pointwise.errors import DataError
from pl_pointwise.plain import from_plain
from pl_pointwise.task import Batch
from pl_pointwise.tasks.common.data import RecordsDataModule, check_fractions
from pl_pointwise.tasks.common.models import limits_of_model

from .model.loading import load_encoder
from .roles import collate_rows
from .text.conversations import ConversationEncoder
from .text.encoded import EncodedResponses
from .text.messages import answer_text, turn_text


@dataclass
class Preparation:
    """How records become samples, and which are held out.

    Args:
        max_prompt_length: the most tokens of a prompt.
        max_length: the most tokens of prompt and response; nothing is ever cut.
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
        check_fractions(self.val_fraction, self.test_fraction)
        if not 1 <= self.max_prompt_length < self.max_length:
            raise DataError(
                f"max_prompt_length={self.max_prompt_length}, max_length={self.max_length}: "
                "need 1 ≤ max_prompt_length < max_length."
            )


DEFAULT_PREPARATION = Preparation()


class ResponseDataModule(RecordsDataModule):
    """Records of prompts and responses from files or the hub, tokenised once.

    A subclass sets the class attributes and says where records come from. Its docstring has the
    arguments. Batches are those of roles.py.

    The model is that of the module it is used with, or given; revision, chat template and its
    arguments are the module's.
    """

    roles: ClassVar[tuple[str, ...]]
    """What a response may be, in the order that a batch numbers them."""
    default_template: ClassVar[str | None] = None
    """The chat template of a model whose tokenizer brings none; None refuses such a model."""

    def __init__(
        self,
        model_name: str | None,
        source: str,
        files: Mapping[str, str | Sequence[str] | None],
        preparation: Preparation,
        **options: Any,
    ) -> None:
        preparation = from_plain(Preparation, preparation)
        shares = {"val": preparation.val_fraction, "test": preparation.test_fraction}
        super().__init__(source, files, shares, preparation.invalid, **options)
        self.given_name, self.preparation = model_name, preparation
        self._encoder: ConversationEncoder

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

    def collate(self, rows: list[dict[str, Any]]) -> Batch:
        """See roles.py."""
        return collate_rows(rows, self.roles)

    # For the base ---------------------------------------------------------------------------------

    def encoded(self, name: str, records: Sequence[Any]) -> EncodedResponses:
        """The data set of records; where the model is known, of what it has rows for."""
        most, rows = limits_of_model(self.trainer)
        return EncodedResponses(
            records,
            self._encoder,
            name=name,
            max_prompt_length=self.preparation.max_prompt_length,
            max_length=int(min(most, self.preparation.max_length)),
            rows=rows,
            skip_invalid=self.skips(name),
        )

    def take_model(self, known: Any) -> tuple[Any, ...]:
        """The model, its revision, chat template and the template's arguments."""
        self.shared_option("roles", self.roles)
        options = ("revision", "chat_template", "template_arguments")
        revision, template, arguments = (self.shared_option(name, None) for name in options)
        taken = (self.model_name, revision, template, arguments)
        if taken != known:
            self._encoder = load_encoder(*taken, self.default_template)
        return taken
