"""The closing table: what a run reached, on what, and what is to be done about it.

One place computes it for every way to train: the module, :class:`~pl_pointwise.PointwiseLoss` and
the mix-in for other trainers. At most three sentences follow the table, the most important first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..constraint import Constraint
from ..formulations import Formulation
from ..metrics import quantiles
from .history import History

SENTENCES = 3
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


@dataclass(frozen=True)
class RequirementRow:
    """One requirement at the end of a run; values are in the unit of its bound.

    Of an interval and of an equality a value is how far it is off.
    """

    name: str
    bound: str  #: in words, "≤ 0.05"
    violated: int | None  #: training samples that violate it at their last visit
    of: int | None
    worst: float | None
    most: float | None  #: the 95th percentile: 95 % of the samples are at this value or better
    held_violated: int | None = None
    held_of: int | None = None
    held_worst: float | None = None
    held_most: float | None = None
    multipliers: int | None = None  #: samples with λ ≠ 0; None without a λ for each
    multiplier: float | None = None  #: λ of a statistic of the batch
    price: float | None = None  #: loosening the bound by δ lowers the mean objective by price · δ


@dataclass(frozen=True)
class HeldOut:
    """What the last evaluation found on samples that were not trained on."""

    constraints: Mapping[str, Constraint]  #: the bounds it measured by
    worst: Mapping[str, Tensor]  #: by constraint (n,), each sample's largest violation
    objective: float | None = None
    step: int | None = None  #: of the training; None where that is not known


@dataclass(frozen=True)
class Conditions:
    """How the run was made, as far as it is known: for the likelier cause of what went wrong."""

    rate: float | None = None  #: the peak learning rate
    epochs: int | None = None
    growth: float | None = None  #: the norm of the trained weights over that at the start
    skipped: int = 0  #: steps without an update, as values were not finite
    left_out: int = 0  #: samples whose values were not finite
    longer: str = "train longer"  #: how
    not_trained: Sequence[str] = ()  #: what was not trained on, and why: a sentence each
    of_task: Sequence[str] = ()  #: sentences of the task's own, such as on answers that changed


@dataclass(frozen=True)
class Closing:
    """The end of a run; ``print`` shows it."""

    steps: int
    epochs: int | None
    objective: tuple[float | None, float | None, float | None]  #: first step, last, held out
    rows: list[RequirementRow]
    held_step: int | None = None
    sentences: list[str] = field(default_factory=list)  #: the most important first
    warnings: list[str] = field(default_factory=list)  #: those of them that call for an answer
    not_trained: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """Numbers and texts, for a file."""
        return asdict(self)

    @classmethod
    def from_plain(cls, found: Mapping[str, Any]) -> Closing:
        """What :meth:`plain` gave, read from JSON."""
        rows = [RequirementRow(**row) for row in found["rows"]]
        first, last, held_out = found["objective"]
        return cls(**{**found, "rows": rows, "objective": (first, last, held_out)})

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        held = any(row.held_of for row in self.rows) or self.objective[2] is not None
        epochs = "" if self.epochs is None else f" in {_counted(self.epochs, 'epoch')}"
        yield (
            f"After {_counted(self.steps, 'step')}{epochs}; training samples as they were at their "
            "last visit."
        )
        yield ""
        first, last, of_held = map(_number, self.objective)
        cells = [["", "first step", "last", "held out"], ["objective", first, last, of_held]]
        yield from _aligned([line if held else line[:3] for line in cells])
        if self.rows:
            yield ""
            yield from _aligned([line if held else line[:6] for line in self._requirements()])
        if held and self.held_step not in (None, self.steps):
            yield f"Held out: measured at step {self.held_step:,} of {self.steps:,}."
        if self.not_trained:
            yield ""
            yield from (f"Not trained on: {line}" for line in self.not_trained)
        if self.sentences:
            yield ""
            yield from (f"- {sentence}" for sentence in self.sentences)

    def _requirements(self) -> list[list[str]]:
        head = ["requirement", "violated", "worst", "95 % within", "λ > 0", "price"]
        lines = [[*head, "held out", "worst", "95 % within"]]
        # A role of no record is one that nobody asked for.
        for row in [row for row in self.rows if row.of] or self.rows:
            multiplier = "" if row.multipliers is None else f"on {row.multipliers:,}"
            if row.multiplier is not None:
                multiplier = _number(row.multiplier)
            lines.append(
                [
                    f"{row.name} {row.bound}",
                    _share(row.violated, row.of),
                    _number(row.worst),
                    _number(row.most),
                    multiplier,
                    _number(row.price),
                    _share(row.held_violated, row.held_of),
                    _number(row.held_worst),
                    _number(row.held_most),
                ]
            )
        return lines


def closing_of(
    history: History,
    formulations: Mapping[str, Formulation],
    multipliers: Mapping[str, Tensor],
    groups: Tensor | None = None,
    held_out: HeldOut | None = None,
    conditions: Conditions = Conditions(),
) -> Closing:
    """The closing table of what a history has read.

    Args:
        history: of the run.
        formulations: by constraint; none of one that is only measured.
        multipliers: λ by constraint, of samples or groups (N, K), of statistics () or (2,).
        groups: (N,), the group of each sample, where multipliers are of groups.
        held_out: of the last evaluation.
        conditions: how the run was made.
    """
    rows = []
    for name, constraint in history.constraints.items():
        row = _row(name, constraint, history.last[name])
        row = _with_multipliers(row, history, formulations.get(name), multipliers.get(name), groups)
        if held_out is not None and name in held_out.worst:
            of_held = _row(name, held_out.constraints[name], held_out.worst[name])
            row = replace(
                row,
                held_violated=of_held.violated,
                held_of=of_held.of,
                held_worst=of_held.worst,
                held_most=of_held.most,
            )
        rows.append(row)
    known = history.objective[~history.objective.isnan()]
    objective = (
        None if math.isnan(history.start) else history.start,
        float(known.double().mean()) if len(known) else None,
        held_out.objective if held_out else None,
    )
    closing = Closing(
        steps=history.steps,
        epochs=conditions.epochs,
        objective=objective,
        rows=rows,
        held_step=held_out.step if held_out else None,
        not_trained=[*conditions.not_trained, *_never_seen(history, conditions.left_out)],
    )
    warnings = list(_warnings(closing, history, formulations, multipliers, conditions))
    said = [*warnings, *_remarks(closing, history, conditions)]
    closing.warnings.extend(warnings[:SENTENCES])
    closing.sentences.extend(said[:SENTENCES])
    return closing


def _row(name: str, constraint: Constraint, worst: Tensor) -> RequirementRow:
    """Of the largest violation of each sample, (n,); NaN where none applies."""
    worst = worst[~worst.isnan()]
    if not len(worst):
        return RequirementRow(name, constraint.in_words(), None, None, None, None)
    return RequirementRow(
        name=name,
        bound=constraint.in_words(),
        violated=int((worst > 0).sum()),
        of=len(worst),
        worst=constraint.value_at(float(worst.max())),
        most=constraint.value_at(float(quantiles(worst, 0.95))),
    )


def _price(name: str, history: History) -> float | None:
    """The mean over samples and columns, of an interval the sum of its sides.

    Not of groups: a shared λ pushes samples that pull in opposite directions, whose forces cancel.
    """
    if name not in history.prices:
        return None
    found = history.prices.mean(name)
    return float(found.abs().mean()) * history.constraints[name].sides


def _with_multipliers(
    row: RequirementRow,
    history: History,
    formulation: Formulation | None,
    table: Tensor | None,
    groups: Tensor | None,
) -> RequirementRow:
    """With its λ, of samples or of a statistic, and its price."""
    count, value = None, None
    if formulation is not None and formulation.scope == "batch" and table is not None:
        value = float(table.abs().max())
    elif formulation is not None and formulation.scope == "sample" and history.samples:
        found = torch.zeros(0, 1) if table is None else table
        found = found[groups] if groups is not None and len(found) else found
        count = int(found.any(1).sum())
    price = _price(row.name, history) if row.of and groups is None else None
    return replace(row, multipliers=count, multiplier=value, price=price)


def _never_seen(history: History, left_out: int) -> Iterator[str]:
    """Samples of the training set that were in no step, or left out of every one."""
    missing = int((~history.seen).sum())
    if not missing or not history.steps or history.partial:
        return
    said = f"{missing:,} of {history.samples:,} training samples were in no step"
    if left_out:
        yield f"{said}: values that were not finite kept some of them out."
    elif history.rows >= 2 * history.samples:
        yield (
            f"{said}, which had {history.rows:,} rows in all. The index is the position of each "
            "sample in the training set, and samples their number: is one of them another?"
        )
    else:
        yield f"{said}: the run ended before, or the loader leaves them out."


# The sentences, in order of importance -----------------------------------------------------------


def _warnings(
    closing: Closing,
    history: History,
    formulations: Mapping[str, Formulation],
    multipliers: Mapping[str, Tensor],
    conditions: Conditions,
) -> Iterator[str]:
    if conditions.skipped or conditions.left_out:
        found = []
        if conditions.left_out:
            found.append(f"left samples out {_counted(conditions.left_out, 'time')}")
        if conditions.skipped:
            found.append(f"skipped {_counted(conditions.skipped, 'step')} whole")
        yield (
            f"Values that were not finite, or masks without a sample, {' and '.join(found)}: look "
            "at these records, or lower the learning rate."
        )
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


def _remarks(closing: Closing, history: History, conditions: Conditions) -> Iterator[str]:
    if not _likelier_cause(closing, history, conditions):
        yield from _on_objective(closing)
    yield from _still_falling(closing, history, conditions)


def _on_objective(closing: Closing) -> Iterator[str]:
    """On one that rose; that starts at its minimum, as a distance from the start, can only rise."""
    first, last, _ = closing.objective
    if first is None or last is None or first < STARTS_AT_0 * last:
        return
    if last > DEARER * first > 0:
        yield (
            f"The objective rose from {_number(first)} to {_number(last)}: that is what the "
            "requirements cost. A looser bound costs less."
        )


def _likelier_cause(closing: Closing, history: History, conditions: Conditions) -> str:
    """The learning rate or the number of steps, where one of them explains what went wrong."""
    first, last, _ = closing.objective
    violated = sum(row.violated or 0 for row in closing.rows)
    rate = (
        "The learning rate" if conditions.rate is None else f"The learning rate {conditions.rate:g}"
    )
    risen = first is not None and last is not None and last > first
    grown = conditions.growth is not None and conditions.growth > GROWN
    worse = [name for name in history.constraints if _worsened(history, name)]
    if worse or (grown and (violated or risen)):
        found = [f"the violations of {name} are far larger than at the start" for name in worse[:1]]
        if grown:
            found.append(f"the weights are {conditions.growth:,.0f} times as large as at the start")
        if risen:
            found.append(f"the objective rose from {_number(first)} to {_number(last)}")
        return f"{rate} is likely too high: {', and '.join(found)}. Take a tenth of it, or less."
    if not violated:
        return ""
    if history.steps < FEW_STEPS:
        return (
            f"{_counted(history.steps, 'step')} in all {'is' if history.steps == 1 else 'are'} too "
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
    start, last = history.start_worst.get(name, 0.0), history.last[name]
    last = last[~last.isnan()]
    return len(last) > 0 and float(last.max()) > RUINED * start > 0


def _stood_still(history: History) -> bool:
    """Whether no violation changed between the first and the last visit of a sample."""
    if history.partial or not history.samples or history.rows < 2 * history.samples:
        return False
    moved = False
    for name, first in history.first.items():
        known = ~(first.isnan() | history.last[name].isnan())
        before, after = first[known].double(), history.last[name][known].double()
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
    formulation, table = formulations.get(row.name), multipliers.get(row.name)
    if formulation is None or history.constraints[row.name].equals is not None:
        return
    idle = (table is None or not table.any()) and not formulation.acts_below_the_bound
    if row.name not in history.ever and idle:
        yield (
            f"{row.name} never acted, as no sample violated it at any time: this run is one with "
            "formulation: null."
        )
    elif row.violated == row.of and not explained:
        yield (
            f"{row.name} is violated by every sample: its bound is out of reach, the epochs were "
            "too few, or it is the wrong way round (at_most for at_least). See docs/settings.md."
        )


def _held_out_above_training(closing: Closing) -> Iterator[str]:
    """On requirements that new samples violate far more often than those of training."""
    for row in closing.rows:
        if not row.held_of or not row.of or row.held_violated is None or row.violated is None:
            continue
        held, trained = row.held_violated / row.held_of, row.violated / row.of
        if held > 2 * trained and held > trained + 0.1:
            yield (
                f"Held out, {row.name} is violated by {row.held_violated:,} of {row.held_of:,} "
                f"(worst {_number(row.held_worst)}), in training by {row.violated:,} of "
                f"{row.of:,}: what the training samples learnt does not hold for new ones. Give "
                "more and more varied samples, a stricter bound, or fewer epochs."
            )


def _still_falling(closing: Closing, history: History, conditions: Conditions) -> Iterator[str]:
    """On violations that a longer run would likely lower further."""
    curves = history.curves()
    quarter = len(curves.steps) // 4
    if quarter < 2:
        return
    for row in closing.rows:
        if not row.violated:
            continue
        shares = torch.tensor(curves.violated[row.name][-2 * quarter :])
        before, after = shares[:quarter].nanmean(), shares[quarter:].nanmean()
        if after < 0.8 * before:
            yield f"The violations of {row.name} were still falling: {conditions.longer}."


# Numbers and columns -----------------------------------------------------------------------------


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _share(number: int | None, of: int | None) -> str:
    return "" if number is None or of is None else f"{number:,} of {of:,}"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _aligned(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns two spaces apart; the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join([f"{first:<{widths[0]}}", *cells]).rstrip()
