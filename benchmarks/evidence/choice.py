"""Which setting of each method is judged: the best on validation data within a common budget.

The budget bounds the objective. It is a quantile of the objectives that the settings of all tuned
methods reach, where every method weighs the same however many settings it has: so no method sets
the budget by which it is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .grids import Entry

Criterion = Literal["cvar95", "violated"]


@dataclass(frozen=True)
class Measured:
    """What one run of a method's setting reached on held-out data; lower is better in each.

    ``cvar95`` and ``violated`` are means over the task's constraints.
    """

    entry: Entry
    seed: int
    objective: float
    cvar95: float
    violated: float


@dataclass(frozen=True)
class Choice:
    """The setting of one method under one budget.

    Attributes:
        quantile, budget: the rule, and the objective it allows.
        criterion: what was minimised on validation data.
        validation: what that setting reached there.
    """

    quantile: float
    budget: float
    criterion: Criterion
    validation: Measured


def budgets(
    tuned: Sequence[Measured], quantiles: Iterable[float]
) -> dict[float, float]:
    """Returns the objective allowed at each quantile: the least with at least that share below.

    Runs whose objective is not finite count as above every budget.

    Raises:
        ValueError: no method was tuned.
    """
    counts: dict[str, int] = {}
    for run in tuned:
        counts[run.entry.method] = counts.get(run.entry.method, 0) + 1
    if not counts:
        raise ValueError("No method that is tuned has a finished run.")
    ordered = sorted(tuned, key=lambda run: _last_if_nan(run.objective))
    weights = [1 / counts[run.entry.method] / len(counts) for run in ordered]
    shares = np.cumsum(weights)
    found = {}
    for quantile in quantiles:
        place = int(np.searchsorted(shares, quantile - 1e-9))
        found[quantile] = ordered[min(place, len(ordered) - 1)].objective
    return found


def choose(
    tuned: Sequence[Measured],
    quantiles: Iterable[float],
    criteria: Iterable[Criterion] = ("cvar95",),
) -> list[Choice]:
    """Returns for every budget, criterion and method the best setting, if one keeps the budget.

    tuned: the runs of methods that have something to tune, on the validation part.
    Ties go to the other criterion, then to the lower objective.
    """
    criteria = list(criteria)
    choices = []
    for quantile, budget in budgets(tuned, quantiles).items():
        for criterion in criteria:
            for runs in by_method(tuned).values():
                within = [run for run in runs if run.objective <= budget]
                if within:
                    best = min(within, key=lambda run: _rank(run, criterion))
                    choices.append(Choice(quantile, budget, criterion, best))
    return choices


def grouped(choices: Iterable[Choice]) -> dict[tuple[float, str], list[Choice]]:
    """Returns the choices by budget's quantile and criterion."""
    found: dict[tuple[float, str], list[Choice]] = {}
    for choice in choices:
        found.setdefault((choice.quantile, choice.criterion), []).append(choice)
    return found


def best_of(choices: Sequence[Choice], role: str) -> Choice | None:
    """Returns the choice that was best on validation data among the methods of a role.

    choices: those of one budget and criterion.
    """
    found = [choice for choice in choices if choice.validation.entry.role == role]
    return min(found, key=lambda c: _rank(c.validation, c.criterion)) if found else None


def by_method(runs: Iterable[Measured]) -> Mapping[str, list[Measured]]:
    found: dict[str, list[Measured]] = {}
    for run in runs:
        found.setdefault(run.entry.method, []).append(run)
    return found


def _rank(run: Measured, criterion: Criterion) -> tuple[float, float, float]:
    first, second = run.cvar95, run.violated
    if criterion == "violated":
        first, second = second, first
    return _last_if_nan(first), _last_if_nan(second), _last_if_nan(run.objective)


def _last_if_nan(value: float) -> float:
    return np.inf if np.isnan(value) else value
