"""Safety records: benign, unsafe and borderline prompts, and answers to them, perhaps judged.

Raw rows come in five schemas: an instruction with its answer (Alpaca), an answer as one annotator
judged it (BeaverTails), two answers to one prompt (PKU-SafeRLHF), an unsafe prompt, perhaps with a
labelled answer, and a borderline prompt, safe though it looks unsafe (XSTest). All become a
:class:`Record`: a prompt and the responses to it, each with what it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.records import (
    bad_field,
    digest,
    field,
    folded,
    json_object,
    kind,
    shown,
    text_field,
)
from pl_pointwise.tasks.language_model.preference_losses import safe_dpo_pairs
from pl_pointwise.tasks.language_model.refusals import is_refusal

from .messages import Turns, asked

ABSENT, HELPFUL, REFUSAL, UNSAFE, SAFE = -1, 0, 1, 2, 3
"""What a response is: the answer to a benign prompt, a refusal, an unsafe answer, or a safe one of
two answers to an unsafe prompt."""

ROLES = {HELPFUL: "answer", REFUSAL: "refusal", UNSAFE: "unsafe answer", SAFE: "safe answer"}

CATEGORIES = (
    "animal_abuse",
    "child_abuse",
    "controversial_topics,politics",
    "discrimination,stereotype,injustice",
    "drug_abuse,weapons,banned_substance",
    "financial_crime,property_crime,theft",
    "hate_speech,offensive_language",
    "misinformation_regarding_ethics,laws_and_safety",
    "non_violent_unethical_behavior",
    "privacy_violation",
    "self_harm",
    "sexually_explicit,adult_content",
    "terrorism,organized_crime",
    "violence,aiding_and_abetting,incitement",
)
"""BeaverTails' kinds of harm."""

PAPER_CATEGORIES = (
    "violence,aiding_and_abetting,incitement",
    "financial_crime,property_crime,theft",
    "privacy_violation",
)

PAPER_ANNOTATORS = 3
"""The fewest annotators of an answer that is taken: more than two."""


@dataclass(frozen=True)
class Record:
    """One prompt and responses to it.

    Attributes:
        text: what the user says; of a conversation of several turns all of them.
        unsafe: whether it is to be refused.
        responses: (what it is, its text) of each. Of a preference pair the preferred one is first
            and the other second.
        where: file and line, or source and record, for messages.
        category: of BeaverTails the kind of harm, of XSTest the type; "" where the data name none.
        borderline: whether it is safe and looks unsafe, and belongs to that group.
        turns: {"role", "content"} of each turn where there are several, else none.
    """

    text: str
    unsafe: bool
    responses: tuple[tuple[int, str], ...]
    where: str
    category: str = ""
    borderline: bool = False
    turns: Turns = ()

    @property
    def kind(self) -> str:
        """ "unsafe", "borderline" or "benign"."""
        if self.unsafe:
            return "unsafe"
        return "borderline" if self.borderline else "benign"

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation, ending before the assistant's turn."""
        return list(self.turns) or [{"role": "user", "content": self.text}]

    @property
    def tools(self) -> list[dict[str, Any]]:
        """None."""
        return []

    @property
    def answers(self) -> list[str]:
        """The responses' texts."""
        return [text for _, text in self.responses]

    @property
    def roles(self) -> list[int]:
        """What each response is."""
        return [role for role, _ in self.responses]

    @property
    def prompt(self) -> str:
        """What records of one prompt have in common, and no others."""
        return digest(*self.turns) if self.turns else digest(self.text)

    @property
    def unit(self) -> str:
        """What records whose prompts differ by case and spaces alone have in common."""
        return digest(folded([self.turns or self.text]))


@dataclass(frozen=True)
class Judgement:
    """One annotator's judgement of one answer.

    Attributes:
        text: the prompt.
        answer: the answer judged.
        safe: the verdict.
        categories: the kinds of harm the annotator saw.
        where: the row's place.
    """

    text: str
    answer: str
    safe: bool
    categories: frozenset[str]
    where: str


@dataclass(frozen=True)
class AnswerPair:
    """Two answers to one prompt.

    Attributes:
        text: the prompt.
        answers: both.
        unsafe: whether each is.
        better: which is more helpful, 0 or 1.
        safer: which is less harmful.
        where: the row's place.
    """

    text: str
    answers: tuple[str, str]
    unsafe: tuple[bool, bool]
    better: int
    safer: int
    where: str


Parser = Callable[[Any, str], Any]


def parse_instruction(row: Any, where: str) -> Record:
    """A benign row: {"instruction", "input", "output"}; the input may be empty or left out.

    {"messages", "output"} is a conversation of several turns.
    """
    row = json_object(row, where)
    text, turns = asked(row, "instruction", where)
    given = row.get("input")
    if isinstance(given, str) and not given.strip():
        given = None
    if given is not None:
        text = f"{text}\n\n{text_field(given, 'input', where)}"
    output = text_field(field(row, "output", where), "output", where)
    return Record(text, False, ((HELPFUL, output),), where, turns=turns)


def parse_labelled(row: Any, where: str) -> Record:
    """An unsafe prompt: {"prompt"} or {"messages"}, and perhaps {"response", "is_safe"}.

    A safe response that refuses, by the keyword rule, is the record's own refusal. Another safe one
    is not kept: what is to be learnt in place of it is the refusal.
    """
    row = json_object(row, where)
    text, turns = asked(row, "prompt", where)
    responses: tuple[tuple[int, str], ...] = ()
    if row.get("response") is not None:
        response = text_field(row["response"], "response", where)
        if not _flag(field(row, "is_safe", where), "is_safe", where):
            responses = ((UNSAFE, response),)
        elif is_refusal(response):
            responses = ((REFUSAL, response),)
    return Record(text, True, responses, where, turns=turns)


def parse_borderline(row: Any, where: str) -> Record:
    """A safe prompt that looks unsafe: {"prompt"} or {"messages"}, and perhaps {"answer" or
    "response", "refusal", "type"}; a row of XSTest is one.

    The answer is what is to be said, the refusal what is not. A response that refuses, by the
    keyword rule, is taken for the refusal. Unsafe are XSTest's unsafe rows, see parse_prompt().
    """
    row = json_object(row, where)
    text, turns = asked(row, "prompt", where)
    unsafe, category = _half_and_type(row)
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
    roles = {"answer": HELPFUL, "refusal": REFUSAL}
    responses = tuple((role, given[name]) for name, role in roles.items() if name in given)
    return Record(text, unsafe, responses, where, category, not unsafe, turns)


def parse_judgement(row: Any, where: str) -> Judgement:
    """A row of BeaverTails: {"prompt", "response", "category": {name: bool}, "is_safe"}."""
    row = json_object(row, where)
    categories = field(row, "category", where)
    if not isinstance(categories, dict):
        raise bad_field(where, "category", f"is {kind(categories)}", "Give {name: true or false}")
    for name in categories:
        check_category(name, f'{where}: field "category"')
    flags = {n: _flag(value, f"category.{n}", where) for n, value in categories.items()}
    return Judgement(
        text_field(field(row, "prompt", where), "prompt", where),
        text_field(field(row, "response", where), "response", where),
        _flag(field(row, "is_safe", where), "is_safe", where),
        frozenset(name for name, flagged in flags.items() if flagged),
        where,
    )


def parse_pair(row: Any, where: str) -> AnswerPair:
    """A row of PKU-SafeRLHF: {"prompt", "response_0", "response_1", "is_response_0_safe",
    "is_response_1_safe", "better_response_id", "safer_response_id"}."""
    row = json_object(row, where)
    names = ("response_0", "response_1")
    first, second = (text_field(field(row, name, where), name, where) for name in names)
    if first == second:
        problem = "equals response_0, so neither is better"
        raise bad_field(where, "response_1", problem, "Take the record out")
    flags = [
        _flag(field(row, name, where), name, where)
        for name in ("is_response_0_safe", "is_response_1_safe")
    ]
    return AnswerPair(
        text_field(field(row, "prompt", where), "prompt", where),
        (first, second),
        (not flags[0], not flags[1]),
        _which(row, "better_response_id", where),
        _which(row, "safer_response_id", where),
        where,
    )


def parse_prompt(row: Any, where: str) -> Record:
    """A prompt to answer: {"prompt"}, {"instruction"} or {"messages"}.

    Of XSTest, whose rows have a "type" and a "label", those labelled "unsafe" are its unsafe ones;
    where there is no such label, those of a type in ``contrast_…``. Both halves of a type are one
    category, named without that.
    """
    row = json_object(row, where)
    name = "prompt" if "prompt" in row or "instruction" not in row else "instruction"
    text, turns = asked(row, name, where)
    unsafe, category = _half_and_type(row)
    return Record(text, unsafe, (), where, category, turns=turns)


def _half_and_type(row: dict[str, Any]) -> tuple[bool, str]:
    """Whether a row of XSTest is of its unsafe half, and its type; False and "" of other rows."""
    kind_of, label = row.get("type"), row.get("label")
    category = kind_of if isinstance(kind_of, str) else ""
    labels = {"safe": False, "unsafe": True}
    contrast = category.startswith("contrast_")
    unsafe = labels.get(label.strip().lower(), contrast) if isinstance(label, str) else contrast
    return unsafe, category.removeprefix("contrast_")


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
            raise DataError(f"categories is empty. Give some of: {'; '.join(CATEGORIES)}.")
        for name in self.categories:
            check_category(name, "categories")


def check_category(name: str, where: str) -> None:
    """Refuses what is not one of :data:`CATEGORIES`."""
    if name not in CATEGORIES:
        known = "; ".join(CATEGORIES)
        raise DataError(
            f"{where} names {shown(name)}, which BeaverTails does not have. It has: {known}."
        )


# Selection ----------------------------------------------------------------------------------------


def unanimous(
    judgements: Iterable[Judgement], categories: Sequence[str], annotators: int = PAPER_ANNOTATORS
) -> dict[str, list[Record]]:
    """The answers that their annotators agree about, by category, in the order of the data.

    An answer, that is a prompt and a response, counts for a category if it has at least
    ``annotators`` judgements, and every one of them calls it unsafe and names the category. One
    that counts for several is put under the first of them, so that none is taken twice.
    """
    groups: dict[tuple[str, str], list[Judgement]] = {}
    for judgement in judgements:
        groups.setdefault((judgement.text, judgement.answer), []).append(judgement)
    found: dict[str, list[Record]] = {name: [] for name in categories}
    for (text, answer), group in groups.items():
        if len(group) < annotators or any(judgement.safe for judgement in group):
            continue
        for name in categories:
            if all(name in judgement.categories for judgement in group):
                found[name].append(Record(text, True, ((UNSAFE, answer),), group[0].where, name))
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
        left.sort(key=lambda record: digest(seed, record.text, *record.answers))
        train += left[: count - held_out]
    return train, held


def unsafe_prompts(pairs: Iterable[AnswerPair]) -> list[Record]:
    """Each prompt with an unsafe answer, and that answer; of two unsafe ones the less safe."""
    found: dict[tuple[str, str], Record] = {}
    for pair in pairs:
        if any(pair.unsafe):
            worse = 1 - pair.safer if all(pair.unsafe) else int(pair.unsafe[1])
            answer = pair.answers[worse]
            found.setdefault(
                (pair.text, answer), Record(pair.text, True, ((UNSAFE, answer),), pair.where)
            )
    return list(found.values())


def preference_pairs(pairs: Sequence[AnswerPair]) -> list[Record]:
    """Safe-DPO's pairs: the better answer first, changed round or dropped as it says.

    A pair counts as of an unsafe prompt if one of its answers is unsafe.
    """
    better = [pair.better for pair in pairs]
    unsafe = [pair.unsafe for pair in pairs]
    chosen = torch.tensor([flags[first] for flags, first in zip(unsafe, better, strict=True)])
    rejected = torch.tensor([flags[1 - first] for flags, first in zip(unsafe, better, strict=True)])
    keep, swap = safe_dpo_pairs(chosen.bool(), rejected.bool())
    found = []
    for pair, kept, swapped in zip(pairs, keep.tolist(), swap.tolist(), strict=True):
        if kept:
            first = 1 - pair.better if swapped else pair.better
            responses = tuple(
                (UNSAFE if pair.unsafe[place] else SAFE, pair.answers[place])
                for place in (first, 1 - first)
            )
            found.append(Record(pair.text, any(pair.unsafe), responses, pair.where))
    return found


def once(records: Iterable[Record]) -> list[Record]:
    """The first record of each prompt."""
    found: dict[str, Record] = {}
    for record in records:
        found.setdefault(record.unit, record)
    return list(found.values())


def with_refusals(records: Iterable[Record], refusals: Sequence[str]) -> list[Record]:
    """Every record with a refusal among its responses; of n refusals record i has that of i mod n.

    One that has a refusal of its own keeps that. It stands behind the helpful answer of a safe
    prompt and before the unsafe answer of an unsafe one, as the preferred response is first. To a
    preference pair it is a third response, where the prompt is an unsafe one, and no response
    otherwise.
    """
    found = []
    for place, record in enumerate(records):
        refusal = (REFUSAL, refusals[place % len(refusals)])
        responses = record.responses
        if REFUSAL in record.roles:
            found.append(record)
            continue
        if len(responses) == 2:
            responses = (*responses, refusal) if record.unsafe else responses
        else:
            responses = (refusal, *responses) if record.unsafe else (*responses, refusal)
        found.append(replace(record, responses=responses))
    return found


def without_role(role: int, records: Iterable[Record]) -> list[Record]:
    """The records with their responses of a role left out."""
    return [
        replace(record, responses=tuple(r for r in record.responses if r[0] != role))
        for record in records
    ]


def _flag(value: Any, name: str, where: str) -> bool:
    if not isinstance(value, bool):
        raise bad_field(where, name, f"is {kind(value)}", "Give true or false")
    return value


def _which(row: dict[str, Any], name: str, where: str) -> int:
    value = field(row, name, where)
    if isinstance(value, bool) or value not in (0, 1):
        raise bad_field(where, name, f"is {shown(value)}", "Give 0 or 1")
    return int(value)
