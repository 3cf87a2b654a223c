"""``Pointwise()`` with little data, few steps or odd parts: it enforces, or says why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pl_pointwise import Constraint, Formulation, Pointwise, Relaxed
from tests.pl_pointwise.toy import (
    Judged,
    Toy,
    ToyRows,
    fit,
    initial_weights,
    lost,
    weights_of,
)

FIT = {"fit": Constraint(at_most=-0.3)}


def excess(module: Toy, rows: ToyRows, bound: float = -0.3) -> float:
    with torch.no_grad():
        return float(
            (torch.tanh(rows.x @ module.first) @ module.last - bound).relu().mean()
        )


CASES: dict[str, dict[str, Any]] = {
    "one sample": {"count": 1},
    "a sample a batch": {"batch_size": 1},
    "one epoch": {"epochs": 1},
    "three steps": {"max_steps": 3},
    "a window of steps": {"primal_steps": 3},
    "dual first": {"order": "dual_first"},
    "a frozen part": {"frozen": True},
    "few that violate": {"bound": 1.0, "batch_size": 2},
    "an interval": {"constraint": Constraint(at_least=-0.5, at_most=-0.3)},
    "judged by another value": {"kind": Judged},
}


@pytest.mark.parametrize("formulation", [Pointwise(), Relaxed(price=10.0)], ids=repr)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_constraint_is_enforced(
    case: dict[str, Any], formulation: Formulation
) -> None:
    case = {
        "kind": Toy,
        "count": 11,
        "batch_size": 4,
        "epochs": 10,
        "max_steps": -1,
        **case,
    }
    rows, runs = ToyRows(case.pop("count"), seed=6), []
    bound = case.pop("bound", -0.3)
    constraint = case.pop("constraint", Constraint(at_most=bound))
    kind, frozen = case.pop("kind"), case.pop("frozen", False)
    how = {name: case.pop(name) for name in ("batch_size", "epochs", "max_steps")}
    for each in (None, formulation):
        module = kind(each, {"fit": constraint}, learning_rate=2e-3, **case)
        module.first.requires_grad_(not frozen)
        runs.append(fit(module, rows, **how))
    plain, found = runs
    assert excess(found, rows, bound) < excess(plain, rows, bound)
    assert torch.isfinite(weights_of(found)).all()
    assert lost(found) == (0, 0)
    assert (found.multipliers["fit"] > 0).any() or excess(found, rows, bound) == 0
    assert torch.equal(found.first.detach(), initial_weights()[0]) == frozen


def test_a_constraint_without_a_gradient_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The objective is trained all the same."""

    class Flat(Toy):
        def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
            return {"fit": 1.0 + 0 * outputs}

    module = fit(Flat(Pointwise(), FIT), ToyRows(8))
    assert (
        caplog.text.count('Constraint "fit": the gradient of its violated values is 0')
        == 1
    )
    assert torch.equal(weights_of(module), weights_of(fit(Toy(None, {}), ToyRows(8))))
