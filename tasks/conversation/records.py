"""The records of conversations: a conversation, and any number of responses with their roles.

What the roles ask stands in module.py; forget is as likely as ``around`` says, no more, no less.

ε is the role's, or the response's own ``tolerance``: absolute, or relative to the reference policy,
s̄ ≥ s̄_ref − δ (prefer, refuse) and s̄ ≤ s̄_ref − δ (avoid). A response to forget has c in ``around``
instead, or of a relative one s̄_ref − c.

:data:`SCHEMAS` has our own schema and the hub's usual ones; docs/conversation.md says what becomes
of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import Any

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.records import (
    Row,
    bad_field,
    did_you_mean,
    kind,
    shown,
)
from pl_pointwise.tasks.language_model.text.messages import (
    from_text,
    is_turns,
    parse_answer,
)
from pl_pointwise.tasks.language_model.text.records import (
    ANSWERS,
    INSTRUCTIONS,
    PROMPTS,
    Record,
    Response,
    answered,
    conversation,
    flag,
    make_record,
    read_preference,
    read_when2call,
    reads_whole,
    truth,
    with_thought,
)

ROLES = ("prefer", "avoid", "refuse", "keep", "forget", "learn", "reference")
"""In the order that a batch numbers them; the first five are constraints, by the same names."""

_CONTENT = ("content", "tool_calls", "reasoning_content")
_BOUND = ("tolerance", "around", "relative")
_OWN = dict.fromkeys(
    ("prefer", "avoid", "refuse"),
    "tolerance, a negative number or with relative: true a δ",
) | {
    "keep": "tolerance, a positive number; for no less likely than before, role prefer",
    "forget": "around, a negative number or with relative: true a δ",
}
"""What a response of a role has of its own."""
_FIELDS = {
    "answer": (PROMPTS, ANSWERS[:2]),
    "instruction": (INSTRUCTIONS, ANSWERS[2:]),
    "response": (PROMPTS, ANSWERS[2:]),
}


def parse_response(
    value: Any, where: str, name: str, prefix: str | None = None
) -> Response:
    """A response and its options; other fields are refused, as a misspelt bound would not hold.

    prefix: what stands before its fields in messages; "" where they are the record's own.
    """
    prefix = f"{name}." if prefix is None else prefix
    if not isinstance(value, dict):
        raise bad_field(where, name, f"is {kind(value)}", "Give {role, content}")
    fields = {key: entry for key, entry in value.items() if entry is not None}
    known = ("role", "refusal", *_BOUND, *_CONTENT)
    unknown = set(fields).difference(known)
    # A misspelt tolerance would be the role's in silence.
    if unknown:
        problem = f"has the field {shown(min(unknown))}"
        near = did_you_mean(min(unknown), known)
        remedy = f"{near}Its fields are {', '.join(known)}"
        raise bad_field(where, name, problem, remedy)
    role = _role(fields.get("role"), where, f"{prefix}role")
    relative = "relative" in fields and flag(fields, "relative", where, prefix)
    refusal = "refusal" in fields and flag(fields, "refusal", where, prefix)
    refusal = refusal or role == "refuse"
    message = {key: fields[key] for key in _CONTENT if key in fields}
    # Refusals have texts in the settings; of anything else nobody knows what is meant.
    if not message and not refusal:
        remedy = (
            "Give content or tool_calls; only a refusal may be left to the settings"
        )
        raise bad_field(where, name, "has no text", remedy)
    answer = parse_answer(message, where, name) if message else None
    return Response(
        role=role,
        answer=answer,
        tolerance=_bound_of_its_own(fields, role, relative, where, name),
        relative=relative,
        refusal=refusal,
    )


def _role(value: Any, where: str, name: str) -> str:
    """The value, if it is a role; ``name`` is the field's in the record."""
    if value in ROLES:
        return str(value)
    problem = "is missing" if value is None else f"is {shown(value)}"
    near = did_you_mean(value, ROLES)
    raise bad_field(where, name, problem, f"{near}Give one of {', '.join(ROLES)}")


def _bound_of_its_own(
    fields: Mapping[str, Any], role: str, relative: bool, where: str, name: str
) -> float | None:
    """A response's own number: its tolerance, of role forget what its band is around."""
    key = "around" if role == "forget" else "tolerance"
    bound: Any = fields.get(key)
    if isinstance(bound, str):  # of a CSV file
        with suppress(ValueError):
            bound = float(bound)
    if bound is None:
        right = not relative  # Relative to the reference there has to be a number.
    elif isinstance(bound, bool) or not isinstance(bound, (int, float)):
        right = False
    elif role == "keep":  # A KL.
        right = not relative and 0 < bound < math.inf
    else:  # A mean log-likelihood, or a difference of two.
        right = role in _OWN and math.isfinite(bound) and (relative or bound <= 0)
    bounds = {option: fields[option] for option in _BOUND if option in fields}
    # Also of a role without a bound, and a band's number under the name of a floor's.
    if not right or bounds.keys() - {key, "relative"}:
        remedy = f"Give {_OWN.get(role, 'none, or a role that is a requirement')}"
        raise bad_field(
            where, name, f"of role {role} has the bound {shown(bounds)}", remedy
        )
    return None if bound is None else float(bound)


def check_together(records: Sequence[Record]) -> None:
    """Refuses a prompt that has to do with two of learn, keep and forget."""
    asked: dict[str, tuple[str, str]] = {}
    for record in records:
        for role in {"learn", "keep", "forget"}.intersection(record.roles):
            other, where = asked.setdefault(record.unit, (role, record.where))
            # One prompt, two wishes: which of them holds would be a matter of multipliers.
            if other != role:
                raise DataError(
                    f"{where}: an answer to the prompt is of role {other} here, and of role {role} "
                    f"in {record.where}. Take one of the two out."
                )


# Schemas ------------------------------------------------------------------------------------------


def _records(row: dict[str, Any], where: str, role: str) -> Record:
    """A conversation with its responses, each with its role."""
    entries = row.get("responses")
    if not isinstance(entries, list):
        remedy = "Give a list of {role, content}"
        raise bad_field(where, "responses", f"is {kind(entries)}", remedy)
    responses = []
    for place, entry in enumerate(entries):
        responses.append(parse_response(entry, where, f"responses[{place}]"))
    return make_record(row, conversation(row, where), responses, where)


def _single(schema: str, row: dict[str, Any], where: str, role: str) -> Record:
    """One answer, a field or the last turn; of the row's role, that of its "label", or ``role``."""
    if schema == "messages":
        *messages, answer = conversation(row, where)
        held = next((field for field in PROMPTS if row.get(field)), "messages")
        name = f"{held}[{len(messages)}]"
        # An open conversation, such as a prompt to predict for.
        if answer["role"] != "assistant":
            problem = "has no answer: its last turn is not the assistant's"
            raise bad_field(where, held, problem, "Add the answer, or give responses")
        # The model would learn to go on before it has the result.
        if messages and messages[-1].get("tool_calls"):
            problem = (
                "ends with a call and an answer, without the call's result between them"
            )
            raise bad_field(
                where, held, problem, "Add the result as a turn of role tool"
            )
        if messages and messages[-1]["role"] == "assistant":
            problem = "ends with two turns of the assistant in a row"
            raise bad_field(where, held, problem, "Join the two, or take one out")
        answer = with_thought(row, answer, where)
    elif schema == "calls":
        name = "answers"
        answer = from_text(
            row[name], where, name, 'Give [{"name": …, "arguments": {…}}]'
        )
        messages = conversation(row, where)
    else:
        prompts, answers = _FIELDS[schema]
        messages, answer, name = answered(row, where, prompts, answers)
        if messages and messages[-1]["role"] == "assistant":
            problem = "stands beside messages that end with an answer already"
            raise bad_field(where, name, problem, "Take one of the two out")
    options = {key: row[key] for key in ("role", *_BOUND) if row.get(key) is not None}
    # KTO's label: true is a good answer.
    if "role" not in options and truth(dict.get(row, "label")) is not None:
        role = "prefer" if flag(row, "label", where) else "avoid"
    response = parse_response(
        {"role": role, **options, "content": "as below"}, where, name, prefix=""
    )
    response = replace(response, answer=parse_answer(answer, where, name))
    return make_record(row, messages, [response], where)


SCHEMAS: Mapping[
    str, tuple[tuple[str, ...], Callable[[dict[str, Any], str, str], Record]]
] = {
    "records": (("responses",), _records),
    "when2call": (("chosen_response", "rejected_response"), read_when2call),
    "preference": (("chosen", "rejected"), read_preference),
    "calls": (("query", "answers", "tools"), partial(_single, "calls")),
    "answer": (("answer|completion",), partial(_single, "answer")),
    "instruction": (
        ("instruction|query", "output|response"),
        partial(_single, "instruction"),
    ),
    "messages": (
        ("messages|conversations|conversation",),
        partial(_single, "messages"),
    ),
    "response": (
        ("prompt|question|input", "response|output"),
        partial(_single, "response"),
    ),
}
"""By name, in the order in which they are tried: the columns that mark each, and its reader.

A reader takes a row, its place, and the role of a response to which its schema gives none.
"""


def _is_known(row: Mapping[str, Any]) -> bool:
    """Whether a row has the columns of a schema."""
    return any(_has_columns(row, columns) for columns, _ in SCHEMAS.values())


def _has_columns(row: Mapping[str, Any], columns: Sequence[str]) -> bool:
    """Whether a row has each of the columns; "a|b" is a column of either name."""
    return all(not row.keys().isdisjoint(column.split("|")) for column in columns)


_TEXTS = {"chosen", "rejected", "chosen_response", "rejected_response"}
_TEXTS |= {*ANSWERS, "answers", "responses"}
_ANSWERS = {"role", *_BOUND, "label", "status", *_TEXTS} - {"answers"}


@reads_whole
def read_record(
    row: Row, where: str, role: str = "reference", responses: bool = True
) -> Record:
    """The record of a row of a file or of a data set on the hub.

    role: of a response to which its schema gives none.
    responses: whether it has to have any.
    """
    prompt: Any = next((row[name] for name in PROMPTS if row.get(name)), None)
    ends_open = isinstance(prompt, str) or (
        is_turns(prompt) and prompt[-1]["role"] != "assistant"
    )
    # To predict for; answers beside the prompt are not looked at.
    if ends_open and not responses:
        row.read |= _ANSWERS
        return make_record(row, conversation(row, where), [], where)
    # As of a table whose prompts to refuse have no answer.
    if ends_open and row.get("role") == "refuse" and not any(map(row.get, _TEXTS)):
        row.read |= _ANSWERS
        _check_spelling(row, where)
        options = {key: row[key] for key in _BOUND if row.get(key) is not None}
        fields = {"role": "refuse", **options}
        refusal = parse_response(fields, where, "role", prefix="")
        return make_record(row, conversation(row, where), [refusal], where)
    name = told(row, where)
    if name in ("records", "answer"):  # Our own.
        _check_spelling(row, where)
    record = SCHEMAS[name][1](row, where, role)
    # responses: [] asks nothing of the model.
    if responses and not record.responses:
        problem = "has none that anything is asked of"
        raise bad_field(where, "responses", problem, "Give at least one")
    return record


_BESIDE = ("system", "tools", "category", *_BOUND, "role")
"""Fields that may be missing, so that nobody would notice another spelling."""


def _check_spelling(row: Mapping[str, Any], where: str) -> None:
    """Refuses a role as a field, and one that is nearly ours: what it asks for would not hold."""
    for name in row.keys() - {*PROMPTS, *_ANSWERS, *_BESIDE}:
        near = get_close_matches(name.lower(), _BESIDE, 1, cutoff=0.85)
        if name in ("prefer", "avoid", "refuse", "keep", "forget") and row[name]:
            raise bad_field(
                where, name, "is not read", "Give responses: [{role, content}]"
            )
        # "Role", "tolerence": close, and with the same letter in front.
        if near and near[0][0] == name[:1].lower():
            remedy = f'Write "{near[0]}", or name it otherwise'
            raise bad_field(where, name, "is not read", remedy)


def told(row: Mapping[str, Any], where: str) -> str:
    """The name of the first schema whose columns the row has."""
    for name, (columns, _) in SCHEMAS.items():
        if _has_columns(row, columns):
            return name
    names = ", ".join(map(shown, list(row)[:12])) or "nothing"
    plain = {name.strip().lower(): None for name in row}
    # Tables made by hand have Prompt and " answer".
    if plain.keys() != row.keys() and _is_known(plain):
        raise DataError(
            f"{where}: the fields ({names}) are known by other names. Write them in lower case "
            "and without blanks."
        )
    near = _near_fields(row)
    raise DataError(
        f"{where}: the fields ({names}) are of no schema that is known. {near}"
        "Give {prompt, answer}, and perhaps role, or {prompt, responses: [{role, content}]}; "
        'a prompt alone is read with "role": "refuse", or from keep_file with '
        "--data.init_args.own_answers true, by which the model answers it itself."
    )


def _near_fields(row: Mapping[str, Any]) -> str:
    """Of names that are not read the nearest that are; "" where none is near."""
    known = sorted({*PROMPTS, *_TEXTS, "role", *_BOUND, "system", "tools"})
    questions = []
    for name in row:
        question = did_you_mean(name, known) if name not in known else ""
        if question:
            questions.append(f"{shown(name)}: {question}")
    return "".join(questions)
