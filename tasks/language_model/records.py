"""The records of the language tasks: a conversation and responses to it, each with its role.

And the readers of the hub's usual schemas, which all tasks share. A reader takes a row, its place
for messages, and the role of a response to which its schema gives none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pl_pointwise.tasks.common.records import bad_field, digest, field, folded, kind, text_field

from .messages import Answer, is_turns, parse_answer, parse_messages, parse_tools


@dataclass(frozen=True)
class Response:
    """One response to a conversation."""

    role: str  # what it is to the task, such as "prefer"
    answer: Answer | None  # None for one of the configured refusals
    tolerance: float | None = None  # its own ε or δ, or what its band is around; None: the role's
    relative: bool = False  # whether that is δ, measured from the reference policy's s̄
    refusal: bool = False
    behaviour: str = ""  # of When2Call, "" if unknown


@dataclass(frozen=True)
class Record:
    """One conversation and its responses."""

    messages: list[dict[str, Any]]  # ending before the assistant's turn
    tools: list[dict[str, Any]]
    responses: tuple[Response, ...]
    where: str  # file and line, or source and record
    given_category: str = ""  # the record's own
    objective: bool | None = None  # whether it applies; None where its roles decide

    @property
    def answers(self) -> list[Answer]:
        """The responses' texts or calls."""
        return ["" if each.answer is None else each.answer for each in self.responses]

    @property
    def roles(self) -> list[str]:
        """What each response is."""
        return [each.role for each in self.responses]

    @property
    def prompt(self) -> str:
        """What records of one prompt have in common, and no others."""
        return digest(self.messages, self.tools)

    @property
    def unit(self) -> str:
        """What records whose prompts differ by case and spaces alone have in common."""
        return digest(folded([self.messages, self.tools]))

    @property
    def kind(self) -> str:
        """Which requirements it has: its roles, a refusal to avoid by that name."""
        names = {
            "avoid refusal" if each.refusal and each.role == "avoid" else each.role
            for each in self.responses
        }
        return " + ".join(sorted(names))

    @property
    def opposed(self) -> list[bool]:
        """For each response whether it is to become unlikely."""
        return [each.role in ("avoid", "forget") for each in self.responses]

    @property
    def category(self) -> str:
        """The record's own category, else its kind."""
        return self.given_category or self.kind


R = TypeVar("R", bound=Record)

PROMPTS = ("messages", "prompt", "input", "question")
"""Fields that hold the conversation, or the user's one turn."""


def make_record(
    row: dict[str, Any], messages: list[dict[str, Any]], responses: Sequence[Response], where: str
) -> Record:
    """A record with what is common to all schemas: "tools", "category", "objective"."""
    if messages[-1]["role"] == "assistant":
        problem = "ends with the assistant's turn, which is the answer's place"
        raise bad_field(where, "messages", problem, "Take the last message out")
    objective = None if row.get("objective") is None else flag(row, "objective", where)
    category, tools = row.get("category"), parse_tools(row.get("tools"), where)
    category = category if isinstance(category, str) else ""
    return Record(messages, tools, tuple(responses), where, category, objective)


def conversation(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The turns in "messages" or "prompt", a list or the user's text, behind a "system" prompt."""
    names = sorted((name for name in PROMPTS if name in row), key=lambda name: not row[name])
    name = names[0] if names else "prompt"
    given = field(row, name, where)
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise bad_field(where, name, f"is {kind(given)}", "Give a text, or [{role, content}]")
    messages = parse_messages(given, where)
    system = row.get("system")
    if isinstance(system, str) and system.strip():
        messages.insert(0, {"role": "system", "content": text_field(system, "system", where)})
    return messages


def with_refusals(records: Iterable[R], refusals: Sequence[str], own: bool = True) -> list[R]:
    """The records with a text for each refusal that has none: one of ``refusals``, by its prompt.

    own: a record's own refusal stays.
    """

    def filled(response: Response, text: str) -> Response:
        lacking = response.answer is None or (response.refusal and not own)
        return replace(response, answer=text) if lacking else response

    found = []
    for record in records:
        text = refusals[int(record.prompt[:12], 16) % len(refusals)]
        responses = tuple(filled(response, text) for response in record.responses)
        found.append(replace(record, responses=responses))
    return found


# The hub's schemas --------------------------------------------------------------------------------


def read_preference(row: dict[str, Any], where: str, role: str = "") -> Record:
    """{"chosen", "rejected"} behind a prompt, or with the conversation that both have in front."""
    given = [field(row, name, where) for name in ("chosen", "rejected")]
    if row.get("status") == "tie":
        raise bad_field(where, "status", "says that neither answer is better", "Take it out")
    if isinstance(given[0], list) and len(given[0]) > 1:
        messages = parse_messages(given[0], where, "chosen.")[:-1]
        other = given[1]
        if isinstance(other, list) and parse_messages(other, where, "rejected.")[:-1] != messages:
            problem = "follows another conversation than the chosen one"
            raise bad_field(where, "rejected", problem, "Let them differ in the answer alone")
    else:
        messages = conversation(row, where)
    prefer = response_of("prefer", given[0], where, "chosen")
    avoid = response_of("avoid", given[1], where, "rejected")
    return _pair(row, messages, prefer, avoid, where)


def read_when2call(row: dict[str, Any], where: str, role: str = "") -> Record:
    """{"messages", "tools", "chosen_response", "rejected_response"}, and both behaviours."""

    def read(role: str, name: str, behaviour: str) -> Response:
        answer = parse_answer(field(row, name, where), where, name, bare_calls=True)
        return Response(role, answer, behaviour=str(row.get(behaviour) or ""))

    prefer = read("prefer", "chosen_response", "category")
    avoid = read("avoid", "rejected_response", "rejected_category")
    return _pair(row, conversation(row, where), prefer, avoid, where)


def _pair(
    row: dict[str, Any], messages: Any, prefer: Response, avoid: Response, where: str
) -> Record:
    if prefer.answer == avoid.answer:
        raise bad_field(where, "rejected", "equals the chosen one", "Change one of the two")
    return make_record(row, messages, [prefer, avoid], where)


def read_instruction(row: dict[str, Any], where: str, role: str) -> Record:
    """{"instruction", "input", "output"}, the input perhaps empty; or {"messages", "output"}."""
    responses, prompt = [response_of(role, field(row, "output", where), where, "output")], row
    if row.get("messages") is None:
        text = text_field(field(row, "instruction", where), "instruction", where)
        given = row.get("input") or ""
        if not isinstance(given, str) or given.strip():
            text = f"{text}\n\n{text_field(given, 'input', where)}"
        prompt = {"prompt": text, "system": row.get("system")}
    return make_record(row, conversation(prompt, where), responses, where)


def response_of(role: str, value: Any, where: str, name: str) -> Response:
    """A response that is a text, a message, calls, or turns of which the last is the answer."""
    if is_turns(value):
        value = value[-1]
    return Response(role, parse_answer(value, where, name), refusal=role == "refuse")


def flag(row: dict[str, Any], name: str, where: str, prefix: str = "") -> bool:
    """A field that is true or false; ``prefix`` stands before its name in messages."""
    value = field(row, name, where, prefix)
    if isinstance(value, str) and value.lower() in ("true", "false"):  # of a CSV file
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise bad_field(where, f"{prefix}{name}", f"is {kind(value)}", "Give true or false")
    return value
