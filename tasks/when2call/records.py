"""When2Call records: a conversation with tools, and answers to it of four behaviours.

Training rows hold tool calls as ``<TOOLCALL>[{"name": …, "arguments": {…}}]</TOOLCALL>``, test rows
as the bare object, and rows of one's own perhaps as ``tool_calls``. All become the same list of
calls (messages.py), which the model's chat template renders later (conversations.py), so that
training and evaluation see one form.

The right answer is of role "prefer", the others of role "avoid"; those of a question to predict for
are of role "candidate".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from pl_pointwise.tasks.common.records import (
    bad_field,
    digest,
    field,
    json_object,
    kind,
    shown,
    text_field,
)
from pl_pointwise.tasks.language_model import records
from pl_pointwise.tasks.language_model.messages import parse_answer, parse_tools, parts_of
from pl_pointwise.tasks.language_model.records import Response, read_preference, read_when2call

CATEGORIES = ("direct", "tool_call", "request_for_info", "cannot_answer")
"""The behaviours, in the order of the published evaluation's choices; ``direct`` hallucinates."""

ROLES = ("prefer", "avoid", "candidate")
"""In the order that a batch numbers them."""

UNKNOWN = -1
"""The category of an answer whose row does not tell."""


@dataclass(frozen=True)
class Record(records.Record):
    """One conversation and its answers, of a labelled record the right one first.

    Attributes:
        choice: whether it is multiple choice.
    """

    choice: bool = False

    @property
    def opposed(self) -> list[bool]:
        """Of a choice none: nothing is trained on it."""
        return [not self.choice and opposed for opposed in super().opposed]

    @property
    def kind(self) -> str:
        """None: all records are of one."""
        return ""

    @property
    def choices(self) -> list[int]:
        """The category of each answer, a position in :data:`CATEGORIES`, or UNKNOWN."""
        return [
            CATEGORIES.index(each.behaviour) if each.behaviour else UNKNOWN
            for each in self.responses
        ]


Parser = Callable[[Any, str], Record]


def parse_preference(row: Any, where: str) -> Record:
    """A row of the preference split: the chosen answer, then the rejected one.

    Args:
        row: {"tools", "messages", "chosen_response": {"content", "tool_calls"},
            "rejected_response": {…}}, one of content and tool_calls or both; optionally "category"
            and "rejected_category". Turns of messages may have calls and results.
        where: the row's place, for messages.
    """
    row = json_object(row, where)
    field(row, "tools", where)
    for name in ("category", "rejected_category"):
        _check_category(row.get(name), name, where)
    return _of_behaviours(read_when2call(row, where))


def parse_pair(row: Any, where: str) -> Record:
    """A row of plain preference pairs: {"input", "chosen", "rejected"}, optionally "system"."""
    row = json_object(row, where)
    known = ("input", "chosen", "rejected", "system", "status")
    return _of_behaviours(read_preference({n: row[n] for n in known if n in row}, where))


def parse_choice(row: Any, where: str) -> Record:
    """A row of the multiple-choice split: the right answer, then the others by category.

    Args:
        row: {"question", "tools", "answers": {category: text}, "correct_answer"}.
        where: the row's place, for messages.
    """
    record = parse_question(row, where)
    candidates = {each.behaviour: each for each in record.responses}
    if missing := [name for name in CATEGORIES if name not in candidates]:
        problem = f"lacks {', '.join(missing)}"
        raise bad_field(where, "answers", problem, "Give one answer of each behaviour")
    right = field(row, "correct_answer", where)
    if right not in CATEGORIES:
        problem = f"is {shown(right)}"
        raise bad_field(where, "correct_answer", problem, f"Give one of {', '.join(CATEGORIES)}")
    wrong = [replace(candidates[name], role="avoid") for name in CATEGORIES if name != right]
    responses = (replace(candidates[right], role="prefer"), *wrong)
    return replace(record, responses=responses, given_category=right, choice=True)


def parse_question(row: Any, where: str) -> Record:
    """A question to predict for: {"question", "tools"}, optionally "answers" to choose from."""
    row = json_object(row, where)
    question = text_field(field(row, "question", where), "question", where)
    candidates = row.get("answers")
    if candidates is not None and not isinstance(candidates, dict):
        raise bad_field(where, "answers", f"is {kind(candidates)}", "Give {behaviour: text}")
    given = {name: text for name, text in (candidates or {}).items() if text is not None}
    for name in given:
        _check_category(name, "answers", where)
    responses = []
    for name in CATEGORIES:
        if name in given:
            answer = parse_answer(given[name], where, f"answers.{name}", bare_calls=True)
            if name == "tool_call" and not parts_of(answer).calls:
                problem = "is not a tool call"
                remedy = 'Give {"name": …, "arguments": {…}} as JSON'
                raise bad_field(where, f"answers.{name}", problem, remedy)
            responses.append(Response("candidate", answer, behaviour=name))
    messages = [{"role": "user", "content": question}]
    tools = parse_tools(field(row, "tools", where), where)
    return Record(messages, tools, tuple(responses), where)


def grouped(found: Iterable[Record]) -> list[Record]:
    """Records of one prompt and one right answer as one record with all their wrong answers.

    A wrong answer that stands several times is kept once. Each group stands where its first
    record stood.
    """
    groups: dict[str, Record] = {}
    for record in found:
        key = digest(record.prompt, record.answers[0])
        known = groups.setdefault(key, record)
        new = [each for each in record.responses[1:] if each.answer not in known.answers]
        groups[key] = replace(known, responses=(*known.responses, *new))
    return list(groups.values())


def _of_behaviours(record: records.Record) -> Record:
    """The record, of the behaviour of its right answer."""
    behaviour = record.responses[0].behaviour
    return Record(record.messages, record.tools, record.responses, record.where, behaviour)


def _check_category(value: Any, name: str, where: str) -> None:
    if value is not None and value not in CATEGORIES:
        problem = f"names {shown(value)}"
        raise bad_field(where, name, problem, f"The behaviours are {', '.join(CATEGORIES)}")
