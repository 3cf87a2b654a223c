"""Each equation's conditions vanish at its solution; a unit changes nothing; the page's table."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from torch import Tensor

from benchmarks.physics import EQUATIONS, TRIALS, Equation
from benchmarks.physics.equation import DATA, as_weighted_sum, in_tolerances
from benchmarks.physics.table import PAGE, RESULTS, cells_of, section
from benchmarks.tasks.training import train

ALL = EQUATIONS | TRIALS


def at_solution(
    equation: Equation, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Tensor]:
    """What each condition is where the network is the solution, (N,), at its own points."""
    found = {
        name: torch.tensor([true], dtype=torch.float64)
        for name, (_, true) in equation.unknown.items()
    }
    monkeypatch.setattr(equation, "u", lambda parameters, at: equation.solution(at))
    residuals = equation.residuals(found, torch.arange(len(equation.rows))[None])
    return {
        name: value[0][equation.membership[name]].detach()
        for name, value in residuals.items()
    }


@pytest.mark.parametrize("name", ALL)
def test_conditions_vanish_at_the_solution(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        equation = ALL[name]()
        values = at_solution(equation, monkeypatch)
    finally:
        torch.set_default_dtype(torch.float32)
    assert set(values) == set(equation.units)
    for condition, value in values.items():
        unit = equation.units[condition]
        if condition == DATA:
            assert float(value.square().mean().sqrt()) < 2 * equation.noise
        # The quadrature of the shock is differentiated twice.
        else:
            bound = 1e-3 if name == "Burgers" else 1e-9
            assert float(value.abs().max()) < bound * unit, condition


def test_another_unit_of_the_equation_is_the_same_run() -> None:
    """λ is kept in float32, so the runs drift apart later on, but not in thirty steps."""
    equation = EQUATIONS["oscillator"]()
    members = [("Pointwise()", 0)]
    before = equation.error(train(in_tolerances(equation), members, 30))
    task = in_tolerances(equation, factors={"equation": 1000.0})
    after = equation.error(train(task, members, 30))
    torch.testing.assert_close(before, after, rtol=1e-3, atol=0)


def test_the_weighted_sum_is_the_usual_loss() -> None:
    """Mean squared residual + w (mean squared start + mean squared speed), by hand."""
    from benchmarks.tasks.methods import Rival
    from benchmarks.tasks.rivals import Rivals
    from benchmarks.tasks.training import started

    equation = EQUATIONS["oscillator"]()
    task = as_weighted_sum(equation)
    parameters = started(task, [3])
    index = torch.arange(len(equation.rows))[None]
    rivals = Rivals(task, [Rival("squared", (100.0,))])
    loss = rivals.loss(task.terms(parameters, index), index)
    at = torch.linspace(0, 1, 64)[None, :, None].requires_grad_()
    u = equation.u(parameters, at)
    speed = torch.autograd.grad(u.sum(), at, create_graph=True)[0][..., 0]
    bent = torch.autograd.grad(speed.sum(), at, create_graph=True)[0][..., 0]
    equals = (bent + 4 * speed + 400 * u).square().mean()
    start = (u[0, 0] - 1).square() + speed[0, 0].square()
    torch.testing.assert_close(loss[0], equals + 100 * start)


def test_the_table_names_the_best_weight_and_the_change_of_units() -> None:
    errors = {"Pointwise()": 0.02, "weight 1": 0.5, "weight 10": 0.01}
    errors |= {"Pointwise(), equation × 1000": 0.021}
    rows = pd.DataFrame(
        [{"method": name, "seed": 0, "error": error} for name, error in errors.items()]
    )
    assert cells_of(rows) == ["0.02", "0.01 (10)", "0.5", "5 %"]


def test_the_page_says_what_the_rows_say() -> None:
    page = PAGE.read_text(encoding="utf-8")
    if not RESULTS.exists():
        assert "best of seven weights" not in page
        return
    assert section(pd.read_csv(RESULTS)) in page
