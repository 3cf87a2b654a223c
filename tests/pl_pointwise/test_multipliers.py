"""λ is a float32 table on the CPU, and neither Parameter nor buffer.

As a Parameter it would be picked up by the optimizer and divided by the number of ranks; as a
buffer DDP overwrites it from rank 0, and a bf16 module casts it: there 256 + 0.5 stays 256.
"""

from __future__ import annotations

import resource
from pathlib import Path
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
    PointwiseModule,
    Training,
)
from pl_pointwise.errors import TrainingError
from tests.pl_pointwise.toy import (
    INTERVALS,
    KINDS,
    At,
    Toy,
    ToyData,
    ToyRows,
    assert_identical_run,
    fit,
    trainer,
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


def test_table_is_made_of_zeros_when_its_width_is_first_seen() -> None:
    multipliers = Multipliers(4)
    assert len(multipliers) == 0
    multipliers.rows("c", torch.tensor([0]), 3)
    assert {name: tuple(table.shape) for name, table in multipliers.items()} == {"c": (4, 3)}
    assert "4 samples" in repr(multipliers)


@pytest.mark.parametrize("index", [[4], [0, 4], [-2], [2**40]])
def test_index_outside_the_training_set_is_refused(index: list[int]) -> None:
    """A negative one would silently be counted from the end."""
    with pytest.raises(TrainingError, match=r'outside the training set of 4.*batch\["index"\]'):
        Multipliers(4).rows("c", torch.tensor(index), 1)


def test_another_number_of_columns_is_refused() -> None:
    multipliers = Multipliers(4)
    multipliers.rows("c", torch.tensor([0]), 3)
    with pytest.raises(TrainingError, match=r'"c".*\(4, 3\).*\(4, 2\).*membership'):
        multipliers.rows("c", torch.tensor([0]), 2)


@pytest.mark.parametrize(("sides", "shape"), [(1, ()), (2, (2,))])
def test_scalar_has_one_entry_a_side(sides: int, shape: tuple[int, ...]) -> None:
    multipliers = Multipliers(4)
    assert multipliers.scalar("a", sides).shape == (sides,)
    assert multipliers["a"].shape == shape
    multipliers.write_scalar("a", torch.arange(1.0, sides + 1))
    assert multipliers.scalar("a", sides).tolist() == list(range(1, sides + 1))


def test_state_round_trip_is_a_copy() -> None:
    multipliers = Multipliers(2)
    multipliers.rows("c", torch.tensor([0]), 1)
    multipliers.write("c", torch.tensor([1]), torch.tensor([[2.0]]))
    other = Multipliers(2)
    other.load_state_dict(multipliers.state_dict())
    multipliers.write("c", torch.tensor([0]), torch.tensor([[9.0]]))
    assert other["c"].tolist() == [[0.0], [2.0]]


def test_state_of_another_dtype_is_stored_as_float32() -> None:
    multipliers = Multipliers(2)
    multipliers.load_state_dict({"c": torch.ones(2, 1, dtype=torch.float64)})
    assert multipliers["c"].dtype == torch.float32


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


# In files -----------------------------------------------------------------------------------------


def mapped(folder: Path, samples: int, **options: Any) -> Multipliers:
    return Multipliers(samples).mapped(folder / "tables", **options)


@given(data=st.data())
def test_mapped_tables_hold_what_memory_holds(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """To the last bit, after any sequence of writes, and in the state that is saved."""
    samples = data.draw(st.integers(1, 20), label="samples")
    columns = data.draw(st.integers(1, 3), label="columns")
    stores = [Multipliers(samples), mapped(tmp_path_factory.mktemp("mapped"), samples)]
    for _ in range(data.draw(st.integers(0, 4), label="writes")):
        index = data.draw(st.lists(st.integers(0, samples - 1), unique=True), label="index")
        rows = torch.rand(len(index), columns)
        for store in stores:
            store.rows("a/b c", torch.tensor(index, dtype=torch.long), columns)
            store.write("a/b c", torch.tensor(index, dtype=torch.long), rows)
            store.scalar("one", 1)
            store.write_scalar("one", rows.sum().reshape(1))
    stores.append(Multipliers(samples))
    stores[2].load_state_dict(stores[1].state_dict())
    for store in stores[1:]:
        assert store.keys() == stores[0].keys()
        assert all(torch.equal(store[name], stores[0][name]) for name in store)


def test_table_takes_four_bytes_a_multiplier_in_memory_and_in_files(tmp_path: Path) -> None:
    for store in (Multipliers(1000), mapped(tmp_path, 1000)):
        store.rows("c", torch.tensor([0]), 3)
        assert store["c"].untyped_storage().nbytes() == 4 * 3 * 1000
    (path,) = tmp_path.glob("tables/*")
    assert path.stat().st_size == 4 * 3 * 1000
    assert path.stat().st_blocks * 512 >= 4 * 3 * 1000  # Not a file with holes.


def test_only_the_writer_of_a_shared_table_writes(tmp_path: Path) -> None:
    """Whichever of the processes opens it first."""
    reader, writer = mapped(tmp_path, 4, writer=False), mapped(tmp_path, 4)
    for store in (reader, writer):
        assert not store.rows("c", torch.tensor([1]), 1).any()
    writer.write("c", torch.tensor([1]), torch.tensor([[2.0]]))
    reader.write("c", torch.tensor([2]), torch.tensor([[3.0]]))
    for store in (reader, writer):
        assert store["c"].flatten().tolist() == [0.0, 2.0, 0.0, 0.0]


def test_files_go_with_the_writer_and_not_with_a_reader(tmp_path: Path) -> None:
    reader, writer = mapped(tmp_path, 4, writer=False), mapped(tmp_path, 4)
    writer.rows("c", torch.tensor([1]), 1)
    del reader
    assert len(list(tmp_path.glob("tables/*"))) == 1
    del writer
    assert not list(tmp_path.iterdir())


def test_table_for_which_there_is_no_space_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    """And not a killed process at the first row that finds no place."""
    store = mapped(tmp_path, 10**6)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * 10**6, limits[1]))
    try:
        with pytest.raises(TrainingError, match=r"c\.float32: .*multiplier_folder"):
            store.rows("c", torch.tensor([0]), 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (tmp_path / "file").touch()
    with pytest.raises(TrainingError, match="multiplier_folder"):
        Multipliers(4).mapped(tmp_path / "file")


@pytest.mark.parametrize("formulation", KINDS.values(), ids=KINDS)
def test_training_with_mapped_multipliers_is_the_same(formulation: Any, tmp_path: Path) -> None:
    expected = fit(Toy(formulation, partial=True, primal_steps=2), ToyRows(7, partial=True))
    module = Toy(formulation, partial=True, primal_steps=2)
    module.training_settings.multiplier_folder = str(tmp_path)
    assert_identical_run(fit(module, ToyRows(7, partial=True)), expected)
    fit(module, ToyRows(7, partial=True), epochs=1)
    fit(expected, ToyRows(7, partial=True), epochs=1)
    assert_identical_run(module, expected)  # A second fit goes on with them.
    assert len(list(tmp_path.iterdir())) == 1  # The files of the first are gone.


def test_resume_takes_the_multipliers_of_the_checkpoint_not_of_the_files(tmp_path: Path) -> None:
    """Which have run ahead of it when a run is killed."""
    path = tmp_path / "early.ckpt"
    save = At(2, lambda trainer: trainer.save_checkpoint(path))
    module = Toy(Pointwise(alpha=1.0, dual_lr=1.0))
    module.training_settings.multiplier_folder = str(tmp_path / "tables")
    fit(module, ToyRows(7), callbacks=[save])
    (table,) = (tmp_path / "tables").glob("*/pair.float32")
    stored = torch.load(path, weights_only=True)["pl_pointwise"]["multipliers"]["pair"]
    assert table.stat().st_size == 4 * stored.numel()
    assert not torch.equal(stored, module.multipliers["pair"])
    resumed = Toy(Pointwise(alpha=1.0, dual_lr=1.0))
    resumed.training_settings.multiplier_folder = module.training_settings.multiplier_folder
    data = ToyData(ToyRows(7), batch_size=4)
    trainer(max_epochs=3).fit(resumed, data, ckpt_path=path)
    assert_identical_run(resumed, module)
    in_memory = Toy(Pointwise(alpha=1.0, dual_lr=1.0))
    data = ToyData(ToyRows(7), batch_size=4)
    trainer(max_epochs=3).fit(in_memory, data, ckpt_path=path)
    assert_identical_run(in_memory, module)


def test_folder_is_an_argument_of_a_module() -> None:
    class Folder(PointwiseModule):
        def __init__(self) -> None:
            super().__init__(
                formulation=None, constraints={}, training=Training(multiplier_folder="scratch")
            )

    assert Folder().training_settings.multiplier_folder == "scratch"
    assert Toy().training_settings.multiplier_folder is None


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
