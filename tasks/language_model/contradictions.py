"""Records that ask for opposite things of one answer to one prompt, in two lines of a file.

What a requirement asks is s̄ within an interval, of s̄ itself or of s̄ − s̄_ref; the intervals of one
answer have to meet. What is learnt by cross-entropy, or kept by its KL, has no number, and meets
none that ends above.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lightning.pytorch.utilities import rank_zero_warn

from pl_pointwise import Constraint
from pl_pointwise.tasks.common.records import digest, folded, shown

from .roles import Requirement, divergence, drop, lead, log_ratio
from .text.messages import Answer, answer_text
from .text.records import Record, Response

LIKELY = "likely"
"""The scale of what is learnt or kept: no number, and against every upper bound."""


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
    """What is asked of one response: low ≤ s̄ ≤ high on a scale."""

    scale: str
    low: float
    high: float
    words: str
    where: str

    def contradicts(self, other: Asked) -> bool:
        """Whether no s̄ does what both ask."""
        if LIKELY in (self.scale, other.scale):
            bounded = other if self.scale == LIKELY else self
            return bounded.high < math.inf
        return self.scale == other.scale and (
            self.low > other.high or other.low > self.high
        )


def warn_of_contradictions(records: Sequence[Record], module: Asking) -> None:
    """Warns once of records that ask for the opposite of an earlier one, by the bounds in force.

    They are trained on all the same: a ``Relaxed`` formulation is made for samples that cannot all
    be satisfied.
    """
    # Without a formulation bounds are only measured.
    if not module.formulations:
        return
    known: dict[str, list[Asked]] = {}
    problems = list[str]()
    for record in records:
        prompt = digest(folded([record.messages, record.tools]))
        asked = [(digest(prompt, about), one) for about, one in _asked(record, module)]
        problem = _first_problem(asked, known)
        if problem:
            problems.append(problem)
        for key, one in asked:
            known.setdefault(key, []).append(one)
    if problems:
        rank_zero_warn(
            f"{len(problems)} of {len(records)} records ask for the opposite of an earlier one, "
            f"and both cannot hold; the first: {problems[0]} Take one of the two out, or change "
            "its role or its bound; Relaxed(price=10) trains on both and leaves each in part."
        )


def _first_problem(
    asked: Sequence[tuple[str, Asked]], known: Mapping[str, Sequence[Asked]]
) -> str:
    """Of what a record asks, by prompt and answer, the first that an earlier one contradicts."""
    for key, one in asked:
        other = next((o for o in known.get(key, ()) if one.contradicts(o)), None)
        if other is not None:
            return (
                f"{one.where}: {one.words}, and the same prompt in {other.where} says the "
                f"opposite: {other.words}."
            )
    return ""


def _asked(record: Record, module: Asking) -> Iterator[tuple[list[Any], Asked]]:
    """What a record asks, each with the scale and the answers that it is about."""
    for place, response in enumerate(record.responses):
        if response.answer is None:
            continue
        of_several = f" (response {place + 1})" if len(record.responses) > 1 else ""
        text = shown(answer_text(response.answer))
        name = f'field "role" of the answer {text}{of_several} is "{response.role}"'
        for scale, low, high, why in _intervals(record, response, module):
            one = Asked(scale, low, high, f"{name} ({why})", record.where)
            yield [_plain(response.answer)], one
        # Of a pair: the same two the other way round.
        first = record.responses[0].answer
        margin = _margin(response, module)
        if place and first is not None and margin is not None:
            about = [_plain(first), _plain(response.answer)]
            swapped = digest(about[0]) > digest(about[1])
            low, high = (-math.inf, -margin) if swapped else (margin, math.inf)
            words = f"{shown(answer_text(first))} is preferred to {text}"
            yield (
                sorted(about, key=digest),
                Asked("pair", low, high, words, record.where),
            )


def _plain(answer: Answer) -> Any:
    """An answer without what surrounds it."""
    return answer.strip() if isinstance(answer, str) else answer


def _margin(response: Response, module: Asking) -> float | None:
    """How much likelier the chosen answer is to be than this one; None where nothing asks."""
    for name in module.formulations:
        requirement = module.requirements[name]
        if requirement.value is log_ratio and requirement.role == response.role:
            return module.constraints[name].at_least
    return None


def _intervals(
    record: Record, response: Response, module: Asking
) -> Iterator[tuple[str, float, float, str]]:
    """(scale, low, high, in words) of all that is asked of one response."""
    if response.role in module.learnt_roles:
        yield LIKELY, 0.0, math.inf, "learnt by cross-entropy"
    for name in module.formulations:
        requirement = module.requirements[name]
        if requirement.role != response.role or requirement.value is log_ratio:
            continue
        if requirement.kinds and record.kind not in requirement.kinds:
            continue
        if requirement.value in (divergence, lead):
            yield LIKELY, 0.0, math.inf, f"kept by {name}_tolerance"
            continue
        interval = _interval(requirement, response, module.constraints[name])
        if interval is not None:
            scale, low, high = interval
            yield scale, low, high, _in_words(scale, low, high)


def _interval(
    requirement: Requirement, response: Response, bound: Constraint
) -> tuple[str, float, float] | None:
    """(scale, low, high) of the mean log-likelihood; None of a band around nothing yet."""
    tolerance = response.tolerance
    # The reference's s̄ less ε; a floor has no bound of a response's own.
    if requirement.value is drop:
        assert bound.at_most is not None
        return "s̄ − s̄_ref", -bound.at_most, math.inf
    scale = "s̄ − s̄_ref" if response.relative else "s̄"
    tolerance = -tolerance if tolerance is not None and response.relative else tolerance
    if requirement.bound == "within":
        if tolerance is None:
            return None
        assert bound.at_most is not None
        assert bound.at_least is not None
        return scale, tolerance + bound.at_least, tolerance + bound.at_most
    if requirement.bound == "at_least":
        low = bound.at_least if tolerance is None else tolerance
        assert low is not None
        return scale, low, math.inf
    high = bound.at_most if tolerance is None else tolerance
    assert high is not None
    return scale, -math.inf, high


def _in_words(scale: str, low: float, high: float) -> str:
    """An interval, "s̄ ≥ -0.02"."""
    ends = [f"{scale} ≥ {low:g}"] if low > -math.inf else []
    ends += [f"{scale} ≤ {high:g}"] if high < math.inf else []
    return ", ".join(ends)
