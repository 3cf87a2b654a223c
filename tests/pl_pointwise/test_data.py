"""Every sample once an epoch, at its place, on any number of ranks and after any interruption."""

from __future__ import annotations

import random
import tracemalloc
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import seed_everything

from pl_pointwise import PointwiseDataModule
from pl_pointwise.data import (
    PADDING,
    IndexedDataset,
    PointwiseSampler,
    ResumableDataLoader,
    fingerprint,
)
from pl_pointwise.errors import DataError
from pl_pointwise.task import take_rows
from tests.pl_pointwise.toy import ToyData, ToyRows, stack


def loader(
    count: int,
    batch_size: int,
    workers: int = 0,
    *,
    epoch: int = 0,
    state: dict[str, Any] | None = None,
    **options: Any,
) -> ResumableDataLoader:
    """A loader at the start of an epoch, or where a state says."""
    dataset = IndexedDataset([{"value": 10 * i} for i in range(count)])
    sampler = PointwiseSampler(dataset, **options)
    made = ResumableDataLoader(dataset, sampler, batch_size, stack, workers)
    if state is not None:
        made.load_state_dict(state)
    else:
        sampler.set_epoch(epoch)
    return made


def indices(batches: Any) -> list[list[int]]:
    return [batch["index"].tolist() for batch in batches]


# What a collate function makes of its rows -------------------------------------------------------


class Collating(PointwiseDataModule):
    """Nine rows in batches of four, of which a collate function makes what a test says."""

    def __init__(self, collate: Any, **options: Any) -> None:
        super().__init__(batch_size=4, **options)
        self.own_collate = collate
        rows = [{"value": float(i)} for i in range(9)]
        self.datasets = dict.fromkeys(("train", "val", "test", "predict"), rows)

    def collate(self, rows: list[dict[str, Any]]) -> Any:
        return self.own_collate(rows)

    def loaders(self) -> dict[str, Any]:
        others = {"val": self.val_dataloader(), "predict": self.predict_dataloader()}
        return {"fit": self.train_dataloader(), **self.test_dataloader(), **others}


def without_five_and_seven(rows: list[Any]) -> Any:
    """As of rows that are too long, or images that cannot be read."""
    return stack([row for row in rows if row["index"] not in (5, 7)])


def in_two(rows: list[Any]) -> Any:
    """Micro-batches of their own lengths, and a row of padding."""
    padding = {**rows[0], "index": PADDING}
    return [stack(rows[:1]), stack([*rows[:0:-1], padding])]


def test_a_collate_that_leaves_rows_out_is_refused_in_every_loader() -> None:
    """Their requirement held nowhere, and evaluation did not count them: all in silence."""
    for name, batches in Collating(without_five_and_seven).loaders().items():
        with pytest.raises(
            DataError, match=r"Collating\.collate\(\) leaves out samp"
        ) as got:
            list(batches)
        assert "setup()" in str(got.value), name
        assert "5" in str(got.value) or "7" in str(got.value), name


@pytest.mark.parametrize(
    ("collate", "says"),
    [
        (
            lambda rows: stack([*rows, rows[0]]),
            r'"index" has sample 0, of rows that have samples',
        ),
        (
            lambda rows: {**stack(rows), "index": torch.arange(4) + 3},
            r"has samples 4, 5, 6, of",
        ),
        (
            lambda rows: [stack(rows), stack(rows)],
            r"has samples 0, 1, 2, 3, of rows that",
        ),
        (
            lambda rows: stack([{**row, "index": PADDING} for row in rows]),
            "leaves out samples 0",
        ),
    ],
    ids=["twice", "another's", "micro-batches", "all padding"],
)
def test_a_batch_with_other_samples_than_its_rows_is_refused(
    collate: Any, says: str
) -> None:
    with pytest.raises(DataError, match=says):
        list(Collating(collate).val_dataloader())


@pytest.mark.parametrize(
    "collate", [stack, in_two, lambda rows: rows], ids=["", "two", "none"]
)
def test_a_collate_that_keeps_all_rows_is_handed_on(collate: Any) -> None:
    """In another order and in pieces too; a batch without an index says so where it is used."""
    rows = [{"value": float(i), "index": i} for i in range(4)]
    first = next(iter(Collating(collate).val_dataloader()))
    assert str(first) == str(collate(rows))


def test_rows_that_a_worker_leaves_out_are_named() -> None:
    data = Collating(without_five_and_seven, num_workers=1)
    with pytest.raises(DataError, match="samples 5, 7 of the 4 rows"):
        list(data.val_dataloader())


# The data set and the sampler ---------------------------------------------------------------------


sizes = st.integers(0, 40)
counts_of_ranks = st.integers(1, 5)


@given(sizes, counts_of_ranks, st.booleans(), st.integers(0, 3), st.integers(0, 3))
def test_every_sample_once_over_the_ranks_and_padding_marked(
    count: int, ranks: int, shuffle: bool, seed: int, epoch: int
) -> None:
    parts = []
    for rank in range(ranks):
        sampler = PointwiseSampler(
            range(count), num_replicas=ranks, rank=rank, shuffle=shuffle, seed=seed
        )
        sampler.set_epoch(epoch)
        parts.append(list(sampler))
        assert len(parts[-1]) == len(sampler)
    assert len({len(part) for part in parts}) == 1  # as many steps on every rank
    together = [position for part in parts for position in part]
    assert sorted(p for p in together if p >= 0) == list(range(count))
    padding = [p for p in together if p < 0]
    assert len(padding) == -count % ranks
    assert all(0 <= -1 - p < count for p in padding)


@given(
    st.integers(1, 40),
    counts_of_ranks,
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 3),
)
def test_batches_of_the_ranks_together_are_the_single_ranks(
    count: int, ranks: int, batch_size: int, shuffle: bool, epoch: int
) -> None:
    def batches(replicas: int, rank: int, size: int) -> list[list[int]]:
        options = {"num_replicas": replicas, "rank": rank, "shuffle": shuffle}
        return indices(loader(count, size, epoch=epoch, **options))

    single = batches(1, 0, ranks * batch_size)
    parts = [batches(ranks, rank, batch_size) for rank in range(ranks)]
    assert all(len(part) == len(single) for part in parts)
    for position, whole in enumerate(single):
        together = [i for part in parts for i in part[position] if i != PADDING]
        assert sorted(together) == sorted(whole)


# The resumable loader -----------------------------------------------------------------------------


@given(
    st.integers(1, 30),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 40),
    st.booleans(),
)
def test_loader_continues_where_it_stood(
    count: int, batch_size: int, ranks: int, taken: int, shuffle: bool
) -> None:
    options = {"num_replicas": ranks, "rank": ranks - 1, "shuffle": shuffle}
    first = loader(count, batch_size, epoch=1, **options)
    whole = indices(first)
    taken = min(taken, len(whole))

    stopped = loader(count, batch_size, epoch=1, **options)
    iterator = iter(stopped)
    seen = indices(next(iterator) for _ in range(taken))
    state = stopped.state_dict()
    if taken == len(whole):
        assert (state["epoch"], state["position"]) == (2, 0)

    resumed = loader(count, batch_size, state=state, **options)
    # Within an epoch the loader knows it; a trainer that counts on is not followed.
    resumed.sampler.set_epoch(state["epoch"] + (state["position"] > 0))
    rest = indices(resumed)
    if taken < len(whole):
        assert seen + rest == whole
    # The epoch after that is whole, in its own order, on either loader.
    following = state["epoch"] + 1
    for one in (resumed, first):
        one.sampler.set_epoch(following)
    assert indices(resumed) == indices(first)
    assert len(resumed) == len(first) == len(whole)


@pytest.mark.parametrize("taken", [1, 3])
def test_loader_with_workers_continues_where_it_stood(taken: int) -> None:
    """The workers have fetched further than what was handed out."""
    whole = indices(loader(17, 3))
    stopped = loader(17, 3, workers=2)
    iterator = iter(stopped)
    seen = indices(next(iterator) for _ in range(taken))
    resumed = loader(17, 3, workers=2, state=stopped.state_dict())
    assert seen + indices(resumed) == whole
    resumed.sampler.set_epoch(1)
    assert indices(resumed) == indices(loader(17, 3, epoch=1))


@pytest.mark.parametrize("workers", [0, 1])
def test_epoch_that_was_left_early_does_not_shift_the_next(workers: int) -> None:
    """As Trainer(limit_train_batches=…) leaves it."""
    one = loader(17, 3, workers=workers)
    iterator = iter(one)
    next(iterator), next(iterator)
    one.sampler.set_epoch(1)
    assert indices(one) == indices(loader(17, 3, epoch=1))
    assert one.state_dict()["position"] == 0


def test_starting_an_epoch_draws_nothing_from_the_random_state() -> None:
    """Else the dropout of a resumed run would not be that of the uninterrupted one."""
    for workers in (0, 1):
        one = loader(6, 3, workers=workers)
        torch.manual_seed(0)
        state = torch.get_rng_state()
        assert len(list(one)) == 2
        assert torch.equal(torch.get_rng_state(), state)


def test_other_batches_are_refused_and_the_same_over_other_ranks_are_not() -> None:
    stopped = loader(24, 4)
    iterator = iter(stopped)
    seen = indices([next(iterator), next(iterator)])
    state = stopped.state_dict()
    with pytest.raises(
        DataError, match="of 4 samples over all ranks; now a batch has 3"
    ):
        next(iter(loader(24, 3, state=state)))
    parts = [
        indices(loader(24, 2, state=state, num_replicas=2, rank=rank))
        for rank in range(2)
    ]
    rest = [sorted(a + b) for a, b in zip(*parts, strict=True)]
    assert rest == [sorted(batch) for batch in indices(loader(24, 4))[2:]]
    assert sorted(i for batch in seen + rest for i in batch) == list(range(24))


def test_state_of_another_seed_restores_the_order_it_was_in() -> None:
    stopped = loader(24, 4, seed=5)
    next(iter(stopped))
    resumed = loader(24, 4, seed=6, state=stopped.state_dict())
    assert indices(resumed) == indices(loader(24, 4, seed=5))[1:]


def test_data_module_has_a_loader_for_every_data_set() -> None:
    data = ToyData(ToyRows(7), ToyRows(5), batch_size=4, eval_batch_size=3)
    assert indices(data.val_dataloader()) == [[0, 1, 2], [3, 4]]
    tests = data.test_dataloader()
    assert {name: len(indices(one)) for name, one in tests.items()} == {
        "test": 2,
        "train": 3,
    }
    assert sorted(
        i for batch in indices(data.train_dataloader()) for i in batch
    ) == list(range(7))
    assert indices(data.predict_dataloader()) == [[0, 1, 2], [3, 4]]
    assert ToyData(ToyRows(7), batch_size=4).val_dataloader() == []
    assert list(ToyData(ToyRows(7), batch_size=4).test_dataloader()) == ["train"]


# take_rows ----------------------------------------------------------------------------------------


def test_rows_are_taken_of_everything_that_has_the_batchs_length() -> None:
    batch = {
        "index": torch.arange(4),
        "x": torch.arange(8.0).reshape(4, 2),
        "text": ["a", "b", "c", "d"],
        "pair": ("a", "b", "c", "d"),
        "array": np.arange(4) * 10,
        "nested": {"y": torch.arange(4) * 2, "name": "all"},
        "scalar": torch.tensor(3.0),
        "other": torch.arange(3),
        "short": ["one", "two"],
        "task": "when2call",
        "number": 4,
        "none": None,
    }
    taken = take_rows(batch, torch.tensor([2, 0]))
    assert taken["index"].tolist() == [2, 0]
    assert taken["x"].tolist() == [[4.0, 5.0], [0.0, 1.0]]
    assert taken["text"] == ["c", "a"]
    assert list(taken["pair"]) == ["c", "a"]
    assert taken["array"].tolist() == [20, 0]
    assert taken["nested"]["y"].tolist() == [4, 0]
    for name in ("scalar", "other", "task", "number", "none"):
        assert taken[name] is batch[name]
    assert taken["short"] == batch["short"]
    assert taken["nested"]["name"] == "all"
    assert batch["index"].tolist() == [0, 1, 2, 3]


# Fingerprints -------------------------------------------------------------------------------------


BASE = [{"text": "a", "label": 1}, {"text": "b", "label": 0}, {"text": "c", "label": 1}]


@pytest.mark.parametrize(
    "rows",
    [
        BASE[::-1],
        BASE[:2],
        [*BASE, BASE[0]],
        [*BASE[:2], {"text": "d", "label": 1}],
        [*BASE[:2], {"text": "c", "labels": 1}],
        [],
    ],
)
def test_fingerprint_tells_order_and_content_apart(rows: list[Any]) -> None:
    assert fingerprint(rows) != fingerprint(BASE)


def test_fingerprint_is_of_the_content_not_of_the_object() -> None:
    copy = [dict(reversed(row.items())) for row in BASE]
    assert fingerprint(copy) == fingerprint(BASE)
    assert fingerprint(IndexedDataset(BASE)) == fingerprint(BASE)


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])),
        (torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 2.0]])),
        (
            torch.tensor([1.0], dtype=torch.bfloat16),
            torch.tensor([1.5], dtype=torch.bfloat16),
        ),
        (np.array([1, 2]), np.array([2, 1])),
        ([1, [2, 3]], [[1, 2], 3]),
        ({"x": 1}, {"x": 1.5}),
        ({"a", "b"}, {"a", "c"}),
        (Path("a.png"), Path("b.png")),
        ([date(2026, 1, 1)], [date(2026, 1, 2)]),
    ],
)
def test_fingerprint_reads_values_of_every_kind(value: Any, other: Any) -> None:
    first, second = fingerprint([value]), fingerprint([other])
    assert first != second
    assert first == fingerprint([value])


def test_fingerprint_draws_nothing() -> None:
    """Rows that are augmented when they are read would train another run."""

    class Augmented(ToyRows):
        def __getitem__(self, position: int) -> dict[str, Any]:
            noise = torch.rand(1) + np.random.rand() + random.random()
            return super().__getitem__(position) | {"noise": noise}

    def drawn() -> list[float]:
        return [float(torch.rand(1)), np.random.rand(), random.random()]

    seed_everything(3, verbose=False)
    alone = drawn()
    seed_everything(3, verbose=False)
    assert fingerprint(Augmented(5)).startswith("random rows")
    assert drawn() == alone


def test_data_sets_own_fingerprint_is_taken() -> None:
    class Owned(list[Any]):
        fingerprint = "of its own"

    class Method(list[Any]):
        def fingerprint(self) -> str:
            return "a method is not a value"

    assert fingerprint(Owned(BASE)) == "of its own"
    assert fingerprint(Method(BASE)) == fingerprint(BASE)


def test_fingerprint_of_much_data_reads_a_sample_of_it() -> None:
    class Counting(list[Any]):
        read = 0

        def __getitem__(self, position: Any) -> Any:
            self.read += 1
            return super().__getitem__(position)

    rows = Counting([{"value": 1}] * 100_000)
    fingerprint(rows)
    assert 0 < rows.read <= 64 + 16
    assert fingerprint(rows) != fingerprint(rows[1:])


# Strata -------------------------------------------------------------------------------------------


def stratified(count: int, share: int, **options) -> PointwiseSampler:
    """A sampler over samples of which the first ``share`` are of one kind."""
    strata = [int(i >= share) for i in range(count)]
    return PointwiseSampler(range(count), strata=strata, **options)


@given(
    share=st.integers(1, 120),
    rest=st.integers(1, 120),
    batch=st.integers(1, 40),
    seed=st.integers(0, 5),
)
def test_every_batch_has_the_kinds_in_proportion(share, rest, batch, seed) -> None:
    count = share + rest
    order = stratified(count, share, seed=seed).order().tolist()
    assert sorted(order) == list(range(count))
    for start in range(0, count, batch):
        part = order[start : start + batch]
        of_kind = sum(i < share for i in part)
        assert abs(of_kind - len(part) * share / count) < 2


def test_two_ranks_share_the_batches_of_one_with_strata_too() -> None:
    alone = stratified(23, 9).order().tolist()
    ranks = [list(stratified(23, 9, num_replicas=2, rank=r)) for r in range(2)]
    together = [i for pair in zip(*ranks, strict=True) for i in pair]
    assert together[:23] == alone
    assert together[23:] == [-1 - alone[0]]


def test_orders_of_seeds_have_nothing_in_common() -> None:
    """Seed 0's second epoch had the order of seed 1's first, so seeds were shifted copies."""

    def order(seed: int, epoch: int) -> list[int]:
        sampler = PointwiseSampler(range(50), seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    orders = {tuple(order(seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    first = torch.randperm(50, generator=torch.Generator().manual_seed(3)).tolist()
    assert order(3, 0) == first  # As it always was.


def test_positions_are_made_one_part_at_a_time() -> None:
    """Lists of all positions took 1.5 GB a rank and epoch for 2·10⁷ samples."""
    sampler = PointwiseSampler(range(10**6), num_replicas=2, rank=1)
    assert isinstance(sampler.order(), torch.Tensor)
    tracemalloc.start()
    assert sum(1 for _ in sampler) == 5 * 10**5
    assert tracemalloc.get_traced_memory()[1] < 10e6
    tracemalloc.stop()


@pytest.mark.parametrize("name", ["batch_size", "eval_batch_size"])
def test_a_batch_of_no_sample_is_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"{name}=0.*give a whole number, at least 1 sample"
    ):
        ToyData(ToyRows(4), **{name: 0})
    for rows in (iter([{"x": 1.0}]), None, []):
        with pytest.raises(
            DataError, match=r"rows have no positions: give a list|is empty: give"
        ):
            ToyData(rows).train_dataloader()


class Ragged(PointwiseDataModule):
    """Rows of different lengths, with the collate that they came with: none."""

    def __init__(self, rows: list[dict[str, Any]], num_workers: int = 0) -> None:
        super().__init__(batch_size=2, num_workers=num_workers)
        self.datasets["test"] = rows


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [{"y": 0.0, "x": torch.ones(2)}, {"y": 0.0, "x": torch.ones(3)}],
            'field "x" of rows 0, 1 does not stack',
        ),
        ([{"x": [1, 2]}, {"x": [1, 2, 3]}], 'field "x" of rows 0, 1 does not stack'),
        ([{"x": 1.0}, {"x": None}], 'field "x" of rows 0, 1 does not stack'),
        ([{"x": 1.0, "y": 2.0}, {"x": 1.0}], 'row 1 has no field "y", as row 0 has'),
    ],
)
def test_rows_that_do_not_stack_are_named_with_the_remedy(
    rows: list[dict[str, Any]], words: str
) -> None:
    for workers in (0, 1):
        loader = Ragged(rows, workers).test_dataloader()["test"]
        with pytest.raises(DataError) as refused:
            next(iter(loader))
        assert f"Ragged: {words}" in str(refused.value)
        assert "collate(self, rows) of the data module" in str(refused.value)
