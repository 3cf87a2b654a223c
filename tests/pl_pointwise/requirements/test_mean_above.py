"""The test that may be looked at for ever: its level, and after how many records it sees."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from pl_pointwise.requirements.p_values import (
    AT_ONCE,
    MeanAbove,
    _log_joining,
    _log_waiting,
    betting,
    p_value_against,
)

Draw = Callable[[np.random.Generator, int], np.ndarray]
LOOK = 50


def rate(share: float) -> Draw:
    return lambda random, n: (random.random(n) < share).astype(float)


def records_until_broken(
    at_most: float, parts: Sequence[tuple[int, Draw]], draws: int, delta: float = 0.05
) -> np.ndarray:
    """(draws,) records of the last part until p ≤ δ, a look every 50; inf: never; -1: before."""
    found = []
    for draw in range(draws):
        random, test, when = (
            np.random.default_rng([7, draw]),
            MeanAbove(at_most),
            math.inf,
        )
        for records, of in parts[:-1]:
            test.add(of(random, records))
        for look in range(parts[-1][0] // LOOK):
            if test.p_value <= delta:
                when = look * LOOK or -1
                break
            test.add(parts[-1][1](random, LOOK))
        found.append(when)
    return np.array(found)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.floats(0.01, 0.95))
def test_it_is_a_mixture_over_bets_and_starting_points(
    losses: list[float], at_most: float
) -> None:
    """Each starting point's own gambler, one after another, and the largest of their sums."""
    test, most = MeanAbove(at_most), 1.0
    test.add(losses)
    waits = [1 / (1 + math.log2(1 + n)) for n in range(len(losses) + 1)]
    for n in range(1, len(losses) + 1):
        wealth = waits[n]
        for start in range(1, n + 1):
            growth = [
                1 + test.bets * (loss - at_most) / at_most
                for loss in losses[start - 1 : n]
            ]
            wealth += (waits[start - 1] - waits[start]) * np.prod(growth, axis=0).mean()
        most = max(most, wealth)
    assert test.p_value == pytest.approx(1 / most, rel=1e-6)
    assert (test.n, len(test.log_started)) == (len(losses), len(test.bets))


def test_the_starting_points_share_one_unit_of_money() -> None:
    """Numbers as of a day a decade on are exact too."""
    numbers = np.arange(1, 100_001)
    begun = np.exp(_log_joining(numbers)).cumsum()
    np.testing.assert_allclose(begun + np.exp(_log_waiting(numbers)), 1, rtol=1e-9)
    late = np.array([10**12])
    width = 1 / (1e12 * math.log(2) * (1 + math.log2(1e12)) ** 2)
    assert np.exp(_log_joining(late))[0] == pytest.approx(width, rel=1e-6)


def test_how_a_stream_is_cut_makes_no_difference() -> None:
    losses = np.random.default_rng(0).beta(1, 8, AT_ONCE + 100)
    whole, cut = MeanAbove(0.1), MeanAbove(0.1)
    whole.add(losses)
    for part in np.array_split(losses, 37):
        cut.add(part)
    assert cut.p_value == pytest.approx(whole.p_value)
    np.testing.assert_allclose(cut.log_started, whole.log_started, atol=1e-6)


def test_what_was_broken_stays_broken() -> None:
    test = MeanAbove(0.05)
    test.add(np.ones(30))
    found = test.p_value
    test.add(np.zeros(500))
    assert found < 1e-6
    assert test.p_value == found


# Allowed, good before, of which so many fail, then, median at most, 95 % at most.
CASES = [
    (0.01, 0, 0.0, 0.02, 3000, 20_000),
    (0.05, 0, 0.0, 0.07, 2500, 20_000),
    (0.05, 10_000, 0.01, 0.3, 100, 200),
    (0.05, 10_000, 0.01, 1.0, 50, 50),
    (0.1, 10_000, 0.02, 0.4, 100, 200),
    (0.001, 0, 0.0, 0.005, 3000, 20_000),
]


@pytest.mark.parametrize(("at_most", "good", "past", "then", "median", "most"), CASES)
@pytest.mark.parametrize("draws", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_what_is_worse_is_seen(
    at_most: float,
    good: int,
    past: float,
    then: float,
    median: float,
    most: float,
    draws: int,
) -> None:
    """With bets from 0.05 on twice of 1 % was never seen, and each good record was a debt."""
    parts = [(good, rate(past)), (20_000, rate(then))]
    found = records_until_broken(at_most, parts, draws)
    assert np.isfinite(found).all()
    assert (found > 0).all()
    assert np.median(found) <= median
    assert np.quantile(found, 0.95) <= most


THIRDS = np.array([0, 1 / 3, 2 / 3, 1])


def with_nan_as_worst(random: np.random.Generator, n: int) -> np.ndarray:
    """Mean 0.2: of 100 values 10 are not a number, which counts 1."""
    return np.where(random.random(n) < 0.1, 1.0, random.beta(1, 8, n))


AT_THE_BOUND: dict[str, tuple[float, Draw]] = {
    "1 %": (0.01, rate(0.01)),
    "5 %": (0.05, rate(0.05)),
    "half": (0.5, rate(0.5)),
    "flat beta": (0.1, lambda random, n: random.beta(1, 9, n)),
    "beta near 0 and 1": (0.1, lambda random, n: random.beta(0.2, 1.8, n)),
    "ties": (0.2, lambda random, n: random.choice(THIRDS, n, p=[0.6, 0.25, 0.1, 0.05])),
    "not a number": (0.1 + 0.9 / 9, with_nan_as_worst),
}


@pytest.mark.parametrize(("at_most", "draw"), AT_THE_BOUND.values(), ids=AT_THE_BOUND)
@pytest.mark.parametrize("draws", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_at_the_bound_hardly_any_stream_is_ever_broken(
    at_most: float, draw: Draw, draws: int
) -> None:
    found = records_until_broken(at_most, [(5000, draw)], draws)
    assert np.isfinite(found).mean() <= (0.05 if draws > 100 else 0.15)


def test_memory_and_time_of_a_call_do_not_grow_with_the_calls() -> None:
    test, seconds = MeanAbove(0.1), []
    losses = rate(0.1)(np.random.default_rng(0), 50)
    for _ in range(2000):
        started = time.perf_counter()
        test.add(losses)
        seconds.append(time.perf_counter() - started)
    assert len(test.log_started) == 24
    assert np.median(seconds[-500:]) < 3 * np.median(seconds[:500])


@pytest.mark.parametrize("good", [0, 3000])
@pytest.mark.parametrize("n", [60, 400])
def test_what_records_could_have_shown_is_shown_so_often(good: int, n: int) -> None:
    """By the test itself; at half of the distance hardly ever."""
    before = MeanAbove(0.1)
    before.add(np.zeros(good))
    least = before.rate_seen(n, 0.05)
    assert least is not None
    seen = []
    for draw in range(200):
        after = MeanAbove(0.1, before.n, before.log_started, before.log_most)
        after.add(rate(least)(np.random.default_rng([3, draw]), n))
        seen.append(after.p_value <= 0.05)
    assert 0.75 <= np.mean(seen) <= 0.95


def test_few_records_could_have_shown_nothing() -> None:
    assert MeanAbove(0.5).rate_seen(3, 0.05) is None
    assert MeanAbove(0.01).violations_that_break(100, 0.05) == 6


@given(st.integers(1, 60), st.integers(0, 60), st.floats(0.01, 0.99))
def test_one_look_against_is_exact(n: int, violated: int, at_most: float) -> None:
    losses = (np.arange(n) < violated).astype(float)
    found = p_value_against(losses, at_most)
    assert found == pytest.approx(
        binom.pmf(np.arange(min(violated, n), n + 1), n, at_most).sum()
    )


def test_one_look_against_a_mean_bets_the_other_way() -> None:
    losses = np.random.default_rng(0).beta(2, 5, 100)
    assert p_value_against(losses, 0.1) == betting(1 - losses, 0.9) < 1e-6
    assert p_value_against(losses, 0.5) == 1.0
    assert p_value_against(np.zeros(0), 0.1) == 1.0
