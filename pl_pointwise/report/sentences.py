"""What is to be done about how a run ended: its sentences, the most important first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..formulations import Formulation
from .closing_table import Closing, Conditions, RequirementRow
from .columns import counted, number_text
from .history import History

FEW_STEPS = 30
"""Fewer say little of a bound that is missed."""
GROWN = 30.0
"""By this factor the weights of no sound run grow: the learning rate is named."""
RUINED = 100.0
"""By this factor the largest violation of no sound run rises."""
DEARER = 2.0
"""The factor by which the objective has risen where a sentence says so."""
STARTS_AT_0 = 0.01
"""An objective below this part of its last value started at its minimum."""
STILL = 1e-3
"""A relative change below which nothing has moved."""


def warnings_of(
    closing: Closing,
    history: History,
    formulations: Mapping[str, Formulation],
    multipliers: Mapping[str, Tensor],
    conditions: Conditions,
) -> Iterator[str]:
    """What calls for an answer: something is wrong, or a requirement asks for nothing."""
    # First, as every number below is of the samples that were left.
    if conditions.skipped or conditions.left_out:
        yield _on_lost_steps(conditions)
    cause = _likelier_cause(closing, history, conditions)
    if cause:
        yield cause
    if closing.rows and not any(row.of for row in closing.rows):
        names = ", ".join(row.name for row in closing.rows)
        yield f"{names} applied to no sample: membership() leaves all out, or there are none."
    for row in closing.rows:
        yield from _on_requirement(row, history, formulations, multipliers, bool(cause))
    yield from _held_out_above_training(closing)
    yield from conditions.of_task


def remarks_of(
    closing: Closing, history: History, conditions: Conditions
) -> Iterator[str]:
    """What is good to know: what the requirements cost, and what more steps would still change."""
    if not _likelier_cause(closing, history, conditions):
        yield from _on_objective(closing)
    yield from _still_falling(closing, history, conditions)


def _on_lost_steps(conditions: Conditions) -> str:
    """On samples that were left out, and steps that were skipped."""
    losses = []
    if conditions.left_out:
        losses.append(f"left samples out {counted(conditions.left_out, 'time')}")
    if conditions.skipped:
        losses.append(f"skipped {counted(conditions.skipped, 'step')} whole")
    return (
        f"Values that were not finite, or masks without a sample, {' and '.join(losses)}: look at "
        "these records, or lower the learning rate."
    )


def _on_objective(closing: Closing) -> Iterator[str]:
    """On one that rose; that starts at its minimum, as a distance from the start, can only rise."""
    first, last, _ = closing.objective
    if first is None or last is None or first < STARTS_AT_0 * last:
        return
    if last > DEARER * first > 0:
        yield (
            f"The objective rose from {number_text(first)} to {number_text(last)}: that is what "
            "the requirements cost. A looser bound costs less."
        )


def _likelier_cause(closing: Closing, history: History, conditions: Conditions) -> str:
    """The learning rate or the number of steps, where one of them explains what went wrong."""
    first, last, _ = closing.objective
    violated = sum(row.beyond for row in closing.rows)
    rate = (
        "The learning rate"
        if conditions.rate is None
        else f"The learning rate {conditions.rate:g}"
    )
    risen = first is not None and last is not None and last > first
    grown = conditions.growth is not None and conditions.growth > GROWN
    # Samples that are exempt may go as far as they like.
    bounded = [
        name for name, bound in history.constraints.items() if bound.share is None
    ]
    worse = [name for name in bounded if _worsened(history, name)]
    # Weights that only grow are no fault where the run reached what it was to reach.
    if worse or (grown and (violated or risen)):
        signs = []
        if worse:
            signs.append(
                f"the violations of {worse[0]} are far larger than at the start"
            )
        if grown:
            signs.append(
                f"the weights are {conditions.growth:,.0f} times as large as at the start"
            )
        if risen:
            signs.append(
                f"the objective rose from {number_text(first)} to {number_text(last)}"
            )
        return f"{rate} is likely too high: {', and '.join(signs)}. Take a tenth of it, or less."
    if not violated:
        return ""
    if history.steps < FEW_STEPS:
        return (
            f"{counted(history.steps, 'step')} in all {'is' if history.steps == 1 else 'are'} too "
            f"few to meet a bound: {conditions.longer}."
        )
    if _stood_still(history):
        return (
            f"Nothing moved in {history.steps:,} steps: objective and violations are what they "
            f"were. {rate} is likely too small, or the trained weights have no part in the values."
        )
    return ""


def _worsened(history: History, name: str) -> bool:
    """Whether the largest violation is far above that of the first step."""
    start = history.start_worst.get(name, 0.0)
    last = history.last[name]
    last = last[~last.isnan()]
    return len(last) > 0 and float(last.max()) > RUINED * start > 0


def _stood_still(history: History) -> bool:
    """Whether no violation changed between the first and the last visit of a sample."""
    # Known only of a whole run over samples with a place, each of which came twice.
    if history.partial or not history.samples or history.rows < 2 * history.samples:
        return False
    moved = False
    for name, first in history.first.items():
        known = ~(first.isnan() | history.last[name].isnan())
        before = first[known].double()
        after = history.last[name][known].double()
        moved |= bool((after - before).abs().sum() > STILL * before.abs().sum())
    return not moved


def _on_requirement(
    row: RequirementRow,
    history: History,
    formulations: Mapping[str, Formulation],
    multipliers: Mapping[str, Tensor],
    explained: bool,
) -> Iterator[str]:
    """On one that applied to nothing, that never acted, or that every sample violates."""
    if not row.of:
        return
    formulation = formulations.get(row.name)
    table = multipliers.get(row.name)
    # An equality is missed by a hair by every sample: neither sentence would say anything of it.
    if formulation is None or history.constraints[row.name].is_equality:
        return
    idle = (table is None or not table.any()) and not formulation.acts_below_the_bound
    what = "group" if row.by_group else "sample"
    if row.name not in history.ever and idle:
        yield (
            f"{row.name} never acted, as no {what} violated it at any time: this run is one with "
            "formulation: null."
        )
    # A learning rate or too few steps explain that already, and are the likelier cause.
    elif row.violated == row.of and not explained:
        yield (
            f"{row.name} is violated by every {what}: its bound is out of reach, the epochs were "
            "too few, or it is the wrong way round (at_most for at_least). See docs/settings.md."
        )


def _held_out_above_training(closing: Closing) -> Iterator[str]:
    """On requirements that new samples violate far more often than those of training."""
    for row in closing.rows:
        if (
            not row.held_of
            or not row.of
            or row.held_violated is None
            or row.violated is None
        ):
            continue
        if not row.held_beyond:
            continue
        held = row.held_violated / row.held_of
        trained = row.violated / row.of
        # Of few samples the shares differ by chance: twice as many, and a tenth of all more.
        if held > 2 * trained and held > trained + 0.1:
            yield (
                f"Held out, {row.name} is violated by {row.held_violated:,} of {row.held_of:,} "
                f"(worst {number_text(row.held_worst)}), in training by {row.violated:,} of "
                f"{row.of:,}: what the training samples learnt does not hold for new ones. Give "
                "more and more varied samples, a stricter bound, or fewer epochs."
            )


def _still_falling(
    closing: Closing, history: History, conditions: Conditions
) -> Iterator[str]:
    """On violations that a longer run would likely lower further."""
    curves = history.curves()
    quarter = len(curves.steps) // 4
    # Two points a quarter at least, or a difference is chance.
    if quarter < 2:
        return
    for row in closing.rows:
        if not row.beyond:
            continue
        # The last quarter of the run beside the one before it.
        shares = torch.tensor(curves.violated[row.name][-2 * quarter :])
        before = shares[:quarter].nanmean()
        after = shares[quarter:].nanmean()
        if after < 0.8 * before:
            yield f"The violations of {row.name} were still falling: {conditions.longer}."
