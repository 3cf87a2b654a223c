"""When2Call records: a conversation with tools, and answers to it of four behaviours.

Training rows hold tool calls as ``<TOOLCALL>[{"name": …, "arguments": {…}}]</TOOLCALL>``, test rows
as the bare object. Both become the same list of calls here, which the model's chat template renders
later (conversations.py), so that training and evaluation see one form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from pl_pointwise.tasks.common.records import (
    bad_field,
    digest,
    field,
    json_object,
    kind,
    problem_of,
    read_json,
    shown,
    text_field,
)
from pl_pointwise.tasks.language_model.conversations import Answer

CATEGORIES = ("direct", "tool_call", "request_for_info", "cannot_answer")
"""The behaviours, in the order of the published evaluation's choices; ``direct`` hallucinates."""

UNKNOWN = -1
"""The category of an answer whose row does not tell."""

_OPEN, _CLOSE = "<TOOLCALL>", "</TOOLCALL>"
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Record:
    """One conversation and its answers.

    Attributes:
        messages: the conversation, ending before the assistant's turn.
        tools: descriptions, as objects.
        answers: texts or lists of tool calls. Of a labelled record the right one comes first.
        choices: the category of each answer, a position in :data:`CATEGORIES`, or UNKNOWN.
        where: file and line, or source and record, for messages.
    """

    messages: list[dict[str, str]]
    tools: list[dict[str, Any]]
    answers: list[Answer]
    choices: list[int]
    where: str

    @property
    def prompt(self) -> str:
        """What records of one prompt have in common, and no others."""
        return digest(self.messages, self.tools)

    @property
    def category(self) -> str:
        """The behaviour of the right answer, which is the first; "" if unknown."""
        return CATEGORIES[self.choices[0]] if self.choices and self.choices[0] >= 0 else ""


Parser = Callable[[Any, str], Record]


def parse_preference(row: Any, where: str) -> Record:
    """A row of the preference split: the chosen answer, then the rejected one.

    Args:
        row: {"tools", "messages", "chosen_response": {"content"}, "rejected_response": {…}},
            optionally "category" and "rejected_category".
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
        text = field(response, "content", where, f"{name}.")
        answers.append(_answer(text, f"{name}.content", where))
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
            answer = _answer(given[name], f"answers.{name}", where)
            if name == "tool_call" and isinstance(answer, str):
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


def tool_calls(text: str) -> list[dict[str, Any]] | None:
    """The calls in an answer, [{"name", "arguments"}], or None if it is no tool call.

    A call is ``<TOOLCALL>[…]</TOOLCALL>``, or the JSON of one call or of a list of them alone.

    Raises:
        ValueError: ``<TOOLCALL>`` around something else, or beside other text; says what is wrong.
    """
    text = text.strip()
    marked = text.startswith(_OPEN)
    if not marked and _OPEN in text:
        raise ValueError("mixes text and a tool call")
    if marked:
        if not text.endswith(_CLOSE):
            raise ValueError(f"opens {_OPEN} and does not end in {_CLOSE}")
        text = text.removeprefix(_OPEN).removesuffix(_CLOSE)
    elif text[:1] not in ("{", "["):
        return None
    try:
        calls = read_json(text)
        calls = calls if isinstance(calls, list) else [calls]
        found = [_call(call) for call in calls]
        if not found:
            raise ValueError("no call in it")
    except (ValueError, RecursionError) as error:
        if not marked:
            return None
        raise ValueError(f"is a malformed tool call ({error})") from None
    return found


def _call(call: Any) -> dict[str, Any]:
    if not isinstance(call, dict) or not {"name", "arguments"} == set(call):
        raise ValueError("a call is an object of name and arguments")
    arguments = call["arguments"]
    if isinstance(arguments, str):
        arguments = read_json(arguments)
    if not isinstance(call["name"], str) or not call["name"] or not isinstance(arguments, dict):
        raise ValueError("a call's name is a text, its arguments an object")
    if problem := problem_of({call["name"]: arguments}):
        raise ValueError(f"a call {problem}")
    return {"name": call["name"], "arguments": arguments}


def _answer(value: Any, name: str, where: str) -> Answer:
    if isinstance(value, (dict, list)):  # tool calls that were not written as a text
        if problem := problem_of(value):
            raise bad_field(where, name, problem, "Give tool calls as JSON has them")
        value = json.dumps(value, ensure_ascii=False)
    text = text_field(value, name, where)
    try:
        calls = tool_calls(text)
    except ValueError as error:
        remedy = 'Give <TOOLCALL>[{"name": …, "arguments": {…}}]</TOOLCALL>'
        raise bad_field(where, name, str(error), remedy) from None
    return text if calls is None else calls


def _category(value: Any, name: str, where: str) -> int:
    if value is None:
        return UNKNOWN
    if value not in CATEGORIES:
        problem = f"names {shown(value)}"
        raise bad_field(where, name, problem, f"The behaviours are {', '.join(CATEGORIES)}")
    return CATEGORIES.index(value)


def _messages(row: dict[str, Any], where: str) -> list[dict[str, str]]:
    messages = field(row, "messages", where)
    if not isinstance(messages, list) or not messages:
        problem = "is empty" if messages == [] else f"is {kind(messages)}"
        raise bad_field(where, "messages", problem, "Give a list of {role, content}")
    found = []
    for place, message in enumerate(messages):
        name = f"messages[{place}]"
        if not isinstance(message, dict):
            raise bad_field(where, name, f"is {kind(message)}", "Give {role, content}")
        role = field(message, "role", where, f"{name}.")
        if role not in _ROLES:
            problem = f"is {shown(role)}"
            raise bad_field(where, f"{name}.role", problem, f"Give one of {', '.join(_ROLES)}")
        content = text_field(field(message, "content", where, f"{name}."), f"{name}.content", where)
        found.append({"role": role, "content": content})
    if found[-1]["role"] == "assistant":
        problem = "ends with the assistant's turn, which is the answer's place"
        raise bad_field(where, "messages", problem, "Take the last message out")
    return found


def _tools(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    tools = field(row, "tools", where)
    tools = [] if tools is None else tools
    if not isinstance(tools, list):
        raise bad_field(where, "tools", f"is {kind(tools)}", "Give a list of tools, or []")
    found = []
    for place, tool in enumerate(tools):
        name = f"tools[{place}]"
        if isinstance(tool, str):
            try:
                tool = read_json(tool)
            except (ValueError, RecursionError) as error:
                unreadable = f"is not readable JSON ({error})"
                raise bad_field(where, name, unreadable, "Give one JSON object a tool") from error
        if not isinstance(tool, dict):
            raise bad_field(where, name, f"is {kind(tool)}", "Give one JSON object a tool")
        described = tool.get("function", tool)
        if not isinstance(described, dict) or not isinstance(described.get("name"), str):
            raise bad_field(where, name, "has no name", "Give {name, description, parameters}")
        if problem := problem_of(tool):
            raise bad_field(where, name, problem, "Give what JSON can hold")
        found.append(tool)
    return found
