"""λ is a float32 table on the CPU, and neither Parameter nor buffer.

As a Parameter it would be picked up by the optimizer and divided by the number of ranks; as a
buffer DDP overwrites it from rank 0, and a bf16 module casts it: there 256 + 0.5 stays 256.
Users set and reset it, and it is kept under another formulation of its kind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pl_pointwise import (
    Average,
    Constraint,
    CVaR,
    Multipliers,
    Penalty,
    Pointwise,
    PointwiseLoss,
    Relaxed,
)
from pl_pointwise.errors import TrainingError
from pl_pointwise.lagrangian.scopes import PerSample
from tests.pl_pointwise.toy import KINDS, Seen, Toy, ToyData, ToyRows, fit, trainer

# The store ----------------------------------------------------------------------------------------


def scope_of_samples(samples: int) -> PerSample:
    loss = PointwiseLoss({"c": Constraint(at_most=0)}, Pointwise(), samples=samples)
    scope = loss._lagrangian.scopes["c"]
    assert isinstance(scope, PerSample)
    return scope


@given(st.data())
def test_rows_written_are_the_rows_read(data: st.DataObject) -> None:
    """Against a list of rows: any sequence of writes, reads of any rows, padding reads zero."""
    samples = data.draw(st.integers(1, 20), label="samples")
    columns = data.draw(st.integers(1, 3), label="columns")
    scope = scope_of_samples(samples)
    table = scope.multipliers.table("c", (samples, columns))
    expected = [[0.0] * columns for _ in range(samples)]
    for _ in range(data.draw(st.integers(0, 4), label="writes")):
        index = data.draw(
            st.lists(st.integers(0, samples - 1), unique=True), label="index"
        )
        rows = torch.rand(len(index), columns)
        table[index] = rows
        for position, row in zip(index, rows.tolist(), strict=True):
            expected[position] = row
    read = data.draw(st.lists(st.integers(-1, samples - 1)), label="read")
    index = torch.tensor(read, dtype=torch.long)
    found = scope.rows(index, torch.zeros(len(index), columns))
    wanted = [expected[i] if i >= 0 else [0.0] * columns for i in read]
    torch.testing.assert_close(found, torch.tensor(wanted).reshape(len(read), columns))
    assert table.dtype == torch.float32


def test_rows_are_a_copy() -> None:
    scope = scope_of_samples(3)
    scope.rows(torch.tensor([1]), torch.zeros(1, 1)).add_(5.0)
    assert not scope.multipliers["c"].any()
    loss = PointwiseLoss({"a": Constraint(at_most=0)}, Average(), samples=3)
    of_batch = loss._lagrangian.on_batch["a"]
    of_batch.multiplier.add_(5.0)
    assert not of_batch.multipliers["a"].any()


@pytest.mark.parametrize("index", [[4], [0, 4], [2**40]])
def test_index_outside_the_training_set_is_refused(index: list[int]) -> None:
    with pytest.raises(
        TrainingError, match=r"outside the training set of 4.*index is the position"
    ):
        scope_of_samples(4).rows(torch.tensor(index), torch.zeros(len(index), 1))


def test_state_round_trip_is_a_copy() -> None:
    multipliers = Multipliers(2)
    multipliers.table("c", (2, 1))[1] = 2.0
    other = Multipliers(2)
    other.load_state_dict(multipliers.state_dict())
    multipliers["c"][0] = 9.0
    assert other["c"].tolist() == [[0.0], [2.0]]


@pytest.mark.parametrize(
    "table",
    [
        torch.zeros(3, 1),
        torch.zeros(2, 1, 1),
        torch.tensor([[0.0], [float("nan")]]),
        torch.tensor(float("inf")),
    ],
)
def test_state_that_is_no_table_of_these_samples_is_refused(table: Any) -> None:
    with pytest.raises(ValueError, match='"c"'):
        Multipliers(2).load_state_dict({"c": table})


# In a module --------------------------------------------------------------------------------------


@pytest.mark.parametrize("formulation", KINDS.values(), ids=KINDS)
def test_multipliers_are_neither_parameters_nor_buffers(formulation: Any) -> None:
    module = fit(Toy(formulation), ToyRows(7), epochs=1)
    assert {name for name, _ in module.named_parameters()} == {"first", "last"}
    assert not dict(module.named_buffers())
    assert module.state_dict().keys() == {"first", "last"}
    optimized = module.trainer.optimizers[0].param_groups[0]["params"]
    assert {id(p) for p in optimized} == {id(module.first), id(module.last)}
    assert all(not table.requires_grad for table in module.multipliers.values())


def test_casting_or_moving_the_module_leaves_the_multipliers() -> None:
    module = fit(Toy(Pointwise(alpha=1.0, dual_lr=1.0)), ToyRows(4), epochs=1)
    before = module.multipliers["pair"].clone()
    module.to(torch.bfloat16)
    assert module.multipliers["pair"].dtype == torch.float32
    assert torch.equal(module.multipliers["pair"], before)


# Set, reset, capped, and kept under another formulation -------------------------------------------

STILL = {"learning_rate": 0.0}  # Weights that stay, so that every violation is known.


def fit_again(module: Toy, count: int = 9, **options: Any) -> Toy:
    return fit(module, ToyRows(count), epochs=1, **options)


def checkpoint_of(module: Toy, folder: Path) -> Path:
    """The file that the module leaves behind after an epoch."""
    fit_again(module).trainer.save_checkpoint(folder / "one.ckpt")
    return folder / "one.ckpt"


def test_initial_values_are_where_the_first_step_starts() -> None:
    """There was no public way; writing into the store before a fit was undone by the fit."""
    for values in (
        0.75,
        torch.full((9,), 0.75),
        torch.full((9, 1), 0.75, dtype=torch.float64),
    ):
        module = Toy(
            Pointwise(alpha=1.0, dual_lr=0.0), {"fit": Constraint(at_most=0.0)}, **STILL
        )
        module.multipliers.set("fit", values)
        assert "fit" not in module.multipliers
        fit_again(module)
        assert module.multipliers["fit"].shape == (9, 1)
        assert (module.multipliers["fit"] == 0.75).all()


def test_set_after_a_fit_moves_the_table_and_reset_starts_it_again() -> None:
    module = fit_again(Toy(Pointwise(alpha=1.0, dual_lr=1.0)))
    module.multipliers.set("fit", 3.0)
    assert (module.multipliers["fit"] == 3.0).all()
    with pytest.raises(ValueError, match=r"shape \(9, 1\).*reset\('fit'\)"):
        module.multipliers.set("fit", torch.ones(8))
    pair = module.multipliers["pair"].clone()
    module.multipliers.reset("fit")
    assert list(module.multipliers) == ["pair"]
    assert torch.equal(module.multipliers["pair"], pair)
    module.multipliers.reset()
    assert not module.multipliers
    with pytest.raises(KeyError, match="no multipliers of other"):
        module.multipliers.reset("other")


@pytest.mark.parametrize(
    ("formulation", "values", "message"),
    [
        (Pointwise(), torch.ones(8), r"of shape \(8,\) for a table of shape \(9, 1\)"),
        (Average(), torch.ones(9, 1), r"of shape \(9, 1\) for a table of shape \(\)"),
        (Pointwise(), -1.0, "below 0, which only an equality has"),
    ],
)
def test_initial_values_that_cannot_be_are_refused_before_the_first_step(
    formulation: Any, values: Any, message: str
) -> None:
    module = Toy(formulation)
    module.multipliers.set("fit", values)
    with pytest.raises(TrainingError, match=message):
        fit_again(module)
    assert module.measured is None


@pytest.mark.parametrize("values", [float("nan"), torch.ones(2, 2, 2)])
def test_initial_values_are_finite_and_a_table(values: Any) -> None:
    with pytest.raises(ValueError, match="finite numbers"):
        Multipliers(2).set("fit", values)


def test_initial_values_of_a_name_that_no_constraint_has_are_dropped_with_a_warning(
    caplog: Any,
) -> None:
    module = Toy(Pointwise())
    module.multipliers.set("fitt", 1.0)
    fit_again(module)
    assert "fitt" not in module.multipliers
    assert 'Multipliers of "fitt" are dropped' in caplog.text


def test_set_values_give_way_to_a_checkpoint_with_a_warning(
    tmp_path: Path, caplog: Any
) -> None:
    path = checkpoint_of(Toy(Pointwise(alpha=1.0, dual_lr=1.0), **STILL), tmp_path)
    module = Toy(Pointwise(alpha=1.0, dual_lr=0.0), **STILL)
    module.multipliers.set("fit", 7.0)
    data = ToyData(ToyRows(9), batch_size=4)
    trainer(max_epochs=2).fit(module, data, ckpt_path=path, weights_only=True)
    assert (module.multipliers["fit"] < 7).all()
    assert "are the checkpoint's" in caplog.text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Pointwise(alpha=1.0, dual_lr=1.0), Relaxed(alpha=1.0, beta=2.0, dual_lr=0.0)),
        (Relaxed(alpha=1.0, beta=2.0, dual_lr=1.0), Pointwise(alpha=None, dual_lr=0.0)),
        (Average(dual_lr=1.0), CVaR(dual_lr=0.0)),
    ],
)
def test_formulation_of_the_same_kind_keeps_the_multipliers(
    before: Any, after: Any
) -> None:
    old = fit_again(Toy(before, **STILL))
    new = Toy(after, **STILL)
    new._lagrangian._hold(old.multipliers, {})
    new._lagrangian.fingerprint = old._lagrangian.fingerprint
    kept = {name: table.clone() for name, table in old.multipliers.items()}
    fit_again(new)
    assert any(table.any() for table in kept.values())
    torch.testing.assert_close(new.multipliers, kept, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (Pointwise(), Average(), "one per sample"),
        (Average(), Pointwise(), "one per constraint"),
    ],
)
def test_formulation_of_another_kind_is_refused_until_a_reset(
    before: Any, after: Any, kind: str, tmp_path: Path
) -> None:
    """It ended in "multipliers of shape ()" at the first step, without a way out."""
    path = checkpoint_of(Toy(before), tmp_path)
    module = Toy.load_from_checkpoint(
        path, formulation=after, constraints=None, weights_only=True
    )
    with pytest.raises(TrainingError, match=rf"{kind}.*reset\('fit'\) before fit"):
        fit_again(module)
    module.multipliers.reset()
    fit_again(module)
    assert module.multipliers["fit"].dim() == (2 if isinstance(after, Pointwise) else 0)


def test_multipliers_of_a_formulation_without_any_are_dropped(caplog: Any) -> None:
    module = fit_again(Toy(Pointwise(alpha=1.0, dual_lr=1.0)))
    module.formulations = {name: Penalty(weight=1.0) for name in module.constraints}
    fit_again(module)
    assert not module.multipliers
    assert 'Multipliers of "fit" are dropped' in caplog.text


def one_step(module: Toy, rows: ToyRows, seed: int = 0) -> set[int]:
    """Takes a step; returns the samples of its batch."""
    seen = Seen()
    data = ToyData(rows, batch_size=4, seed=seed)
    trainer(max_steps=1, callbacks=[seen]).fit(module, data)
    return {*seen.batches[0][1]}


def test_other_data_close_no_window_and_keep_no_unit() -> None:
    module = Toy(Pointwise(), primal_steps=2)
    one_step(module, ToyRows(8))
    one_step(module, ToyRows(5, seed=3))
    assert not any(table.any() for table in module.multipliers.values())
    assert len(module._lagrangian._window) == 1
    assert module._lagrangian.units.state_dict()["states"]["fit"]["visits"] == 1


def test_what_was_reset_is_not_stepped_by_visits_from_before() -> None:
    module = Toy(
        Pointwise(alpha=None, dual_lr=1.0), {"fit": Constraint(at_most=-50.0)}, **STILL
    )
    module.training_settings.primal_steps = 2
    before = one_step(module, ToyRows(8))
    module.multipliers.reset("fit")
    after = one_step(module, ToyRows(8), seed=1)
    assert before != after
    assert {*module.multipliers["fit"].nonzero()[:, 0].tolist()} == after


def test_a_threshold_goes_with_the_formulation_that_learns_it() -> None:
    module = fit_again(Toy(CVaR(level=0.5)))
    assert {*module.thresholds} == {*module.constraints}
    module.formulations = {name: Average() for name in module.constraints}
    fit_again(module)
    assert module.thresholds == {}


def test_logs_and_evaluation_of_an_equality_report_its_distance() -> None:
    """The dual follows ℓ − c with its sign; what users read is how far off the samples are."""
    module = Toy(
        Pointwise(alpha=1.0, dual_lr=1.0), {"fit": Constraint(equals=0.3)}, **STILL
    )
    runner = trainer(max_epochs=1)
    runner.fit(module, ToyData(ToyRows(9), batch_size=9))
    residual = module.measured.judged["fit"] if module.measured else torch.empty(0)
    assert (residual < 0).any()
    torch.testing.assert_close(
        runner.callback_metrics["running/fit/mean"].double(), residual.abs().mean()
    )
    assert (module.multipliers["fit"] < 0).any()
    trainer().test(module, ToyData(ToyRows(9), ToyRows(9), batch_size=4))
    torch.testing.assert_close(
        module.violations["test"]["fit"].sort().values,
        residual.abs()[:, 0].sort().values,
    )


def test_a_batch_padded_to_its_own_longest_row_is_told_to_pad_to_one_width() -> None:
    table = Multipliers(4)
    table.table("fit", (4, 3))
    with pytest.raises(
        TrainingError, match=r"\(4, 3\).*need \(4, 2\).*pad to one width"
    ):
        table.table("fit", (4, 2))
