"""A test that may be looked at after every new sample, for ever: the error is that of all looks.

A gambler starts with 1 and bets against a hypothesis, at odds that are fair if it is true: the
wealth is above 1/δ at any time with a probability of at most δ (Ville's inequality). It is the
state: a new look goes on from that of the look before.
"""

from __future__ import annotations

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
        return float(min(1.0, len(BETS) * np.exp(-np.logaddexp.reduce(self.log_wealth))))
