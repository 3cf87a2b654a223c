"""The history of a run: curves and last visits, against plain loops over all steps."""

from __future__ import annotations

import math

import pytest
import torch

from pl_pointwise import Average, Constraint, Pointwise
from pl_pointwise.lagrangian.prices import Step
from pl_pointwise.lagrangian.terms import OBJECTIVE, PADDING, Measured
from pl_pointwise.report.history import POINTS, RECENT, History

CONSTRAINTS = {"fit": Constraint(at_most=1.0), "near": Constraint(equals=0.5)}


def step(generator: torch.Generator, samples: int, rows: int) -> Measured:
    index = torch.randperm(samples, generator=generator)[:rows]
    index[torch.rand(rows, generator=generator) < 0.1] = PADDING
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    real = index != PADDING
    masks = {name: (draw(rows, 2) > -1) & real[:, None] for name in CONSTRAINTS}
    judged = {name: draw(rows, 2) for name in CONSTRAINTS}
    return Measured(
        index=index,
        objective=draw(rows),
        followed=judged,
        judged=judged,
        masks={OBJECTIVE: (draw(rows) > -1) & real, **masks},
        multipliers={"fit": draw(rows, 2).abs()},
        counts={},
        lagrangian=0.0,
        gradient_norm=0.0,
    )


def as_taken(measured: Measured) -> Step:
    forms = {"fit": Pointwise(alpha=1.0), "near": Average(alpha=1.0)}
    return Step(measured, forms, {"near": torch.tensor([1.0, -3.0])})


@pytest.mark.parametrize("steps", [3, 100, 5 * POINTS + 7])
def test_curves_and_last_visits_are_those_of_a_plain_loop(steps: int) -> None:
    generator = torch.Generator().manual_seed(steps)
    history = History(CONSTRAINTS, samples=12)
    taken, last, first, objective = [], {}, {}, {}
    for number in range(steps):
        one = step(generator, 12, 5 if number % 7 else 3)
        taken.append(one)
        history.unread.append(as_taken(one))
        if number % 50 == 49:
            history.read()
        for row, index in enumerate(one.index.tolist()):
            if index == PADDING:
                continue
            objective[index] = (
                float(one.objective[row]) if one.masks[OBJECTIVE][row] else math.nan
            )
            for name, constraint in CONSTRAINTS.items():
                values = one.judged[name][row][one.masks[name][row]]
                values = values.abs() if constraint.equals is not None else values
                worst = float(values.max()) if len(values) else math.nan
                last[name, index] = worst
                first.setdefault((name, index), worst)
    history.read()
    for (name, index), value in last.items():
        assert float(history.last[name][index]) == pytest.approx(value, nan_ok=True)
        assert float(history.first[name][index]) == pytest.approx(
            first[name, index], nan_ok=True
        )
    for index, value in objective.items():
        assert float(history.objective[index]) == pytest.approx(value, nan_ok=True)
    assert history.seen.sum() == len(objective)
    assert history.rows == sum(int((one.index != PADDING).sum()) for one in taken)
    assert history.ever == {"fit", "near"}

    curves = history.curves()
    assert curves.steps[-1] == history.steps == steps
    assert len(curves.steps) <= 2 * POINTS
    if steps > POINTS:
        assert len(curves.steps) >= POINTS // 2
        ends = torch.tensor(curves.steps)  # Of equal points, but for the last one.
        assert (ends.diff()[:-1] == ends[0]).all()
        assert int(ends[0]).bit_count() == 1  # Doubled, each time there were too many.
    begin = 0
    for point, end in enumerate(curves.steps):
        part, begin = taken[begin:end], end
        values = torch.cat([one.objective[one.masks[OBJECTIVE]] for one in part])
        if len(values) and history._points.width == 1:
            assert curves.objective[point] == pytest.approx(float(values.mean()))
        violated, number, largest = 0, 0, -math.inf
        for one in part:
            for row, mask in zip(one.judged["fit"], one.masks["fit"], strict=True):
                if mask.any():
                    number, worst = number + 1, float(row[mask].max())
                    violated, largest = violated + (worst > 0), max(largest, worst)
        if history._points.width == 1:
            assert curves.violated["fit"][point] == pytest.approx(violated / number)
        assert (
            curves.worst["fit"][point] == pytest.approx(largest)
            or history._points.width > 1
        )
        assert curves.multiplier["near"][point] == pytest.approx(2.0)


def test_joined_points_keep_every_sum() -> None:
    """Halving moves no step and loses none: the means over all points are those over all steps."""
    generator = torch.Generator().manual_seed(0)
    history, total, number, violated = History(CONSTRAINTS, 12), 0.0, 0, 0
    for _ in range(3 * POINTS + 11):
        one = step(generator, 12, 4)
        history.unread.append(as_taken(one))
        history.read()
        total += float(one.objective[one.masks[OBJECTIVE]].sum())
        number += int(one.masks[OBJECTIVE].sum())
        worst = one.judged["fit"].masked_fill(~one.masks["fit"], -math.inf).amax(1)
        violated += int((worst > 0).sum())
    sums, _ = history._points.all()
    assert float(sums[:, 0].sum()) == pytest.approx(3 * POINTS + 11)
    assert float(sums[:, 1].sum()) == pytest.approx(total)
    assert float(sums[:, 2].sum()) == pytest.approx(number)
    assert float(sums[:, 4].sum()) == pytest.approx(violated)


def test_of_a_stream_the_most_recent_samples_are_kept() -> None:
    generator = torch.Generator().manual_seed(0)
    history, objective = History(CONSTRAINTS, samples=0), []
    for _ in range(500):
        one = step(generator, 1000, 4)
        history.unread.append(as_taken(one))
        real = one.index != PADDING
        values = one.objective.masked_fill(~one.masks[OBJECTIVE], math.nan)[real]
        objective += values.tolist()
    history.read()
    expected = torch.tensor(objective[-RECENT:])
    assert torch.equal(history.objective.isnan(), expected.isnan())
    assert torch.allclose(history.objective.nan_to_num(), expected.nan_to_num())


def test_a_state_goes_on_where_it_was() -> None:
    generator = torch.Generator().manual_seed(0)
    steps = [step(generator, 12, 4) for _ in range(90)]
    whole, half = History(CONSTRAINTS, 12), History(CONSTRAINTS, 12)
    for one in steps:
        whole.unread.append(as_taken(one))
    whole.read()
    half.unread = [as_taken(one) for one in steps[:40]]
    half.read()
    again = History.from_state(CONSTRAINTS, 0, half.state_dict())
    again.unread = [as_taken(one) for one in steps[40:]]
    again.read()
    assert again.curves().violated == whole.curves().violated
    assert again.curves().worst == whole.curves().worst
    assert torch.equal(again.last["fit"].nan_to_num(), whole.last["fit"].nan_to_num())
    assert again.totals() == pytest.approx(whole.totals())
