"""The hub's usual schemas, and own columns, as conversations with responses.

    records      our own: {"messages", "responses": [{"role", "content", …}]}
    preference   {"chosen", "rejected"} and "prompt": texts or lists of messages; without a prompt,
                 or with longer lists, the conversation is what both have in front of the answer
    when2call    {"tools", "messages", "chosen_response", "rejected_response"}
    pku          {"prompt", "response_0", "response_1", "is_response_0_safe", "is_response_1_safe"}
    beavertails  {"prompt", "response", "is_safe"}
    xstest       {"prompt", "type", "label"}
    roles        {"messages" or "prompt"} and one or more of the roles of records.py ("learn",
                 "keep", "prefer", …), each a text, a message or a list of these; "refuse": true
                 for one of the configured refusals
    answer       {"prompt", "answer"}, and perhaps "role", "tolerance", "around" and "relative"
    instruction  {"instruction", "input", "output"}
    messages     {"messages"} that end in the assistant's turn, which is the response

Chosen responses are of role prefer, rejected ones of role avoid; so are unsafe ones, and safe ones
are references. XSTest's unsafe prompts are to be refused, and of its safe ones a refusal is to be
avoided. Every schema may have "system", "tools" and "category".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

from .records import ROLES, parse_record, parse_response

COMMON = ("system", "tools", "category", "objective")
ANSWER_OPTIONS = ("role", "tolerance", "around", "relative")

Parser = Callable[[dict[str, Any], str, str], Record]
"""Makes a record of a row, its place, and the role of a response to which its schema gives none."""


def _records(row: dict[str, Any], where: str, role: str) -> Record:
    return parse_record(row, where)


def _xstest(row: dict[str, Any], where: str, role: str) -> Record:
    text_field(field(row, "type", where), "type", where)
    unsafe, category = read_xstest(row, where)
    response = Response("refuse" if unsafe else "avoid", None, refusal=True)
    return make_record(row, conversation(row, where), [response], where, category)


def _roles(row: dict[str, Any], where: str, role: str) -> Record:
    responses = []
    for name in ROLES:
        given = row.get(name)
        if given is None or given == "":
            continue
        if name == "refuse" and given is True:
            responses.append(Response("refuse", None, refusal=True))
            continue
        several = isinstance(given, list) and not is_turns(given)
        for each in given if several else [given]:
            responses.append(response_of(name, each, where, name))
    return make_record(row, conversation(row, where), responses, where)


def _answer(row: dict[str, Any], where: str, role: str) -> Record:
    given = {name: row[name] for name in ANSWER_OPTIONS if row.get(name) is not None}
    answer = text_field(field(row, "answer", where), "answer", where)
    response = parse_response({"role": role, **given, "content": answer}, where, "answer")
    return make_record(row, conversation(row, where), [response], where)


def _messages(row: dict[str, Any], where: str, role: str) -> Record:
    messages = conversation(row, where)
    if messages[-1]["role"] != "assistant":
        problem = "has no answer: its last turn is not the assistant's"
        raise bad_field(where, "messages", problem, "Add the answer, or give responses")
    response = response_of(role, messages[-1], where, f"messages[{len(messages) - 1}]")
    return make_record(row, messages[:-1], [response], where)


SCHEMAS: Mapping[str, tuple[tuple[str, ...], Parser]] = {
    "records": (("responses",), _records),
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
    """Reads the rows of a file or of a data set on the hub, as ``records_of`` calls it.

    Args:
        schema: a name of :data:`SCHEMAS`; "auto" tells it from a row's columns.
        columns: of a name in :data:`COLUMNS` the file's own name.
        role: of a response to which its schema gives none: of "answer", "messages" and
            "instruction".
        responses: whether a record has to have any.
    """

    schema: str = "auto"
    columns: Mapping[str, str] | None = None
    role: str = "reference"
    responses: bool = True

    def __call__(self, row: Any, where: str) -> Record:
        row = self._named(json_object(row, where), where)
        if not self.responses and self._ends_open(row):
            return make_record(row, conversation(row, where), [], where)
        name = told(row, where) if self.schema == "auto" else self.schema
        record = SCHEMAS[name][1](row, where, self.role)
        if self.responses and not record.responses:
            problem = "is empty" if name == "records" else "and every other response is missing"
            raise bad_field(where, "responses", problem, "Give at least one")
        return record

    def _named(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        """The row under our names."""
        if not self.columns:
            return row
        found = {}
        for ours, theirs in self.columns.items():
            if theirs not in row:
                names = ", ".join(map(shown, list(row)[:12]))
                raise DataError(
                    f'{where}: columns.{ours} is "{theirs}", and the record has no such field '
                    f"(found: {names}). Name one of these."
                )
            found[ours] = row[theirs]
        kept = {name: row[name] for name in COMMON if name in row}
        return kept | found

    @staticmethod
    def _ends_open(row: dict[str, Any]) -> bool:
        """Whether there is a prompt and nothing that answers it, so nothing to leave out."""
        given = next((row[name] for name in PROMPTS if row.get(name)), None)
        if isinstance(given, list) and given and isinstance(given[-1], dict):
            return given[-1].get("role") != "assistant"
        return isinstance(given, str)


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
