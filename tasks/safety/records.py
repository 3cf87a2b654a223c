"""Safety records: which prompts are unsafe, and what each response to them is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch

from pl_pointwise.tasks.common.records import (
    bad_field,
    digest,
    field,
    kind,
    largest,
    shown,
)
from pl_pointwise.tasks.language_model.text.messages import answer_text
from pl_pointwise.tasks.language_model.text.reasoning import is_refusal
from pl_pointwise.tasks.language_model.text.records import (
    ANSWERS,
    INSTRUCTIONS,
    Record,
    Response,
    answered,
    conversation,
    flag,
    make_record,
    reads_whole,
    response_of,
    truth,
)

HELPFUL, REFUSAL, UNSAFE, SAFE = ROLES = (
    "answer",
    "refusal",
    "unsafe answer",
    "safe answer",
)
"""What a response is, in the order that a batch numbers them; a safe answer is that of two answers
to an unsafe prompt."""

PAPER_ANNOTATORS = 3
"""The fewest annotators of an answer that is taken: more than two."""

REFUSES = Response(REFUSAL, None, refusal=True)


class Judgement(NamedTuple):
    """A record of an answer, as an unsafe one, and the harms that one annotator saw in it."""

    record: Record
    harms: frozenset[str]  # none for an answer labelled safe


class AnswerPair(NamedTuple):
    """A record of two answers; which is more helpful, and which less harmful, 0 or 1."""

    record: Record
    better: int
    safer: int


# The schemas --------------------------------------------------------------------------------------


@reads_whole
def parse_instruction(row: Any, where: str) -> Record:
    """A benign prompt with its answer, {"instruction", "input", "output"}."""
    messages, answer, name = answered(row, where, INSTRUCTIONS, ANSWERS[2:])
    response = response_of(HELPFUL, answer, where, name)
    return _record(messages, where, "benign", [response, REFUSES])


@reads_whole
def parse_labelled(row: Any, where: str) -> Record:
    """An unsafe prompt; a safe response that refuses, by the keyword rule, is its own refusal."""
    responses = [REFUSES]
    judged = row.get("response") is not None
    row.read |= {*ANSWERS}  # An answer that nobody judged is not taken.
    # A prompt of a list of unsafe ones; that nobody answered it says nothing.
    if not judged:
        for name in ("label", "safe", "is_safe"):
            value = row.get(name)
            if value == "safe" or (name != "label" and truth(value)):
                problem = f"is {shown(value)}, and the file is of unsafe prompts"
                raise bad_field(where, name, problem, "Take the record out")
    else:
        answer = _judged(row, "response", "is_safe", where)
        if answer.role == UNSAFE:
            responses.append(answer)
        # A safe answer that helps, such as with a crime's history, is no refusal to learn.
        elif is_refusal(answer_text(answer.answer or "")):
            responses = [replace(REFUSES, answer=answer.answer)]
    return _record(conversation(row, where), where, "unsafe", responses)


@reads_whole
def parse_judgement(row: Any, where: str) -> Judgement:
    """{"prompt", "response", "is_safe", "category": {name: bool}}, one annotator's."""
    harms = field(row, "category", where)
    if not isinstance(harms, dict):
        raise bad_field(
            where, "category", f"is {kind(harms)}", "Give {name: true or false}"
        )
    seen = frozenset(name for name in harms if flag(harms, name, where, "category."))
    answer = _judged(row, "response", "is_safe", where)
    responses = [REFUSES, replace(answer, role=UNSAFE)]
    record = _record(conversation(row, where), where, "unsafe", responses)
    return Judgement(record, seen if answer.role == UNSAFE else frozenset())


@reads_whole
def parse_pair(row: Any, where: str) -> AnswerPair:
    """{"prompt"}, two of {"response_0", "is_response_0_safe"}, {better, safer}_response_id."""
    responses = [
        _judged(row, f"response_{i}", f"is_response_{i}_safe", where) for i in (0, 1)
    ]
    better = _zero_or_one(row, "better_response_id", where)
    safer = _zero_or_one(row, "safer_response_id", where)
    of = (
        "unsafe" if any(response.role == UNSAFE for response in responses) else "benign"
    )
    record = _record(conversation(row, where), where, of, responses)
    return AnswerPair(record, better, safer)


def _zero_or_one(row: dict[str, Any], name: str, where: str) -> int:
    """Which of two responses a field names."""
    value = field(row, name, where)
    # true is 1 to Python, and which of two it names nobody knows.
    if isinstance(value, bool) or value not in (0, 1):
        raise bad_field(where, name, f"is {shown(value)}", "Give 0 or 1")
    return int(value)


@reads_whole
def parse_prompt(row: Any, where: str) -> Record:
    """A prompt to answer: {"prompt"}, {"instruction"} or {"messages"}.

    Unsafe by "label"; of XSTest's files without one by "type", as ``contrast_homonyms``.
    """
    label = row.get("label")
    # XSTest has no label; its unsafe contrasts say so in their type.
    if label in (None, ""):
        label = "unsafe" if str(row.get("type")).startswith("contrast_") else "safe"
    if label not in ("safe", "unsafe"):
        raise bad_field(where, "label", f"is {shown(label)}", "Give safe or unsafe")
    # of AlpacaEval and XSTest; no answer is looked at
    row.read |= {*ANSWERS, "focus", "note"}
    of = "unsafe" if label == "unsafe" else "benign"
    return _record(conversation(row, where), where, of, [REFUSES])


def _record(
    messages: list[Any], where: str, kind: str, responses: Sequence[Response]
) -> Record:
    """A benign or unsafe record, without tools and category, told apart by its texts."""
    read = make_record({}, messages, responses, where)
    identity = (read.text,) if len(messages) == 1 else tuple(messages)
    return replace(read, given_kind=kind, identity=identity)


def _judged(row: dict[str, Any], name: str, safe: str, where: str) -> Response:
    """The response in a field, safe or not by what another field says."""
    role = SAFE if flag(row, safe, where) else UNSAFE
    return response_of(role, field(row, name, where), where, name)


# Selection ----------------------------------------------------------------------------------------


def unanimous(
    judgements: Iterable[Judgement], categories: Sequence[str]
) -> list[Record]:
    """The answers that their annotators agree about, by category, in the order of the data.

    An answer, that is a prompt and a response, counts for a category if it has at least
    PAPER_ANNOTATORS judgements, and every one of them calls it unsafe and names the category. One
    that counts for several is put under the first of them, so that none is taken twice.
    """
    groups: dict[str, list[Judgement]] = {}
    for judgement in judgements:
        answer = digest(judgement.record.text, judgement.record.answers)
        groups.setdefault(answer, []).append(judgement)
    records = []
    for group in groups.values():
        shared = frozenset.intersection(*[judgement.harms for judgement in group])
        named = [name for name in categories if name in shared]
        # Fewer judgements, or one that differs: the paper leaves the answer out.
        if len(group) >= PAPER_ANNOTATORS and named:
            records.append(replace(group[0].record, given_category=named[0]))
    return sorted(records, key=lambda record: categories.index(record.category))


def per_category(
    records: Iterable[Record], count: int, held_out: int, seed: int
) -> tuple[list[Record], list[Record]]:
    """``count`` records of each category, ``held_out`` of them held out: (training, held-out).

    Drawn by ``seed``, whatever the order of the data. A prompt that is held out for one category
    is trained on for none. Where a category has fewer than ``count``, the same share of them is
    held out.
    """
    groups = [
        list(group) for _, group in groupby(records, key=lambda record: record.category)
    ]
    held: list[Record] = []
    units: set[str] = set()
    for group in groups:
        wanted = held_out if len(group) >= count else len(group) * held_out // count
        # Those first whose prompts are held out for an earlier category, then as they are drawn.
        order = sorted(group, key=lambda r: (r.unit not in units, digest(seed, r.text)))
        held += order[:wanted]
        units.update(record.unit for record in held)
    train: list[Record] = []
    for group in groups:
        left = without(held, group)
        left.sort(
            key=lambda record: digest(seed, record.text, *filter(None, record.answers))
        )
        train += left[: count - held_out]
    return train, held


def longest(
    records: Sequence[Record], count: int | None, held_out: int, seed: int
) -> tuple[list[Record], list[Record]]:
    """The ``count`` with the longest answers, and others, drawn by ``seed``, to hold out."""
    lengths = [len(answer_text(record.answers[0])) for record in records]
    train = [records[place] for place in largest(lengths, count)]
    others = without(train, records)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(others), generator=generator)[:held_out]
    return train, [others[place] for place in sorted(drawn.tolist())]


def without(known: Sequence[Record], records: Sequence[Record]) -> list[Record]:
    """The records whose prompts are none of the known ones."""
    units = {record.unit for record in known}
    return [record for record in records if record.unit not in units]


def unsafe_prompts(pairs: Iterable[AnswerPair], once: bool = False) -> list[Record]:
    """Each prompt with an unsafe answer, of two the less safe; ``once``: its first record alone."""
    prompts: dict[str, Record] = {}
    for record, _, safer in pairs:
        unsafe = [response for response in record.responses if response.role == UNSAFE]
        if unsafe:
            worse = record.responses[1 - safer] if len(unsafe) == 2 else unsafe[0]
            key = record.unit if once else digest(record.text, worse.answer)
            prompts.setdefault(key, replace(record, responses=(REFUSES, worse)))
    return list(prompts.values())


def preference_pairs(pairs: Iterable[AnswerPair]) -> list[Record]:
    """Safe-DPO's pairs: the better answer first, or the safe one; of two unsafe ones no pair.

    A pair counts as of an unsafe prompt if one of its answers is unsafe; a refusal is then its
    third response.
    """
    records = []
    for record, better, _ in pairs:
        unsafe = [role == UNSAFE for role in record.roles]
        # Which of two unsafe answers is better says nothing of safety.
        if all(unsafe):
            continue
        first = 1 - better if unsafe[better] else better
        responses = [record.responses[first], record.responses[1 - first]]
        # Its constraint is on the refusal, beside the pair of the objective.
        if record.unsafe:
            responses.append(REFUSES)
        records.append(replace(record, responses=tuple(responses)))
    return records
