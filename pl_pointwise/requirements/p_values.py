"""How unlikely a sample is where a requirement fails: p-values, and the samples they take.

The hypothesis is always "the mean of the losses is above ``at_most``". Losses lie in [0, 1] and are
independent draws. If the hypothesis is true, a p-value is ≤ δ with a probability of at most δ, for
any distribution and any number of samples.

Violations that count as 0 or 1 take the exact binomial one. For losses in between it comes from the
largest wealth of a gambler who bets that the mean is below; Waudby-Smith and Ramdas, 2010.09686.

The gambler of :class:`MeanAbove` may be looked at after every new sample, for ever: if the
hypothesis is true his bets are fair, and from 1 he is above 1/δ at any time with a probability of
at most δ (Ville's inequality).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from pl_pointwise.certificates import violation_bound

Losses = NDArray[np.float64]
"""(n,), one per independent sample, within [0, 1]."""


def p_value(
    losses: Losses, at_most: float, confidence: float = 0.95, zero_one: bool | None = None
) -> float:
    """Returns the p-value of "the mean loss is above ``at_most``": 1 without any sample.

    Args:
        losses: in [0, 1], one per sample.
        at_most: the bound on their mean.
        confidence: at which it will be used; it sets how boldly the gambler bets.
        zero_one: whether it is the binomial one, with losses in between counted as 1. None, by a
            look at the losses, is for those of which it is known in any case: of two valid tests,
            the one that the sample suggests is not quite valid.

    Raises:
        ValueError: losses outside [0, 1], or ``at_most`` outside [0, 1).

    >>> round(p_value(np.zeros(59), 0.05), 3)
    0.048
    """
    if not 0 <= at_most < 1:
        raise ValueError(f"at_most={at_most}: give a rate from 0 to below 1.")
    if not len(losses):
        return 1.0
    if not ((losses >= 0) & (losses <= 1)).all():  # NaN is refused too.
        raise ValueError("losses must lie within [0, 1].")
    if are_zero_one(losses) if zero_one is None else zero_one:
        return binomial(int(np.count_nonzero(losses)), len(losses), at_most)
    return betting(losses, at_most, confidence)


def are_zero_one(losses: Losses) -> bool:
    """Returns whether every loss is 0 or 1."""
    return bool(np.isin(losses, (0, 1)).all())


def binomial(violated: int, n: int, at_most: float) -> float:
    """Returns P(Binomial(n, at_most) ≤ violated): exact for losses of 0 and 1."""
    return float(binom.cdf(violated, n, at_most))


def betting(losses: Losses, at_most: float, confidence: float = 0.95) -> float:
    """Returns 1 / max_t K_t, K_t = Π_{i ≤ t} (1 − ν_i (L_i − α)), α at_most.

    The bet ν_i = min(max(1, 0.9 / (1 − α)), √(2 log(1/δ) / (n s²_{i−1}))) depends on earlier losses
    alone, through their variance s², and is at most 1 / (1 − α), so that K is a nonnegative
    supermartingale where the mean is α or more. Every factor grows with α. δ = 1 − confidence. The
    order of the losses matters, and must not depend on them.
    """
    n = len(losses)
    counts = np.arange(1, n + 1)
    means = (0.5 + losses.cumsum()) / (1 + counts)
    variances = (0.25 + ((losses - means) ** 2).cumsum()) / (1 + counts)
    before = np.concatenate([[0.25], variances[:-1]])
    boldest = max(1.0, 0.9 / (1 - at_most))
    bets = np.minimum(boldest, np.sqrt(2 * math.log(1 / (1 - confidence)) / (n * before)))
    wealth = np.log1p(-bets * (losses - at_most)).cumsum()
    return float(math.exp(-max(0.0, wealth.max())))


def upper_bound(losses: Losses, confidence: float, zero_one: bool | None = None) -> float:
    """Returns the smallest rate that the losses refuse; of none, 1.

    confidence: in [0, 1). Where k models are looked at, 1 − δ/k makes all k bounds hold together.
    zero_one: as of :func:`p_value`.
    """
    if not len(losses):
        return 1.0
    if are_zero_one(losses) if zero_one is None else zero_one:
        return violation_bound(int(np.count_nonzero(losses)), len(losses), confidence)
    low, high = float(losses.mean()), 1.0
    for _ in range(50):  # p-values fall as the rate rises.
        middle = (low + high) / 2
        if middle < 1 and betting(losses, middle, confidence) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def fewest_samples(at_most: float, confidence: float = 0.95) -> int:
    """Returns the fewest samples that can certify a rate: with none of them violated.

    >>> fewest_samples(0.05), fewest_samples(0.01)
    (59, 299)
    """
    return math.ceil(round(math.log(1 - confidence) / math.log1p(-at_most), 9))


def samples_needed(
    at_most: float, share: float, confidence: float = 0.95, power: float = 0.8
) -> int | None:
    """Returns from how many samples on a model that violates ``share`` of the inputs is certified.

    With a probability of at least ``power``, for this number of samples and every larger one.
    None where ``share`` is not below ``at_most``, or so near to it that 100,000 are too few.

    >>> samples_needed(0.05, 0.0), samples_needed(0.05, 0.02), samples_needed(0.05, 0.05)
    (59, 286, None)
    """
    n, delta = np.arange(1, 100_001), 1 - confidence
    allowed = binom.ppf(delta, n, at_most)  # The first count that reaches δ,
    allowed -= binom.cdf(allowed, n, at_most) > delta  # and may be above it.
    # Not by bisection: the power falls while the number that may be violated stays.
    lapses = np.append(0, n[binom.cdf(allowed, n, share) < power])
    return None if share >= at_most or lapses[-1] == n[-1] else int(lapses[-1]) + 1


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
