"""When2Call data: a conversation with tools, answers to it of four behaviours, the data module.

The right answer is of role "prefer", the others of role "avoid". The schemas are those of
language_model/text/records.py, with one form of calls.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

from pl_pointwise.errors import DataError, one_of
from pl_pointwise.task import Batch
from pl_pointwise.tasks.common.data import Needs, Parse
from pl_pointwise.tasks.common.records import bad_field, field, kind, shown, text_field
from pl_pointwise.tasks.language_model.likelihood.batch import collate_columns
from pl_pointwise.tasks.language_model.pairs import PairsDataModule
from pl_pointwise.tasks.language_model.text.messages import (
    parse_answer,
    parse_tools,
    parts_of,
)
from pl_pointwise.tasks.language_model.text.pairs import parse_pair
from pl_pointwise.tasks.language_model.text.records import (
    Record,
    Response,
    read_when2call,
    reads_whole,
)

CATEGORIES = ("direct", "tool_call", "request_for_info", "cannot_answer")
"""The behaviours, in the order of the published evaluation's choices; ``direct`` hallucinates."""


_PUBLISHED = {"answers", "correct_answer", "target_tool", "held_out_param"}
"""Fields of multiple choice that say nothing of the question; the last two how it was made."""


class When2CallDataModule(PairsDataModule):
    """Preference records for training, multiple-choice records for the table, tokenised once.

    Raw records are those of ``nvidia/When2Call``; tools and calls may be JSON or objects.
    For the preference split {"tools", "messages", "chosen_response",
    "rejected_response", "category", "rejected_category"}; of the multiple-choice split
    {"question", "tools", "answers": {behaviour: text}, "correct_answer"}.

    Batches are those of language_model/roles.py, response 0 the chosen or right one, and have
    ``characters`` (B, R) long, of each response without what ends the turn.

    ``test`` runs three data sets: "test", held-out preference records; "train", one full pass
    over the training data; "mcq", multiple choice. It leaves out what there is none of.

    Args:
        model_name: the model whose tokenizer and chat template to use; None takes the module's.
        source: "hub" or "files".
        hub_path: the data set on the hub, or a folder of the same layout.
        schema: of the preference records, "when2call" or "pairs": {input, chosen, rejected} and
            optionally system, all texts; then without multiple choice on the hub. For pairs of your
            own the task ``preference`` is the better place.
        train_file: preference records: JSON lines, JSON, CSV, TSV, Parquet or Arrow, by its ending.
        val_file: those held out; without one a part of the training prompts.
        test_file: those that certify; without one preparation.test_fraction, else "val".
        mcq_file: multiple-choice records.
        predict_file: records of {question, tools} to answer; with any source.
        group_rejected: make one sample of the records of one prompt and chosen response, with
            several rejected ones; otherwise each record is a sample with one.
        options: ``preparation``, of skipping and holding out, and those of `PointwiseDataModule`;
            ``seed`` also of what is held out.
    """

    needs: ClassVar[Needs] = {
        **PairsDataModule.needs,
        "test": ("test", "train", "mcq"),
    }

    def __init__(
        self,
        model_name: str | None = None,
        *,
        source: Literal["hub", "files"] = "hub",
        hub_path: str = "nvidia/When2Call",
        schema: Literal["when2call", "pairs"] = "when2call",
        train_file: str | None = None,
        val_file: str | None = None,
        test_file: str | None = None,
        mcq_file: str | None = None,
        predict_file: str | None = None,
        group_rejected: bool = False,
        **options: Any,
    ) -> None:
        files = {
            "train": train_file,
            "val": val_file,
            "test": test_file,
            "mcq": mcq_file,
        }
        files["predict"] = predict_file
        super().__init__(model_name, source, files, **options)
        one_of("schema", schema, ("when2call", "pairs"), DataError)
        self.hub_path, self.schema, self.group_rejected = (
            hub_path,
            schema,
            group_rejected,
        )

    def collate(self, rows: list[dict[str, Any]]) -> Batch:
        """Besides, the characters of each response."""
        characters = collate_columns(
            [row["characters"] for row in rows], rows[0]["columns"], 0
        )
        return super().collate(rows) | {"characters": characters}

    def on_hub(self, name: str) -> tuple[str, str | None, str] | None:
        """A configuration of ``nvidia/When2Call`` for each; of pairs the one split."""
        configurations = {"train": "train_pref", "mcq": "test"}
        configs = {"train": None} if self.schema == "pairs" else configurations
        return (self.hub_path, configs[name], name) if name in configs else None

    def reader(self, name: str) -> Parse:
        """By data set; of preference records by ``schema``."""
        parse = parse_preference if self.schema == "when2call" else parse_pair
        return {"predict": parse_question, "mcq": parse_choice}.get(name, parse)


# Records -----------------------------------------------------------------------------------------


def choices_of(record: Record) -> list[int]:
    """The category of each answer, a position in :data:`CATEGORIES`; −1 if unknown."""
    return [
        CATEGORIES.index(r.behaviour) if r.behaviour else -1 for r in record.responses
    ]


@reads_whole
def parse_preference(row: Any, where: str) -> Record:
    """A row of schema "when2call": the chosen answer, then the rejected one."""
    field(row, "tools", where)
    read = read_when2call(row, where)
    return replace(read, given_category=read.responses[0].behaviour, given_kind="")


@reads_whole
def parse_choice(row: Any, where: str) -> Record:
    """A row of the multiple-choice split: the right answer, then the others by category."""
    right = _behaviour(field(row, "correct_answer", where), "correct_answer", where)
    answers = field(row, "answers", where)
    if not isinstance(answers, dict):
        raise bad_field(
            where, "answers", f"is {kind(answers)}", "Give {behaviour: text}"
        )
    texts = {_behaviour(name, "answers", where): text for name, text in answers.items()}
    if missing := [name for name in CATEGORIES if texts.get(name) is None]:
        problem = f"lacks {', '.join(missing)}"
        raise bad_field(where, "answers", problem, "Give one answer of each behaviour")
    responses: list[Response] = []
    # False sorts before True: the right answer comes first.
    for name in sorted(CATEGORIES, key=lambda name: name != right):
        answer = parse_answer(texts[name], where, f"answers.{name}", bare_calls=True)
        # Else the table would count a text as the behaviour that it is not.
        if name == "tool_call" and not parts_of(answer).calls:
            remedy = 'Give {"name": …, "arguments": {…}} as JSON'
            raise bad_field(where, f"answers.{name}", "is not a tool call", remedy)
        responses.append(
            Response("avoid" if responses else "prefer", answer, behaviour=name)
        )
    asked = parse_question(row, where)
    return replace(
        asked, responses=tuple(responses), given_category=right, given_kind="choice"
    )


@reads_whole
def parse_question(row: Any, where: str) -> Record:
    """A question to answer, {"question", "tools"}; a row of the published file is one too."""
    question = text_field(field(row, "question", where), "question", where)
    tools = parse_tools(field(row, "tools", where), where)
    # Else every row of the published file would be told of as one with fields that nobody reads.
    row.read |= _PUBLISHED
    return Record(
        [{"role": "user", "content": question}], tools, (), where, given_kind=""
    )


def _behaviour(value: Any, name: str, where: str) -> str:
    """The value of a field, if it is one of :data:`CATEGORIES`."""
    if value in CATEGORIES:
        return str(value)
    raise bad_field(
        where, name, f"is {shown(value)}", f"Give one of {', '.join(CATEGORIES)}"
    )
