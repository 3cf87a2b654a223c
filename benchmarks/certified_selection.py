"""How often the model chosen by a selection fails its requirement, though it has a certificate.

    pip install mapie==1.6.0        (optional: its lines are left out without it)
    python benchmarks/certified_selection.py

For each problem, number of samples n and draw: ten candidates are measured on a selection split and
on a certification split, and each procedure chooses one of them, or none. A certificate is false if
the chosen model's true rate is above a requirement. Candidates violate on the same inputs: a
Gaussian copula, of which the input's difficulty is ``SHARED``. A lower objective costs a higher
rate. Printed per procedure: the share of draws with a false certificate and its standard error, the
share with any certificate, the mean true objective of the chosen models (lower is better).

    select              pl_pointwise.requirements.select, on both splits
    … selection n/2     the same, its first p-values from half of the selection split
    Holm, Bonferroni    the same p-values, certification split alone; of those certified, the best
    Holm, both splits   the same of both splits as one, which is right if nothing else has used them
    naive               of those with a share of at most the requirement on the certification split,
                        the best
    naive, own bounds   of those whose own bound at 95 % is at most the requirement, the best
    MAPIE               control_fwer of its Hoeffding–Bentkus p-values: Holm (its default) on the
                        certification split, or on both splits as one, and split_fixed_sequence with
                        the order that its controllers learn on the selection split

One core, minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr
from scipy.stats import binom

from pl_pointwise.requirements.p_values import p_value
from pl_pointwise.requirements.selection import Candidate, select

Array = NDArray[np.float64]
Choice = int | None
DELTA = 0.05
SHARED = 0.7
RATES = np.array([0.04, 0.055, 0.07, 0.08, 0.09, 0.104, 0.11, 0.12, 0.13, 0.15])


@dataclass(frozen=True)
class Requirement:
    """One mean of losses; each candidate's true one."""

    at_most: float
    means: Array
    """(m,)."""
    share: float = 1.0
    """Of the inputs that are of its category."""
    zero_one: bool = True


@dataclass(frozen=True)
class Problem:
    name: str
    requirements: Sequence[Requirement]

    @property
    def objectives(self) -> Array:
        """(m,), the true ones: a higher rate buys a lower objective."""
        return 1 - 3 * self.requirements[0].means

    @property
    def fails(self) -> NDArray[np.bool_]:
        """(m,), whether a candidate fails any requirement."""
        return np.any([each.means > each.at_most for each in self.requirements], axis=0)

    def draw(self, generator: np.random.Generator, n: int) -> list[Array]:
        """Returns the losses of a split per requirement, each (its n, m)."""
        found = []
        where = np.zeros(n, dtype=bool)
        latent = self._latent(generator, n)
        first = 0
        for each in self.requirements:
            # Categories share no input; requirements of all inputs are about the same ones.
            count = round(each.share * n)
            where[:] = False
            where[first : first + count] = True
            first = (first + count) % n
            uniform = ndtr(latent[where])
            if each.zero_one:
                found.append((uniform > 1 - each.means).astype(float))
            else:  # Beta(1, b) of mean 1 / (1 + b).
                found.append(1 - (1 - uniform) ** (each.means / (1 - each.means)))
        return found

    def _latent(self, generator: np.random.Generator, n: int) -> Array:
        difficulty = generator.normal(size=(n, 1))
        own = generator.normal(size=(n, len(self.objectives)))
        return math.sqrt(SHARED) * difficulty + math.sqrt(1 - SHARED) * own


def problems() -> list[Problem]:
    values = np.array([0.14, 0.15, 0.16, 0.17, 0.21, 0.18, 0.19, 0.19, 0.21, 0.22])
    few = np.array([0.08, 0.11, 0.14, 0.15, 0.17, 0.19, 0.21, 0.23, 0.25, 0.3])
    return [
        Problem("one requirement", [Requirement(0.1, RATES)]),
        Problem(
            "all just above it", [Requirement(0.1, np.linspace(0.1001, 0.101, 10))]
        ),
        Problem(
            "a rate and a metric in [0, 1]",
            [Requirement(0.1, RATES), Requirement(0.2, values, zero_one=False)],
        ),
        Problem(
            "two categories, 70 % and 30 %",
            [Requirement(0.1, RATES, share=0.7), Requirement(0.2, few, share=0.3)],
        ),
    ]


@dataclass(frozen=True)
class Draw:
    """Both splits, per requirement (its n, m), and the objectives measured on the first."""

    problem: Problem
    selection: list[Array]
    certification: list[Array]
    objectives: Array
    listed: NDArray[np.int64]
    """The candidates in an order that says nothing of them."""

    @classmethod
    def of(cls, problem: Problem, generator: np.random.Generator, n: int) -> Draw:
        noise = 0.1 / math.sqrt(n) * generator.normal(size=len(problem.objectives))
        selection = problem.draw(generator, n)
        certification = problem.draw(generator, n)
        listed = generator.spawn(1)[0].permutation(len(noise))
        return cls(
            problem, selection, certification, problem.objectives + noise, listed
        )

    @property
    def rates(self) -> list[float]:
        return [each.at_most for each in self.problem.requirements]

    def candidates(self, shorter: int = 1) -> list[Candidate]:
        return [
            Candidate(
                str(each),
                float(self.objectives[each]),
                [losses[::shorter, each] for losses in self.selection],
                [losses[:, each] for losses in self.certification],
            )
            for each in range(len(self.objectives))
        ]

    def best(self, among: Iterable[int]) -> Choice:
        return min(among, key=lambda each: self.objectives[each], default=None)


def by_selection(draw: Draw) -> dict[str, Choice]:
    """Returns what ``select`` chooses, and what the p-values beside it would."""
    whole = select(draw.candidates(), draw.rates, 1 - DELTA)
    half = select(draw.candidates(shorter=2), draw.rates, 1 - DELTA)
    found: dict[str, Choice] = {
        "select": whole.position,
        "select, selection n/2": half.position,
    }
    p = [tested.p for tested in whole.tested]
    found["Holm"] = draw.best(np.flatnonzero(holm(p, DELTA)).tolist())
    found["Bonferroni"] = draw.best(
        np.flatnonzero(np.array(p) <= DELTA / len(p)).tolist()
    )
    return found


def holm(p_values: Sequence[float], delta: float) -> list[bool]:
    """Returns which are rejected: in rising order, the i-th at δ / (m − i), until one is not."""
    order = np.argsort(p_values, kind="stable")
    bars = delta / np.arange(len(order), 0, -1)
    passed = np.zeros(len(order), dtype=bool)
    passed[order] = np.cumprod(np.array(p_values)[order] <= bars).astype(bool)
    return passed.tolist()


def by_one_split(draw: Draw) -> dict[str, Choice]:
    """Returns what Holm chooses with both splits as one certification split."""
    both = [
        np.concatenate(each)
        for each in zip(draw.selection, draw.certification, strict=True)
    ]
    p = [
        max(
            p_value(losses[:, each], requirement.at_most, zero_one=requirement.zero_one)
            for losses, requirement in zip(both, draw.problem.requirements, strict=True)
        )
        for each in range(len(draw.objectives))
    ]
    return {"Holm, both splits": draw.best(np.flatnonzero(holm(p, DELTA)).tolist())}


def naively(draw: Draw) -> dict[str, Choice]:
    """Returns the picks from one split, by its shares and by each candidate's own bound."""
    numbers = range(len(draw.objectives))
    met = np.all(
        [
            each.mean(0) <= rate
            for each, rate in zip(draw.certification, draw.rates, strict=True)
        ],
        0,
    )
    bounded = np.all(
        [
            binom.cdf(each.sum(0), len(each), requirement.at_most) <= DELTA
            if requirement.zero_one
            else [
                p_value(each[:, number], requirement.at_most) <= DELTA
                for number in numbers
            ]
            for each, requirement in zip(
                draw.certification, draw.problem.requirements, strict=True
            )
        ],
        0,
    )
    return {
        "naive": draw.best(int(each) for each in np.flatnonzero(met)),
        "naive, own bounds": draw.best(int(each) for each in np.flatnonzero(bounded)),
    }


def by_mapie(draw: Draw) -> dict[str, Choice]:
    """Returns what MAPIE's control of the family-wise error chooses; {} without MAPIE."""
    try:
        from mapie.risk_control.fwer_control import control_fwer
        from mapie.risk_control.methods import compute_hoeffding_bentkus_p_value
    except ImportError:
        return {}

    def p_values(splits: list[list[Array]]) -> Array:
        """(R, m)."""
        found = []
        for number, requirement in enumerate(draw.problem.requirements):
            losses = np.concatenate([split[number] for split in splits])
            mean, n = losses.mean(0), len(losses)
            p = compute_hoeffding_bentkus_p_value(
                mean, n, requirement.at_most, binary=requirement.zero_one
            )
            found.append(p[:, 0])
        return np.array(found)

    p = p_values([draw.certification]).max(0)
    both = p_values([draw.selection, draw.certification]).max(0)
    before = p_values([draw.selection])[:, draw.listed]
    # As its controllers learn it: for each β of a grid the candidate whose p-values are nearest,
    # the first of several.
    grid = np.logspace(-25, 0, 1000)
    nearest = np.abs(before[:, :, None] - grid).max(0).argmin(0)
    order = draw.listed[list(dict.fromkeys(nearest.tolist()))].tolist()
    in_order = control_fwer(p[order], DELTA, "split_fixed_sequence")
    return {
        "MAPIE, Holm": draw.best(control_fwer(p, DELTA).tolist()),
        "MAPIE, Holm, both splits": draw.best(control_fwer(both, DELTA).tolist()),
        "MAPIE, split_fixed_sequence": draw.best(order[each] for each in in_order),
    }


PROCEDURES: Sequence[Callable[[Draw], dict[str, Choice]]] = (
    by_selection,
    by_one_split,
    naively,
    by_mapie,
)


def choices(
    problem: Problem,
    n: int,
    draws: int,
    procedures: Sequence[Callable[[Draw], dict[str, Choice]]] = PROCEDURES,
) -> dict[str, list[Choice]]:
    """Returns each procedure's choice in each draw."""
    generator = np.random.default_rng(n)
    found: dict[str, list[Choice]] = {}
    for _ in range(draws):
        draw = Draw.of(problem, generator, n)
        for procedure in procedures:
            for name, choice in procedure(draw).items():
                found.setdefault(name, []).append(choice)
    return found


def false_share(problem: Problem, chosen: Sequence[Choice]) -> float:
    """Returns the share of draws whose chosen model fails a requirement."""
    return float(
        np.mean([each is not None and bool(problem.fails[each]) for each in chosen])
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--draws", type=int, default=2000)
    arguments = parser.parse_args()
    if importlib.util.find_spec("mapie") is None:
        print("MAPIE is not installed: its lines are left out.", file=sys.stderr)
    print(
        "| problem | n | procedure | false | s.e. | any | objective |\n|" + "---|" * 7
    )
    for problem in problems():
        for n in arguments.samples:
            for name, chosen in choices(problem, n, arguments.draws).items():
                wrong = false_share(problem, chosen)
                error = math.sqrt(wrong * (1 - wrong) / len(chosen))
                there = [each for each in chosen if each is not None]
                mean = f"{problem.objectives[there].mean():.3f}" if there else "–"
                cells = f"{wrong:.3f} | {error:.3f} | {len(there) / len(chosen):.3f} | {mean}"
                print(f"| {problem.name} | {n} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
