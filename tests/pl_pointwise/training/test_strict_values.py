"""Strict values: the multipliers and the reports follow them, the weights follow the surrogate.

Training steps are compared with the loop by hand (by_hand.py), in which only the dual step and the
statistics it takes read the strict values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pl_pointwise import CVaR, Pointwise, Relaxed
from pl_pointwise.callbacks import DualMonitor, HardestSamples
from pl_pointwise.errors import DataError
from tests.pl_pointwise.by_hand import run
from tests.pl_pointwise.toy import (
    FORMULATIONS,
    At,
    Judged,
    Seen,
    Toy,
    ToyData,
    ToyRows,
    assert_identical_run,
    assert_same_run,
    fit,
    lost,
    multipliers_of,
    passed,
    trainer,
    weights_of,
)
from tests.pl_pointwise.training.test_training_step import (
    CASES,
    EPOCHS,
    INTERVALS,
    LEARNING_RATE,
    ONE_SIDED,
    STEPS,
    assert_same,
    constraints,
)

CASES_TO_JUDGE = [
    name for name in CASES if "cvar" not in name and name != "tail by name"
]


FEW = ("average augmented", "tilted", "pointwise", "relaxed linear")


@pytest.mark.parametrize(
    ("name", "bounds", "options"),
    [
        *((name, ONE_SIDED, {}) for name in CASES_TO_JUDGE),
        *((name, INTERVALS, {"order": "dual_first"}) for name in FEW),
        *((name, INTERVALS, {"primal_steps": 2}) for name in FEW),
    ],
)
def test_steps_equal_the_algorithm_by_hand(
    name: str, bounds: Any, options: Any
) -> None:
    formulation, rules = CASES[name]
    rows, seen = ToyRows(11, seed=5, partial=True), Seen()
    module = Judged(
        formulation,
        constraints(bounds),
        partial=True,
        learning_rate=LEARNING_RATE,
        **options,
    )
    data = ToyData(rows, batch_size=4)
    trainer(max_epochs=EPOCHS, max_steps=STEPS, callbacks=[seen]).fit(module, data)
    arguments: Any = {"learning_rate": LEARNING_RATE, **options}
    expected = run(
        rows,
        seen.batches,
        rules,
        bounds,
        strict=lambda z: {"fit": passed(z)[:, None]},
        **arguments,
    )
    assert_same(module, expected)
    if rules.get("fit") is not None and rules["fit"].eta:  # Else no multiplier moves.
        other = run(rows, seen.batches, rules, bounds, **arguments).multipliers["fit"]
        assert (other - expected.multipliers["fit"]).abs().max() > 0.01


@pytest.mark.parametrize("options", [{}, {"order": "dual_first"}], ids=str)
@pytest.mark.parametrize("name", FEW)
def test_micro_batches_equal_the_whole_batch(name: str, options: Any) -> None:
    rows, arguments = ToyRows(17, seed=2, partial=True), {"partial": True, **options}
    whole = fit(Judged(FORMULATIONS[name], **arguments), rows, batch_size=7)
    cut = fit(
        Judged(FORMULATIONS[name], micro_batch_size=2, **arguments), rows, batch_size=7
    )
    assert_same_run(cut, whole)


class Undecided(Judged):
    """Draws random numbers, and has no strict value."""

    def strict_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        assert not torch.is_grad_enabled()
        torch.rand(5)
        return {}


@pytest.mark.parametrize("name", ["tilted augmented", "cvar", "by name"])
def test_without_a_strict_value_the_run_is_the_same_to_the_last_bit(name: str) -> None:
    rows = ToyRows(13, seed=2, partial=True)
    arguments: Any = {"partial": True, "dropout": 0.3, "micro_batch_size": 2}
    runs = []
    for kind in (Toy, Undecided):
        torch.manual_seed(3)
        runs.append(fit(kind(FORMULATIONS[name], **arguments), rows))
    assert_identical_run(*runs)
    assert [run.measured.strict for run in runs] == [False, True]


@pytest.mark.parametrize(("name", "at"), [("average augmented", 2), ("relaxed", 3)])
def test_resumed_equals_uninterrupted(name: str, at: int, tmp_path: Path) -> None:
    rows, path = ToyRows(11, seed=2), tmp_path / "run.ckpt"

    def made() -> Judged:
        return Judged(FORMULATIONS[name], primal_steps=2)

    save = At(at, lambda trainer: trainer.save_checkpoint(path))
    whole = fit(made(), rows, callbacks=[save])
    resumed = made()
    trainer(max_epochs=3).fit(resumed, ToyData(rows, batch_size=4), ckpt_path=path)
    assert_identical_run(resumed, whole)
    assert any(bool(table.any()) for table in multipliers_of(whole).values())


def test_what_is_reported_is_strict(tmp_path: Path) -> None:
    rows = ToyRows(11, seed=5)
    module = Judged(Relaxed(alpha=0.8, beta=1.7, dual_lr=0.9), learning_rate=0.0)
    page = HardestSamples(count=3)
    runner = trainer(
        max_epochs=2,
        callbacks=[DualMonitor(), page],
        default_root_dir=tmp_path,
        logger=False,
    )
    runner.fit(module, ToyData(rows, rows, batch_size=11))
    violation = passed(module({"x": rows.x}).detach()) + 0.3
    surrogate = module({"x": rows.x}).detach() + 0.3
    share = float((violation > 0).double().mean())
    assert float(surrogate.max()) > float(violation.max()) + 1
    logged = {key: float(value) for key, value in runner.callback_metrics.items()}
    assert (
        logged["running/fit/violated"]
        == logged["val/fit/violated"]
        == pytest.approx(share)
    )
    assert set(module.violations["val"]["fit"].tolist()) == set(violation.tolist())
    multiplier = module.multipliers["fit"][:, 0].double()
    relaxed = Relaxed(alpha=0.8, beta=1.7).relaxation(violation, multiplier)
    infeasible = (violation - relaxed).clamp(min=0).max()
    assert logged["dual/fit/infeasibility_mean"] <= float(violation.max())
    assert infeasible > 0
    assert module.measured is not None
    torch.testing.assert_close(
        module.measured.followed["fit"].sort(0).values, surrogate.sort().values[:, None]
    )
    assert list(tmp_path.rglob("samples.jsonl"))


def test_a_value_that_is_not_finite_leaves_its_sample_out() -> None:
    class Broken(Judged):
        def strict_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
            values = passed(outputs)
            return {"fit": torch.where(batch["index"] == 2, torch.nan, values)}

    module = Broken(Pointwise(alpha=1.0, dual_lr=1.0))
    fit(module, ToyRows(6, seed=4), epochs=1, batch_size=6)
    assert lost(module) == (1, 0)
    assert module.multipliers["fit"][2] == 0
    assert torch.isfinite(weights_of(module)).all()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"fitt": torch.zeros(4)},
            ValueError,
            r"strict_values\(\) names 'fitt': .* 'fit', 'pair'",
        ),
        (
            {"pair": torch.zeros(4)},
            DataError,
            r'\["pair"\] must have .* \(4, 3\), got \(4,\)',
        ),
        ({"fit": 1.0}, DataError, r'\["fit"\] must have .* \(4,\), got float'),
        (
            torch.zeros(4),
            ValueError,
            r"strict_values\(\) returned a Tensor: return a dict",
        ),
    ],
)
def test_other_names_and_shapes_are_refused_by_name(
    given: Any, error: Any, message: str
) -> None:
    class Wrong(Toy):
        def strict_values(self, outputs: Tensor, batch: Any) -> Any:
            return given

    with pytest.raises(error, match=message):
        fit(Wrong(Pointwise()), ToyRows(4), epochs=1)


def test_cvar_with_strict_values_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r'strict_values\(\)\["fit"\]: the threshold of a CVaR'
    ):
        fit(Judged(CVaR()), ToyRows(4), epochs=1)
