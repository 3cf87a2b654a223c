"""Means over seeds with their intervals, and differences at equal seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """A mean over seeds and the bounds of its 95 % t-interval, NaN for a single seed."""

    mean: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        if self.seeds == 1:
            return f"{self.mean:.3g}"
        return f"{self.mean:.3g} ± {self.high - self.mean:.2g}"

    @property
    def sign(self) -> int:
        """-1 or 1 where the whole interval lies on one side of zero, else 0."""
        return int(self.high < 0) * -1 + int(self.low > 0)


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def estimate(values: Sequence[float]) -> Estimate:
    """Returns the mean with the interval of Student's t.

    Raises:
        ValueError: there is no value.
    """
    if not len(values):
        raise ValueError("No value to take the mean of.")
    centre, count = mean(values), len(values)
    if count == 1:
        return Estimate(centre, np.nan, np.nan, count)
    if np.ptp(values) == 0:  # scipy warns of lost precision
        return Estimate(centre, centre, centre, count)
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval(CONFIDENCE)
    return Estimate(centre, float(low), float(high), count)


def paired_difference(
    first: Mapping[int, float], second: Mapping[int, float]
) -> Estimate | None:
    """Returns first − second over the seeds that both have, None if there is none.

    Data and initialisation of a seed are the same for both, so that what they share cancels out.
    """
    seeds = [seed for seed in first if seed in second]
    return estimate([first[seed] - second[seed] for seed in seeds]) if seeds else None


def p_value(first: Mapping[int, float], second: Mapping[int, float]) -> float:
    """Of Student's paired t test; 1 where every difference is 0."""
    differences = [first[seed] - second[seed] for seed in first if seed in second]
    if np.ptp(differences) == 0:
        return float(differences[0] == 0)
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def holm(p_values: Sequence[float], level: float = 1 - CONFIDENCE) -> np.ndarray:
    """Which hypotheses Holm's procedure rejects, at one error for all of them."""
    order = np.argsort(p_values)
    allowed = level / np.arange(len(p_values), 0, -1)
    passed = np.logical_and.accumulate(np.asarray(p_values)[order] <= allowed)
    rejected = np.zeros(len(p_values), bool)
    rejected[order] = passed
    return rejected
