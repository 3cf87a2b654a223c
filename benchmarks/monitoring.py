"""How often a monitor that is looked at again and again gives an alarm, with and without a cause.

    pip install --no-deps mapie==1.6.0
    python benchmarks/monitoring.py

A stream is 200 looks, each at 20 new samples that violate with a given probability; the requirement
allows .05 (and .01, .2), the error of all looks .05. Beside ``pl_pointwise.requirements.anytime``:
a binomial test at 5 % in every look, over all samples so far, as before; and MAPIE's
RiskMonitoring with the threshold stated. Printed: the share of streams with an alarm, and the
median number of samples until it. The last lines are of drift: 200 normal values, then others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.stats import binom

from pl_pointwise.requirements.anytime import Drift, MeanAbove

LOOKS, BATCH, DELTA = 200, 20, 0.05


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
    """RiskMonitoring of the misclassified, with ``at_most`` as its threshold."""

    def __init__(self, at_most: float) -> None:
        from mapie.exchangeability_testing import RiskMonitoring
        from mapie.risk_control import BinaryRisk

        error = BinaryRisk(
            risk_occurrence=lambda y_true, y_pred: y_true != y_pred,
            risk_condition=lambda y_true, y_pred: np.repeat(True, len(y_true)),
            higher_is_better=False,
        )
        self.monitor = RiskMonitoring(error, test_level=DELTA, threshold=at_most, warn=False)

    def add(self, losses: Any) -> None:
        self.monitor.update(np.ones(len(losses), int), 1 - np.asarray(losses, int))

    @property
    def p_value(self) -> float:
        return 0.0 if self.monitor.harmful_shift_detected else 1.0


def alarms(
    make: Callable[[], Any], draw: Callable[[int], Any], draws: int, looks: int = LOOKS
) -> str:
    """The share of streams with an alarm, and after how many samples half of these gave it."""
    when = []
    for _ in range(draws):
        test = make()
        for look in range(looks):
            test.add(draw(BATCH))
            if test.p_value <= DELTA:
                when.append((look + 1) * BATCH)
                break
    after = f", after {np.median(when):.0f}" if when else ""
    return f"{len(when) / draws:.3f}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--mapie-draws", type=int, default=200, help="it takes most of the time")
    arguments = parser.parse_args()
    random = np.random.default_rng(0)
    print("| required | violated | anytime | a test in every look | MAPIE |\n|---|---|---|---|---|")
    for at_most, rate in (
        *((0.01, 0.01), (0.05, 0.05), (0.2, 0.2)),
        *((0.05, 0.08), (0.05, 0.1), (0.05, 0.2)),
    ):

        def draw(n: int, rate: float = rate) -> Any:
            return (random.random(n) < rate).astype(float)

        cells = [
            alarms(lambda: kind(at_most), draw, draws)  # noqa: B023
            for kind, draws in (
                (MeanAbove, arguments.draws),
                (EveryLook, arguments.draws),
                (Mapie, arguments.mapie_draws),
            )
        ]
        print(f"| {at_most} | {rate} | {' | '.join(cells)} |", flush=True)
    for name, shift, scale in (("none", 0, 1), ("+.5", 0.5, 1), ("× 2", 0, 2)):
        found = alarms(
            lambda: Drift(random.normal(size=200).tolist()),
            lambda n: (shift + scale * random.normal(size=n)).tolist(),  # noqa: B023
            arguments.draws // 10,
        )
        print(f"drift {name}: {found}", flush=True)


if __name__ == "__main__":
    main()
