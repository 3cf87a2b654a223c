"""The hub's usual schemas, and own columns, as conversations with responses.

:data:`SCHEMAS` has their columns; docs/conversation.md says what becomes of them. A conversation is
in "messages", or the user's one turn in "prompt"; of schema "roles" each role of records.py is a
column, with a text, a message or a list of these. Every schema may have "system", "tools" and
"category".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.records import bad_field, field, json_object, shown, text_field
from pl_pointwise.tasks.language_model.messages import is_turns
from pl_pointwise.tasks.language_model.records import (
    PROMPTS,
    Record,
    Response,
    conversation,
    make_record,
    read_beavertails,
    read_instruction,
    read_pku,
    read_preference,
    read_when2call,
    read_xstest,
    response_of,
)

from .records import MEASURED, ROLES, parse_record, parse_response

COMMON = ("system", "tools", "category", "objective")
ANSWER_OPTIONS = ("role", "tolerance", "around", "relative")

Parser = Callable[[dict[str, Any], str, str], Record]
"""Makes a record of a row, its place, and the role of a response to which its schema gives none."""


def _xstest(row: dict[str, Any], where: str, role: str) -> Record:
    text_field(field(row, "type", where), "type", where)
    unsafe, category = read_xstest(row, where)
    response = Response("refuse" if unsafe else "avoid", None, refusal=True)
    return make_record(row, conversation(row, where), [response], where, category)


def _roles(row: dict[str, Any], where: str, role: str) -> Record:
    return make_record(row, conversation(row, where), _of_roles(row, where, ROLES), where)


def _answer(row: dict[str, Any], where: str, role: str) -> Record:
    given = {name: row[name] for name in ANSWER_OPTIONS if row.get(name) is not None}
    answer = text_field(field(row, "answer", where), "answer", where)
    response = parse_response({"role": role, **given, "content": answer}, where, "answer")
    responses = [response, *_of_roles(row, where, MEASURED)]
    return make_record(row, conversation(row, where), responses, where)


def _of_roles(row: dict[str, Any], where: str, roles: Sequence[str]) -> list[Response]:
    """The responses in the columns that are called by their roles."""
    responses = []
    for name in roles:
        given = row.get(name)
        if given is None or given == "":
            continue
        if name == "refuse" and given is True:
            responses.append(Response("refuse", None, refusal=True))
            continue
        several = isinstance(given, list) and not is_turns(given)
        for each in given if several else [given]:
            responses.append(response_of(name, each, where, name))
    return responses


def _messages(row: dict[str, Any], where: str, role: str) -> Record:
    messages = conversation(row, where)
    if messages[-1]["role"] != "assistant":
        problem = "has no answer: its last turn is not the assistant's"
        raise bad_field(where, "messages", problem, "Add the answer, or give responses")
    response = response_of(role, messages[-1], where, f"messages[{len(messages) - 1}]")
    return make_record(row, messages[:-1], [response], where)


SCHEMAS: Mapping[str, tuple[tuple[str, ...], Parser]] = {
    "records": (("responses",), parse_record),
    "when2call": (("chosen_response", "rejected_response"), read_when2call),
    "pku": (("response_0", "response_1", "is_response_0_safe", "is_response_1_safe"), read_pku),
    "preference": (("chosen", "rejected"), read_preference),
    "beavertails": (("prompt", "response", "is_safe"), read_beavertails),
    "xstest": (("prompt", "type", "label"), _xstest),
    "answer": (("answer",), _answer),
    "roles": ((), _roles),
    "instruction": (("instruction", "output"), read_instruction),
    "messages": (("messages",), _messages),
}
"""By name, in the order in which they are tried: the columns by which each is told, its reader."""

_TOLD_BY = [name for columns, _ in SCHEMAS.values() for name in columns]
COLUMNS = sorted({*COMMON, *PROMPTS, *ROLES, *ANSWER_OPTIONS, "status", *_TOLD_BY})
"""All columns that some schema reads."""


@dataclass(frozen=True)
class Reading:
    """Reads the rows of a file or of a data set on the hub; options as the data module has them.

    responses: whether a record has to have any.
    """

    schema: str = "auto"
    columns: Mapping[str, str] | None = None
    role: str = "reference"
    responses: bool = True

    def __call__(self, row: Any, where: str) -> Record:
        row = self._named(json_object(row, where), where)
        given: Any = next((row[name] for name in PROMPTS if row.get(name)), None)
        ends_open = isinstance(given, str) or (is_turns(given) and given[-1]["role"] != "assistant")
        if ends_open and not self.responses:
            return make_record(row, conversation(row, where), [], where)
        name = told(row, where) if self.schema == "auto" else self.schema
        record = SCHEMAS[name][1](row, where, self.role)
        if self.responses and set(MEASURED).issuperset(record.roles):
            problem = "has none that anything is asked of"
            raise bad_field(where, "responses", problem, "Give at least one")
        return record

    def _named(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        """The row under our names."""
        if not self.columns:
            return row
        for ours, theirs in self.columns.items():
            if theirs not in row:
                names = ", ".join(map(shown, list(row)[:12]))
                raise DataError(
                    f'{where}: columns.{ours} is "{theirs}", and the record has no such field '
                    f"(found: {names}). Name one of these."
                )
        found = {ours: row[theirs] for ours, theirs in self.columns.items()}
        return {name: row[name] for name in COMMON if name in row} | found


def told(row: Mapping[str, Any], where: str) -> str:
    """The name of the first schema whose columns the row has.

    Raises:
        DataError: none.
    """
    for name, (columns, _) in SCHEMAS.items():
        by_role = name == "roles" and any(role in row for role in ROLES)
        if (columns and all(column in row for column in columns)) or by_role:
            return name
    found = ", ".join(map(shown, list(row)[:12])) or "nothing"
    raise DataError(
        f"{where}: the fields ({found}) are of no schema that is known ({', '.join(SCHEMAS)}). "
        "Name them with columns, as {prompt: question, prefer: good_answer, avoid: bad_answer}."
    )
