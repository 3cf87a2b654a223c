"""What the steps of a run measured, kept for its end: the last visit of every sample, and curves.

A step only appends what it measured to ``unread``; it is read many steps at a time, since a step of
a small model takes less time than the sums over it. Nothing here moves a weight or a multiplier.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ..constraint import Constraint
from ..lagrangian.prices import Prices, Step
from ..lagrangian.terms import OBJECTIVE, PADDING, Measured, last_visits

UNREAD_STEPS = 64
UNREAD_ROWS = 8192
"""What is read at once, at most: so many steps, or so many samples."""
POINTS = 512
"""Of a curve, at least half of that once there are as many steps."""
RECENT = 1024
"""Samples of a stream, whose rows have no place of their own, that its end speaks of."""


@dataclass(frozen=True)
class Curves:
    """What steps measured, averaged over ``width`` steps a point."""

    steps: list[int]  #: the last step of each point
    objective: list[float]  #: the mean; NaN where no sample had one
    violated: dict[str, list[float]]  #: by constraint the share of its samples
    worst: dict[str, list[float]]  #: the largest violation
    #: the mean λ of the samples, as the steps used it
    multiplier: dict[str, list[float]]


class _Points:
    """Rows of sums and of maxima, one a step; neighbours are joined when there are too many."""

    def __init__(self, sums: int, maxima: int) -> None:
        self.width = 1  # Steps a point.
        self.sums = torch.zeros(0, sums, dtype=torch.float64)
        self.maxima = torch.zeros(0, maxima, dtype=torch.float64)
        self.open = (self.sums, self.maxima)  # Of steps that are no whole point yet.

    def add(self, sums: Tensor, maxima: Tensor) -> None:
        """Adds steps, (steps, columns) each."""
        sums = torch.cat([self.open[0], sums])
        maxima = torch.cat([self.open[1], maxima])
        whole = len(sums) // self.width * self.width
        self.open = (sums[whole:], maxima[whole:])
        new_sums, new_maxima = _joined(sums[:whole], maxima[:whole], self.width)
        self.sums = torch.cat([self.sums, new_sums])
        self.maxima = torch.cat([self.maxima, new_maxima])
        while len(self.sums) > POINTS:
            self._halve()

    def _halve(self) -> None:
        """Two points become one; an odd one waits with the steps that are no whole point."""
        sums = self.sums
        maxima = self.maxima
        even = len(sums) // 2 * 2
        if len(sums) > even:
            # A point of the old width stands for its steps, as one row of their sums.
            open_sums = _as_steps(sums[even:], self.width)
            open_maxima = maxima[even:].repeat(self.width, 1)
            self.open = (
                torch.cat([open_sums, self.open[0]]),
                torch.cat([open_maxima, self.open[1]]),
            )
        self.sums, self.maxima = _joined(sums[:even], maxima[:even], 2)
        self.width *= 2

    def all(self) -> tuple[Tensor, Tensor]:
        """All points, the last one of the steps that are no whole point yet."""
        sums, maxima = self.open
        if not len(sums):
            return self.sums, self.maxima
        open_sums, open_maxima = _joined(sums, maxima, len(sums))
        return torch.cat([self.sums, open_sums]), torch.cat([self.maxima, open_maxima])


def _joined(sums: Tensor, maxima: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Every ``number`` rows as one."""
    return sums.unflatten(0, (-1, number)).sum(1), maxima.unflatten(
        0, (-1, number)
    ).amax(1)


def _as_steps(sums: Tensor, width: int) -> Tensor:
    """A point's sums spread over its steps."""
    return (sums / width).repeat(width, 1)


class History:
    """The steps of one run.

    Args:
        constraints: by name.
        samples: N, of the training set; 0 of a stream.

    Attributes:
        steps, rows: that were read, and the samples that they had in all.
        seen: bool (N,), the samples that some step had; (0,) of a stream.
        objective: (N,), of each sample at its last visit, NaN of one without; of a stream (n,), of
            its most recent samples.
        first, last: by constraint the largest violation of each sample, |ℓ − c| of an equality, at
            its first and at its last visit; shapes and NaN as those of ``objective``.
        start: the mean objective of the first step; NaN where it is not known.
        start_worst: the largest violation of the first step, by constraint that it had.
        norm: that of the trained weights before the first step; NaN where it is not known.
        partial: whether it began in the midst of a run, at a checkpoint without it.
        ever: the constraints that some sample violated.
        prices: what each requirement costs.
    """

    def __init__(self, constraints: Mapping[str, Constraint], samples: int) -> None:
        self.constraints = dict(constraints)
        self.samples = samples
        self.unread: list[Step] = []
        self.prices = Prices(samples)
        self.steps = 0
        self.rows = 0
        self.start = math.nan
        self.norm = math.nan
        self.partial = False
        self.start_worst = dict[str, float]()
        self.ever = set[str]()
        # Of what was read, once they were asked for.
        self._totals: dict[str, float] = {}
        unknown = torch.full((samples,), math.nan, dtype=torch.float32)
        self.seen = torch.zeros(samples, dtype=torch.bool)
        self.objective = unknown.clone()
        self.first = {name: unknown.clone() for name in constraints}
        self.last = {name: unknown.clone() for name in constraints}
        # Sums: steps, of the objective the sum and number, and of every constraint the samples,
        # the violated ones, the sum and number of λ. Maxima: of every constraint the violation.
        self._points = _Points(3 + 4 * len(self.constraints), len(self.constraints))

    def read(self) -> None:
        """Reads what steps appended."""
        unread = self.unread
        self.unread = []
        self._totals = {}
        for _, alike in groupby(unread, key=_shapes):  # Those are stacked.
            steps = list(alike)
            self._read(steps)
            self.prices.add_steps(steps)

    def _read(self, unread: Sequence[Step]) -> None:
        """Reads steps with as many rows and columns each."""
        steps = [step.measured for step in unread]
        index = torch.stack([step.index for step in steps])
        if not index.shape[1]:  # All samples of these steps were left out.
            self.steps += len(steps)
            return
        real = index != PADDING
        objective = torch.stack([step.objective for step in steps]).double()
        applies = torch.stack([step.masks[OBJECTIVE] for step in steps]) & real
        objective = objective.masked_fill(~applies, 0.0)
        number = applies.sum(1)
        sums = [torch.ones(len(steps)), objective.sum(1), number]
        maxima = []
        is_start = not (self.steps or self.partial)
        if is_start and number[0]:
            self.start = float(objective[0].sum() / number[0])
        self.steps += len(steps)
        self.rows += int(real.sum())
        worst = dict[str, Tensor]()
        for name in self.constraints:
            # −∞ stands where the constraint does not apply: the largest of several is right then.
            values = self._worst(name, steps).masked_fill(~real, -math.inf)
            sums += [(values > -math.inf).sum(1), (values > 0).sum(1)]
            sums += _multipliers(name, unread)
            maxima.append(values.amax(1))
            self._note_violations(name, values, is_start)
            worst[name] = values.masked_fill(values == -math.inf, math.nan)
        no_maxima = torch.zeros(len(steps), 0, dtype=torch.float64)
        self._points.add(
            torch.stack([column.double() for column in sums], 1),
            torch.stack(maxima, 1).double() if maxima else no_maxima,
        )
        self._visit(
            index.flatten(), objective.masked_fill(~applies, math.nan).flatten(), worst
        )

    def _note_violations(self, name: str, values: Tensor, is_start: bool) -> None:
        """Whether it was ever violated, and how far at the start; (steps, R), −∞ of none."""
        if name not in self.ever and (values > 0).any():
            self.ever.add(name)
        if is_start and (values[0] > -math.inf).any():
            self.start_worst[name] = float(values[0].max())

    def _worst(self, name: str, steps: Sequence[Measured]) -> Tensor:
        """(steps, R), the largest violation of each sample; −inf where none applies."""
        violation = torch.stack([step.judged[name] for step in steps])
        if self.constraints[name].is_equality:
            violation = violation.abs()
        if not all(step.whole for step in steps):
            masks = torch.stack([step.masks[name] for step in steps])
            violation = violation.masked_fill(~masks, -math.inf)
        return violation.amax(2)

    def _visit(
        self, index: Tensor, objective: Tensor, worst: Mapping[str, Tensor]
    ) -> None:
        """Keeps the values of samples, (n,) each, in the order of their steps."""
        rows = (index != PADDING).nonzero()[:, 0]
        index = index[rows]
        objective = objective[rows].float()
        values = {
            name: of_steps.flatten()[rows].float() for name, of_steps in worst.items()
        }
        if not self.samples:  # Of a stream: no sample has a row of its own.
            self.objective = torch.cat([self.objective, objective])[-RECENT:]
            for name, value in values.items():
                self.last[name] = torch.cat([self.last[name], value])[-RECENT:]
            return
        inside = index < self.samples  # A larger one is refused where λ is looked up.
        rows = inside.nonzero()[:, 0]
        rows = rows[last_visits(index[rows])]
        last = index[rows]
        self.objective[last] = objective[rows]
        for name, value in values.items():
            self.last[name][last] = value[rows]
        if not self.seen.all():
            self._visit_first(index, inside, values)
            self.seen[last] = True

    def _visit_first(
        self, index: Tensor, inside: Tensor, values: Mapping[str, Tensor]
    ) -> None:
        """Keeps the values of samples that no step had before."""
        seen = self.seen[index.clamp(max=self.samples - 1)]
        new = (inside & ~seen).nonzero()[:, 0]
        # The first visit is the last one in reverse.
        backwards = new.flip(0)
        rows = backwards[last_visits(index[backwards])]
        for name, value in values.items():
            self.first[name][index[rows]] = value[rows]

    def curves(self) -> Curves:
        """What :meth:`read` has read, in up to 512 points."""
        sums, maxima = self._points.all()
        ends = sums[:, 0].cumsum(0).round().long().tolist()
        curves = Curves(
            steps=ends,
            objective=(sums[:, 1] / sums[:, 2]).tolist(),
            violated={},
            worst={},
            multiplier={},
        )
        for position, name in enumerate(self.constraints):
            start = 3 + 4 * position  # Behind those of the objective; see __init__.
            samples, violated, multipliers, count = sums[:, start : start + 4].unbind(1)
            curves.violated[name] = (violated / samples).tolist()
            curves.worst[name] = maxima[:, position].tolist()
            curves.multiplier[name] = (multipliers / count).tolist()
        return curves

    # In a checkpoint ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values; of what was read."""
        points = self._points
        return {
            "constraints": [*self.constraints],
            "samples": self.samples,
            "steps": self.steps,
            "rows": self.rows,
            "start": self.start,
            "start_worst": dict(self.start_worst),
            "norm": self.norm,
            "partial": self.partial,
            "ever": sorted(self.ever),
            "prices": self.prices.state_dict(),
            "seen": self.seen,
            "objective": self.objective,
            "first": dict(self.first),
            "last": dict(self.last),
            "width": points.width,
            "points": [points.sums, points.maxima, *points.open],
        }

    @classmethod
    def from_state(
        cls,
        constraints: Mapping[str, Constraint],
        samples: int,
        state: Mapping[str, Any] | None,
    ) -> History:
        """Goes on from :meth:`state_dict`; without one, or of other constraints, it is partial.

        samples: where the state does not say it.
        """
        if state is None or state["constraints"] != [*constraints]:
            history = cls(constraints, samples)
            history.partial = True
            return history
        history = cls(constraints, int(state["samples"]))
        history.steps = int(state["steps"])
        history.rows = int(state["rows"])
        history.start = float(state["start"])
        history.norm = float(state["norm"])
        history.start_worst = dict(state["start_worst"])
        history.partial = bool(state["partial"])
        history.ever = set(state["ever"])
        history.seen = state["seen"].clone()
        history.objective = state["objective"].clone()
        history.first = {name: table.clone() for name, table in state["first"].items()}
        history.last = {name: table.clone() for name, table in state["last"].items()}
        history.prices.load_state_dict(state["prices"])
        points = history._points
        points.width = int(state["width"])
        sums, maxima, open_sums, open_maxima = state["points"]
        points.sums = sums.clone()
        points.maxima = maxima.clone()
        points.open = (open_sums.clone(), open_maxima.clone())
        return history

    def totals(self) -> dict[str, float]:
        """Of the whole training set, at the samples' last visits: the progress bar's numbers.

        "objective", its mean; "violated" and "of", numbers of requirements, one for each sample and
        constraint that applies to it.
        """
        if not self._totals:
            known = [table[~table.isnan()] for table in self.last.values()]
            self._totals = {
                "objective": float(self.objective.nanmean()),
                "violated": float(sum(int((worst > 0).sum()) for worst in known)),
                "of": float(sum(map(len, known))),
            }
        return self._totals


def _shapes(step: Step) -> tuple[int, ...]:
    """The rows of a step, and the columns of each constraint."""
    measured = step.measured
    columns = [table.shape[1] for table in measured.judged.values()]
    return (len(measured.index), *columns)


def _multipliers(name: str, unread: Sequence[Step]) -> list[Tensor]:
    """Of each step the sum of |λ| and how many there are: those of its samples, or of the batch."""
    steps = [step.measured for step in unread]
    if all(name in step.multipliers for step in steps):
        multipliers = (
            torch.stack([step.multipliers[name] for step in steps]).abs().flatten(1)
        )
        masks = torch.stack([step.masks[name] for step in steps]).flatten(1)
        return [multipliers.masked_fill(~masks, 0.0).sum(1), masks.sum(1)]
    # λ of a statistic; a constraint that is only measured has none, and counts none.
    tables = [step.statistics.get(name) for step in unread]
    means = [0.0 if table is None else float(table.abs().mean()) for table in tables]
    counts = [table is not None for table in tables]
    return [
        torch.tensor(means, dtype=torch.float64),
        torch.tensor(counts, dtype=torch.float64),
    ]
