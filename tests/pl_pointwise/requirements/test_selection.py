"""The procedures against their definitions, and whole selections simulated.

A selection that ordered or chose its p-values by the certification split would certify too often:
the simulation, and the test before it, fail then.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import certified_selection
from benchmarks.certified_selection import by_selection, choices, false_share, naively
from pl_pointwise.requirements.p_values import betting, binomial
from pl_pointwise.requirements.selection import Candidate, pareto_order, select


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=8))
def test_pareto_order_leaves_out_what_another_beats(
    pairs: list[tuple[int, int]],
) -> None:
    """By its definition: no worse in both and better in one; of equal ones the first stays."""

    def beaten(each: int) -> bool:
        return any(
            pairs[other][0] <= pairs[each][0]
            and pairs[other][1] <= pairs[each][1]
            and (pairs[other] != pairs[each] or other < each)
            for other in range(len(pairs))
        )

    found = pareto_order([float(p) for p, _ in pairs], [float(o) for _, o in pairs])
    assert sorted(found) == [each for each in range(len(pairs)) if not beaten(each)]
    assert found == sorted(found, key=lambda each: pairs[each][0])
    objectives = [pairs[each][1] for each in found]
    assert objectives == sorted(objectives, reverse=True)


def losses(violated: int, n: int = 100) -> np.ndarray:
    return np.concatenate([np.ones(violated), np.zeros(n - violated)])


def candidate(name: str, objective: float, first: int, second: int) -> Candidate:
    return Candidate(name, objective, [losses(first)], [losses(second)])


def test_the_last_before_the_first_that_is_not_certified_is_chosen() -> None:
    """At 10 %, up to four violated of 100 are certified at the full 5 %."""
    found = select(
        [
            candidate("beaten", 9.0, 1, 0),
            candidate("second", 3.0, 2, 4),
            candidate("first", 5.0, 1, 4),
            candidate("fourth", 1.0, 6, 0),
            candidate("third", 2.0, 5, 5),
        ],
        [0.1],
    )
    names = [found.tested[position].candidate.name for position in found.order]
    assert names == ["first", "second", "third", "fourth"]
    assert found.position is not None
    assert found.tested[found.position].candidate.name == "second"
    by_name = {each.candidate.name: each for each in found.tested}
    assert list(by_name) == ["beaten", "second", "first", "fourth", "third"]
    assert by_name["beaten"].place is None
    assert [name for name in by_name if by_name[name].certified] == ["second", "first"]
    assert by_name["second"].p == pytest.approx(binomial(4, 100, 0.1))


def test_none_is_chosen_where_the_first_is_not_certified() -> None:
    """Even if a later one would be."""
    found = select(
        [candidate("first", 5.0, 1, 30), candidate("then", 3.0, 2, 0)], [0.1]
    )
    assert found.position is None
    assert select([], [0.1]).position is None


def test_a_candidate_has_to_meet_every_requirement() -> None:
    both = Candidate("both", 1.0, [losses(0), losses(0)], [losses(0), losses(3)])
    one = Candidate("one", 0.0, [losses(1), losses(1)], [losses(0), losses(12)])
    found = select([both, one], [0.1, 0.1])
    assert found.position == 0
    assert found.tested[0].p == pytest.approx(binomial(3, 100, 0.1))
    assert found.tested[1].p == pytest.approx(binomial(12, 100, 0.1))
    assert select([both], [0.1, 0.1], confidence=0.999).position is None


def test_the_kind_of_the_losses_knows_nothing_of_the_certification_split() -> None:
    """Two tests, of which the sample chooses, are together less sure than either."""
    between = np.append(losses(3, 99), 0.5)
    seen_before = Candidate("a", 0.0, [between], [losses(3)])
    seen_after = Candidate("a", 0.0, [losses(3)], [between])
    assert select([seen_before], [0.1]).tested[0].p == pytest.approx(
        betting(losses(3), 0.1)
    )
    assert select([seen_after], [0.1]).tested[0].p == pytest.approx(
        binomial(4, 100, 0.1)
    )


@pytest.mark.parametrize(
    "problem", certified_selection.problems(), ids=lambda each: each.name
)
def test_a_selection_is_seldom_false_and_naive_picking_often_is(
    problem: certified_selection.Problem,
) -> None:
    """200 draws of benchmarks/certified_selection.py, whose table has 2,000."""
    draws = 200
    found = choices(problem, 100, draws, [by_selection, naively])
    most = 0.05 + 3.1 * math.sqrt(0.05 * 0.95 / draws)
    for name, chosen in found.items():
        if not name.startswith("naive"):
            assert false_share(problem, chosen) <= most, name
    assert false_share(problem, found["naive"]) > 0.3
    if problem.name == "all just above it":
        assert false_share(problem, found["naive, own bounds"]) > most
    if problem.name == "one requirement":
        assert np.mean([each is not None for each in found["select"]]) > 0.4
