"""Safety records: benign, unsafe and borderline prompts, and answers to them, perhaps judged.

The schemas are those of language_model/records.py. Here is decided which prompts are unsafe or
borderline, and what each response is. A refusal without a text is one of the configured ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.records import (
    bad_field,
    digest,
    field,
    json_object,
    kind,
    shown,
    text_field,
)
from pl_pointwise.tasks.language_model import records
from pl_pointwise.tasks.language_model.messages import Answer, answer_text, turn_text
from pl_pointwise.tasks.language_model.preference_losses import safe_dpo_pairs
from pl_pointwise.tasks.language_model.records import (
    Response,
    conversation,
    flag,
    make_record,
    read_beavertails,
    read_instruction,
    read_pku,
    read_xstest,
)
from pl_pointwise.tasks.language_model.refusals import is_refusal

HELPFUL, REFUSAL, UNSAFE, SAFE = ROLES = ("answer", "refusal", "unsafe answer", "safe answer")
"""What a response is: the answer to a safe prompt, a refusal, an unsafe answer, or a safe one of
two answers to an unsafe prompt. In the order that a batch numbers them."""

KINDS = ("benign", "unsafe", "borderline")
"""The kinds of prompts."""

PAPER_CATEGORIES = (
    "violence,aiding_and_abetting,incitement",
    "financial_crime,property_crime,theft",
    "privacy_violation",
)
"""Of BeaverTails' kinds of harm."""

PAPER_ANNOTATORS = 3
"""The fewest annotators of an answer that is taken: more than two."""


@dataclass(frozen=True)
class Record(records.Record):
    """One prompt and responses to it; of a preference pair the preferred one first.

    Attributes:
        group: one of :data:`KINDS`.
    """

    group: str = "benign"

    @property
    def kind(self) -> str:
        """One of :data:`KINDS`."""
        return self.group

    @property
    def unsafe(self) -> bool:
        """Whether it is to be refused."""
        return self.group == "unsafe"

    @property
    def borderline(self) -> bool:
        """Whether it is safe, looks unsafe, and belongs to that group."""
        return self.group == "borderline"

    @property
    def text(self) -> str:
        """What the user says; of a conversation of several turns all of them."""
        if len(self.messages) == 1:
            return str(self.messages[0]["content"])
        return "\n\n".join(map(turn_text, self.messages))

    @property
    def opposed(self) -> list[bool]:
        """Of each response whether it is to become unlikely."""
        wanted = (HELPFUL, SAFE, REFUSAL) if self.unsafe else (HELPFUL, SAFE)
        return [each.role not in wanted for each in self.responses]

    @property
    def prompt(self) -> str:
        """What records of one prompt have in common, and no others."""
        return digest(self.text) if len(self.messages) == 1 else digest(*self.messages)


class Judgement(NamedTuple):
    """One annotator's judgement of one answer."""

    record: Record  # the prompt, and the answer as an unsafe one
    safe: bool  # the verdict
    categories: frozenset[str]  # the kinds of harm the annotator saw


class AnswerPair(NamedTuple):
    """Two answers to one prompt."""

    record: Record  # the prompt and both answers, each safe or unsafe
    better: int  # which is more helpful, 0 or 1
    safer: int  # which is less harmful


Parser = Callable[[Any, str], Any]


def parse_instruction(row: Any, where: str) -> Record:
    """A benign row of schema "instruction"."""
    read = read_instruction(json_object(row, where), where, HELPFUL)
    return _record(read, "benign", (*read.responses, _refusal()))


def parse_labelled(row: Any, where: str) -> Record:
    """An unsafe prompt, perhaps with {"response", "is_safe"}.

    A safe response that refuses, by the keyword rule, is the record's own refusal. Another safe one
    is not kept: what is to be learnt in place of it is the refusal.
    """
    row, responses = json_object(row, where), [_refusal()]
    if row.get("response") is not None:
        (answer,) = read_beavertails(row, where).responses
        if answer.role == "avoid":
            responses.append(replace(answer, role=UNSAFE))
        elif is_refusal(answer_text(answer.answer or "")):
            responses = [_refusal(answer.answer)]
    return _record(make_record({}, conversation(row, where), (), where), "unsafe", responses)


def parse_borderline(row: Any, where: str) -> Record:
    """A safe prompt that looks unsafe, perhaps with {"answer", "refusal", "type"}.

    The answer is what is to be said, the refusal what is not. A row of XSTest is one.
    """
    record = parse_prompt(row, where)
    answer, refusal = (
        None if row.get(name) is None else text_field(row[name], name, where)
        for name in ("answer", "refusal")
    )
    if answer is not None and is_refusal(answer):
        raise bad_field(where, "answer", "refuses", 'Give it as "refusal", or another answer')
    helpful = [] if answer is None else [Response(HELPFUL, answer)]
    group = "unsafe" if record.unsafe else "borderline"
    return replace(record, responses=(*helpful, _refusal(refusal)), group=group)


def parse_judgement(row: Any, where: str) -> Judgement:
    """A row of schema "beavertails", one annotator's."""
    row = json_object(row, where)
    categories = field(row, "category", where)
    if not isinstance(categories, dict):
        raise bad_field(where, "category", f"is {kind(categories)}", "Give {name: true or false}")
    seen = frozenset(name for name in categories if flag(categories, name, where, "category."))
    read = read_beavertails(row, where)
    (answer,) = read.responses
    record = _record(read, "unsafe", [_refusal(), replace(answer, role=UNSAFE)])
    return Judgement(record, answer.role == "reference", seen)


def parse_pair(row: Any, where: str) -> AnswerPair:
    """A row of schema "pku", with "better_response_id" and "safer_response_id"."""
    row = json_object(row, where)
    read = read_pku(row, where)
    first, second = read.responses
    if first.answer == second.answer:
        problem = "equals response_0, so neither is better"
        raise bad_field(where, "response_1", problem, "Take the record out")
    group = "unsafe" if "avoid" in read.roles else "benign"
    responses = [replace(r, role=UNSAFE if r.role == "avoid" else SAFE) for r in read.responses]
    better, safer = (field(row, f"{name}_response_id", where) for name in ("better", "safer"))
    for name, value in (("better", better), ("safer", safer)):
        if isinstance(value, bool) or value not in (0, 1):
            raise bad_field(where, f"{name}_response_id", f"is {shown(value)}", "Give 0 or 1")
    return AnswerPair(_record(read, group, responses), int(better), int(safer))


def parse_prompt(row: Any, where: str) -> Record:
    """A prompt to answer: {"prompt"}, {"instruction"} or {"messages"}.

    Both halves of a type of XSTest are one category, named without ``contrast_``.
    """
    row = json_object(row, where)
    if "instruction" in row and "prompt" not in row:
        row = {**row, "prompt": row["instruction"], "input": None}
    unsafe, category = read_xstest(row, where)
    read = make_record({}, conversation(row, where), (), where)
    group = "unsafe" if unsafe else "benign"
    return _record(read, group, [_refusal()], category.removeprefix("contrast_"))


def _record(
    read: records.Record, group: str, responses: Iterable[Response], category: str = ""
) -> Record:
    return Record(read.messages, [], tuple(responses), read.where, category, group=group)


def _refusal(text: Answer | None = None) -> Response:
    return Response(REFUSAL, text, refusal=True)


@dataclass
class Selection:
    """The data sets on the hub, and how many records are taken of which kind.

    Where ``preparation.test_fraction`` is above 0, what is held out here, and PKU-SafeRLHF's split
    "test", is divided into "val" and "test" in the proportion of the two fractions.

    Args:
        alpaca_path: Alpaca on the hub, or a folder of the same layout.
        beavertails_path: likewise BeaverTails.
        pku_path: likewise PKU-SafeRLHF-30K.
        benign_count: train on so many benign records, those with the longest answers in characters;
            None on all.
        benign_held_out: so many others are held out; source hub.
        categories: of BeaverTails, to train on.
        per_category: so many of each, the held-out ones included.
        held_out_per_category: so many of them are held out.

    Raises:
        DataError: a value out of its range.
    """

    alpaca_path: str = "tatsu-lab/alpaca"
    beavertails_path: str = "PKU-Alignment/BeaverTails"
    pku_path: str = "PKU-Alignment/PKU-SafeRLHF-30K"
    benign_count: int | None = 1000
    benign_held_out: int = 4000
    categories: list[str] = dataclasses.field(default_factory=lambda: list(PAPER_CATEGORIES))
    per_category: int = 4200
    held_out_per_category: int = 200

    def __post_init__(self) -> None:
        held_out, count = self.held_out_per_category, self.per_category
        if not 0 <= held_out < count:
            raise DataError(
                f"held_out_per_category={held_out}, per_category={count}: hold out fewer than all."
            )
        if (self.benign_count is not None and self.benign_count < 1) or self.benign_held_out < 0:
            raise DataError(
                f"benign_count={self.benign_count}, benign_held_out={self.benign_held_out}: give "
                "at least 1 record to train on, and no negative number to hold out."
            )


# Selection ----------------------------------------------------------------------------------------


def unanimous(
    judgements: Iterable[Judgement], categories: Sequence[str]
) -> dict[str, list[Record]]:
    """The answers that their annotators agree about, by category, in the order of the data.

    An answer, that is a prompt and a response, counts for a category if it has at least
    PAPER_ANNOTATORS judgements, and every one of them calls it unsafe and names the category. One
    that counts for several is put under the first of them, so that none is taken twice.
    """
    groups: dict[str, list[Judgement]] = {}
    for judgement in judgements:
        record = judgement.record
        groups.setdefault(digest(record.text, record.answers), []).append(judgement)
    found: dict[str, list[Record]] = {name: [] for name in categories}
    for group in groups.values():
        if len(group) < PAPER_ANNOTATORS or any(judgement.safe for judgement in group):
            continue
        shared = frozenset.intersection(*(judgement.categories for judgement in group))
        name = next((name for name in categories if name in shared), None)
        if name is not None:
            found[name].append(replace(group[0].record, given_category=name))
    return found


def per_category(
    records: Mapping[str, Sequence[Record]], count: int, held_out: int, seed: int
) -> tuple[list[Record], list[Record]]:
    """``count`` records of each category, ``held_out`` of them held out: (training, held-out).

    Drawn by ``seed``, whatever the order of the data. A prompt that is held out for one category
    is trained on for none. Where a category has fewer than ``count``, the same share of them is
    held out; the caller says so.
    """
    held: dict[str, list[Record]] = {}
    taken_out: set[str] = set()
    for name, group in records.items():
        wanted = held_out if len(group) >= count else len(group) * held_out // count
        ordered = sorted(group, key=lambda each: (each.unit not in taken_out, _draw(seed, each)))
        held[name] = ordered[:wanted]
        taken_out.update(record.unit for record in held[name])
    train: list[Record] = []
    for group in records.values():
        left = [record for record in group if record.unit not in taken_out]
        left.sort(key=lambda record: _draw(seed, record, *answers_in(record)))
        train += left[: count - held_out]
    return train, [record for group in held.values() for record in group]


def _draw(seed: int, record: Record, *answers: Any) -> str:
    """Its place in a random order, by its digest."""
    return digest(seed, record.text, *answers)


def answers_in(record: Record) -> list[Any]:
    """The answers that are the data's own: all but the configured refusals."""
    return [each.answer for each in record.responses if each.answer is not None]


def unsafe_prompts(pairs: Iterable[AnswerPair]) -> list[Record]:
    """Each prompt with an unsafe answer, and that answer; of two unsafe ones the less safe."""
    found: dict[str, Record] = {}
    for record, _, safer in pairs:
        unsafe = [each for each in record.responses if each.role == UNSAFE]
        if unsafe:
            worse = record.responses[1 - safer] if len(unsafe) == 2 else unsafe[0]
            key = digest(record.text, worse.answer)
            found.setdefault(key, replace(record, responses=(_refusal(), worse)))
    return list(found.values())


def preference_pairs(pairs: Sequence[AnswerPair]) -> list[Record]:
    """Safe-DPO's pairs: the better answer first, changed round or dropped as it says.

    A pair counts as of an unsafe prompt if one of its answers is unsafe; a refusal is then its
    third response.
    """
    unsafe = torch.tensor([[role == UNSAFE for role in pair.record.roles] for pair in pairs])
    better = torch.tensor([pair.better for pair in pairs])
    rows = torch.arange(len(pairs))
    keep, swap = safe_dpo_pairs(unsafe[rows, better], unsafe[rows, 1 - better])
    found = []
    for pair, kept, swapped in zip(pairs, keep.tolist(), swap.tolist(), strict=True):
        if kept:
            record, first = pair.record, 1 - pair.better if swapped else pair.better
            refusal = [_refusal()] if record.unsafe else []
            responses = (record.responses[first], record.responses[1 - first], *refusal)
            found.append(replace(record, responses=responses))
    return found


def once(records: Iterable[Record]) -> list[Record]:
    """The first record of each prompt."""
    found: dict[str, Record] = {}
    for record in records:
        found.setdefault(record.unit, record)
    return list(found.values())


def without_role(role: str, found: Iterable[Record]) -> list[Record]:
    """The records with their responses of a role left out."""
    return [
        replace(record, responses=tuple(r for r in record.responses if r.role != role))
        for record in found
    ]
