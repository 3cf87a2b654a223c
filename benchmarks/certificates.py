"""How often the bound on the 95th percentile of violations holds, and how far above it lies.

    python benchmarks/certificates.py

For each distribution and number of samples n, 1,000 times: n values are drawn, and the bound of
``quantile_bound`` at 95 % confidence is compared with the true 95th percentile. Printed: the share
of bounds at or above it, and by how much they are above it on average. One core, seconds.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from pl_pointwise.certificates import quantile_bound

LEVEL = 0.95


Distribution = tuple[
    str, Callable[[np.random.Generator, int], NDArray[np.float64]], float
]
"""Its name, how to draw n values, and the true quantile."""


def distributions() -> list[Distribution]:
    """Tails from none to heavy."""
    z, rest = float(stats.norm.ppf(LEVEL)), 1 - LEVEL
    tenth = 1 - rest ** (1 / 9)  # F(t) = 1 − (1 − t)⁹
    return [
        ("uniform", lambda r, n: r.uniform(size=n), LEVEL),
        ("normal", lambda r, n: r.normal(size=n), z),
        ("exponential", lambda r, n: r.exponential(size=n), -math.log(rest)),
        ("log-normal", lambda r, n: r.lognormal(size=n), math.exp(z)),
        (
            "Student's t, 3 degrees",
            lambda r, n: r.standard_t(3, size=n),
            stats.t(3).ppf(LEVEL),
        ),
        ("Beta(1, 9)", lambda r, n: r.beta(1, 9, size=n), tenth),
    ]


def bounds_table(samples: list[int], draws: int) -> None:
    print("| distribution | n | quantile covers | mean excess |\n|---|---|---|---|")
    for name, draw, quantile in distributions():
        for n in samples:
            generator = np.random.default_rng(n)
            drawn = [draw(generator, n) for _ in range(draws)]
            excess = np.array([quantile_bound(each, LEVEL) for each in drawn])
            excess -= quantile
            cells = f"{(excess >= 0).mean():.3f} | {excess.mean():.3g}"
            print(f"| {name} | {n} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--samples", type=int, nargs="+", default=[100, 300, 1000, 3000]
    )
    parser.add_argument("--draws", type=int, default=1000)
    arguments = parser.parse_args()
    bounds_table(arguments.samples, arguments.draws)


if __name__ == "__main__":
    main()
