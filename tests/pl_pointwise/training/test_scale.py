"""λ, α and η mean the same whatever the batch size and the number of samples.

Terms are means over the samples that carry them. With sums instead (or means over all rows), tuned
values of α and η stop working when the batch grows or another task joins the mixture.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pl_pointwise.toy import FORMULATIONS, Toy, ToyRows, fit


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
