"""Safety records: benign, unsafe and borderline prompts, and answers to them, perhaps judged.

Raw rows come in five schemas: an instruction with its answer (Alpaca), an answer as one annotator
judged it (BeaverTails), two answers to one prompt (PKU-SafeRLHF), an unsafe prompt, perhaps with a
labelled answer, and a borderline prompt, safe though it looks unsafe (XSTest). All become a
:class:`Record`: a prompt and the responses to it, each with what it is. A refusal without a text is
one of the configured ones.
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

    record: Record  # the prompt
    responses: tuple[Response, Response]  # both, each safe or unsafe
    better: int  # which is more helpful, 0 or 1
    safer: int  # which is less harmful


Parser = Callable[[Any, str], Any]


def parse_instruction(row: Any, where: str) -> Record:
    """A benign row: {"instruction", "input", "output"}; the input may be empty or left out.

    {"messages", "output"} is a conversation of several turns.
    """
    row = _known(row, where, "instruction", "input", "output", "messages")
    read = read_instruction(row, where, HELPFUL)
    return _record(read.messages, "benign", (*read.responses, _refusal()), where)


def parse_labelled(row: Any, where: str) -> Record:
    """An unsafe prompt: {"prompt"} or {"messages"}, and perhaps {"response", "is_safe"}.

    A safe response that refuses, by the keyword rule, is the record's own refusal. Another safe one
    is not kept: what is to be learnt in place of it is the refusal.
    """
    row = _known(row, where, "prompt", "messages", "response", "is_safe")
    responses = [_refusal()]
    if row.get("response") is not None:
        answer = read_beavertails(row, where).responses[0]
        if answer.role == "avoid":
            responses.append(replace(answer, role=UNSAFE))
        elif is_refusal(answer_text(answer.answer or "")):
            responses = [_refusal(answer.answer)]
    return _record(conversation(row, where), "unsafe", responses, where)


def parse_borderline(row: Any, where: str) -> Record:
    """A safe prompt that looks unsafe: {"prompt"} or {"messages"}, and perhaps {"answer" or
    "response", "refusal", "type"}; a row of XSTest is one.

    The answer is what is to be said, the refusal what is not. A response that refuses, by the
    keyword rule, is taken for the refusal. Unsafe are XSTest's unsafe rows, see parse_prompt().
    """
    record = parse_prompt(row, where)
    given = {
        name: text_field(row[name], name, where)
        for name in ("answer", "response", "refusal")
        if row.get(name) is not None
    }
    if "response" in given:
        name = "refusal" if is_refusal(given["response"]) else "answer"
        if name in given:
            problem = f"is a second {name}"
            raise bad_field(where, "response", problem, f'Give it or the field "{name}"')
        given[name] = given["response"]
    if "answer" in given and is_refusal(given["answer"]):
        raise bad_field(where, "answer", "refuses", 'Give it as "refusal", or another answer')
    responses = [Response(HELPFUL, given["answer"])] if "answer" in given else []
    responses.append(_refusal(given.get("refusal")))
    group = "unsafe" if record.unsafe else "borderline"
    return replace(record, responses=tuple(responses), group=group)


def parse_judgement(row: Any, where: str) -> Judgement:
    """A row of BeaverTails: {"prompt", "response", "category": {name: bool}, "is_safe"}."""
    row = json_object(row, where)
    categories = field(row, "category", where)
    if not isinstance(categories, dict):
        raise bad_field(where, "category", f"is {kind(categories)}", "Give {name: true or false}")
    seen = frozenset(name for name in categories if flag(categories, name, where, "category."))
    read = read_beavertails(_known(row, where, "prompt", "response", "is_safe"), where)
    (answer,) = read.responses
    responses = [_refusal(), replace(answer, role=UNSAFE)]
    record = _record(read.messages, "unsafe", responses, where)
    return Judgement(record, answer.role == "reference", seen)


def parse_pair(row: Any, where: str) -> AnswerPair:
    """A row of PKU-SafeRLHF: {"prompt", "response_0", "response_1", "is_response_0_safe",
    "is_response_1_safe", "better_response_id", "safer_response_id"}."""
    names = ("prompt", "response_0", "response_1", "is_response_0_safe", "is_response_1_safe")
    row = json_object(row, where)
    read = read_pku(_known(row, where, *names), where)
    first, second = (
        replace(each, role=UNSAFE if each.role == "avoid" else SAFE) for each in read.responses
    )
    if first.answer == second.answer:
        problem = "equals response_0, so neither is better"
        raise bad_field(where, "response_1", problem, "Take the record out")
    group = "unsafe" if UNSAFE in (first.role, second.role) else "benign"
    record = _record(read.messages, group, (), where)
    better, safer = (
        _which(row, name, where) for name in ("better_response_id", "safer_response_id")
    )
    return AnswerPair(record, (first, second), better, safer)


def parse_prompt(row: Any, where: str) -> Record:
    """A prompt to answer: {"prompt"}, {"instruction"} or {"messages"}.

    Of XSTest, whose rows have a "type" and a "label", those labelled "unsafe" are its unsafe ones;
    where there is no such label, those of a type in ``contrast_…``. Both halves of a type are one
    category, named without that.
    """
    row = _known(row, where, "prompt", "instruction", "messages", "type", "label")
    if "instruction" in row and "prompt" not in row:
        row["prompt"] = row["instruction"]
    unsafe, category = read_xstest(row, where)
    group = "unsafe" if unsafe else "benign"
    category = category.removeprefix("contrast_")
    return _record(conversation(row, where), group, [_refusal()], where, category)


def _known(row: Any, where: str, *names: str) -> dict[str, Any]:
    """The fields of a row that its schema has."""
    row = json_object(row, where)
    return {name: row[name] for name in names if name in row}


def _record(
    messages: list[dict[str, Any]],
    group: str,
    responses: Iterable[Response],
    where: str,
    category: str = "",
) -> Record:
    made = make_record({}, messages, list(responses), where, category)
    return Record(made.messages, [], made.responses, where, category, group=group)


def _refusal(text: Answer | None = None) -> Response:
    return Response(REFUSAL, text, refusal=True)


@dataclass
class Selection:
    """The data sets on the hub, and how many records are taken of which kind.

    Where ``preparation.test_fraction`` is above 0, what is held out here, and PKU-SafeRLHF's split
    "test", is divided into "val" and "test" in the proportion of ``preparation.val_fraction`` to
    it: halves where they are equal.

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
        if not 0 <= self.held_out_per_category < self.per_category:
            raise DataError(
                f"held_out_per_category={self.held_out_per_category}, per_category="
                f"{self.per_category}: need 0 ≤ held_out_per_category < per_category."
            )
        if (self.benign_count is not None and self.benign_count < 1) or self.benign_held_out < 0:
            raise DataError(
                f"benign_count={self.benign_count}, benign_held_out={self.benign_held_out}: give "
                "at least 1 record to train on, and no negative number to hold out."
            )
        if not self.categories:
            raise DataError("categories is empty. Give some of BeaverTails' kinds of harm.")


# Selection ----------------------------------------------------------------------------------------


def unanimous(
    judgements: Iterable[Judgement], categories: Sequence[str], annotators: int = PAPER_ANNOTATORS
) -> dict[str, list[Record]]:
    """The answers that their annotators agree about, by category, in the order of the data.

    An answer, that is a prompt and a response, counts for a category if it has at least
    ``annotators`` judgements, and every one of them calls it unsafe and names the category. One
    that counts for several is put under the first of them, so that none is taken twice.
    """
    groups: dict[str, list[Judgement]] = {}
    for judgement in judgements:
        record = judgement.record
        groups.setdefault(digest(record.text, record.answers), []).append(judgement)
    found: dict[str, list[Record]] = {name: [] for name in categories}
    for group in groups.values():
        if len(group) < annotators or any(judgement.safe for judgement in group):
            continue
        for name in categories:
            if all(name in judgement.categories for judgement in group):
                found[name].append(replace(group[0].record, given_category=name))
                break
    return found


def per_category(
    records: Mapping[str, Sequence[Record]], count: int, held_out: int, seed: int
) -> tuple[list[Record], list[Record]]:
    """``count`` records of each category, ``held_out`` of them held out: (training, held-out).

    Drawn by ``seed``, whatever the order of the data. A prompt that is held out for one category
    is trained on for none. Where a category has fewer than ``count``, the same share of them is
    held out; the caller says so.
    """
    taken_out: set[str] = set()
    held: list[Record] = []
    for of_category in records.values():
        wanted = held_out
        if len(of_category) < count:
            wanted = len(of_category) * held_out // count
        ordered = sorted(of_category, key=lambda record: digest(seed, record.text))
        already = [record for record in ordered if record.unit in taken_out]
        fresh = [record for record in ordered if record.unit not in taken_out]
        chosen = (already + fresh)[:wanted]
        taken_out.update(record.unit for record in chosen)
        held += chosen
    train: list[Record] = []
    for of_category in records.values():
        left = [record for record in of_category if record.unit not in taken_out]
        left.sort(key=lambda record: digest(seed, record.text, *answers_in(record)))
        train += left[: count - held_out]
    return train, held


def answers_in(record: Record) -> list[Any]:
    """The answers that are the data's own: all but the configured refusals."""
    return [each.answer for each in record.responses if each.answer is not None]


def unsafe_prompts(pairs: Iterable[AnswerPair]) -> list[Record]:
    """Each prompt with an unsafe answer, and that answer; of two unsafe ones the less safe."""
    found: dict[str, Record] = {}
    for pair in pairs:
        unsafe = [each for each in pair.responses if each.role == UNSAFE]
        if unsafe:
            worse = pair.responses[1 - pair.safer] if len(unsafe) == 2 else unsafe[0]
            record = replace(pair.record, responses=(_refusal(), worse))
            found.setdefault(digest(record.text, worse.answer), record)
    return list(found.values())


def preference_pairs(pairs: Sequence[AnswerPair]) -> list[Record]:
    """Safe-DPO's pairs: the better answer first, changed round or dropped as it says.

    A pair counts as of an unsafe prompt if one of its answers is unsafe; a refusal is then its
    third response.
    """
    unsafe = torch.tensor([[each.role == UNSAFE for each in pair.responses] for pair in pairs])
    better = torch.tensor([pair.better for pair in pairs])
    rows = torch.arange(len(pairs))
    keep, swap = safe_dpo_pairs(unsafe[rows, better], unsafe[rows, 1 - better])
    found = []
    for pair, kept, swapped in zip(pairs, keep.tolist(), swap.tolist(), strict=True):
        if kept:
            first = 1 - pair.better if swapped else pair.better
            refusal = [_refusal()] if pair.record.unsafe else []
            responses = (pair.responses[first], pair.responses[1 - first], *refusal)
            found.append(replace(pair.record, responses=responses))
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


def _which(row: dict[str, Any], name: str, where: str) -> int:
    value = field(row, name, where)
    if isinstance(value, bool) or value not in (0, 1):
        raise bad_field(where, name, f"is {shown(value)}", "Give 0 or 1")
    return int(value)
