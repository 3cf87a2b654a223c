"""A batch is one optimisation step; micro-batches are only how it is computed.

Per-micro-batch means are not the batch's when sizes do not divide or samples carry different
terms; an augmented average needs the mean of the whole batch before the first backward pass; and a
multiplier stepped once per micro-batch would see another λ in each.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pl_pointwise import Average, Pointwise, Tilted
from pl_pointwise.data import IndexedDataset, PointwiseSampler, ResumableDataLoader
from pl_pointwise.errors import DataError
from tests.pl_pointwise.table import STATISTICS, rule_of
from tests.pl_pointwise.toy import (
    CONSTRAINTS,
    FORMULATIONS,
    INTERVALS,
    KINDS,
    Steep,
    Toy,
    ToyData,
    ToyRows,
    assert_same_run,
    fit,
    lost,
    stack,
    trainer,
)

# Batches of 7, 7 and 3 rows: in pieces of 2 the last has 1 row, in pieces of 5 it has 2 or 3.
ROWS, BATCH = 17, 7


@pytest.mark.parametrize("name", KINDS)
def test_micro_batches_equal_the_whole_batch_where_the_dual_step_comes_first(
    name: str,
) -> None:
    """For the other order see test_layouts.py."""
    formulation, rows = FORMULATIONS[name], ToyRows(ROWS, seed=2, partial=True)
    arguments: Any = {"partial": True, "order": "dual_first"}
    whole = fit(Toy(formulation, **arguments), rows, batch_size=BATCH)
    cut = fit(Toy(formulation, micro_batch_size=5, **arguments), rows, batch_size=BATCH)
    assert_same_run(cut, whole)
    assert cut.trainer.global_step == whole.trainer.global_step == 9


@pytest.mark.parametrize(
    "name", ["average augmented", "tilted", "cvar augmented", "pointwise", "by name"]
)
def test_micro_batches_made_by_the_collate_function_equal_the_whole_batch(
    name: str,
) -> None:
    rows = ToyRows(ROWS, seed=2, partial=True)
    whole = fit(
        Toy(FORMULATIONS[name], INTERVALS, partial=True), rows, batch_size=BATCH
    )
    cut = Toy(FORMULATIONS[name], INTERVALS, partial=True)
    assert_same_run(fit(cut, rows, batch_size=BATCH, pieces=3), whole)
    both = Toy(FORMULATIONS[name], INTERVALS, partial=True, micro_batch_size=2)
    assert_same_run(fit(both, rows, batch_size=BATCH, pieces=3), whole)


@pytest.mark.parametrize("size", [None, 1, 3])
def test_tilted_mean_does_not_overflow_wherever_the_largest_violation_is(
    size: int | None,
) -> None:
    """In another micro-batch or on another rank, exp(v − a) of this one's own a is infinite."""
    rows = ToyRows(7)
    tilted = Tilted(tilt=2.0, dual_lr=0.5)
    module = fit(
        Steep(tilted, learning_rate=0.0, micro_batch_size=size),
        rows,
        batch_size=7,
        epochs=2,
    )
    assert lost(module) == (0, 0)
    outputs = module({"x": rows.x}).detach()
    violations = {
        "fit": 1e4 * outputs + 0.3,
        "pair": 0.2 - 1e4 * (outputs[:, None] * rows.x[:, :3]).flatten(),
    }
    for name, v in violations.items():
        figure = (torch.logsumexp(2 * v, 0) - math.log(len(v))) / 2
        assert figure > 1e3
        assert float(module.multipliers[name]) == pytest.approx(float(figure), rel=1e-6)


class Watched(Toy):
    """Keeps the output of every forward pass, and whether it had a gradient."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.passes: list[tuple[bool, Tensor]] = []

    def forward(self, batch: Any) -> Tensor:
        outputs = super().forward(batch)
        self.passes.append((outputs.requires_grad, outputs.detach().clone()))
        return outputs


@pytest.mark.parametrize("formulation", FORMULATIONS.values(), ids=FORMULATIONS)
def test_each_sample_is_forwarded_once(formulation: Any) -> None:
    """Objective and constraints read one forward pass; only where ψ bends does a mean need one."""
    module = fit(Watched(formulation), ToyRows(7), batch_size=7, epochs=1)
    assert [has_gradient for has_gradient, _ in module.passes] == [True]
    module = fit(
        Watched(formulation, micro_batch_size=3), ToyRows(7), batch_size=7, epochs=1
    )
    of_names = formulation.values() if isinstance(formulation, dict) else [formulation]
    rules = [
        rule for rule in map(rule_of, of_names) if rule and rule.kind in STATISTICS
    ]
    bends = [
        rule.kind not in ("average", "cvar") or rule.alpha is not None for rule in rules
    ]
    expected = [False] * 3 * any(bends) + [True] * 3
    assert [has_gradient for has_gradient, _ in module.passes] == expected


@pytest.mark.parametrize("options", [{}, {"order": "dual_first"}])
def test_the_pass_for_the_mean_sees_the_same_dropout(options: Any) -> None:
    """Else the price of the mean belongs to other outputs than those that are differentiated."""
    rows = ToyRows(7)
    module = Watched(Average(alpha=1.0), micro_batch_size=3, dropout=0.5, **options)
    torch.manual_seed(0)
    fit(module, rows, batch_size=7, epochs=1)
    means, steps = module.passes[:3], module.passes[3:]
    for (_, mean), (_, step) in zip(means, steps, strict=True):
        assert torch.equal(mean, step)
    # The dropout is on: the same rows without it come out otherwise.
    plain = Watched(Average(alpha=1.0), micro_batch_size=3, **options)
    fit(plain, rows, batch_size=7, epochs=1)
    assert not torch.equal(plain.passes[0][1], means[0][1])


def test_the_pass_for_the_mean_draws_nothing_from_the_random_state() -> None:
    """Two steps of an augmented average draw the dropout of two steps of a standard one."""
    outputs = []
    for alpha in (None, 1.0):
        module = Watched(
            Average(alpha=alpha, dual_lr=0.0),
            micro_batch_size=3,
            dropout=0.5,
            learning_rate=0.0,
        )
        torch.manual_seed(0)
        fit(module, ToyRows(7), batch_size=7, epochs=2)
        outputs.append(
            [output for has_gradient, output in module.passes if has_gradient]
        )
    for standard, augmented in zip(*outputs, strict=True):
        assert torch.equal(standard, augmented)


def test_a_term_that_nobody_carries_contributes_nothing_and_takes_no_dual_step() -> (
    None
):
    """0/0 would be NaN; and a mean of nobody must not move the average's multiplier."""
    for name, formulation in FORMULATIONS.items():
        rows = ToyRows(7, partial=True)
        rows.has["fit"][:] = False
        module = fit(Toy(formulation, partial=True), rows, batch_size=7)
        without = Toy(
            formulation["pair"] if isinstance(formulation, dict) else formulation,
            {"pair": CONSTRAINTS["pair"]},
            partial=True,
        )
        fit(without, rows, batch_size=7)
        torch.testing.assert_close(
            module.first, without.first, rtol=0, atol=1e-9, msg=name
        )
        assert "fit" not in module.multipliers or not module.multipliers["fit"].any(), (
            name
        )


def test_batch_without_any_objective_still_trains_the_constraints() -> None:
    rows = ToyRows(7, partial=True)
    rows.has["objective"][:] = False
    module = fit(Toy(Pointwise(), partial=True), rows, batch_size=7)
    assert lost(module)[1] == 0
    assert (module.multipliers["fit"] > 0).any()
    assert not torch.equal(module.first, Toy().first)


# What a batch has to be ---------------------------------------------------------------------------


def shaped(name: str, change: Any) -> type[Toy]:
    class Shaped(Toy):
        def objective(self, outputs: Tensor, batch: Any) -> Any:
            values = super().objective(outputs, batch)
            return change(values) if name == "objective" else values

        def constraint_values(self, outputs: Tensor, batch: Any) -> Any:
            values = super().constraint_values(outputs, batch)
            return {**values, name: change(values[name])} if name in values else values

    return Shaped


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("objective", lambda v: v.mean(), "do not reduce over the batch"),
        ("objective", lambda v: v[:, None], r"\(4,\), got \(4, 1\)"),
        ("objective", lambda v: None, "Is its return missing"),
        ("fit", lambda v: v.mean(), "do not reduce over the batch"),
        ("pair", lambda v: v[:2], r"\(4,\) or \(4, K\), got \(2, 3\)"),
        ("pair", lambda v: v[..., None], "got"),
    ],
)
def test_values_of_another_shape_are_refused(
    name: str, change: Any, message: str
) -> None:
    """A reduced loss broadcasts against everything and trains something else in silence."""
    with pytest.raises(DataError, match=message):
        fit(shaped(name, change)(Pointwise()), ToyRows(4))


def test_missing_and_unknown_constraint_values_are_refused_by_name() -> None:
    for place, names, message in (
        ("constraint_values", ["fit"], "lacks 'pair'"),
        (
            "constraint_values",
            ["fit", "pair", "fitt"],
            r"constraint_values\(\) names 'fitt'",
        ),
        ("membership", ["fitt"], r"membership\(\) names 'fitt'"),
    ):
        module, named = Toy(Pointwise()), dict.fromkeys(names, torch.ones(4))
        setattr(module, place, lambda *_, named=named: named)
        with pytest.raises(ValueError, match=message):
            fit(module, ToyRows(4))


@pytest.mark.parametrize(
    "mask",
    [
        lambda mask: mask.float(),
        lambda mask: mask[:2],
        lambda mask: mask[:, :2],  # two columns for three values
    ],
)
def test_members_of_another_shape_or_type_are_refused(mask: Any) -> None:
    class Masked(Toy):
        def membership(self, batch: Any) -> Any:
            return {"pair": mask(batch["has_pair"])}

    with pytest.raises(DataError, match="pair"):
        fit(Masked(Pointwise()), ToyRows(4))


def test_number_of_columns_must_not_change() -> None:
    class Changing(Toy):
        def constraint_values(self, outputs: Tensor, batch: Any) -> Any:
            values = super().constraint_values(outputs, batch)
            return {**values, "pair": values["pair"][:, : len(outputs) - 1]}

    with pytest.raises(RuntimeError, match="as many values in every batch"):
        fit(Changing(Pointwise()), ToyRows(7))  # batches of 4 and 3


@pytest.mark.parametrize("index", [None, torch.tensor(3), [0, 1, 2, 3]])
def test_batch_without_its_index_is_refused(index: Any) -> None:
    class Forgetful(ToyData):
        def collate(self, rows: Any) -> Any:
            batch = super().collate(rows)
            del batch["index"]
            return batch if index is None else {**batch, "index": index}

    with pytest.raises(DataError, match="IndexedDataset"):
        trainer().fit(Toy(Pointwise()), Forgetful(ToyRows(4), batch_size=4))


class Repeating(PointwiseSampler):
    """With replacement."""

    def order(self) -> list[int]:
        return [2, 2, 0, 2]


def drawn_with_replacement(rows: ToyRows) -> ResumableDataLoader:
    dataset = IndexedDataset(rows)
    return ResumableDataLoader(dataset, Repeating(dataset), 4, stack)


def test_a_sample_that_the_batch_has_twice_is_left_out_twice() -> None:
    """A value that only one copy breaks by, as dropout draws it: the others are not trained."""

    class FirstBreaks(Toy):
        def objective(self, outputs: Tensor, batch: Any) -> Tensor:
            broken = torch.tensor([torch.nan, 0, 0, 0], dtype=outputs.dtype)
            return super().objective(outputs, batch) + broken

    module = FirstBreaks(Pointwise(alpha=1.0))
    trainer().fit(module, drawn_with_replacement(ToyRows(4)))
    assert lost(module) == (3, 0)
    assert module.measured is not None
    assert module.measured.index.tolist() == [0]


def test_same_sample_twice_in_a_batch_steps_once() -> None:
    """A sampler with replacement would otherwise step λ twice, or write one step over the other."""
    module = Toy(Pointwise(alpha=None, dual_lr=0.5), learning_rate=0.0)
    rows = ToyRows(4)
    rows.x[2] = 3.0
    trainer().fit(module, drawn_with_replacement(rows))
    violation = CONSTRAINTS["pair"].violation(
        module({"x": rows.x})[:, None] * rows.x[:, :3]
    )
    expected = (0.5 * violation.detach()).clamp(min=0).float()
    expected[[1, 3]] = 0
    torch.testing.assert_close(module.multipliers["pair"], expected)
