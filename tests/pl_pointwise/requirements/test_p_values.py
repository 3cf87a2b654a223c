"""p-values against exact fractions, and enumeration of every outcome."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from pl_pointwise.certificates import violation_bound
from pl_pointwise.requirements.p_values import (
    MeanAbove,
    betting,
    binomial,
    fewest_samples,
    p_value,
    samples_needed,
    upper_bound,
)

CONFIDENCES = st.sampled_from([0.5, 0.8, 0.9, 0.95, 0.99])


def zeros_and_ones(violated: int, n: int) -> np.ndarray:
    return np.concatenate([np.ones(violated), np.zeros(n - violated)])


@given(st.integers(1, 14), st.integers(0, 14), st.integers(1, 99))
def test_binomial_is_exact(n: int, violated: int, percent: int) -> None:
    """Against a sum of fractions, which knows no rounding; and never below it."""
    violated, rate = min(violated, n), Fraction(percent, 100)
    exact = sum(
        math.comb(n, k) * rate**k * (1 - rate) ** (n - k) for k in range(violated + 1)
    )
    found = p_value(zeros_and_ones(violated, n), percent / 100)
    assert found == pytest.approx(float(exact), rel=1e-12)


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=40),
    st.floats(0.01, 0.99),
    CONFIDENCES,
)
def test_betting_is_a_gamblers_wealth(
    losses: list[float], rate: float, confidence: float
) -> None:
    """Bet by bet; Waudby-Smith and Ramdas, 2010.09686, equations (25) to (27), from above."""
    n, wealth, most, seen, squares = len(losses), 1.0, 1.0, 0.0, 0.0
    for number, loss in enumerate(losses, start=1):
        variance = (0.25 + squares) / number
        # At 1 / (1 − rate) a loss of 1 takes everything.
        boldest = max(1.0, 0.9 / (1 - rate))
        bet = min(
            boldest, math.sqrt(2 * math.log(1 / (1 - confidence)) / (n * variance))
        )
        wealth *= 1 - bet * (loss - rate)
        most = max(most, wealth)
        seen += loss
        squares += (loss - (0.5 + seen) / (number + 1)) ** 2
    assert betting(np.array(losses), rate, confidence) == pytest.approx(
        1 / most, rel=1e-6
    )


@pytest.mark.parametrize(
    ("points", "masses"),
    [
        ((0.0, 0.5, 1.0), (0.7, 0.2, 0.1)),  # mean 0.2
        ((0.0, 0.2, 1.0), (0.1, 0.875, 0.025)),
    ],
)
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_betting_is_super_uniform_at_every_level(
    points: tuple[float, ...], masses: tuple[float, ...], confidence: float
) -> None:
    """Over every sequence of eight losses, by its probability."""
    n, mean = 8, float(np.dot(points, masses))
    places = np.array(list(itertools.product(range(3), repeat=n)))
    mass = np.array(masses)[places].prod(1)
    found = np.array(
        [betting(row, mean, confidence) for row in np.array(points)[places]]
    )
    order = found.argsort()
    last_of_ties = np.append(np.diff(found[order]) > 1e-12, True)
    reached = mass[order].cumsum()
    assert reached[-1] == pytest.approx(1)
    assert (reached <= found[order] + 1e-9)[last_of_ties].all()


def test_the_larger_rate_is_the_less_likely_one_and_no_sample_says_nothing() -> None:
    for losses in (zeros_and_ones(3, 60), np.random.default_rng(0).beta(1, 9, 60)):
        found = [p_value(losses, rate) for rate in np.linspace(0, 0.99, 40)]
        assert found == sorted(found, reverse=True)
        assert found[0] == 1.0
        assert found[-1] < 1e-6
    assert p_value(np.zeros(0), 0.5) == 1.0


def test_which_test_it_is_can_be_said_beforehand() -> None:
    """Losses between 0 and 1 then count as 1, which makes a p-value larger, never smaller."""
    losses = np.array([0.0] * 90 + [0.4] * 4)
    assert p_value(losses, 0.1, zero_one=True) == binomial(4, 94, 0.1)
    assert (
        p_value(losses, 0.1)
        == p_value(losses, 0.1, zero_one=False)
        == betting(losses, 0.1)
    )
    rounded = losses > 0
    assert p_value(1.0 * rounded, 0.1) == binomial(4, 94, 0.1)
    assert p_value(1.0 * rounded, 0.1, zero_one=False) == betting(1.0 * rounded, 0.1)
    assert upper_bound(losses, 0.95, zero_one=True) == pytest.approx(
        violation_bound(4, 94)
    )


@pytest.mark.parametrize(
    ("losses", "rate", "message"),
    [([0.0, math.nan], 0.1, r"within \[0, 1\]"), ([0.0], 1.0, "from 0 to below 1")],
)
def test_what_has_no_p_value_is_refused(
    losses: list[float], rate: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        p_value(np.array(losses), rate)


@given(st.lists(st.floats(0.01, 0.6), min_size=1, max_size=60), CONFIDENCES)
def test_upper_bound_is_where_rates_begin_to_be_refused(
    losses: list[float], confidence: float
) -> None:
    values, delta = np.array(losses), 1 - confidence
    bound = upper_bound(values, confidence)
    assert values.mean() <= bound <= 1
    if bound + 1e-9 < 1:
        assert p_value(values, bound + 1e-9, confidence) <= delta + 1e-9
    if bound - 1e-9 > values.mean() + 1e-9:
        assert p_value(values, bound - 1e-9, confidence) > delta - 1e-6


@given(st.floats(1e-4, 0.99), CONFIDENCES)
def test_fewest_samples_is_the_first_number_that_can_certify(
    rate: float, confidence: float
) -> None:
    """Multiplied out; within rounding of the level."""
    found, delta = fewest_samples(rate, confidence), 1 - confidence
    assert binomial(0, found, rate) <= delta * (1 + 1e-7)
    if found > 1:
        assert binomial(0, found - 1, rate) > delta * (1 - 1e-7)


def test_fewest_samples_is_rounded_well() -> None:
    # log .25 / log .5 is 2, and a little more in binary
    assert fewest_samples(0.5, 0.75) == 2


@pytest.mark.parametrize(
    ("rate", "share", "confidence", "power"),
    [(0.1, 0.0, 0.95, 0.8), (0.3, 0.2, 0.95, 0.9), (0.5, 0.1, 0.5, 0.99)],
)
def test_samples_needed_against_every_number_of_samples(
    rate: float, share: float, confidence: float, power: float
) -> None:
    found = samples_needed(rate, share, confidence, power)
    assert found is not None

    def reached(n: int) -> float:
        """The probability that a binomial test of n samples certifies."""
        k = np.arange(n + 1)
        passes = stats.binom.cdf(k, n, rate) <= 1 - confidence
        return float(stats.binom.pmf(k, n, share)[passes].sum())

    assert all(reached(n) >= power - 1e-9 for n in range(found, 4 * found + 50))
    if found > 1:
        assert reached(found - 1) < power


@pytest.mark.parametrize("share", [0.05, 0.0499])  # The second takes millions.
def test_samples_needed_is_none_where_no_number_would_do(share: float) -> None:
    assert samples_needed(0.05, share) is None


# What may be looked at for ever ----------------------------------------------------------------

RATES = st.floats(0.01, 0.95)


@given(RATES, st.floats(0, 1))
def test_a_bet_on_the_mean_is_fair_at_the_bound(at_most: float, low: float) -> None:
    """Of losses ``low`` and 1 with the mean α no bet gains or loses on average."""
    low = low * at_most
    odds = (at_most - low) / (1 - low)
    after = []
    for loss in (low, 1.0):
        test = MeanAbove(at_most)
        test.add([loss])
        after.append(np.exp(test.log_wealth))
    np.testing.assert_allclose((1 - odds) * after[0] + odds * after[1], 1, rtol=1e-9)


def alarms(
    make: object, draw: object, draws: int, looks: int = 40, batch: int = 20
) -> float:
    """The share of streams that ever give an alarm at 5 %."""
    found = 0
    for _ in range(draws):
        test = make()  # type: ignore[operator]
        for _ in range(looks):
            test.add(draw(batch))  # type: ignore[operator]
            if test.p_value <= 0.05:
                found += 1
                break
    return found / draws


@pytest.mark.parametrize("rate", [0.02, 0.2, 0.6])
def test_the_error_is_that_of_all_looks(rate: float) -> None:
    """At the bound; a test at 5 % in each look would end in an alarm far more often than .05."""
    draw = np.random.default_rng(1)
    assert (
        alarms(lambda: MeanAbove(rate), lambda n: draw.random(n) < rate, draws=300)
        <= 0.05
    )
    assert (
        alarms(lambda: MeanAbove(rate), lambda n: draw.random(n) < rate + 0.2, draws=20)
        == 1
    )


@pytest.mark.parametrize("loss", [-0.1, 1.1, np.nan])
def test_losses_outside_the_unit_interval_are_refused(loss: float) -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        MeanAbove(0.1).add([loss])
