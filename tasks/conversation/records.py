"""The records of conversations: a conversation, and any number of responses with their roles.

What the roles ask stands in module.py; forget is as likely as ``around`` says, no more and no
less. Two are measured alone (forgetting.py): paraphrase, what is to be kept or forgotten in other
words, and wrong, a wrong answer beside it.

ε is the role's, or the response's own ``tolerance``: absolute, or relative to the reference policy,
s̄ ≥ s̄_ref − δ (prefer, refuse) and s̄ ≤ s̄_ref − δ (avoid). A response to forget has c in ``around``
instead, or of a relative one s̄_ref − c.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.records import bad_field, digest, kind, shown
from pl_pointwise.tasks.language_model.messages import Answer, parse_answer
from pl_pointwise.tasks.language_model.records import Record, Response, conversation, make_record

MEASURED = ("paraphrase", "wrong")
"""Roles that evaluations read alone."""

ROLES = ("prefer", "avoid", "refuse", "keep", "forget", "learn", "reference", *MEASURED)
"""In the order that a batch numbers them; the first five are constraints, by the same names."""

_CONTENT = ("message", "text", "content", "tool_calls", "reasoning_content")
_OPTIONS = ("role", "tolerance", "around", "relative", "refusal")


def parse_record(row: dict[str, Any], where: str, role: str = "") -> Record:
    """A row of our own schema: {"messages" or "prompt", "responses": [{"role", …}]}.

    Raises:
        DataError: something else; names record, field and remedy.
    """
    given = row.get("responses")
    if not isinstance(given, list):
        raise bad_field(where, "responses", f"is {kind(given)}", "Give a list of {role, content}")
    responses = [
        parse_response(each, where, f"responses[{place}]") for place, each in enumerate(given)
    ]
    return make_record(row, conversation(row, where), responses, where)


def parse_response(value: Any, where: str, name: str) -> Response:
    """{"role", "content" or "tool_calls" or "message" or "text"} and a response's options.

    Raises:
        DataError: something else, a field of another name included: a bound that is misspelt would
            otherwise not hold.
    """
    if not isinstance(value, dict):
        raise bad_field(where, name, f"is {kind(value)}", "Give {role, content}")
    given = {key: entry for key, entry in value.items() if entry is not None}
    if unknown := set(given).difference(_CONTENT, _OPTIONS):
        problem = f"has the field {shown(min(unknown))}"
        known = ", ".join((*_OPTIONS, *_CONTENT))
        raise bad_field(where, name, problem, f"Its fields are {known}")
    role = given.get("role")
    if role not in ROLES:
        problem = "is missing" if role is None else f"is {shown(role)}"
        raise bad_field(where, f"{name}.role", problem, f"Give one of {', '.join(ROLES)}")
    for flag in ("relative", "refusal"):
        if not isinstance(given.get(flag, False), bool):
            raise bad_field(where, f"{name}.{flag}", "is no flag", "Give true or false")
    refusal = role == "refuse" or given.get("refusal", False)
    answer: Answer | None = None
    if whole := next((key for key in ("message", "text") if key in given), None):
        answer = parse_answer(given[whole], where, f"{name}.{whole}")
    elif message := {key: given[key] for key in _CONTENT if key in given}:
        answer = parse_answer(message, where, name)
    elif not refusal:
        remedy = f"Give one of {', '.join(_CONTENT)}; only a refusal may be left to the settings"
        raise bad_field(where, name, "has no text", remedy)
    return Response(role, answer, _bound(given, where, name), given.get("relative", False), refusal)


def _bound(given: dict[str, Any], where: str, name: str) -> float | None:
    """A response's own number: its tolerance, of role forget what its band is around."""
    role, relative = given["role"], given.get("relative", False)
    own, other = ("around", "tolerance") if role == "forget" else ("tolerance", "around")
    value = given.get(own)
    field, problem, remedy = f"{name}.{own}", "", "Give a number"
    if relative and role == "keep":
        field, problem = f"{name}.relative", "is true of role keep, whose KL is to the reference"
        remedy = "Give tolerance alone; for no less likely than before, role prefer"
    elif other in given:
        field, problem = f"{name}.{other}", f"is no field of role {role}"
        remedy = f"Give {own}; a band is as wide as model.forget_tolerance"
    elif value is None:
        problem = "is missing" if relative else ""
        remedy = "A relative response needs its δ"
    elif isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        problem = f"is {shown(value)}"
    elif role in ("reference", "learn", *MEASURED):
        problem, remedy = f"bounds a response of role {role}", "Give a role that is a requirement"
    elif role == "keep" and value <= 0:
        problem, remedy = f"is {value}, and a KL is above 0", "Give a positive number"
    elif role != "keep" and value > 0 and not relative:
        problem = f"is {value}, and no mean log-likelihood is above 0"
        remedy = "Give a negative number, or relative: true"
    if problem:
        raise bad_field(where, field, problem, remedy)
    return None if value is None else float(value)


def check_kept_and_forgotten(records: Iterable[Record]) -> None:
    """
    Raises:
        DataError: a prompt with a response to keep or learn and one to forget.
    """
    kept: dict[str, Record] = {}
    forgotten: dict[str, Record] = {}
    for record in records:
        if {"keep", "learn"}.intersection(record.roles):
            kept.setdefault(record.prompt, record)
        if "forget" in record.roles:
            forgotten.setdefault(record.prompt, record)
    for prompt, record in kept.items():
        if other := forgotten.get(prompt):
            raise DataError(
                f"{record.where}: the prompt is to be kept here and forgotten in {other.where}. "
                "Take one of the two out."
            )


def grouped(records: Iterable[Record]) -> list[Record]:
    """All records of one prompt as one, with all their responses, each once.

    An answer that is to be avoided is no longer a reference. Each group stands where its first
    record stood, with its category.

    Raises:
        DataError: an answer that is to be likely in one record and unlikely in another.
    """
    groups: dict[str, tuple[Record, dict[str, Response]]] = {}
    for record in records:
        _, found = groups.setdefault(record.prompt, (record, {}))
        for response in record.responses:
            one = found.setdefault(digest(response.answer), response)
            roles = {one.role, response.role}
            if roles & {"avoid", "forget"} and roles & {"prefer", "refuse", "keep", "learn"}:
                raise DataError(
                    f"{record.where}: a response is of role {response.role} here and of role "
                    f"{one.role} in another record of the same prompt. Change one of the two."
                )
            if one.role == "reference":
                found[digest(response.answer)] = response
    return [replace(first, responses=tuple(found.values())) for first, found in groups.values()]
