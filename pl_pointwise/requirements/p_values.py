"""How unlikely a sample is where a requirement fails: p-values, and the samples they take.

The hypothesis is always "the mean of the losses is above ``at_most``". Losses lie in [0, 1] and are
independent draws. If the hypothesis is true, a p-value is ≤ δ with a probability of at most δ, for
any distribution and any number of samples.

Violations that count as 0 or 1 take the exact binomial one. For losses in between it comes from the
largest wealth of a gambler who bets that the mean is below; Waudby-Smith and Ramdas, 2010.09686.

The opposite, "the mean is at most ``at_most``", is what speaks for a certificate that was given:
:func:`p_value_against` in one look, :class:`MeanAbove` in as many as one likes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta, binom

from pl_pointwise.certificates import violation_bound

Losses = NDArray[np.float64]
"""(n,), one per independent sample, within [0, 1]."""


MOST_SAMPLES = 100_000
"""What :func:`samples_needed` looks at."""


def p_value(
    losses: Losses,
    at_most: float,
    confidence: float = 0.95,
    zero_one: bool | None = None,
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
    if _takes_binomial(losses, zero_one):
        return binomial(int(np.count_nonzero(losses)), len(losses), at_most)
    return betting(losses, at_most, confidence)


def _takes_binomial(losses: Losses, zero_one: bool | None) -> bool:
    """What the caller knows of the losses, else what they look like."""
    return are_zero_one(losses) if zero_one is None else zero_one


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
    bets = np.minimum(
        boldest, np.sqrt(2 * math.log(1 / (1 - confidence)) / (n * before))
    )
    wealth = np.log1p(-bets * (losses - at_most)).cumsum()
    return float(math.exp(-max(0.0, wealth.max())))


def p_value_against(
    losses: Losses,
    at_most: float,
    confidence: float = 0.95,
    zero_one: bool | None = None,
) -> float:
    """Returns the p-value of the opposite, "the mean loss is at most ``at_most``", for one look.

    Arguments as of :func:`p_value`; ``at_most`` above 0.

    >>> round(p_value_against(np.ones(2), 0.1), 3)
    0.01
    """
    if not len(losses):
        return 1.0
    if _takes_binomial(losses, zero_one):
        violated = int(np.count_nonzero(losses))
        return float(binom.sf(violated - 1, len(losses), at_most))
    return betting(1 - losses, 1 - at_most, confidence)


def upper_bound(
    losses: Losses, confidence: float, zero_one: bool | None = None
) -> float:
    """Returns the smallest rate that the losses refuse; of none, 1.

    confidence: in [0, 1). Where k models are looked at, 1 − δ/k makes all k bounds hold together.
    zero_one: as of :func:`p_value`.
    """
    if not len(losses):
        return 1.0
    if _takes_binomial(losses, zero_one):
        return violation_bound(int(np.count_nonzero(losses)), len(losses), confidence)
    low = float(losses.mean())
    high = 1.0
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
    if share >= at_most:
        return None
    n = np.arange(1, MOST_SAMPLES + 1)
    delta = 1 - confidence
    allowed = binom.ppf(delta, n, at_most)  # The first count that reaches δ,
    allowed -= binom.cdf(allowed, n, at_most) > delta  # and may be above it.
    # Not by bisection: the power falls while the number that may be violated stays.
    too_few = n[binom.cdf(allowed, n, share) < power]
    last = int(too_few[-1]) if len(too_few) else 0
    return None if last == MOST_SAMPLES else last + 1


BETS = 24
BOLDEST = 0.95
"""The largest bet."""
FINEST = 0.01
"""How much above ``at_most``, as a part of it, the smallest bet sees."""
AT_ONCE = 4096
"""Losses that are read together."""


@dataclass
class MeanAbove:
    """Whether the mean of losses in [0, 1] is above ``at_most``, looked at as often as one likes.

    A gambler wins where it is. With bet b his money is multiplied by f_b(L) = 1 + b (L − α) / α on
    every loss L. He spreads it evenly over bets spaced by ratio, so that he is nowhere blind, and
    each bet's over all moments from which on to bet: w_n = T_{n−1} − T_n of it joins in with the
    n-th loss, and T_n = 1 / (1 + log₂(1 + n)) still waits, from T_0 = 1 down to 0. So a good past
    costs him only what had joined in by then. With S_0 = 0 his wealth after n losses is

        S_n(b) = (S_{n−1}(b) + w_n) f_b(L_n),    E_n = mean over b of S_n(b), plus T_n

    Whoever looks at it, and whenever, is right. Where given the past the mean of L_n is at most α,
    that of f_b(L_n) is at most 1, and f_b ≥ 0, as 0 < b ≤ 1. So the mean of E_n is at most that of
    S_{n−1}(b) + w_n over b, plus T_n, which is E_{n−1}. E is a nonnegative supermartingale from
    E_0 = 1, and by Ville's inequality it ever reaches 1/δ with a probability of at most δ. The
    bets: Waudby-Smith and Ramdas, 2010.09686; starting points by weights: Shin, Ramdas and Rinaldo,
    2203.03532. The losses' order must not depend on them.

    Attributes:
        at_most: α in [0, 1).
        n: losses so far.
        log_started: log S_n(b) by bet.
        log_most: log of the largest E so far, 0 at the start.
    """

    at_most: float
    n: int = 0
    log_started: Losses = field(default_factory=lambda: np.full(BETS, -np.inf))
    log_most: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.at_most < 1:
            raise ValueError(f"at_most={self.at_most}: give a rate from 0 to below 1.")

    @property
    def bets(self) -> Losses:
        """(BETS,), rising. Bet b is the best one where losses of 0 and 1 are 1 at α + b (1 − α)."""
        smallest = FINEST * min(1.0, self.at_most / (1 - self.at_most))
        return np.geomspace(max(smallest, 1e-6), BOLDEST, BETS)

    @property
    def log_wealth(self) -> Losses:
        """(BETS,), the log of S_n(b) + T_n, what a bet has become from 1."""
        return np.logaddexp(self.log_started, _log_waiting(self.n))

    @property
    def p_value(self) -> float:
        """Ever at most δ with a probability of at most δ, where the mean is at most α. It only
        falls: that the mean was above is not undone by what comes after.
        """
        return float(min(1.0, math.exp(-self.log_most)))

    def add(self, losses: Iterable[float]) -> None:
        """Bets on these losses, in an order that does not depend on them."""
        values = np.array(list(losses), dtype=np.float64)
        if not ((values >= 0) & (values <= 1)).all():  # NaN is refused too.
            raise ValueError("losses must lie within [0, 1].")
        for start in range(0, len(values), AT_ONCE):
            self._bet(values[start : start + AT_ONCE])

    def _bet(self, losses: Losses) -> None:
        # α = 0 is broken by any loss above 0; the least number stands for it.
        gains = (losses - self.at_most) / max(self.at_most, 1e-9)
        grown = np.log1p(self.bets[:, None] * gains).cumsum(1)  # (BETS, losses)
        numbers = self.n + np.arange(1, 1 + len(losses))
        # S_n = F_n (S_0 + Σ_k w_k / F_{k−1}), where F_n is the product of f up to the n-th.
        before = np.column_stack([np.zeros(BETS), grown[:, :-1]])
        joining = np.column_stack([self.log_started, _log_joining(numbers) - before])
        started = np.logaddexp.accumulate(joining, axis=1)[:, 1:] + grown
        wealth = np.logaddexp(_log_mean(started), _log_waiting(numbers))
        self.n += len(losses)
        self.log_started = started[:, -1]
        self.log_most = max(self.log_most, float(wealth.max()))

    def violations_that_break(self, n: int, delta: float) -> int | None:
        """How many of n more losses of 0 and 1 have to be 1 so that p is surely δ or less after
        them, whatever their order: those that join in with the first alone are enough. None: not
        even n.
        """
        started = np.logaddexp(self.log_started, _log_joining(np.array(self.n + 1)))
        # log f_b(1) and log f_b(0).
        won = np.log1p(self.bets * (1 / max(self.at_most, 1e-9) - 1))
        lost = np.log1p(-self.bets)
        waiting = _log_waiting(self.n + n)

        def breaks(violated: int) -> bool:
            after = started + violated * won + (n - violated) * lost
            return bool(np.logaddexp(_log_mean(after), waiting) >= -math.log(delta))

        violated = bisect_left(range(n + 1), True, key=breaks)
        return violated if violated <= n else None

    def rate_seen(self, n: int, delta: float, power: float = 0.8) -> float | None:
        """From which rate on n more losses of 0 and 1 end in p ≤ δ, with a probability of at least
        ``power``: P(Binomial(n, rate) ≥ k) = power, of k violations that break. None: not even 1.
        """
        violated = self.violations_that_break(n, delta)
        return (
            None
            if violated is None
            else float(beta.ppf(power, violated, n - violated + 1))
        )


def _log_waiting(n: Any) -> Any:
    """log T_n."""
    return -np.log1p(np.log2(1 + n))


def _log_joining(n: NDArray[np.int64]) -> Losses:
    """log w_n = log (T_{n−1} − T_n), n ≥ 1, without the difference of near numbers."""
    step = np.log1p(1 / n) / math.log(2)  # log₂(1 + n) − log₂ n
    return np.asarray(np.log(step) + _log_waiting(n) + _log_waiting(n - 1))


def _log_mean(logs: Losses) -> Any:
    """log of the mean over the first axis of what logs are of."""
    return np.logaddexp.reduce(logs, axis=0) - math.log(len(logs))
