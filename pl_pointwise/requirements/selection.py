"""Choosing among trained models so that the certificate of the chosen one holds.

Learn, then test (Angelopoulos and others, 2110.01052), with the order of Pareto testing
(Laufer-Goldshtein and others, 2210.07913): docs/requirement.md has the steps. Whatever the models
and the data, the probability that any certified model fails any requirement is at most
1 − confidence, all of them together. A candidate's p-value is the largest of its requirements',
because it fails if it fails one; so several requirements cost no confidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .p_values import Losses, are_zero_one, p_value


@dataclass(frozen=True)
class Candidate:
    """A model measured on both splits."""

    name: str  #: what it is called
    objective: float  #: smaller is better
    selection: Sequence[Losses]  #: by requirement, on the selection split
    certification: Sequence[Losses]  #: on the certification split


@dataclass(frozen=True)
class Tested:
    """A candidate after the test."""

    candidate: Candidate  #: the one that was tested
    p: float  #: on the certification split, the largest over the requirements
    place: int | None  #: in the sequence, from 0; None for one that another beats
    certified: bool  #: whether its place was reached, with a p-value that is small enough


@dataclass(frozen=True)
class Selection:
    """What came of a selection.

    Attributes:
        tested: in the order of the candidates.
        order: positions among them, of those that stand in the sequence.
        zero_one: of each requirement whether its losses are taken as 0 and 1.
    """

    tested: list[Tested]
    order: list[int]
    zero_one: list[bool]

    @property
    def position(self) -> int | None:
        """The chosen one, the last of the sequence that is certified; None: there is none."""
        certified = [position for position in self.order if self.tested[position].certified]
        return certified[-1] if certified else None


def select(
    candidates: Sequence[Candidate], rates: Sequence[float], confidence: float = 0.95
) -> Selection:
    """Orders on the selection split, tests on the certification split at ``rates``, chooses."""
    by_requirement = zip(*(each.selection for each in candidates), strict=True)
    kinds = [all(map(are_zero_one, losses)) for losses in by_requirement]

    def largest(losses: Sequence[Losses]) -> float:
        found = zip(losses, rates, kinds, strict=True)
        return max(p_value(each, rate, confidence, kind) for each, rate, kind in found)

    before = [largest(each.selection) for each in candidates]
    after = [largest(each.certification) for each in candidates]
    order = pareto_order(before, [each.objective for each in candidates])
    in_order = [after[position] for position in order]
    # A fixed sequence: rejected are those before the first that is above δ.
    passed = [max(in_order[: place + 1]) <= 1 - confidence for place in range(len(in_order))]
    tested = []
    for position, candidate in enumerate(candidates):
        place = order.index(position) if position in order else None
        certified = place is not None and passed[place]
        tested.append(Tested(candidate, after[position], place, certified))
    return Selection(tested, order, kinds)


def pareto_order(p_values: Sequence[float], objectives: Sequence[float]) -> list[int]:
    """Returns the candidates that none beats in both, by rising p-value and falling objective.

    >>> pareto_order([0.01, 0.02, 0.3, 0.4], [5., 6., 2., 1.])
    [0, 2, 3]
    """
    order = sorted(range(len(p_values)), key=lambda each: (p_values[each], objectives[each]))
    kept: list[int] = []
    for position in order:
        if not kept or objectives[position] < objectives[kept[-1]]:
            kept.append(position)
    return kept
