"""λ, α and η mean the same whatever the batch size, the number of samples or of columns.

Terms are means over the samples that carry them. With sums instead (or means over all rows), tuned
values of α and η stop working when the batch grows or another task joins the mixture.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pl_pointwise import Multipliers
from tests.pl_pointwise.toy import FORMULATIONS, KINDS, Toy, ToyRows, assert_same_run, fit


class Repeated:
    """The rows of a data set, each several times in turn."""

    def __init__(self, rows: ToyRows, times: int) -> None:
        self.rows, self.times = rows, times

    def __len__(self) -> int:
        return len(self.rows) * self.times

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        return self.rows[position // self.times]


@pytest.mark.parametrize("formulation", FORMULATIONS.values(), ids=FORMULATIONS)
def test_batch_of_repeated_samples_takes_the_same_steps(formulation: Any) -> None:
    rows = ToyRows(5, seed=2, partial=True)
    once = fit(Toy(formulation, partial=True), rows, batch_size=5, epochs=4)
    thrice = fit(Toy(formulation, partial=True), Repeated(rows, 3), batch_size=15, epochs=4)
    for name, table in once.multipliers.items():
        wanted = table.repeat_interleave(3, dim=0) if table.dim() == 2 else table
        torch.testing.assert_close(thrice.multipliers[name], wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(thrice.first, once.first, rtol=0, atol=1e-7)
    torch.testing.assert_close(thrice.last, once.last, rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", ["pointwise", "relaxed", "pointwise standard", "relaxed linear"])
def test_first_step_of_a_multiplier_does_not_depend_on_the_batch_size(name: str) -> None:
    """With the weights fixed, one epoch gives every sample the same λ in batches of any size."""
    rows = ToyRows(12, seed=2)
    tables = []
    for size in (1, 4, 12):
        module = Toy(FORMULATIONS[name], learning_rate=0.0)
        tables.append(fit(module, rows, batch_size=size, epochs=1).multipliers["pair"])
    assert (tables[0] > 0.1).any()
    for table in tables[1:]:
        torch.testing.assert_close(table, tables[0])


class Doubled(Toy):
    """Every pair twice: twice the columns, of the same values."""

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        values = super().constraint_values(outputs, batch)
        return {**values, "pair": values["pair"].repeat(1, 2)}

    def membership(self, batch: Any) -> dict[str, Tensor]:
        masks = super().membership(batch)
        return {**masks, "pair": masks["pair"].repeat(1, 2)}


@pytest.mark.parametrize("formulation", KINDS.values(), ids=KINDS)
def test_columns_are_averaged_not_summed(formulation: Any) -> None:
    rows = ToyRows(7, seed=2, partial=True)
    single = fit(Toy(formulation, partial=True), rows, batch_size=7)
    double = fit(Doubled(formulation, partial=True), rows, batch_size=7)
    torch.testing.assert_close(double.first, single.first, rtol=0, atol=1e-7)
    if "pair" in single.multipliers and single.multipliers["pair"].dim() == 2:
        wanted = single.multipliers["pair"].repeat(1, 2)
        torch.testing.assert_close(double.multipliers["pair"], wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("formulation", KINDS.values(), ids=KINDS)
def test_samples_that_carry_nothing_change_nothing(formulation: Any) -> None:
    """A batch mixes the data of several terms: each term is a mean over its own samples."""
    rows = ToyRows(6, seed=2, partial=True)
    mixed = ToyRows(9, seed=2, partial=True)
    mixed.x[:6], mixed.y[:6] = rows.x, rows.y
    for name, mask in mixed.has.items():
        mask[:6], mask[6:] = rows.has[name], False
    alone = fit(Toy(formulation, partial=True), rows, batch_size=6)
    among = fit(Toy(formulation, partial=True), mixed, batch_size=9)
    for table in among.multipliers.values():
        assert table.dim() < 2 or not table[6:].any()
    tables = {n: t[:6] if t.dim() == 2 else t for n, t in among.multipliers.items()}
    among._duals.multipliers = Multipliers(6)
    among.multipliers.load_state_dict(tables)
    assert_same_run(among, alone)
