"""When2Call records: a conversation with tools, and answers to it of four behaviours.

Training rows hold tool calls as ``<TOOLCALL>[{"name": …, "arguments": {…}}]</TOOLCALL>``, test rows
as the bare object, and rows of one's own perhaps as ``tool_calls``. All become the same list of
calls (messages.py), which the model's chat template renders later (conversations.py), so that
training and evaluation see one form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from pl_pointwise.tasks.common.records import (
    bad_field,
    digest,
    field,
    folded,
    json_object,
    kind,
    shown,
    text_field,
)
from pl_pointwise.tasks.language_model.messages import (
    Answer,
    parse_answer,
    parse_messages,
    parse_tools,
    parts_of,
)

CATEGORIES = ("direct", "tool_call", "request_for_info", "cannot_answer")
"""The behaviours, in the order of the published evaluation's choices; ``direct`` hallucinates."""

UNKNOWN = -1
"""The category of an answer whose row does not tell."""


@dataclass(frozen=True)
class Record:
    """One conversation and its answers.

    Attributes:
        messages: the conversation, ending before the assistant's turn.
        tools: descriptions, as objects.
        answers: texts, tool calls, or both (messages.py). Of a labelled record the right one comes
            first.
        choices: the category of each answer, a position in :data:`CATEGORIES`, or UNKNOWN.
        where: file and line, or source and record, for messages.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    answers: list[Answer]
    choices: list[int]
    where: str

    @property
    def prompt(self) -> str:
        """What records of one prompt have in common, and no others."""
        return digest(self.messages, self.tools)

    @property
    def unit(self) -> str:
        """What records whose prompts differ by case and spaces alone have in common."""
        return digest(folded([self.messages, self.tools]))

    @property
    def category(self) -> str:
        """The behaviour of the right answer, which is the first; "" if unknown."""
        return CATEGORIES[self.choices[0]] if self.choices and self.choices[0] >= 0 else ""


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
    answers, choices = [], []
    for name, category in (
        ("chosen_response", "category"),
        ("rejected_response", "rejected_category"),
    ):
        response = field(row, name, where)
        if not isinstance(response, dict):
            raise bad_field(where, name, f"is {kind(response)}", "Give {role, content}")
        if not response.get("tool_calls"):  # calls alone need no content
            field(response, "content", where, f"{name}.")
        answers.append(parse_answer(response, where, name, bare_calls=True))
        choices.append(_category(row.get(category), category, where))
    if answers[0] == answers[1]:
        problem = "equals the chosen one, so it cannot be both right and wrong"
        raise bad_field(where, "rejected_response", problem, "Change one of the two")
    return Record(_messages(row, where), _tools(row, where), answers, choices, where)


def parse_pair(row: Any, where: str) -> Record:
    """A row of plain preference pairs: {"input", "chosen", "rejected"}, optionally "system"."""
    row = json_object(row, where)
    if row.get("status") == "tie":
        raise bad_field(where, "status", "says that neither answer is better", "Take it out")
    messages = [{"role": "user", "content": text_field(field(row, "input", where), "input", where)}]
    system = row.get("system")
    if isinstance(system, str) and system.strip():
        messages.insert(0, {"role": "system", "content": text_field(system, "system", where)})
    answers: list[Answer] = [
        text_field(field(row, name, where), name, where) for name in ("chosen", "rejected")
    ]
    if answers[0] == answers[1]:
        problem = "equals the chosen one, so it cannot be both right and wrong"
        raise bad_field(where, "rejected", problem, "Change one of the two")
    return Record(messages, [], answers, [UNKNOWN, UNKNOWN], where)


def parse_choice(row: Any, where: str) -> Record:
    """A row of the multiple-choice split: the right answer, then the others by category.

    Args:
        row: {"question", "tools", "answers": {category: text}, "correct_answer"}.
        where: the row's place, for messages.
    """
    record = parse_question(row, where)
    missing = [name for place, name in enumerate(CATEGORIES) if place not in record.choices]
    if missing:
        problem = f"lacks {', '.join(missing)}"
        raise bad_field(where, "answers", problem, "Give one answer of each behaviour")
    right = _category(field(row, "correct_answer", where), "correct_answer", where)
    if right == UNKNOWN:
        raise bad_field(where, "correct_answer", "is null", f"Give one of {', '.join(CATEGORIES)}")
    order = [right, *(choice for choice in record.choices if choice != right)]
    answers = dict(zip(record.choices, record.answers, strict=True))
    return replace(record, answers=[answers[choice] for choice in order], choices=order)


def parse_question(row: Any, where: str) -> Record:
    """A question to predict for: {"question", "tools"}, optionally "answers" to choose from."""
    row = json_object(row, where)
    question = text_field(field(row, "question", where), "question", where)
    candidates = row.get("answers")
    if candidates is not None and not isinstance(candidates, dict):
        raise bad_field(where, "answers", f"is {kind(candidates)}", "Give {behaviour: text}")
    given = {name: text for name, text in (candidates or {}).items() if text is not None}
    answers, choices = [], []
    for name in given:
        _category(name, "answers", where)
    for place, name in enumerate(CATEGORIES):
        if name in given:
            answer = parse_answer(given[name], where, f"answers.{name}", bare_calls=True)
            if name == "tool_call" and not parts_of(answer).calls:
                problem = "is not a tool call"
                remedy = 'Give {"name": …, "arguments": {…}} as JSON'
                raise bad_field(where, f"answers.{name}", problem, remedy)
            answers.append(answer)
            choices.append(place)
    messages = [{"role": "user", "content": question}]
    return Record(messages, _tools(row, where), answers, choices, where)


def grouped(records: Iterable[Record]) -> list[Record]:
    """Records of one prompt and one right answer as one record with all their wrong answers.

    A wrong answer that stands several times is kept once. Each group stands where its first
    record stood.
    """
    groups: dict[str, Record] = {}
    for record in records:
        key = digest(record.prompt, record.answers[0])
        known = groups.get(key)
        if known is None:
            groups[key] = record
            continue
        new = [
            (answer, choice)
            for answer, choice in zip(record.answers[1:], record.choices[1:], strict=True)
            if answer not in known.answers
        ]
        groups[key] = replace(
            known,
            answers=known.answers + [answer for answer, _ in new],
            choices=known.choices + [choice for _, choice in new],
        )
    return list(groups.values())


def _category(value: Any, name: str, where: str) -> int:
    if value is None:
        return UNKNOWN
    if value not in CATEGORIES:
        problem = f"names {shown(value)}"
        raise bad_field(where, name, problem, f"The behaviours are {', '.join(CATEGORIES)}")
    return CATEGORIES.index(value)


def _messages(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    found = parse_messages(field(row, "messages", where), where)
    if found[-1]["role"] == "assistant":
        problem = "ends with the assistant's turn, which is the answer's place"
        raise bad_field(where, "messages", problem, "Take the last message out")
    return found


def _tools(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    return parse_tools(field(row, "tools", where), where)
