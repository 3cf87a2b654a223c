"""Records that ask for opposite things of one answer to one prompt, in two lines of a file.

By the roles alone: one asks for the answer to be likely, another for it to be unlikely, or a pair
stands there in both orders. A response with a bound of its own is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lightning.pytorch.utilities import rank_zero_warn

from pl_pointwise import Constraint
from pl_pointwise.tasks.common.records import digest, folded, shown

from .roles import Requirement, divergence, drop, lead, log_ratio
from .text.messages import Answer, answer_text
from .text.records import Record


class Asking(Protocol):
    """What it needs of a module."""

    requirements: Mapping[str, Requirement]
    constraints: Mapping[str, Constraint]

    @property
    def formulations(self) -> Mapping[str, Any]:
        """Of the constraints that are enforced."""

    @property
    def learnt_roles(self) -> set[str]:
        """Roles of answers that cross-entropy makes likely."""


@dataclass(frozen=True)
class Asked:
    """One of two opposite things that may be asked about the same answers to a prompt."""

    about: list[
        Any
    ]  #: the answer; of a pair both, in an order that does not depend on theirs
    one_way: bool  #: likely; of a pair its first answer preferred
    words: str


def warn_of_contradictions(records: Sequence[Record], module: Asking) -> None:
    """Warns once of records that ask for the opposite of an earlier one.

    They are trained on all the same: a ``Relaxed`` formulation is made for samples that cannot all
    be satisfied.
    """
    # Without a formulation bounds are only measured.
    if not module.formulations:
        return
    known: dict[tuple[str, bool], tuple[str, str]] = {}  # Where, and in which words.
    count, first = 0, ""
    for record in records:
        prompt = folded([record.messages, record.tools])
        opposite = ""
        for asked in _asked(record, module):
            key = digest(prompt, asked.about)
            known.setdefault((key, asked.one_way), (record.where, asked.words))
            other = known.get((key, not asked.one_way))
            if other is not None and other[0] != record.where:
                opposite = f"{record.where}: {asked.words}; {other[0]}: {other[1]}."
        count += bool(opposite)
        first = first or opposite
    if count:
        rank_zero_warn(
            f"{count} of {len(records)} records ask for the opposite of an earlier one of the same "
            f"prompt; the first: {first} Take one of the two out; Relaxed(price=10) trains on both "
            "and leaves each in part."
        )


def _asked(record: Record, module: Asking) -> Iterator[Asked]:
    for place, response in enumerate(record.responses):
        if response.answer is None or response.tolerance is not None:
            continue
        text = shown(answer_text(response.answer))
        if response.role in module.learnt_roles:
            words = f"{text} is to be learnt"
            yield Asked([_plain(response.answer)], one_way=True, words=words)
        for name in module.formulations:
            requirement = module.requirements[name]
            if requirement.role != response.role:
                continue
            if requirement.kinds and record.kind not in requirement.kinds:
                continue
            first = record.responses[0].answer
            if requirement.value is not log_ratio:
                likely = _likely(requirement)
                if likely is not None:
                    words = f'{text} has the role "{response.role}" ({name})'
                    yield Asked([_plain(response.answer)], likely, words)
            # A pair: the first response is to be ahead of this one.
            elif place and first is not None and _is_ahead(module.constraints[name]):
                pair = [_plain(first), _plain(response.answer)]
                ordered = sorted(pair, key=digest)
                words = f"{shown(answer_text(first))} is preferred to {text}"
                yield Asked(ordered, ordered == pair, words)


def _likely(requirement: Requirement) -> bool | None:
    """Whether it asks for a likely answer, or an unlikely one; None of a band around its value."""
    if requirement.value in (divergence, lead, drop):  # As likely as before, or ahead.
        return True
    return {"at_least": True, "at_most": False}.get(requirement.bound)


def _is_ahead(bound: Constraint) -> bool:
    """Whether the first of a pair must be ahead: below 0 it may be a little behind."""
    return bound.at_least is not None and bound.at_least > 0


def _plain(answer: Answer) -> Any:
    """An answer without what surrounds it."""
    return answer.strip() if isinstance(answer, str) else answer
