"""The records of conversations: a conversation, and any number of responses with their roles.

What a role asks of a response y, with s̄ its mean log-likelihood a token:

    learn      nothing: cross-entropy over it is minimised
    reference  nothing: the objective is taken over it, as KL to the reference or cross-entropy
    keep       KL(π ‖ π_ref) ≤ ε a token: the model goes on saying it as before
    prefer     s̄ ≥ ε, the prompt must be answered like this
    avoid      s̄ ≤ ε, it must never be
    refuse     s̄ ≥ ε, the response is a refusal
    forget     |s̄ − c| ≤ ε, as likely as ``around`` says, no more and no less

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
from pl_pointwise.tasks.common.records import (
    bad_field,
    digest,
    json_object,
    kind,
    shown,
)
from pl_pointwise.tasks.language_model.messages import Answer, parse_answer
from pl_pointwise.tasks.language_model.records import Record, Response, conversation, make_record

ROLES = ("prefer", "avoid", "refuse", "keep", "forget", "learn", "reference")
"""In the order that a batch numbers them; the first five are constraints, by the same names."""


_CONTENT = ("message", "text", "content", "tool_calls", "reasoning_content")
_OPTIONS = ("role", "tolerance", "around", "relative", "refusal")


def parse_record(row: Any, where: str) -> Record:
    """A row of our own schema.

    Args:
        row: {"messages": […], "responses": [{"role", …}]}, a text "prompt" in place of the
            messages; optionally "tools", "category" and "objective".
        where: the row's place, for messages.

    Raises:
        DataError: something else; names record, field and remedy.
    """
    row = json_object(row, where)
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
    answer = _answer_of(given, where, name)
    if answer is None and not refusal:
        remedy = f"Give one of {', '.join(_CONTENT)}; only a refusal may be left to the settings"
        raise bad_field(where, name, "has no text", remedy)
    relative = given.get("relative", False)
    if relative and role == "keep":
        remedy = (
            "It is measured from the reference as it is; no less likely than before is role "
            "prefer with relative: true and tolerance: δ"
        )
        raise bad_field(where, f"{name}.relative", "is true of role keep", remedy)
    own, other = ("around", "tolerance") if role == "forget" else ("tolerance", "around")
    if other in given:
        remedy = f"Give {own}; the width of the band is model.forget_tolerance"
        if role != "forget":
            remedy = f"Give {own}"
        raise bad_field(where, f"{name}.{other}", f"is no field of role {role}", remedy)
    tolerance = _bound(given.get(own), role, relative, where, f"{name}.{own}")
    return Response(role, answer, tolerance, relative, refusal)


def _answer_of(given: dict[str, Any], where: str, name: str) -> Answer | None:
    if "message" in given or "text" in given:
        key = "message" if "message" in given else "text"
        return parse_answer(given[key], where, f"{name}.{key}")
    parts = ("content", "tool_calls", "reasoning_content")
    message = {key: given[key] for key in parts if key in given}
    return parse_answer(message, where, name) if message else None


def _bound(value: Any, role: str, relative: bool, where: str, name: str) -> float | None:
    if value is None:
        if relative:
            raise bad_field(where, name, "is missing", "A relative response needs its δ")
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise bad_field(where, name, f"is {shown(value)}", "Give a number")
    if role in ("reference", "learn"):
        remedy = "Give the response a role that is a requirement, or leave it out"
        raise bad_field(where, name, f"bounds a response of role {role}", remedy)
    if role == "keep" and value <= 0:
        raise bad_field(where, name, f"is {value}, and a KL is above 0", "Give a positive number")
    if role != "keep" and value > 0 and not relative:
        problem = f"is {value}, and no mean log-likelihood is above 0"
        raise bad_field(where, name, problem, "Give a negative number, or relative: true")
    return float(value)


def check_kept_and_forgotten(records: Iterable[Record]) -> None:
    """
    Raises:
        DataError: a prompt with a response to keep or learn and one to forget.
    """
    seen: dict[tuple[str, bool], Record] = {}
    for record in records:
        for role in record.roles:
            if role in ("keep", "learn", "forget"):
                forgotten = role == "forget"
                seen.setdefault((record.prompt, forgotten), record)
                if other := seen.get((record.prompt, not forgotten)):
                    one, two = ("forgotten", other.where) if forgotten else ("kept", other.where)
                    raise DataError(
                        f"{record.where}: the prompt is to be {one} here, and the other way round "
                        f"in {two}. Take one of the two out."
                    )


def grouped(records: Iterable[Record]) -> list[Record]:
    """All records of one prompt as one, with all their responses, each once.

    An answer that is to be avoided is no longer a reference. Each group stands where its first
    record stood, with its category.

    Raises:
        DataError: an answer that is to be likely in one record and unlikely in another.
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.prompt, []).append(record)
    found = []
    for group in groups.values():
        by_answer: dict[str, Response] = {}
        for record in group:
            for response in record.responses:
                key = digest(response.answer)
                by_answer[key] = _stricter(by_answer.get(key, response), response, record.where)
        found.append(replace(group[0], responses=tuple(by_answer.values())))
    return found


def _stricter(one: Response, other: Response, where: str) -> Response:
    """Of two responses with the same answer the one that is kept."""
    roles = {one.role, other.role}
    if roles & {"avoid", "forget"} and roles & {"prefer", "refuse", "keep", "learn"}:
        raise DataError(
            f"{where}: a response is of role {other.role} here and of role {one.role} in another "
            "record of the same prompt. Change one of the two."
        )
    return other if one.role == "reference" else one
