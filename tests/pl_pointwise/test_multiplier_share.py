"""λ's share of the force and its overshoot: by definition, and over a run.

That the figures of an epoch are those of its steps: tests/callbacks/test_dual_monitor.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pl_pointwise import Average, Constraint, CVaR, Formulation, Pointwise, Relaxed, Tilted
from pl_pointwise.multipliers import PullShares
from pl_pointwise.step import DualStep
from tests.pl_pointwise.toy import At, Toy, ToyData, ToyRows, fit, trainer

ROWS = ToyRows(12)
OUT_OF_REACH = {"fit": Constraint(at_most=-3.0)}


def figures(formulation: Formulation, violation: Any, multiplier: Any) -> dict[str, float]:
    """Of one column of entries."""
    v, m = torch.tensor(violation), torch.tensor(multiplier)
    step = DualStep(None, v, torch.ones_like(v, dtype=torch.bool), m, m, v)
    shares = PullShares()
    shares.add(0, {"c": step}, {"c": formulation}, dual_first=False)
    return shares.figures().get("c", {})


@pytest.mark.parametrize(
    ("formulation", "violation", "multiplier", "share", "overshoot"),
    [
        # λ/(λ + 2αv) of one that violates.
        (Pointwise(alpha=0.5), [2.0], [1.0], 1 / 3, 0),
        # Satisfied: pulled by λ alone, with λ + 2αv; the third is not pulled at all.
        (Pointwise(alpha=0.5), [2.0, -1.0, -9.0], [1.0, 3.0, 3.0], (1 + 2) / 5, 2 / 5),
        (Pointwise(alpha=None), [2.0, -1.0], [1.0, 3.0], 1, 3 / 4),
        (Average(alpha=0.5), [2.0], [1.0], 1 / 3, 0),
        (Tilted(tilt=2.0, alpha=0.5), [2.0], [1.0], 1 / 3, 0),
        (CVaR(alpha=0.5), [-1.0], [3.0], 1, 1),
        # A relaxation scales the pull by β/(α+β), of all entries alike.
        (Relaxed(alpha=0.5, beta=0.1), [2.0, -1.0], [1.0, 3.0], 3 / 5, 2 / 5),
        # Or caps it: at β = 2.5 the first is pulled with 2.5, with 2 of it without λ.
        (Relaxed(alpha=0.5, beta=2.5, cost="linear"), [2.0, -1.0], [1.0, 3.0], 2.5 / 4.5, 2 / 4.5),
        # Of an equality either way: λ + 2αv is 3; −3 by λ alone; and λ 1 against a pull of −2.
        (Pointwise(alpha=0.5).for_equality(), [2.0, 1.0, -3.0], [1.0, -4.0, 1.0], 4 / 8, 3 / 8),
    ],
)
def test_share_and_overshoot_by_hand(
    formulation: Formulation, violation: Any, multiplier: Any, share: float, overshoot: float
) -> None:
    found = figures(formulation, violation, multiplier)
    assert found == pytest.approx({"share": share, "overshoot": overshoot})


def test_without_any_pull_there_is_no_share() -> None:
    assert figures(Pointwise(), [-1.0, -2.0], [0.0, 1.0]) == {}


def test_a_formulation_of_ones_own_is_measured_by_its_own_slope() -> None:
    class Cubic(Pointwise):
        def lagrangian(self, violation: Tensor, multiplier: Tensor) -> Tensor:
            return multiplier * violation + violation.relu() ** 3

    assert figures(Cubic(), [2.0], [3.0])["share"] == pytest.approx(3 / (3 + 12))

    class Constant(Pointwise):
        def lagrangian(self, violation: Tensor, multiplier: Tensor) -> Tensor:
            return multiplier

    assert figures(Constant(), [2.0], [3.0]) == {}


def test_the_multiplier_that_pulled_is_the_new_one_where_the_dual_step_comes_first() -> None:
    """With η = 2α, λ after the first visit is the 2αv of that visit: half of the force then."""
    options: dict[str, Any] = {"epochs": 1, "batch_size": 12}
    formulation = Pointwise(alpha=0.5, dual_lr=1.0)
    first = fit(Toy(formulation, OUT_OF_REACH, order="dual_first"), ROWS, **options)
    assert first.pull_shares.figures()["fit"]["share"] == pytest.approx(0.5)
    last = fit(Toy(formulation, OUT_OF_REACH), ROWS, **options)
    assert last.pull_shares.figures()["fit"] == {"share": 0.0, "overshoot": 0.0}


# Checkpoints ------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [3, 5], ids=str)
def test_a_resumed_fit_has_the_figures_of_the_uninterrupted_one(
    batches: int, tmp_path: Path
) -> None:
    """Three batches an epoch: saved at the end of an epoch, and within one."""
    found: list[Any] = []
    for path in (None, tmp_path / "stopped.ckpt"):
        save = At(batches, lambda trainer: trainer.save_checkpoint(tmp_path / "stopped.ckpt"))
        module = Toy(Pointwise(alpha=1.0, dual_lr=0.1), OUT_OF_REACH)
        runner = trainer(max_epochs=4, callbacks=[] if path else [save])
        runner.fit(module, ToyData(ROWS, batch_size=4), ckpt_path=path)
        found.append((module.pull_shares.figures(), module.pull_shares.state_dict()))
    assert found[0][0]
    assert found[0] == found[1]
