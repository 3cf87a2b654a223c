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
from torch import Tensor

from pl_pointwise import (
    Average,
    Constraint,
    CVaR,
    Multipliers,
    Penalty,
    Pointwise,
    PointwiseModule,
    Relaxed,
    Training,
    initialise_multipliers,
)
from pl_pointwise.errors import DataError, TrainingError
from tests.pl_pointwise.toy import (
    FORMULATIONS,
    INTERVALS,
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
        torch.zeros(2, 1, dtype=torch.long),
        torch.zeros(2, 1, 1),
        torch.tensor([[0.0], [float("nan")]]),
        torch.tensor(float("inf")),
        [[0.0], [0.0]],
    ],
)
def test_state_that_is_no_table_of_these_samples_is_refused(table: Any) -> None:
    with pytest.raises(TrainingError, match=r'"c": the stored multipliers .*resume from another'):
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


@pytest.mark.parametrize("formulation", FORMULATIONS.values(), ids=FORMULATIONS)
def test_training_with_mapped_multipliers_is_the_same(formulation: Any, tmp_path: Path) -> None:
    expected = fit(Toy(formulation, partial=True, primal_steps=2), ToyRows(7, partial=True))
    module = Toy(formulation, partial=True, primal_steps=2)
    module.multiplier_folder = str(tmp_path)
    assert_identical_run(fit(module, ToyRows(7, partial=True)), expected)
    fit(module, ToyRows(7, partial=True), epochs=1)
    fit(expected, ToyRows(7, partial=True), epochs=1)
    assert_identical_run(module, expected)  # A second fit goes on with them.
    assert len(list(tmp_path.iterdir())) == 1  # The files of the first are gone.


def test_resume_takes_the_multipliers_of_the_checkpoint_not_of_the_files(tmp_path: Path) -> None:
    """Which have run ahead of it when a run is killed."""
    path = tmp_path / "early.ckpt"
    save = At(2, lambda trainer: trainer.save_checkpoint(path))
    module = Toy(Pointwise(dual_lr=1.0))
    module.multiplier_folder = str(tmp_path / "tables")
    fit(module, ToyRows(7), callbacks=[save])
    (table,) = (tmp_path / "tables").glob("*/pair.float32")
    stored = torch.load(path, weights_only=True)["pl_pointwise"]["multipliers"]["pair"]
    assert table.stat().st_size == 4 * stored.numel()
    assert not torch.equal(stored, module.multipliers["pair"])
    resumed = Toy(Pointwise(dual_lr=1.0))
    resumed.multiplier_folder = module.multiplier_folder
    data = ToyData(ToyRows(7), batch_size=4)
    trainer(max_epochs=3).fit(resumed, data, ckpt_path=path)
    assert_identical_run(resumed, module)
    in_memory = Toy(Pointwise(dual_lr=1.0))
    data = ToyData(ToyRows(7), batch_size=4)
    trainer(max_epochs=3).fit(in_memory, data, ckpt_path=path)
    assert_identical_run(in_memory, module)


def test_folder_is_an_argument_of_a_module() -> None:
    class Folder(PointwiseModule):
        def __init__(self) -> None:
            super().__init__(
                formulation=None, constraints={}, training=Training(multiplier_folder="scratch")
            )

    assert Folder().multiplier_folder == "scratch"
    assert Toy().multiplier_folder is None


# In a module --------------------------------------------------------------------------------------


@pytest.mark.parametrize("formulation", FORMULATIONS.values(), ids=FORMULATIONS)
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


class Constant(PointwiseModule):
    """Every value of the constraint is 0.5 above its bound, whatever the weights."""

    def __init__(self, formulation: Any) -> None:
        super().__init__(formulation=formulation, constraints={"fit": Constraint(at_most=0.0)})
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, batch: Any) -> Tensor:
        return batch["x"][:, 0] * self.weight

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"fit": 0 * outputs + 0.5}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """λ stands at 256 before the step."""
        if isinstance(self.formulations["fit"], Average):
            self.multipliers.scalar("fit", 1)
            self.multipliers.write_scalar("fit", torch.tensor([256.0]))
        else:
            self.multipliers.rows("fit", batch["index"], 1)
            self.multipliers.write(
                "fit", batch["index"], torch.full((len(batch["index"]), 1), 256.0)
            )


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("formulation", [Pointwise(alpha=None, dual_lr=1.0), Average(dual_lr=1.0)])
def test_multiplier_stays_float32_under_every_precision(formulation: Any, precision: Any) -> None:
    """In bfloat16 the steps of a large multiplier are lost one by one: 256 + 0.5 is 256."""
    module = Constant(formulation)
    fit(module, ToyRows(4), epochs=1, precision=precision)  # type: ignore[arg-type]
    assert module.weight.dtype == {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(
        precision, torch.float32
    )
    table = module.multipliers["fit"]
    assert table.dtype == torch.float32
    assert table.device.type == "cpu"
    assert (table == 256.5).all()


def test_casting_or_moving_the_module_leaves_the_multipliers() -> None:
    module = fit(Toy(Pointwise(dual_lr=1.0)), ToyRows(4), epochs=1)
    before = module.multipliers["pair"].clone()
    module.to(torch.bfloat16)
    assert module.multipliers["pair"].dtype == torch.float32
    assert torch.equal(module.multipliers["pair"], before)


def test_data_without_places_is_refused_where_multipliers_need_them() -> None:
    """An iterable has no positions; one multiplier a constraint needs none."""

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            rows = ToyRows(8)
            return iter([{**rows[i], "index": i} for i in range(8)])

    loader: Any = torch.utils.data.DataLoader(Stream(), batch_size=4)
    with pytest.raises(TrainingError, match="map-style data set"):
        trainer().fit(Toy(Pointwise()), loader)
    module = Toy(Average(dual_lr=1.0))
    trainer(max_steps=2).fit(module, loader)
    assert module.multipliers["pair"] > 0
    assert module.trainer.global_step == 2


def test_index_of_another_data_set_is_refused() -> None:
    """Rows that bring an index of their own, from before they were filtered, say."""

    class Shifted(ToyRows):
        def __getitem__(self, position: int) -> dict[str, Tensor]:
            return {**super().__getitem__(position), "index": torch.tensor(position + 100)}

    loader: Any = torch.utils.data.DataLoader(Shifted(4), batch_size=4)  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match="103 is outside the training set of 4"):
        trainer().fit(Toy(Pointwise()), loader)


# Set, reset, capped, and kept under another formulation -------------------------------------------

STILL = {"learning_rate": 0.0}  # Weights that stay, so that every violation is known.


def fit_again(module: Toy, count: int = 9, **options: Any) -> Toy:
    return fit(module, ToyRows(count), epochs=1, **options)


def test_initial_values_are_where_the_first_step_starts() -> None:
    """There was no public way; writing into the store before a fit was undone by the fit."""
    for values in (0.75, torch.full((9,), 0.75), torch.full((9, 1), 0.75, dtype=torch.float64)):
        module = Toy(Pointwise(dual_lr=0.0), {"fit": Constraint(at_most=0.0)}, **STILL)
        module.multipliers.set("fit", values)
        assert "fit" not in module.multipliers
        fit_again(module)
        assert module.multipliers["fit"].shape == (9, 1)
        assert (module.multipliers["fit"] == 0.75).all()


def test_initial_values_change_the_weights() -> None:
    plain, started = (Toy(Pointwise(alpha=None, dual_lr=0.0)) for _ in range(2))
    started.multipliers.set("fit", 2.0)
    started.multipliers.set("pair", torch.arange(27.0).view(9, 3))
    fit_again(plain), fit_again(started)
    assert not torch.equal(plain.last, started.last)
    assert torch.equal(started.multipliers["pair"], torch.arange(27.0).view(9, 3))


def test_set_after_a_fit_moves_the_table_and_reset_starts_it_again() -> None:
    module = fit_again(Toy(Pointwise(dual_lr=1.0)))
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
    with pytest.raises(KeyError, match="no multipliers of 'other'"):
        module.multipliers.reset("other")


def test_reset_equals_a_fresh_store() -> None:
    again = fit_again(Toy(Pointwise(dual_lr=1.0), **STILL))
    first = {name: table.clone() for name, table in again.multipliers.items()}
    again.multipliers.reset()
    fit_again(again)
    assert all(torch.equal(again.multipliers[name], table) for name, table in first.items())


@pytest.mark.parametrize(
    ("formulation", "values", "message"),
    [
        (Pointwise(), torch.ones(8), r"needs one number, or \(9,\) or \(9, K\)"),
        (Average(), torch.ones(9, 1), r"needs one number, or \(\) or \(2,\)"),
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


def test_initial_values_in_files_are_those_in_memory(tmp_path: Path) -> None:
    module = Toy(Pointwise(dual_lr=0.0))
    module.multiplier_folder = str(tmp_path)
    module.multipliers.set("fit", torch.arange(9.0))
    fit_again(module)
    assert module.multipliers["fit"][:, 0].tolist() == list(range(9))


def test_initial_values_of_a_name_that_no_constraint_has_are_dropped_with_a_warning(
    caplog: Any,
) -> None:
    module = Toy(Pointwise())
    module.multipliers.set("fitt", 1.0)
    fit_again(module)
    assert "fitt" not in module.multipliers
    assert 'Multipliers of "fitt" are dropped' in caplog.text


def test_set_values_give_way_to_a_checkpoint_with_a_warning(tmp_path: Path, caplog: Any) -> None:
    runner = trainer(max_epochs=1)
    runner.fit(Toy(Pointwise(dual_lr=1.0), **STILL), ToyData(ToyRows(9), batch_size=4))
    runner.save_checkpoint(tmp_path / "one.ckpt")
    module = Toy(Pointwise(dual_lr=0.0), **STILL)
    module.multipliers.set("fit", 7.0)
    data = ToyData(ToyRows(9), batch_size=4)
    trainer(max_epochs=2).fit(module, data, ckpt_path=tmp_path / "one.ckpt", weights_only=True)
    assert (module.multipliers["fit"] < 7).all()
    assert "are the checkpoint's" in caplog.text


def test_multipliers_stay_within_their_cap() -> None:
    """λ of a sample that cannot be satisfied grew without limit."""
    for formulation in (Pointwise(dual_lr=50.0, multiplier_max=0.4), Average(dual_lr=50.0)):
        module = fit_again(Toy(formulation, **STILL))
        largest = max(float(table.max()) for table in module.multipliers.values())
        assert largest == pytest.approx(0.4) if formulation.multiplier_max else largest > 0.4
    module = Toy(Pointwise(dual_lr=0.0, multiplier_max=0.4), **STILL)
    module.multipliers.set("fit", 3.0)
    fit_again(module)
    assert (module.multipliers["fit"] == torch.tensor(0.4)).all()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Pointwise(dual_lr=1.0), Relaxed(beta=2.0, dual_lr=0.0)),
        (Relaxed(beta=2.0, dual_lr=1.0), Pointwise(alpha=None, dual_lr=0.0)),
        (Average(dual_lr=1.0), CVaR(dual_lr=0.0)),
    ],
)
def test_formulation_of_the_same_kind_keeps_the_multipliers(before: Any, after: Any) -> None:
    old = fit_again(Toy(before, **STILL))
    new = Toy(after, **STILL)
    new.multipliers, new._fingerprint = old.multipliers, old._fingerprint
    kept = {name: table.clone() for name, table in old.multipliers.items()}
    fit_again(new)
    assert any(table.any() for table in kept.values())
    assert all(torch.equal(new.multipliers[name], table) for name, table in kept.items())


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
    runner = trainer(max_epochs=1)
    runner.fit(Toy(before), ToyData(ToyRows(9), batch_size=4))
    runner.save_checkpoint(tmp_path / "one.ckpt")
    module = Toy.load_from_checkpoint(
        tmp_path / "one.ckpt", formulation=after, constraints=None, weights_only=True
    )
    with pytest.raises(TrainingError, match=rf"{kind}.*reset\('fit'\) before fit"):
        fit_again(module)
    module.multipliers.reset()
    fit_again(module)
    assert module.multipliers["fit"].dim() == (2 if isinstance(after, Pointwise) else 0)


def test_multipliers_of_a_formulation_without_any_are_dropped(caplog: Any) -> None:
    module = fit_again(Toy(Pointwise(dual_lr=1.0)))
    module.formulations = {name: Penalty(weight=1.0) for name in module.constraints}
    fit_again(module)
    assert not module.multipliers
    assert 'Multipliers of "fit" are dropped' in caplog.text


def loader_of(count: int = 9) -> Any:
    data = ToyData(ToyRows(count, partial=True), batch_size=4)
    data.setup("fit")
    return data.train_dataloader()


@pytest.mark.parametrize(
    ("formulation", "pull"),
    [
        (Pointwise(alpha=0.8), lambda v: 1.6 * v.relu()),
        (Relaxed(alpha=0.8, beta=0.2), lambda v: 0.2 / 1.0 * 1.6 * v.relu()),
        (Relaxed(alpha=0.8, beta=0.3, cost="linear"), lambda v: (1.6 * v).clamp(0, 0.3)),
    ],
)
def test_a_pass_over_the_data_starts_every_sample_at_its_pull(formulation: Any, pull: Any) -> None:
    module = Toy(formulation, partial=True, dropout=0.5, **STILL)
    module.train()
    module.dropout.eval()  # A part of its own mode keeps it.
    initialise_multipliers(module, loader_of())
    assert module.training
    assert not module.dropout.training
    rows = ToyRows(9, partial=True)
    with torch.no_grad():
        outputs = torch.tanh(rows.x @ module.first) @ module.last
    expected = pull(outputs + 0.3) * rows.has["fit"]
    found = module.multipliers.pending()["fit"][:, 0]
    torch.testing.assert_close(found, expected.float())
    assert found.any()
    initialise_multipliers(module, loader_of(), start=lambda v: v.relu())
    torch.testing.assert_close(
        module.multipliers.pending()["fit"][:, 0],
        ((outputs + 0.3).relu() * rows.has["fit"]).float(),
    )


def test_a_pass_over_the_data_starts_the_multiplier_of_the_mean() -> None:
    module = Toy(Average(alpha=0.8, dual_lr=0.0), {"fit": Constraint(at_most=-2.0)}, **STILL)
    initialise_multipliers(module, loader_of())
    fit_again(module)
    with torch.no_grad():
        mean = (torch.tanh(ToyRows(9).x @ module.first) @ module.last + 2).mean()
    assert float(module.multipliers["fit"]) == pytest.approx(1.6 * float(mean), rel=1e-5)


def test_a_pass_over_the_data_refuses_what_it_cannot_use() -> None:
    with pytest.raises(ValueError, match="starts at 0"):
        initialise_multipliers(Toy(Pointwise(alpha=None)), loader_of())
    with pytest.raises(DataError, match="came twice"):
        initialise_multipliers(Toy(Pointwise()), [*loader_of(), *loader_of()])


def test_logs_and_evaluation_of_an_equality_report_its_distance() -> None:
    """The dual follows ℓ − c with its sign; what users read is how far off the samples are."""
    module = Toy(Pointwise(dual_lr=1.0), {"fit": Constraint(equals=0.3)}, **STILL)
    runner = trainer(max_epochs=1)
    runner.fit(module, ToyData(ToyRows(9), batch_size=9))
    residual = module.measured.violations["fit"] if module.measured else torch.empty(0)
    assert (residual < 0).any()
    torch.testing.assert_close(
        runner.callback_metrics["running/fit/mean"].double(), residual.abs().mean()
    )
    assert (module.multipliers["fit"] < 0).any()
    trainer().test(module, ToyData(ToyRows(9), ToyRows(9), batch_size=4))
    torch.testing.assert_close(
        module.violations["test"]["fit"].sort().values, residual.abs()[:, 0].sort().values
    )
