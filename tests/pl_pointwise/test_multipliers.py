"""λ is a float32 table on the CPU, and neither Parameter nor buffer.

As a Parameter it would be picked up by the optimizer and divided by the number of ranks; as a
buffer DDP overwrites it from rank 0, and a bf16 module casts it: there 256 + 0.5 stays 256.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pl_pointwise import (
    Average,
    Multipliers,
    Penalty,
    Pointwise,
)
from pl_pointwise.errors import TrainingError
from tests.pl_pointwise.toy import (
    INTERVALS,
    KINDS,
    Toy,
    ToyRows,
    fit,
)

# The store ----------------------------------------------------------------------------------------


@given(st.data())
def test_rows_written_are_the_rows_read(data: st.DataObject) -> None:
    """Against a list of rows: any sequence of writes, reads of any rows, padding reads zero."""
    samples = data.draw(st.integers(1, 20), label="samples")
    columns = data.draw(st.integers(1, 3), label="columns")
    multipliers = Multipliers(samples)
    expected = [[0.0] * columns for _ in range(samples)]
    multipliers.rows("c", torch.tensor([], dtype=torch.long), columns)
    for _ in range(data.draw(st.integers(0, 4), label="writes")):
        index = data.draw(st.lists(st.integers(0, samples - 1), unique=True), label="index")
        rows = torch.rand(len(index), columns)
        multipliers.write("c", torch.tensor(index, dtype=torch.long), rows)
        for position, row in zip(index, rows.tolist(), strict=True):
            expected[position] = row
    read = data.draw(st.lists(st.integers(-1, samples - 1)), label="read")
    found = multipliers.rows("c", torch.tensor(read, dtype=torch.long), columns)
    wanted = [expected[i] if i >= 0 else [0.0] * columns for i in read]
    torch.testing.assert_close(found, torch.tensor(wanted).reshape(len(read), columns))
    assert multipliers["c"].dtype == torch.float32


def test_rows_are_a_copy() -> None:
    multipliers = Multipliers(3)
    multipliers.rows("c", torch.tensor([1]), 1).add_(5.0)
    assert not multipliers["c"].any()
    multipliers.scalar("a", 1).add_(5.0)
    assert not multipliers["a"].any()


@pytest.mark.parametrize("index", [[4], [0, 4], [-2], [2**40]])
def test_index_outside_the_training_set_is_refused(index: list[int]) -> None:
    """A negative one would silently be counted from the end."""
    with pytest.raises(TrainingError, match=r'outside the training set of 4.*batch\["index"\]'):
        Multipliers(4).rows("c", torch.tensor(index), 1)


def test_state_round_trip_is_a_copy() -> None:
    multipliers = Multipliers(2)
    multipliers.rows("c", torch.tensor([0]), 1)
    multipliers.write("c", torch.tensor([1]), torch.tensor([[2.0]]))
    other = Multipliers(2)
    other.load_state_dict(multipliers.state_dict())
    multipliers.write("c", torch.tensor([0]), torch.tensor([[9.0]]))
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


def test_shapes_after_fit() -> None:
    rows = ToyRows(7)
    pointwise = fit(Toy(Pointwise()), rows, epochs=1).multipliers
    assert (pointwise["fit"].shape, pointwise["pair"].shape) == ((7, 1), (7, 3))
    intervals = fit(Toy(Pointwise(), INTERVALS), rows, epochs=1).multipliers
    assert (intervals["fit"].shape, intervals["pair"].shape) == ((7, 2), (7, 6))
    average = fit(Toy(Average()), rows, epochs=1).multipliers
    assert (average["fit"].shape, average["pair"].shape) == ((), ())
    average = fit(Toy(Average(), INTERVALS), rows, epochs=1).multipliers
    assert (average["fit"].shape, average["pair"].shape) == ((2,), (2,))
    assert len(fit(Toy(Penalty(weight=1.0)), rows, epochs=1).multipliers) == 0
    assert len(fit(Toy(None), rows, epochs=1).multipliers) == 0


def test_casting_or_moving_the_module_leaves_the_multipliers() -> None:
    module = fit(Toy(Pointwise(alpha=1.0, dual_lr=1.0)), ToyRows(4), epochs=1)
    before = module.multipliers["pair"].clone()
    module.to(torch.bfloat16)
    assert module.multipliers["pair"].dtype == torch.float32
    assert torch.equal(module.multipliers["pair"], before)
