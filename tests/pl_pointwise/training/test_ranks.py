"""Two ranks with batches of B do what one rank does with batches of 2B; run with gloo on the CPU.

DDP averages gradients, so a rank's own means are wrong wherever ranks differ in how many samples
carry a term; a multiplier stepped on one rank only is lost; padding must count nowhere; and a
decision that one rank takes alone leaves the others waiting forever.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pl_pointwise.errors import DataError
from tests.pl_pointwise import toy
from tests.pl_pointwise.toy import ToyData, ToyRows
from tests.programs.launch import run_on_ranks
from tests.programs.two_ranks import SCENARIOS, UNEVEN, World, resumable

SPECIAL = {
    "loop_of_ones_own",
    "everything_skipped",
    "foreign_sampler",
    "evaluation",
    "prediction",
    "synchronisation",
    "resumed_with_dropout",
    "resumed_with_workers",
    "resumed_without_dropout",
    "terminated",
    "stopped",
}


@pytest.fixture(name="folder", scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(name="ranks", scope="module")
def results_of_two_ranks(folder: Path) -> list[dict[str, Any]]:
    """What every scenario gave, by rank."""
    run_on_ranks(2, "tests.programs.two_ranks", [str(folder)], folder)
    return [
        torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)
    ]


@pytest.fixture(name="single", scope="module")
def one_rank(folder: Path) -> World:
    return World(ranks=1, folder=folder)


def assert_same(
    found: dict[str, Any], expected: dict[str, Any], atol: float = 1e-6
) -> None:
    for key in ("weights", "thresholds", "multipliers"):
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=atol)


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in SPECIAL])
def test_two_ranks_equal_one_rank_with_twice_the_batch(
    name: str, ranks: list[dict[str, Any]], single: World
) -> None:
    expected = SCENARIOS[name](single)
    for outcomes in ranks:
        found = outcomes[name]
        assert_same(found, expected)
        for count in ("global_step", "left_out", "skipped_steps"):
            assert found[count] == expected[count]
        assert found["logged"] == pytest.approx(expected["logged"], rel=1e-5, abs=1e-6)
        assert found["closing"] == pytest.approx(
            expected["closing"], rel=1e-4, abs=1e-5
        )
    # Every rank has the same of both to the last bit, or they would drift apart.
    for kind in ("multipliers", "thresholds"):
        torch.testing.assert_close(
            ranks[0][name][kind], ranks[1][name][kind], rtol=0, atol=0
        )


def test_batches_of_the_ranks_are_the_single_ranks_batch(
    ranks: list[dict[str, Any]], single: World
) -> None:
    expected = SCENARIOS["pointwise"](single)["batches"]
    found = [outcomes["pointwise"]["batches"] for outcomes in ranks]
    assert len(expected) == 9
    for (epoch, batch), *parts in zip(expected, *found, strict=True):
        together = sorted(index for _, part in parts for index in part if index >= 0)
        assert together == sorted(batch)
        assert all(at == epoch for at, _ in parts)
    # once an epoch
    assert sum(index < 0 for _, batch in found[1] for index in batch) == 3


def test_poisoned_ranks_left_out_what_they_should(ranks: list[dict[str, Any]]) -> None:
    """The comparison above would not notice if neither side left anything out."""
    names = [name for name in SCENARIOS if "poisoned" in name]
    assert len(names) == 3
    for name in names:
        assert ranks[0][name]["left_out"] == 12
        assert ranks[0][name]["skipped_steps"] == 0
    assert ranks[0]["gradient_of_one_rank"]["skipped_steps"] == 3
    assert ranks[1]["gradient_of_one_rank"]["skipped_steps"] == 3


def test_run_in_which_everything_is_skipped_stops_on_every_rank(
    ranks: list[dict[str, Any]],
) -> None:
    for outcomes in ranks:
        assert "All 2 steps of epoch 0 were skipped" in outcomes["everything_skipped"]


def test_a_foreign_sampler_is_refused(ranks: list[dict[str, Any]]) -> None:
    """DistributedSampler fills uneven ranks with copies, which step their multipliers twice."""
    for outcomes in ranks:
        message = outcomes["foreign_sampler"]
        assert "13 samples over 2 ranks" in message
        assert "repeats 1" in message
        assert "DistributedSampler" in message
        assert "PointwiseDataModule" in message


def test_evaluation_counts_every_sample_once(
    ranks: list[dict[str, Any]], single: World
) -> None:
    expected = SCENARIOS["evaluation"](single)
    assert any(key.startswith("train/") for key in expected["figures"])
    for outcomes in ranks:
        found = outcomes["evaluation"]
        assert found["figures"] == pytest.approx(expected["figures"], rel=1e-5)
        torch.testing.assert_close(found["pooled"], expected["pooled"])
        torch.testing.assert_close(found["rows"], expected["rows"], equal_nan=True)


def test_prediction_gives_every_sample_once(ranks: list[dict[str, Any]]) -> None:
    assert sorted(ranks[0]["prediction"] + ranks[1]["prediction"]) == list(
        range(UNEVEN)
    )


def test_only_the_last_micro_batch_synchronises(ranks: list[dict[str, Any]]) -> None:
    for outcomes in ranks:
        assert outcomes["synchronisation"] == [False, False, True]


@pytest.mark.parametrize("name", ["resumed_with_dropout", "resumed_with_workers"])
def test_resumed_equals_uninterrupted_on_two_ranks(
    name: str, ranks: list[dict[str, Any]]
) -> None:
    """Each rank's own random state belongs to the checkpoint."""
    for outcomes in ranks:
        uninterrupted, *runs = outcomes[name]
        for run in runs:
            assert_same(run, uninterrupted, atol=0)
            assert run["batches"] == uninterrupted["batches"][-len(run["batches"]) :]
            assert run["global_step"] == uninterrupted["global_step"] == 9
        assert [len(run["batches"]) for run in runs] == [5, 3]
    dropped = [outcomes[name][0]["weights"] for outcomes in ranks]
    assert not torch.equal(
        dropped[0], ranks[0]["resumed_without_dropout"][0]["weights"]
    )


def test_sigterm_to_one_rank_saves_on_both_and_the_next_run_goes_on(
    ranks: list[dict[str, Any]], folder: Path
) -> None:
    """Lightning's own handler starts a collective on the rank that was hit, wherever that is."""
    for outcomes in ranks:
        uninterrupted, code, resumed = outcomes["terminated"]
        assert code == 143
        assert_same(resumed, uninterrupted, atol=0)
        assert len(resumed["batches"]) == 5
    assert not list((folder / "terminated").iterdir())  # Removed at the planned end.


def test_stopped_within_an_epoch_two_ranks_go_on_exactly(
    ranks: list[dict[str, Any]],
) -> None:
    """The rest of the epoch was dropped, and the window that the stop closed stayed closed."""
    for outcomes in ranks:
        uninterrupted, resumed = outcomes["stopped"]
        assert_same(resumed, uninterrupted, atol=0)
        assert len(resumed["batches"]) == 4


def test_two_ranks_checkpoint_resumes_on_one_rank_with_twice_the_batch(
    ranks: list[dict[str, Any]], folder: Path
) -> None:
    uninterrupted, *_ = ranks[0]["resumed_without_dropout"]
    rows = ToyRows(UNEVEN, seed=2, partial=True)
    for at, checkpoint in (
        (4, folder / "2-0.0-0-4.ckpt"),
        (6, folder / "2-0.0-0-6.ckpt"),
    ):
        module = resumable(dropout=0.0)
        runner = toy.trainer(max_epochs=3)
        runner.fit(module, ToyData(rows, batch_size=6), ckpt_path=checkpoint)
        assert runner.global_step == 9, at
        found = {"weights": toy.weights_of(module), "multipliers": module.multipliers}
        assert module.thresholds.keys() == {"fit"}
        assert_same({**found, "thresholds": module.thresholds}, uninterrupted)


def test_two_ranks_checkpoint_is_refused_on_one_rank_with_the_same_batch(
    ranks: list[dict[str, Any]], folder: Path
) -> None:
    assert ranks
    rows = ToyRows(UNEVEN, seed=2, partial=True)
    with pytest.raises(
        DataError, match="of 6 samples over all ranks; now a batch has 3"
    ):
        toy.trainer(max_epochs=3).fit(
            resumable(0.0),
            ToyData(rows, batch_size=3),
            ckpt_path=folder / "2-0.0-0-4.ckpt",
        )


def test_a_loop_of_ones_own_on_two_ranks_equals_one(
    ranks: list[dict[str, Any]], single: World
) -> None:
    expected = SCENARIOS["loop_of_ones_own"](single)
    for found in ranks:
        torch.testing.assert_close(
            found["loop_of_ones_own"], expected, rtol=0, atol=1e-6
        )
    assert all(any(table.any() for table in of.values()) for _, of in expected.values())
