"""How often a monitor that is looked at again and again gives an alarm, false or due, and how late.

    pip install --no-deps mapie==1.6.0
    python benchmarks/monitoring.py > monitoring.csv
    python benchmarks/monitoring.py --delay > monitoring-delay.csv

A stream is 200 looks, each at 20 new samples that violate with a given probability; the requirement
allows .05 (and .01, .2), the error of all looks is 5 %. Beside ``MeanAbove``, the monitor's test:
a binomial test at 5 % in every look, over all samples so far; and MAPIE's RiskMonitoring with the
threshold stated. It keeps half its level for a threshold that is estimated, so it is given 10 %.
Printed: the share of streams with an alarm within so many looks.

With --delay: samples that are good, then samples that are not, 20,000 at most, a look every 50.
Printed: the share of streams with an alarm after the change, and after how many samples half of
the streams have one, and 95 %; and of one exact binomial test at 5 % of the 20,000 alone.
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

        # Of its level for the stream, as its bound of one side takes it.
        level = DELTA / 2
        self.wealth = GammaExponentialMixtureBound(
            v_opt=1, c=1, alpha_opt=level
        ).log_supermg
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


def alarms(
    make: Callable[[], Any], draw: Callable[[int], Any], draws: int
) -> list[float]:
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


CHANGES = [  # allowed, good samples, of which so many fail, then
    *(
        (0.01, 0, 0.0, 0.015),
        (0.01, 0, 0.0, 0.02),
        (0.05, 0, 0.0, 0.06),
        (0.05, 0, 0.0, 0.07),
    ),
    *((0.1, 0, 0.0, 0.12), (0.05, 0, 0.0, 0.3)),
    *((0.05, 500, 0.01, 0.3), (0.05, 10_000, 0.01, 0.3), (0.05, 10_000, 0.01, 1.0)),
    *((0.05, 10_000, 0.03, 0.3), (0.1, 10_000, 0.02, 0.4), (0.1, 10_000, 0.05, 0.12)),
]
MOST, LOOK = 20_000, 50


def delays(
    make: Callable[[], Any], change: tuple[float, int, float, float], draws: int
) -> str:
    """The share of streams with an alarm after the change; the samples until then."""
    _, good, past, then = change
    found = []
    for stream in range(draws):
        random, test = np.random.default_rng([1, stream]), make()
        before, after = random.random(good) < past, random.random(MOST) < then
        for start in range(0, good, LOOK):
            test.add(before[start : start + LOOK].astype(float))
        samples = math.inf
        for start in range(0, MOST, LOOK):
            test.add(after[start : start + LOOK].astype(float))
            if test.p_value <= DELTA:
                samples = start + LOOK
                break
        found.append(samples)
    late = np.quantile(found, [0.5, 0.95], method="inverted_cdf")
    shown = ["" if math.isinf(each) else f"{each:.0f}" for each in late]
    return f"{np.isfinite(found).mean():.3f},{','.join(shown)}"


def exact_share(change: tuple[float, int, float, float]) -> float:
    """How often one binomial test at 5 % of the samples after the change alone would see it."""
    at_most, _, _, then = change
    fewest = binom.isf(DELTA, MOST, at_most) + 1
    return float(binom.sf(fewest - 1, MOST, then))


def print_delays(draws: int) -> None:
    kinds = {"monitor": MeanAbove, "MAPIE": Mapie}
    columns = [
        f"{kind} {what}" for kind in kinds for what in ("sees", "median", "95 %")
    ]
    print(
        f"required,good samples,violated,then,{','.join(columns)},exact test at the end"
    )
    for change in CHANGES:
        found = [
            delays(partial(kind, change[0]), change, draws) for kind in kinds.values()
        ]
        first = ",".join(map(str, change))
        print(f"{first},{','.join(found)},{exact_share(change):.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, help="default: 2000, or with --delay 200")
    parser.add_argument("--delay", action="store_true")
    options = parser.parse_args()
    draws = options.draws or (200 if options.delay else 2000)
    random = np.random.default_rng(0)
    check_mapie(random)
    if options.delay:
        print_delays(draws)
        return
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
            print(
                f"{at_most},{rate},{looks},{','.join(f'{s:.4f}' for s in shares)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
