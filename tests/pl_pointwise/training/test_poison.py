"""Extreme values: infinite ones are left out, large ones are used, zeros do nothing.

test_non_finite.py shows what the step is when a sample is left out. Here are finite values at
which a formula may overflow or divide by zero: α = 1000 with violations of 10⁴ against the same
steps by hand in float64, a batch in which nothing is active, a gradient that is zero.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pl_pointwise import Average, Constraint, CVaR, Pointwise, Relaxed, Tilted
from tests.pl_pointwise.by_hand import run
from tests.pl_pointwise.table import rule_of
from tests.pl_pointwise.toy import (
    FORMULATIONS,
    Seen,
    Toy,
    ToyData,
    ToyRows,
    fit,
    lost,
    multipliers_of,
    thresholds_of,
    trainer,
    weights_of,
)
from tests.pl_pointwise.training.test_precision import Float


def test_violation_beyond_float32_does_not_reach_the_multiplier(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is finite in float64, and infinite as a λ, from which no later step would recover."""

    class Beyond(Toy):
        def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
            values = super().constraint_values(outputs, batch)
            return {
                **values,
                "fit": values["fit"] + 1e39 * (batch["index"] == 3).double(),
            }

    module = Beyond(Pointwise(alpha=None))
    fit(module, ToyRows(8, seed=5), epochs=2, batch_size=8)
    assert lost(module)[0] == 2
    assert torch.isfinite(module.multipliers["fit"]).all()
    assert "1e+39 for sample 3" in caplog.text


# Large but finite ---------------------------------------------------------------------------------

FAR = {"fit": (-1e4, None), "pair": (None, 1e4)}
STIFF: dict[str, Any] = {
    "average": Average(alpha=1000.0, dual_lr=0.5),
    "tilted": Tilted(tilt=0.7, alpha=1000.0, dual_lr=0.5),
    "cvar": CVaR(level=0.6, threshold_lr=0.05, alpha=1000.0, dual_lr=0.5),
    "pointwise": Pointwise(alpha=1000.0, dual_lr=0.5),
    "relaxed": Relaxed(alpha=1000.0, beta=50.0, dual_lr=0.5),
    "relaxed linear": Relaxed(alpha=1000.0, beta=50.0, cost="linear", dual_lr=0.5),
}


@pytest.mark.parametrize("kind", STIFF)
def test_stiff_terms_far_from_satisfied_are_exact_in_float32(kind: str) -> None:
    """α 1000, violations of 10⁴: ψ is 10¹¹, its square would be lost, nothing is skipped."""
    formulation = STIFF[kind]
    bounds = {n: Constraint(at_most=u, at_least=low) for n, (u, low) in FAR.items()}
    rows, seen = ToyRows(11, seed=5, partial=True), Seen()
    module = Float(formulation, bounds, partial=True, gradient_clip_val=1.0)
    trainer(max_epochs=2, callbacks=[seen]).fit(module, ToyData(rows, batch_size=4))
    rules = dict.fromkeys(FAR, rule_of(formulation))
    expected = run(rows, seen.batches, rules, FAR, learning_rate=0.05, clip=1.0)
    assert lost(module) == (0, 0)
    torch.testing.assert_close(weights_of(module), expected.weights, rtol=0, atol=1e-4)
    for name, table in multipliers_of(module).items():
        torch.testing.assert_close(
            table.double(), expected.multipliers[name], rtol=1e-5, atol=1e-3
        )
        assert (table > 0.01).any()


# Nothing to do ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [name for name in FORMULATIONS if name not in ("none", "penalty", "by name")],
)
def test_batch_in_which_nothing_is_active_is_plain_training(name: str) -> None:
    """Satisfied with room to spare, at λ = 0: no formulation with multipliers pushes further."""
    met = {"fit": Constraint(at_most=1e3), "pair": Constraint(at_least=-1e3)}
    rows = ToyRows(7, seed=5)
    plain = fit(Toy(None, met), rows)
    module = fit(Toy(FORMULATIONS[name], met, micro_batch_size=3), rows)
    torch.testing.assert_close(
        weights_of(module), weights_of(plain), rtol=0, atol=1e-12
    )
    assert not any(table.any() for table in module.multipliers.values())
    assert lost(module) == (0, 0)
    assert all(torch.isfinite(value).all() for value in thresholds_of(module).values())
