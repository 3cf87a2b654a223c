"""How often ``check`` and ``compare --require`` say yes, where they must not and where they should.

    python benchmarks/verdicts.py > verdicts.csv

A new model and its predecessor meet a requirement, and have a metric, on the same inputs; which
ones is drawn anew 2,000 times. In the first lines one requirement is exactly at its bound, so that
a yes is wrong: at most .05 of the draws may end in one. In the others all hold with room, and a yes
is right. Beside it, on the same draws: a paired bootstrap, yes where the upper 95 % limit of the
mean (500 resamples, percentiles) is within the bound, and the bare numbers, yes where the mean is.

The last cases are of ten candidates beside one predecessor, which fail on the same inputs: a
Gaussian copula, .7 of which is the input's. ``compare --require`` orders them on one split and
tests on another of the same size; a yes is any model chosen. Beside it: any of the ten that passes
on the second split, by its bootstrap or by its mean.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from pl_pointwise.requirements import Candidate, Requirement, select
from pl_pointwise.requirements.p_values import p_value

Array = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], list[Array]]
RESAMPLES = 500


def violations(share: float, random: np.random.Generator, n: int) -> Array:
    return np.where(random.random(n) < share, 1.0, -1.0)


def lost(share: float, start: float = 0.2) -> Draw:
    """Losses of "lost(v) <= 0.05" where so many inputs are lost of those that were met."""

    def draw(random: np.random.Generator, n: int) -> list[Array]:
        before = violations(start, random, n)
        now = np.where(before > 0, before, violations(share / (1 - start), random, n))
        return [Requirement.parse("lost(v) <= 0.05").losses(now, before)]

    return draw


def lost_in_units(share: float) -> Draw:
    """The same with two samples a unit, which are lost together half the time; the worst counts."""

    def draw(random: np.random.Generator, n: int) -> list[Array]:
        single = 1 - np.sqrt(1 - share)
        both = random.random(n) < 0.5
        first = random.random(n) < np.where(both, share, single)
        second = np.where(both, first, random.random(n) < np.where(both, share, single))
        return [np.maximum(first, second).astype(float)]

    return draw


def worse(drop: float) -> Draw:
    """Losses of "mrr >= predecessor - 0.05" where the mean falls by so much; most do not change."""

    def draw(random: np.random.Generator, n: int) -> list[Array]:
        before = random.choice([0.25, 0.5, 1.0], n)
        falls = random.random(n) < drop / (1.25 / 3)  # By .25, .5 and .5.
        now = np.where(falls, before - np.minimum(before, 0.5), before)
        requirement = Requirement.parse("mrr >= predecessor - 0.05")
        return [requirement.losses(now, before)]

    return draw


def all_of(*draws: Draw) -> Draw:
    return lambda random, n: [losses for draw in draws for losses in draw(random, n)]


def violated(share: float) -> Draw:
    def draw(random: np.random.Generator, n: int) -> list[Array]:
        now = violations(share, random, n)
        return [Requirement.parse("v: violated <= 0.3").losses(now, None)]

    return draw


BOUNDS = {"lost": 0.05, "worse": 0.525, "violated": 0.3}
CASES: dict[str, tuple[list[str], Draw]] = {
    "wrong: 5 % lost": (["lost"], lost(0.05)),
    "wrong: 5 % of units lost": (["lost"], lost_in_units(0.05)),
    "wrong: the metric .05 lower": (["worse"], worse(0.05)),
    "wrong: 30 % violated": (["violated"], violated(0.3)),
    "wrong: three required, one at its bound": (
        ["lost", "worse", "violated"],
        all_of(lost(0.05), worse(0.0), violated(0.2)),
    ),
    "right: nothing lost": (["lost"], lost(0.0)),
    "right: 2 % lost": (["lost"], lost(0.02)),
    "right: the metric as before": (["worse"], worse(0.0)),
    "right: the metric .02 lower": (["worse"], worse(0.02)),
    "right: three required, all with room": (
        ["lost", "worse", "violated"],
        all_of(lost(0.02), worse(0.0), violated(0.2)),
    ),
}


CANDIDATES = 10
Shares = dict[str, list[float]]
"""Of each candidate, by what is required."""


def alike(random: np.random.Generator, n: int) -> Array:
    """(n, 10), even in [0, 1], alike between candidates."""
    own = random.normal(size=(n, CANDIDATES))
    return ndtr(np.sqrt(0.7) * random.normal(size=(n, 1)) + np.sqrt(0.3) * own)


def losses_of_ten(shares: Shares, random: np.random.Generator, n: int) -> list[Array]:
    """(n, 10) by requirement: as of :func:`lost`, :func:`lost_in_units`, :func:`worse`."""
    found = []
    for kind, share in shares.items():
        rates = np.array(share)
        if kind == "lost":
            before = violations(0.2, random, n)[:, None]
            now = np.where(alike(random, n) < rates / 0.8, 1.0, before)
            found.append(Requirement.parse("lost(v) <= 0.05").losses(now, before))
        elif kind == "units":
            both = random.random((n, 1)) < 0.5
            each = np.where(both, rates, 1 - np.sqrt(1 - rates))
            first = alike(random, n) < each
            second = np.where(both, first, alike(random, n) < each)
            found.append(np.maximum(first, second).astype(float))
        elif kind == "worse":
            before = random.choice([0.25, 0.5, 1.0], (n, 1))
            falls = alike(random, n) < rates / (1.25 / 3)
            now = np.where(falls, before - np.minimum(before, 0.5), before)
            found.append(
                Requirement.parse("mrr >= predecessor - 0.05").losses(now, before)
            )
        else:
            now = np.where(alike(random, n) < rates, 1.0, -1.0)
            found.append(Requirement.parse("v: violated <= 0.3").losses(now))
    return found


OF_TEN: dict[str, Shares] = {
    "wrong: ten candidates, all lose 5 %": {"lost": [0.05] * 10},
    "wrong: ten candidates, all lose 5 % of units": {"units": [0.05] * 10},
    "wrong: ten candidates, three required, one at its bound": {
        "lost": [0.05] * 4 + [0.01] * 6,
        "worse": [0.0] * 4 + [0.05] * 3 + [0.0] * 3,
        "violated": [0.2] * 7 + [0.3] * 3,
    },
    "right: ten candidates, all lose 2 %": {"lost": [0.02] * 10},
    "right: ten candidates, three required, all with room": {
        "lost": [0.02] * 10,
        "worse": [0.0] * 10,
        "violated": [0.2] * 10,
    },
}


def said_of_ten(
    shares: Shares, random: np.random.Generator, n: int
) -> tuple[bool, bool, bool]:
    """Whether a model is chosen: by ``select``, by the bootstrap, by the bare numbers."""
    before, after = (losses_of_ten(shares, random, n) for _ in range(2))
    objectives = random.normal(size=CANDIDATES)
    bounds = [BOUNDS["lost" if kind == "units" else kind] for kind in shares]
    candidates = [
        Candidate(
            str(k), objectives[k], [x[:, k] for x in before], [x[:, k] for x in after]
        )
        for k in range(CANDIDATES)
    ]
    weights = random.multinomial(n, np.full(n, 1 / n), RESAMPLES) / n
    limits = [np.quantile(weights @ losses, 0.95, axis=0) for losses in after]
    means = [losses.mean(0) for losses in after]
    return (
        select(candidates, bounds).position is not None,
        bool(np.all([x <= b for x, b in zip(limits, bounds, strict=True)], 0).any()),
        bool(np.all([x <= b for x, b in zip(means, bounds, strict=True)], 0).any()),
    )


def by_bootstrap(losses: Array, bound: float, random: np.random.Generator) -> bool:
    means = random.choice(losses, (RESAMPLES, len(losses))).mean(1)
    return bool(np.quantile(means, 0.95) <= bound)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=2000)
    args = parser.parse_args()
    print("case,inputs,pl-pointwise,paired bootstrap,bare numbers")
    for name, (kinds, draw) in CASES.items():
        for n in (100, 400):
            random, said = np.random.default_rng(0), np.zeros(3)
            for _ in range(args.draws):
                each = [
                    (losses, BOUNDS[kind])
                    for losses, kind in zip(draw(random, n), kinds, strict=True)
                ]
                said += (
                    all(
                        p_value(x, b, 0.95, kind != "worse") <= 0.05
                        for (x, b), kind in zip(each, kinds, strict=True)
                    ),
                    all(by_bootstrap(x, b, random) for x, b in each),
                    all(x.mean() <= b for x, b in each),
                )
            show(name, n, said / args.draws)
    for name, shares in OF_TEN.items():
        for n in (100, 400):
            random = np.random.default_rng(0)
            found = [said_of_ten(shares, random, n) for _ in range(args.draws)]
            show(name, n, np.mean(found, 0))


def show(name: str, n: int, said: Array) -> None:
    print(f'"{name}",{n},{",".join(f"{share:.3f}" for share in said)}', flush=True)


if __name__ == "__main__":
    main()
