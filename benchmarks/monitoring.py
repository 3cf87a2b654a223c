"""How often a monitor that is looked at again and again gives an alarm, with and without a cause.

    pip install --no-deps mapie==1.6.0
    python benchmarks/monitoring.py > monitoring.csv

A stream is 200 looks, each at 20 new samples that violate with a given probability; the requirement
allows .05 (and .01, .2), the error of all looks is 5 %. Beside ``MeanAbove``, the monitor's test:
a binomial test at 5 % in every look, over all samples so far; and MAPIE's RiskMonitoring with the
threshold stated. It keeps half its level for a threshold that is estimated, so it is given 10 %.
Printed: the share of streams with an alarm within so many looks.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from scipy.stats import binom

from pl_pointwise.requirements.p_values import MeanAbove

LOOKS, BATCH, DELTA = (10, 50, 200), 20, 0.05
"""Looks within which an alarm is counted; samples of each; the error."""


class EveryLook:
    """The binomial test over all samples so far, at 5 % in every look."""

    def __init__(self, at_most: float) -> None:
        self.at_most, self.n, self.violated = at_most, 0, 0

    def add(self, losses: Any) -> None:
        self.n, self.violated = self.n + len(losses), self.violated + int(sum(losses))

    @property
    def p_value(self) -> float:
        return float(binom.sf(self.violated - 1, self.n, self.at_most))


class Mapie:
    """The test of RiskMonitoring with ``at_most`` as its threshold.

    That solves for the bounds after all samples so far in every look; whether one is above the
    threshold is seen without. :func:`check_mapie` compares both.
    """

    def __init__(self, at_most: float) -> None:
        from mapie.exchangeability_testing.bounds import GammaExponentialMixtureBound

        level = DELTA / 2  # Of its level for the stream, as its bound of one side takes it.
        self.wealth = GammaExponentialMixtureBound(v_opt=1, c=1, alpha_opt=level).log_supermg
        self.at_most, self.bar = at_most, math.log(1 / level)
        self.n, self.total, self.variance, self.p_value = 0, 0.0, 0.0, 1.0

    def add(self, losses: Any) -> None:
        for loss in losses:
            self.variance += (loss - (self.total / self.n if self.n else 0.5)) ** 2
            self.n, self.total = self.n + 1, self.total + loss
            above = self.total - self.at_most * self.n
            if above > 0 and self.wealth(above, self.variance) > self.bar:
                self.p_value = 0.0


def check_mapie(random: np.random.Generator) -> None:
    """
    Raises:
        AssertionError: RiskMonitoring itself gives an alarm in another look.
    """
    from mapie.exchangeability_testing import RiskMonitoring
    from mapie.risk_control import BinaryRisk

    error = BinaryRisk(
        risk_occurrence=lambda y_true, y_pred: y_true != y_pred,
        risk_condition=lambda y_true, y_pred: np.repeat(True, len(y_true)),
        higher_is_better=False,
    )
    for rate in (0.05, 0.1, 0.2, 0.4):
        ours = Mapie(0.05)
        theirs = RiskMonitoring(error, test_level=2 * DELTA, threshold=0.05, warn=False)
        for _ in range(10):
            violated = (random.random(BATCH) < rate).astype(int)
            ours.add(violated)
            theirs.update(np.ones(BATCH, int), 1 - violated)
            assert theirs.harmful_shift_detected == (ours.p_value == 0.0), rate


def alarms(make: Callable[[], Any], draw: Callable[[int], Any], draws: int) -> list[float]:
    """The shares of streams with an alarm within 10, 50 and 200 looks."""
    first = np.full(draws, np.inf)
    for stream in range(draws):
        test = make()
        for look in range(1, LOOKS[-1] + 1):
            test.add(draw(BATCH))
            if test.p_value <= DELTA:
                first[stream] = look
                break
    return [float((first <= looks).mean()) for looks in LOOKS]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=2000)
    draws = parser.parse_args().draws
    random = np.random.default_rng(0)
    check_mapie(random)
    print("required,violated,looks,monitor,MAPIE,a test in every look")
    for at_most, rate in (
        *((0.01, 0.01), (0.05, 0.05), (0.2, 0.2)),
        *((0.05, 0.06), (0.05, 0.08), (0.05, 0.1), (0.05, 0.2)),
    ):

        def draw(n: int, rate: float = rate) -> Any:
            return (random.random(n) < rate).astype(float)

        kinds = (MeanAbove, Mapie, EveryLook)
        found = [alarms(partial(kind, at_most), draw, draws) for kind in kinds]
        for looks, shares in zip(LOOKS, zip(*found, strict=True), strict=True):
            print(f"{at_most},{rate},{looks},{','.join(f'{s:.4f}' for s in shares)}", flush=True)


if __name__ == "__main__":
    main()
