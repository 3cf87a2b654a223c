"""When2Call records: a conversation with tools, and answers to it of four behaviours.

The right answer is of role "prefer", the others of role "avoid". The schemas are those of
language_model/text/records.py, with one form of calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pl_pointwise.tasks.common.records import bad_field, digest, field, kind, shown, text_field
from pl_pointwise.tasks.language_model.text.messages import parse_answer, parse_tools, parts_of
from pl_pointwise.tasks.language_model.text.records import (
    Record,
    Response,
    read_preference,
    read_when2call,
    reads_whole,
)

CATEGORIES = ("direct", "tool_call", "request_for_info", "cannot_answer")
"""The behaviours, in the order of the published evaluation's choices; ``direct`` hallucinates."""

ROLES = ("prefer", "avoid")
"""In the order that a batch numbers them."""


def choices_of(record: Record) -> list[int]:
    """The category of each answer, a position in :data:`CATEGORIES`; −1 if unknown."""
    return [CATEGORIES.index(r.behaviour) if r.behaviour else -1 for r in record.responses]


@reads_whole
def parse_preference(row: Any, where: str) -> Record:
    """A row of schema "when2call": the chosen answer, then the rejected one."""
    field(row, "tools", where)
    read = read_when2call(row, where)
    return replace(read, given_category=read.responses[0].behaviour, given_kind="")


@reads_whole
def parse_pair(row: Any, where: str) -> Record:
    """A row of schema "preference"."""
    return replace(read_preference(row, where), given_category="", given_kind="")


@reads_whole
def parse_choice(row: Any, where: str) -> Record:
    """A row of the multiple-choice split: the right answer, then the others by category."""
    right = _behaviour(field(row, "correct_answer", where), "correct_answer", where)
    given = field(row, "answers", where)
    if not isinstance(given, dict):
        raise bad_field(where, "answers", f"is {kind(given)}", "Give {behaviour: text}")
    texts = {_behaviour(name, "answers", where): text for name, text in given.items()}
    if missing := [name for name in CATEGORIES if texts.get(name) is None]:
        problem = f"lacks {', '.join(missing)}"
        raise bad_field(where, "answers", problem, "Give one answer of each behaviour")
    responses: list[Response] = []
    for name in sorted(CATEGORIES, key=lambda name: name != right):
        answer = parse_answer(texts[name], where, f"answers.{name}", bare_calls=True)
        if name == "tool_call" and not parts_of(answer).calls:
            remedy = 'Give {"name": …, "arguments": {…}} as JSON'
            raise bad_field(where, f"answers.{name}", "is not a tool call", remedy)
        responses.append(Response("avoid" if responses else "prefer", answer, behaviour=name))
    asked = parse_question(row, where)
    return replace(asked, responses=tuple(responses), given_category=right, given_kind="choice")


@reads_whole
def parse_question(row: Any, where: str) -> Record:
    """A question to answer, {"question", "tools"}."""
    question = text_field(field(row, "question", where), "question", where)
    tools = parse_tools(field(row, "tools", where), where)
    return Record([{"role": "user", "content": question}], tools, (), where, given_kind="")


def grouped(found: Iterable[Record]) -> list[Record]:
    """Records of one prompt and right answer as one, where the first stood, wrong answers once."""
    groups: dict[str, Record] = {}
    for record in found:
        key = digest(record.prompt, record.answers[0])
        known = groups.setdefault(key, record)
        new = [each for each in record.responses[1:] if each.answer not in known.answers]
        groups[key] = replace(known, responses=(*known.responses, *new))
    return list(groups.values())


def _behaviour(value: Any, name: str, where: str) -> str:
    """The value of a field, if it is one of :data:`CATEGORIES`."""
    if value in CATEGORIES:
        return str(value)
    raise bad_field(where, name, f"is {shown(value)}", f"Give one of {', '.join(CATEGORIES)}")
