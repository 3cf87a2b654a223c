"""The line on each constraint at the end of a fit: counted by hand, and what it makes of it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from pl_pointwise import Average, Constraint, Penalty, Pointwise
from tests.pl_pointwise.toy import Toy, ToyData, ToyRows, trainer

ROWS = ToyRows(9)


class Counted(Callback):
    """The violated samples of the last epoch, from the values that a step saw."""

    def on_train_epoch_start(self, *_: Any) -> None:
        self.violated: dict[str, int] = {}
        self.seen: dict[str, int] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for name, violation in module.measured.judged.items():
            carried = module.measured.masks[name]
            for row, kept in zip(violation.tolist(), carried.tolist(), strict=True):
                # An interval's sides are of one value: at most one of them is above 0.
                values = [v for v, k in zip(row, kept, strict=True) if k]
                self.seen[name] = self.seen.get(name, 0) + bool(values)
                self.violated[name] = self.violated.get(name, 0) + any(v > 0 for v in values)


def said(module: Toy, caplog: pytest.LogCaptureFixture, **options: Any) -> tuple[str, str, Counted]:
    """What was kept for the command line, what was warned of, and the count."""
    counted = Counted()
    with caplog.at_level(logging.WARNING, logger="pl_pointwise"):
        runner = trainer(**{"max_epochs": 2, "callbacks": [counted], **options})
        runner.fit(module, ToyData(module.rows if hasattr(module, "rows") else ROWS, batch_size=4))
    return "\n".join(module._stepper.watch.lines), caplog.text, counted


@pytest.mark.parametrize("formulation", [Pointwise(), Average(), None])
@pytest.mark.parametrize("partial", [False, True])
def test_the_numbers_are_those_of_the_last_epoch(formulation, partial, caplog) -> None:
    module = Toy(formulation, partial=partial)
    module.rows = ToyRows(23, partial=partial)
    lines, warned, counted = said(module, caplog)
    for name in module.constraints:
        count = f"{name}: {counted.violated[name]} of {counted.seen[name]} violated in the last"
        assert count in lines + warned
        if formulation is None or formulation.scope != "sample":
            assert f"{count} epoch." in lines
        else:
            active = int((module.multipliers[name] > 0).any(1).sum())
            assert f"{count} epoch, λ > 0 on {active}" in lines + warned


@pytest.mark.parametrize(
    ("formulation", "bound", "words"),
    [
        (Pointwise(), Constraint(at_most=-1e3), "9 of 9 violated in the last epoch, λ > 0 on 9:"),
        (Pointwise(), Constraint(at_most=1e3), "λ > 0 on 0: it never acted, so"),
        (Average(), Constraint(at_most=1e3), "last epoch: it never acted, so"),
        (Penalty(weight=1.0), Constraint(at_most=1e3), ""),
        (None, Constraint(at_least=1e3), ""),
        (Pointwise(), Constraint(equals=0.1), ""),
    ],
    ids=str,
)
def test_what_calls_for_an_answer_is_a_warning(formulation, bound, words, caplog) -> None:
    """Out of reach, the wrong way round, never violated: each ended with success, in silence."""
    lines, warned, _ = said(Toy(formulation, {"fit": bound}), caplog)
    assert ("fit: " in warned, "fit: " in lines) == (bool(words), not words)
    assert words in warned
    if bound.equals is not None:
        assert "fit: off by 0." in lines
        assert "λ ≠ 0 on 9." in lines


def test_a_constraint_that_no_sample_has_is_a_warning(caplog) -> None:
    class Nobody(Toy):
        def membership(self, batch: Any) -> dict[str, Tensor]:
            return {"fit": torch.zeros(len(batch["index"]), dtype=torch.bool)}

    _, warned, _ = said(Nobody(Pointwise(), {"fit": Constraint(at_most=0.0)}), caplog)
    assert "fit: applied to no sample in the last epoch: membership() leaves all" in warned
    caplog.clear()
    lines, warned, _ = said(Nobody(Pointwise()), caplog)  # Beside another one: as a role of none.
    assert "fit: applied to no sample in the last epoch." in lines
    assert "no sample" not in warned


class Same(Toy):
    """A model that is its own reference: the objective is 0, and everything holds."""

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:
        return (outputs - outputs.detach() * self.start) ** 2

    start = 1.0


@pytest.mark.parametrize(
    ("start", "bound", "warns"), [(1, 9.0, True), (1, -9.0, False), (0, 9.0, False)]
)
def test_a_start_at_the_optimum_is_a_warning(start, bound, warns, caplog) -> None:
    """``fit --config forget`` with one model in both places: training could only do harm."""
    module = Same(Pointwise(), {"fit": Constraint(at_most=bound)})
    module.start = start
    assert ("The first batch has nothing to learn" in said(module, caplog)[1]) == warns
