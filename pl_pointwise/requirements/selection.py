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
    #: by requirement, of its violations on the selection split
    sizes: Sequence[float] = ()


@dataclass(frozen=True)
class Tested:
    """A candidate after the test."""

    candidate: Candidate  #: the one that was tested
    p: float  #: on the certification split, the largest over the requirements
    place: int | None  #: in the sequence, from 0; None for one that another beats
    #: whether its place was reached, with a p-value that is small enough
    certified: bool
    reached: bool = False  #: whether the test came to its place
    selection_p: float = 1.0  #: the largest p-value on the selection split
    p_by_requirement: Sequence[float] = ()  #: on the certification split
    #: the position of one that is no worse in p and objective
    beaten_by: int | None = None


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
    def reached(self) -> list[int]:
        """The positions that the test came to: up to the first that is not certified."""
        return [position for position in self.order if self.tested[position].reached]

    @property
    def position(self) -> int | None:
        """The chosen one, the last of the sequence that is certified; None: there is none."""
        certified = [
            position for position in self.order if self.tested[position].certified
        ]
        return certified[-1] if certified else None


def select(
    candidates: Sequence[Candidate], rates: Sequence[float], confidence: float = 0.95
) -> Selection:
    """Orders on the selection split, tests on the certification split at ``rates``, chooses.

    >>> import numpy as np
    >>> from pl_pointwise.requirements import Candidate, select
    >>> met, failed = np.zeros(200), np.ones(200)  # The losses of 200 samples.
    >>> cautious = Candidate("cautious", 2.0, selection=[met], certification=[met])
    >>> bold = Candidate("bold", 1.0, selection=[failed], certification=[failed])
    >>> select([cautious, bold], rates=[0.05]).position
    0
    """
    of_all = zip(*[candidate.selection for candidate in candidates], strict=True)
    zero_one = [all(map(are_zero_one, losses)) for losses in of_all]

    def p_values(losses: Sequence[Losses]) -> list[float]:
        """By requirement, of one candidate on one split."""
        by_requirement = zip(losses, rates, zero_one, strict=True)
        return [
            p_value(of_one, rate, confidence, kind)
            for of_one, rate, kind in by_requirement
        ]

    before = [max(p_values(candidate.selection)) for candidate in candidates]
    after = [p_values(candidate.certification) for candidate in candidates]
    objectives = [candidate.objective for candidate in candidates]
    margins = margins_of([candidate.sizes for candidate in candidates])
    order = pareto_order(before, objectives, margins)
    # A fixed sequence: rejected are those before the first that is above δ.
    passed = 0
    while passed < len(order) and max(after[order[passed]]) <= 1 - confidence:
        passed += 1
    tested = []
    for position, candidate in enumerate(candidates):
        place = order.index(position) if position in order else None
        beaten_by = None
        if place is None:
            beaten_by = _first_no_worse(position, order, before, objectives)
        result = Tested(
            candidate=candidate,
            p=max(after[position]),
            place=place,
            certified=place is not None and place < passed,
            # The first that is not certified was tested too, and ended the test.
            reached=place is not None and place <= passed,
            selection_p=before[position],
            p_by_requirement=after[position],
            beaten_by=beaten_by,
        )
        tested.append(result)
    return Selection(tested, order, zero_one)


def _first_no_worse(
    beaten: int,
    order: Sequence[int],
    p_values: Sequence[float],
    objectives: Sequence[float],
) -> int:
    """The position of the first of the sequence that is no worse in p-value and objective."""
    for position in order:
        no_worse_p = p_values[position] <= p_values[beaten]
        if no_worse_p and objectives[position] <= objectives[beaten]:
            return position
    raise AssertionError("What is not in the sequence is beaten by one in it.")


def margins_of(sizes: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Returns how far candidates are from violating, smaller is better, whatever the units: the
    largest of their ranks by the requirements' sizes, then the ranks' sum.

    sizes: by candidate and requirement.

    >>> margins_of([[0.1, 9.0], [0.2, 3.0], [0.3, 4.0]])
    [(2, 2), (1, 1), (2, 3)]
    """
    ranks: list[list[int]] = [[] for _ in sizes]
    for column in zip(*sizes, strict=True):  # The sizes of one requirement.
        for of_candidate, size in zip(ranks, column, strict=True):
            of_candidate.append(sum(other < size for other in column))
    return [(max(of_one, default=0), sum(of_one)) for of_one in ranks]


def pareto_order(
    p_values: Sequence[float],
    objectives: Sequence[float],
    margins: Sequence[tuple[float, float]] | None = None,
) -> list[int]:
    """Returns the candidates that none beats in both, by rising p-value and falling objective.

    Few samples give many candidates one p-value. Of those the one with the smallest margin stands
    first, and not the one with the best objective, which would drop all others.

    >>> pareto_order([0.01, 0.02, 0.3, 0.4], [5., 6., 2., 1.])
    [0, 2, 3]
    >>> pareto_order([0.03, 0.03, 0.03], [1., 2., 3.], [(2, 2), (0, 0), (1, 1)])
    [1, 0]
    """
    ties = [(0.0, 0.0)] * len(p_values) if margins is None else margins

    def key(position: int) -> tuple[float, tuple[float, float], float]:
        return p_values[position], ties[position], objectives[position]

    kept: list[int] = []
    for position in sorted(range(len(p_values)), key=key):
        if not kept or objectives[position] < objectives[kept[-1]]:
            kept.append(position)
    return kept
