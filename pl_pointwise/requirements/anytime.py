"""Tests that may be looked at after every new sample, for ever: the error is that of all looks.

A gambler starts with 1 and bets against a hypothesis, at odds that are fair if it is true: the
wealth is above 1/δ at any time with a probability of at most δ (Ville's inequality). It is the
state: a new look goes on from that of the look before.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

BETS = np.linspace(0.05, 0.95, 19)
"""Shares of what may be bet; the gambler spreads his money over them and lets it lie."""


@dataclass
class MeanAbove:
    """Whether the mean of losses in [0, 1] is above ``at_most`` (Waudby-Smith and Ramdas,
    2010.09686).

    Attributes:
        at_most: α in [0, 1).
        log_wealth: what lies on each bet; 1/19 at the start.
    """

    at_most: float
    log_wealth: list[float] = field(default_factory=lambda: [0.0] * len(BETS))

    def add(self, losses: Iterable[float]) -> None:
        """Bets on these losses, in an order that does not depend on them.

        A share b of the money wins b(L − α)/α, so that at worst, of a loss of 0, 1 − b is left.
        """
        gains = np.array(list(losses), dtype=np.float64)
        if not ((gains >= 0) & (gains <= 1)).all():  # NaN is refused too.
            raise ValueError("losses must lie within [0, 1].")
        # α = 0 is broken by any loss above 0; the least number stands for it.
        gains = (gains - self.at_most) / max(self.at_most, 1e-9)
        found = np.array(self.log_wealth) + np.log1p(BETS[:, None] * gains[None]).sum(1)
        self.log_wealth = found.tolist()

    @property
    def p_value(self) -> float:
        """At any time at most δ with a probability of at most δ, where the mean is at most α."""
        return _p_value(self.log_wealth)


@dataclass
class Drift:
    """Whether values that come one after another are drawn as the first ones were: a conformal test
    martingale (Vovk et al., 1204.3251).

    Attributes:
        values: all so far, sorted; at the start those it is asked about.
        log_wealth: what lies on each bet on small ranks, then on each bet on large ones.
    """

    values: list[float]
    log_wealth: list[float] = field(default_factory=lambda: [0.0] * (2 * len(BETS)))

    def __post_init__(self) -> None:
        self.values = sorted(self.values)

    def add(self, values: Iterable[float], seed: int = 0) -> None:
        """Bets on the rank of each value among all before it, ties broken by chance.

        If all are drawn alike, the ranks p are independent and even in (0, 1); a share b of the
        money on small ones becomes (1 − b)·p^(−b) times as much.
        """
        generator = np.random.default_rng([seed, len(self.values)])
        ranks = []
        for value in values:
            left, right = bisect_left(self.values, value), bisect_right(self.values, value)
            ranks.append((left + generator.random() * (right - left + 1)) / (len(self.values) + 1))
            self.values.insert(right, value)
        small = np.array(ranks).clip(1e-12, 1 - 1e-12)
        found = [
            (np.log1p(-BETS)[:, None] - BETS[:, None] * np.log(p)[None]).sum(1)
            for p in (small, 1 - small)
        ]
        self.log_wealth = (np.array(self.log_wealth) + np.concatenate(found)).tolist()

    @property
    def p_value(self) -> float:
        """At any time at most δ with a probability of at most δ, where nothing has changed."""
        return _p_value(self.log_wealth)


def _p_value(log_wealth: list[float]) -> float:
    """One over the mean of the wealths, at most 1."""
    return float(min(1.0, np.exp(-np.logaddexp.reduce(log_wealth)) * len(log_wealth)))
