"""α by itself: its first value, its growth, and that a run with it stays exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pl_pointwise import Average, Constraint, CVaR, Pointwise, Relaxed
from tests.pl_pointwise.toy import (
    At,
    Toy,
    ToyData,
    ToyRows,
    assert_identical_run,
    assert_same_run,
    fit,
    initial_weights,
    trainer,
    weights_of,
)


class Alphas(At):
    """The α of "fit" after every step."""

    def __init__(self) -> None:
        super().__init__(0, lambda _: None)
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.values.append(pl_module.in_force("fit").augmentation)


def alphas(
    formulation: Any, rows: Any = None, epochs: int = 6, kind: type[Toy] = Toy, **options: Any
) -> list[float]:
    """α of each epoch; two steps make one."""
    seen = Alphas()
    fit(kind(formulation, **options), rows or ToyRows(8), epochs=epochs, callbacks=[seen])
    return seen.values[::2]


def first_violations(rows: ToyRows) -> tuple[Tensor, Tensor]:
    """ℓ₀ and the violations of "fit" before any step."""
    first, last = initial_weights()
    z = torch.tanh(rows.x @ first) @ last
    return (z - rows.y).square(), z + 0.3


def test_first_alpha_makes_both_terms_weigh_alike() -> None:
    rows = ToyRows(4)
    objective, violation = first_violations(rows)
    expected = objective.mean() / violation.clamp(min=0).square().mean()
    assert alphas(Pointwise(), rows, epochs=1) == pytest.approx([float(expected)], rel=1e-6)


@pytest.mark.parametrize("pieces", [1, 3])
def test_first_alpha_is_that_of_the_whole_batch(pieces: int) -> None:
    whole = alphas(Pointwise(), partial=True, rows=ToyRows(8, partial=True))
    parts = alphas(
        Pointwise(), partial=True, rows=ToyRows(8, partial=True), micro_batch_size=pieces
    )
    assert parts == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_finding_alpha_changes_nothing_else(dropout: float) -> None:
    """Not the weights, nor the random numbers that follow: as if α had been stated."""
    torch.manual_seed(3)
    found = Toy(Pointwise(alpha_growth=1.0), dropout=dropout)
    fit(found, ToyRows(9))
    states = found.adaptive_alpha.state_dict()
    torch.manual_seed(3)
    stated = {n: Pointwise(alpha=float(s["alpha"] or 0)) for n, s in states.items()}
    assert_identical_run(found, fit(Toy(stated, dropout=dropout), ToyRows(9)))


class Scaled(Toy):
    """The toy with its objective and its constraints in other units."""

    objective_unit = 1.0
    unit = 1.0

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:
        return self.objective_unit * super().objective(outputs, batch)

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        values = super().constraint_values(outputs, batch)
        return {name: self.unit * value for name, value in values.items()}


@pytest.mark.parametrize(("objective_unit", "unit"), [(1.0, 1e3), (1e-2, 1.0), (50.0, 1e-3)])
def test_units_change_nothing(objective_unit: float, unit: float) -> None:
    """A user states ε and nothing else, whatever ℓ₀ and ℓ are measured in."""
    runs = []
    for of_objective, of_constraint in ((1.0, 1.0), (objective_unit, unit)):
        bound = {"fit": Constraint(at_most=-0.3 * of_constraint)}
        module = Scaled(Pointwise(), bound, learning_rate=0.05 / of_objective)
        module.objective_unit, module.unit = of_objective, of_constraint
        fit(module, ToyRows(11), epochs=5)
        pull = module.multipliers["fit"] * of_constraint / of_objective
        runs.append((weights_of(module), pull))
    torch.testing.assert_close(runs[1][0], runs[0][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(runs[1][1], runs[0][1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("at_most", [-0.3, -3.0, 50.0])
def test_objective_that_starts_at_zero_leaves_alpha_at_one(at_most: float) -> None:
    """A stated scale over mean (v)₊² pulled hardest on what was nearly met."""

    class FromZero(Toy):
        def objective(self, outputs: Tensor, batch: Any) -> Tensor:
            return (outputs - outputs.detach()).square()

    seen, bound = Alphas(), {"fit": Constraint(at_most=at_most)}
    fit(FromZero(Pointwise(), bound), ToyRows(4), epochs=1, callbacks=[seen])
    assert seen.values == [1.0]


def test_dropout_alone_is_no_scale_of_the_objective() -> None:
    """The distance to the model itself is not 0 under dropout, as a KL would not be."""

    class FromItself(Toy):
        def objective(self, outputs: Tensor, batch: Any) -> Tensor:
            first, last = initial_weights()
            return (outputs - torch.tanh(batch["x"] @ first) @ last).square()

    assert alphas(Pointwise(), epochs=1, dropout=0.4, kind=FromItself) == [1.0]
    assert alphas(Pointwise(), epochs=1, dropout=0.4) != [1.0]


def test_first_batch_whose_objective_is_not_finite_tells_no_scale() -> None:
    """In training mode alone: without dropout the same batch may have finite values."""

    class NotFinite(Toy):
        def objective(self, outputs: Tensor, batch: Any) -> Tensor:
            found = super().objective(outputs, batch)
            return found * float("nan") if self.training and not self.skipped_steps else found

    assert alphas(Pointwise(), epochs=1, kind=NotFinite) == [1.0]


def test_start_where_all_are_satisfied_has_the_objectives_unit() -> None:
    rows = ToyRows(4)
    objective, _ = first_violations(rows)
    seen = Alphas()
    fit(Toy(Pointwise(), {"fit": Constraint(at_most=50.0)}), rows, epochs=1, callbacks=[seen])
    assert seen.values == pytest.approx([float(objective.mean())], rel=1e-6)


def test_alpha_doubles_while_violations_stay_and_stops_at_its_cap() -> None:
    """Of weights that hardly move; the first epoch has none before it to be compared with."""
    still = {"learning_rate": 1e-9}
    growing = alphas(Pointwise(alpha=0.5, alpha_growth="auto"), **still)
    assert growing == [0.5, 0.5, 1.0, 2.0, 4.0, 8.0]
    capped = alphas(Pointwise(alpha=0.5, alpha_growth="auto", alpha_max=3.0), **still)
    assert capped == [0.5, 0.5, 1.0, 2.0, 3.0, 3.0]
    assert alphas(Pointwise(alpha=0.5), **still) == [0.5] * 6


@pytest.mark.parametrize(("violated", "grows"), [(2, False), (3, True)])
def test_alpha_stays_where_all_but_a_twentieth_are_satisfied(violated: int, grows: bool) -> None:
    """Of 40 samples, with weights that hardly move."""
    rows = ToyRows(40)
    values = (first_violations(rows)[1] - 0.3).sort(descending=True).values
    between = float(values[violated - 1] + values[violated]) / 2
    module = Toy(
        Pointwise(alpha=0.5, alpha_growth="auto"),
        {"fit": Constraint(at_most=between)},
        learning_rate=1e-9,
    )
    fit(module, rows, epochs=4)
    alpha = module.in_force("fit").augmentation
    assert alpha is not None
    assert (alpha > 0.5) is grows


def test_alpha_stays_where_the_rest_is_relaxed() -> None:
    """A sample that buys its violation is no reason to press harder: v = u* at its optimum."""
    far = {"fit": Constraint(at_most=-50.0)}
    seen, module = Alphas(), Toy(Relaxed(alpha=0.5, beta=0.1, alpha_growth="auto"), far)
    module.learning_rate = 1e-9
    fit(module, ToyRows(8), epochs=12, callbacks=[seen])
    assert set(seen.values) == {0.5}


def test_equality_has_an_alpha_too() -> None:
    rows = ToyRows(4)
    objective, violation = first_violations(rows)
    seen = Alphas()
    bound = {"fit": Constraint(equals=-0.3)}
    module = fit(Toy(Pointwise(), bound), rows, epochs=1, callbacks=[seen])
    expected = objective.mean() / violation.square().mean()
    assert seen.values == pytest.approx([float(expected)], rel=1e-6)
    assert module.in_force("fit").step_size == pytest.approx(2 * float(expected), rel=1e-6)


@pytest.mark.parametrize("batches", [1, 2, 5])
def test_resume_is_exact(tmp_path: Path, batches: int) -> None:
    path = tmp_path / "saved.ckpt"
    save = At(batches, lambda trainer: trainer.save_checkpoint(path))
    uninterrupted = fit(Toy(Pointwise(), primal_steps=2), ToyRows(7), epochs=4, callbacks=[save])
    resumed = Toy(Pointwise(), primal_steps=2)
    trainer(max_epochs=4).fit(resumed, ToyData(ToyRows(7), batch_size=4), ckpt_path=path)
    assert_identical_run(resumed, uninterrupted)
    assert resumed.adaptive_alpha.state_dict() == uninterrupted.adaptive_alpha.state_dict()


def test_other_data_start_again() -> None:
    module = fit(Toy(Pointwise()), ToyRows(7), epochs=2)
    fit(module, ToyRows(9, seed=5), epochs=1)
    fresh = Toy(Pointwise())
    fresh.load_state_dict(fit(Toy(Pointwise()), ToyRows(7), epochs=2).state_dict())
    assert_same_run(module, fit(fresh, ToyRows(9, seed=5), epochs=1))


def test_first_alpha_is_at_most_its_cap() -> None:
    assert alphas(Pointwise(alpha_max=0.01), epochs=1) == [0.01]


def test_alpha_that_is_stated_anew_takes_the_place_of_what_has_grown() -> None:
    module = Toy(Pointwise(alpha=0.5, alpha_growth="auto"), learning_rate=1e-9)
    fit(module, ToyRows(8), epochs=4)
    assert module.in_force("fit").augmentation == 2.0
    module.formulations = dict.fromkeys(
        module.formulations, Pointwise(alpha=5.0, alpha_growth="auto")
    )
    assert module.in_force("fit").augmentation == 5.0
    seen = Alphas()
    fit(module, ToyRows(8), epochs=3, callbacks=[seen])
    assert seen.values[::2] == [5.0, 5.0, 10.0]


def test_statistics_of_the_batch_need_a_number() -> None:
    with pytest.raises(ValueError, match="only Pointwise and Relaxed"):
        Average(alpha="auto")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="only Pointwise and Relaxed"):
        CVaR(alpha=1.0, alpha_growth="auto")  # type: ignore[arg-type]


def test_before_a_fit_alpha_is_one() -> None:
    assert Pointwise().augmentation == 1.0
    assert Pointwise().step_size == 2.0
    assert Pointwise(alpha=None).step_size == 0.1
