"""Tests that may be looked at for ever: fair bets, states that go on, and alarms at all looks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pl_pointwise.requirements.anytime import MeanAbove

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


def alarms(make: object, draw: object, draws: int, looks: int = 40, batch: int = 20) -> float:
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
    assert alarms(lambda: MeanAbove(rate), lambda n: draw.random(n) < rate, draws=300) <= 0.05
    assert alarms(lambda: MeanAbove(rate), lambda n: draw.random(n) < rate + 0.2, draws=20) == 1


@pytest.mark.parametrize("loss", [-0.1, 1.1, np.nan])
def test_losses_outside_the_unit_interval_are_refused(loss: float) -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        MeanAbove(0.1).add([loss])
