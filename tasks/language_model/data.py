"""A data module of prompts and responses, and its data sets: records tokenised once.

Where records come from is the task's, and tasks/common/data.py's. One that does not fit is refused,
left out, or loses its earliest turns, as ``too_long`` says.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from pl_pointwise.errors import DataError, one_of
from pl_pointwise.plain import from_plain
from pl_pointwise.task import Batch
from pl_pointwise.tasks.common.data import RecordsDataModule, check_fractions
from pl_pointwise.tasks.common.models import check_known, limits_of_model
from pl_pointwise.tasks.common.records import CHUNK, digest, refused, report_skipped

from .contradictions import warn_of_contradictions
from .model.loading import load_encoder
from .roles import collate_rows
from .text.conversations import ConversationEncoder
from .text.messages import answer_text, turn_text
from .text.records import Record
from .text.shortening import shortened


@dataclass(frozen=True)
class Preparation:
    """How records become samples, and which are held out.

    Args:
        max_prompt_length: the most tokens of a prompt.
        max_length: the most tokens of prompt and response.
        too_long: what to do with a record that does not fit: "refuse" it as one that cannot be used
            (``invalid``); "skip" leaves it out, and no other; "cut" takes the earliest turns out of
            its conversation until it fits, never the system's, the last of the user, or a part of
            a text. How many records and turns that is, is said.
        invalid: what to do with a record that cannot be used, or does not fit: "error" or "skip".
            None is "skip" for the hub and "error" for files. Records to predict for are never
            skipped.
        val_fraction: the part of a file's records to hold out as "val"; of each category the same
            part, and no prompt stands on two sides.
        test_fraction: the same as "test", the split that is used once, for a certificate of the
            model that was chosen by "val". At 0 and without a file of them "test" is "val".

    Raises:
        DataError: a value out of its range.

    >>> from pl_pointwise.tasks.language_model.data import Preparation
    >>> preparation = Preparation(max_length=4096, too_long="cut", val_fraction=0.1)
    >>> preparation.max_prompt_length
    1024
    """

    max_prompt_length: int = 1024
    max_length: int = 2048
    too_long: Literal["refuse", "skip", "cut"] = "refuse"
    invalid: Literal["error", "skip"] | None = None
    val_fraction: float = 0.05
    test_fraction: float = 0.0

    def __post_init__(self) -> None:
        check_fractions(self.val_fraction, self.test_fraction)
        one_of("too_long", self.too_long, ("refuse", "skip", "cut"), DataError)
        if not 1 <= self.max_prompt_length < self.max_length:
            raise DataError(
                f"max_prompt_length={self.max_prompt_length}, max_length={self.max_length}: "
                "need 1 ≤ max_prompt_length < max_length."
            )


class ResponseDataModule(RecordsDataModule):
    """Records of prompts and responses from files or the hub, tokenised once.

    A subclass sets the class attributes and says where records come from. Batches are those of
    roles.py. The model is that of the module it is used with, or given; revision, chat template and
    its arguments are the module's.

    Args:
        model_name, source, files: as of a task.
        preparation: how records become samples: skipping, holding out.
        options: of `PointwiseDataModule`.
    """

    roles: ClassVar[tuple[str, ...]]
    """What a response may be, in the order that a batch numbers them."""
    default_template: ClassVar[str | None] = None
    """The chat template of a model whose tokenizer brings none; None refuses such a model."""
    fraction_option = "data.preparation.{}_fraction"

    def __init__(
        self,
        model_name: str | None,
        source: str,
        files: Mapping[str, str | Sequence[str] | None],
        *,
        preparation: Preparation = Preparation(),
        **options: Any,
    ) -> None:
        # Checkpoints and configurations hold it as a mapping.
        preparation = from_plain(Preparation, preparation)
        shares = {"val": preparation.val_fraction, "test": preparation.test_fraction}
        super().__init__(source, files, shares, preparation.invalid, **options)
        self.given_name, self.preparation = model_name, preparation
        # Set by take_model(), which Lightning's hooks call before any record is tokenised.
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

    def describe(self, index: int, dataset: str = "train") -> dict[str, str]:
        """The texts of sample ``index``: conversation, tools, kind, and each response."""
        samples = self.datasets[dataset]
        assert isinstance(samples, EncodedResponses)
        record = samples.records[index]
        texts = {
            "record": record.where,
            "prompt": "\n".join(map(turn_text, record.messages)),
        }
        if record.tools:
            texts["tools"] = json.dumps(record.tools, ensure_ascii=False)
        if record.kind:
            texts["kind"] = record.kind
        # A record may have several responses of a role: a number tells them apart.
        seen: Counter[str] = Counter()
        for response in record.responses:
            seen[response.role] += 1
            # What a reader of a page needs to judge it: its behaviour, and its own bound if it
            # has one.
            about = [response.behaviour] if response.behaviour else []
            if response.tolerance is not None:
                about.append(
                    f"{'s̄_ref − ' if response.relative else ''}{response.tolerance:g}"
                )
            name = " ".join(
                [
                    response.role,
                    str(seen[response.role]),
                    *(f"({what})" for what in about),
                ]
            )
            texts[name] = (
                "" if response.answer is None else answer_text(response.answer)
            )
        return texts

    def collate(self, rows: list[dict[str, Any]]) -> Batch:
        """See roles.py."""
        return collate_rows(rows, self.roles)

    # For the base ---------------------------------------------------------------------------------

    def encoded(self, name: str, records: Sequence[Any]) -> EncodedResponses:
        """The data set of records; where the model is known, of what it has rows for."""
        module: Any = getattr(self.trainer, "lightning_module", None)
        # The bounds are the module's; of data set up by hand there are none.
        if name == "train" and hasattr(module, "learnt_roles"):
            warn_of_contradictions(records, module)
        # A model may have fewer positions, and fewer rows of embeddings, than its tokenizer allows.
        most, rows = limits_of_model(self.trainer)
        return EncodedResponses(
            records,
            self._encoder,
            name=name,
            max_prompt_length=self.preparation.max_prompt_length,
            max_length=int(min(most, self.preparation.max_length)),
            rows=rows,
            skip_invalid=self.skips(name),
            too_long=self.preparation.too_long,
        )

    def take_model(self, known: Any) -> tuple[Any, ...]:
        """The model, its revision, chat template and the template's arguments."""
        # Compared alone: a batch numbers roles in this order, and the module reads them in its own.
        self.shared_option("roles", self.roles)
        options = ("revision", "chat_template", "template_arguments")
        revision, template, arguments = (
            self.shared_option(name, None) for name in options
        )
        name = self.model_name
        # Loaded anew only where one of them changed, as reading a large vocabulary takes seconds.
        if (name, revision, template, arguments) != known:
            default = self.default_template
            self._encoder = load_encoder(name, revision, template, arguments, default)
        return name, revision, template, arguments


Fitting = tuple[Record, list[str], list[int], list[list[int]]]
"""A record, the texts of its responses, and the tokens of its prompt and of each response."""


@dataclass
class LongRecords:
    """What became of records that do not fit.

    Attributes:
        skipped: why each that was left out does not.
        cut: of each that was cut how many turns went.
    """

    skipped: list[str] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)

    def report(self, name: str, whole: int) -> None:
        """Says how many there are."""
        if self.skipped:
            rank_zero_warn(
                f"{name}: left out {len(self.skipped):,} of {whole:,} records that are too long "
                f"(too_long: skip); the first: {self.skipped[0]}"
            )
        if self.cut:
            rank_zero_warn(
                f"{name}: took {sum(self.cut):,} early turns out of {len(self.cut):,} of {whole:,} "
                "records that are too long (too_long: cut)."
            )


class EncodedResponses:
    """Prompts and responses as token ids.

    Row i is {"prompt": (P,), "responses": R arrays (T,), "columns": the most responses of a row,
    "record": the record, "characters": R counts, "widths": the most responses of each role, "rank":
    its place among the samples of its category}.

    Args:
        records: in the order of the data set.
        encoder: renders and tokenises.
        max_prompt_length, max_length: see :class:`Preparation`.
        name: of the data set, for messages.
        rows: of the model's embeddings, one a token.
        skip_invalid: leave out a record that cannot be rendered or does not fit, and say how many.
            None is False where the user has no choice, and then none is skipped for its length.
        too_long: see :class:`Preparation`.

    Attributes:
        records: those that were kept.
        long: what ``too_long`` did.
    """

    def __init__(
        self,
        records: Sequence[Record],
        encoder: ConversationEncoder,
        *,
        max_prompt_length: int,
        max_length: int,
        name: str = "data",
        rows: float = math.inf,
        skip_invalid: bool | None = None,
        too_long: Literal["refuse", "skip", "cut"] = "refuse",
    ) -> None:
        self.records: list[Record] = []
        self.long, self._too_long = LongRecords(), too_long
        self._rows: list[dict[str, Any]] = []
        self._limits = max_prompt_length, max_length, rows
        self._skip_invalid = skip_invalid
        skipped: list[str] = []
        # In chunks, since texts and tokens of all records at once would take several times the
        # memory.
        for start in range(0, len(records), CHUNK):
            self._encode(records[start : start + CHUNK], encoder, skipped)
        # report_skipped() would say that no record is usable, and not that all are too long.
        if not self.records and self.long.skipped:
            raise DataError(
                f"{name}: no record fits (too_long: skip). {self.long.skipped[0]}"
            )
        self.long.report(name, len(records))
        report_skipped(name, skipped, len(self.records))
        self.columns = max(len(record.responses) for record in self.records)

    def _encode(
        self,
        records: Sequence[Record],
        encoder: ConversationEncoder,
        skipped: list[str],
    ) -> None:
        """Adds the records as rows; ``skipped`` takes why others are left out."""
        rendered = []
        for record in records:
            try:
                prompt, texts = encoder.texts(record)
                # Two answers that differ in the file may be one text to the model, as where a
                # template drops what tells them apart.
                sides = [*zip(texts, record.opposed, strict=True)]
                if {text for text, no in sides if no} & {
                    text for text, no in sides if not no
                }:
                    raise DataError(
                        f"{record.where}: the chat template renders two responses alike, so one "
                        "would have to be likely and unlikely at once. Change one, or take out "
                        "the record."
                    )
                rendered.append((record, prompt, texts))
            except DataError as error:
                skipped.append(refused(error, self._skip_invalid))
        encoded = encoder.encode(
            [prompt for _, prompt, _ in rendered], [r for *_, r in rendered]
        )
        for (record, _, texts), (ids, tokens) in zip(rendered, encoded, strict=True):
            try:
                fitting = self._fitting(record, texts, ids, tokens, encoder)
            except DataError as error:
                skipped.append(refused(error, self._skip_invalid))
                continue
            # Too long and skipped; the report counts it.
            if fitting is None:
                continue
            record, texts, ids, tokens = fitting
            self.records.append(record)
            row: dict[str, Any] = {"prompt": np.asarray(ids, np.int32)}
            row["responses"] = [np.asarray(response, np.int32) for response in tokens]
            self._rows.append(row | {"characters": [*map(encoder.characters, texts)]})

    def _fitting(
        self,
        record: Record,
        texts: list[str],
        ids: list[int],
        tokens: list[list[int]],
        encoder: ConversationEncoder,
    ) -> Fitting | None:
        """A record that fits, cut where that is asked for; None of one to skip for its length."""
        # Said here with the record's place, and not by an index error within a step.
        check_known(
            max(map(max, filter(None, [ids, *tokens]))), self._limits[2], record.where
        )
        problem = self._length_problem(record.where, ids, tokens)
        if not problem:
            return record, texts, ids, tokens
        # Turns go only from what does not fit, so a shorter file keeps its prompts.
        if self._too_long == "cut":
            return self._cut(record, encoder, problem)
        # None is of records to predict for: one left out would move the answers of all behind it.
        if self._too_long == "skip" and self._skip_invalid is not None:
            self.long.skipped.append(problem)
            return None
        raise DataError(problem)

    def _length_problem(
        self, where: str, ids: list[int], tokens: list[list[int]]
    ) -> str:
        """Why a record does not fit; "" of one that does."""
        prompt_limit, limit, _ = self._limits
        # Two limits with two remedies: max_length is the model's too, max_prompt_length is not.
        if len(ids) > prompt_limit:
            return (
                f"{where}: the prompt has {len(ids):,} tokens and does not fit in "
                f"max_prompt_length={prompt_limit:,}. Raise it, shorten the record, or set "
                "preparation.too_long to skip or cut."
            )
        longest = max(map(len, tokens), default=1)
        if len(ids) + longest > limit:
            return (
                f"{where}: a response of {longest:,} tokens does not fit behind a prompt of "
                f"{len(ids):,}: max_length, or the model's positions, are {limit:,}. Raise "
                "max_length as far as these, shorten the record, or set preparation.too_long to "
                "skip or cut."
            )
        return ""

    def _cut(
        self, record: Record, encoder: ConversationEncoder, problem: str
    ) -> Fitting:
        """The record without its earliest turns, rendered again."""

        # Rendered from the start: a template may put its own text in front of the first turn, and
        # the tokens of a turn depend on what stands before it.
        def rendered(part: Record) -> tuple[list[str], list[int], list[list[int]]]:
            prompt, texts = encoder.texts(part)
            ((ids, tokens),) = encoder.encode([prompt], [texts])
            return texts, ids, tokens

        def fits(part: Record) -> bool:
            _, ids, tokens = rendered(part)
            return not self._length_problem(part.where, ids, tokens)

        end = shortened(record, fits)
        # The last question alone is too long.
        if end is None:
            raise DataError(
                f"{problem} Without its earlier turns it does not fit either."
            )
        shorter, turns = end
        self.long.cut.append(turns)
        return shorter, *rendered(shorter)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, position: int) -> dict[str, Any]:
        return {
            **self._rows[position],
            "columns": self.columns,
            "record": self.records[position],
            "widths": self.widths,
            "rank": self.ranks[position],
        }

    def record(self, position: int) -> Record:
        """The texts of a row, for reports."""
        return self.records[position]

    units_are_content = True  # Not names that somebody gave.

    @cached_property
    def units(self) -> list[str]:
        """The prompt of each sample: samples of one prompt depend on each other."""
        return [record.unit for record in self.records]

    @cached_property
    def widths(self) -> dict[str, int]:
        """By role the most responses of a sample."""
        counts = [Counter(record.roles) for record in self.records]
        widths: dict[str, int] = {}
        for of_record in counts:
            for role, count in of_record.items():
                widths[role] = max(count, widths.get(role, 0))
        return widths

    @cached_property
    def categories(self) -> list[str] | None:
        """Each record's category; None where none has one."""
        names = [record.category for record in self.records]
        return names if any(names) else None

    @cached_property
    def strata(self) -> list[int] | None:
        """Each record's kind as a number, so that batches are mixed; None where none has one."""
        # Sorted names: the numbers must not depend on the order of the records.
        kinds = [record.kind for record in self.records]
        names = sorted(set(kinds))
        return [names.index(kind) for kind in kinds] if any(kinds) else None

    @cached_property
    def ranks(self) -> list[int]:
        """The place of each sample among those of its category, in an order by prompt digests."""
        seen: Counter[str] = Counter()
        places = [0] * len(self)
        for i in sorted(
            range(len(self)), key=lambda i: digest("rank", self.records[i].prompt)
        ):
            category = self.records[i].category
            places[i] = seen[category]
            seen[category] += 1
        return places

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the tokens, their order, and what is asked of each response."""
        tokens = hashlib.sha256()
        for row in self._rows:
            for ids in (row["prompt"], *row["responses"]):
                # With its length, or a token moved from the prompt into the response would change
                # nothing.
                tokens.update(len(ids).to_bytes(8, "little") + ids.tobytes())
        asked: list[Any] = []
        for record in self.records:
            # The same text under another bound is another requirement, and λ must not go on with
            # it.
            bounds = [[r.role, r.tolerance, r.relative] for r in record.responses]
            asked.append([record.kind, bounds])
        return digest(tokens.hexdigest(), asked)
