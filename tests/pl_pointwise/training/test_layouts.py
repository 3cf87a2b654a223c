"""A batch of 8 is one step, however it is laid out over ranks and micro-batches.

1 rank × 8, 1 × 8 in pieces of 3, 2 × 4, 2 × 4 in pieces of 3, 4 × 2: the same weights and
multipliers after every step, for every formulation over batches that do not divide, with padding,
membership masks, clipping, and rows that are not finite; on several ranks in one piece for some of
the formulations. Both the largest difference and the mean one are bounded: a small bias in one
direction would hide in the largest alone.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.programs.launch import run_on_ranks
from tests.programs.layouts import PIECES, REFERENCE, STEPS, runs, train_all

LARGEST, MEAN = 1e-6, 1e-7

States = list[dict[str, Tensor]]


@pytest.fixture(name="reference", scope="module")
def one_rank_in_one_piece() -> dict[str, States]:
    return {run.name: run.train(1) for run in REFERENCE}


@pytest.fixture(name="trajectories", scope="module")
def every_rank_of_every_layout(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[int, list[dict[str, States]]]:
    """What every run gave on every rank, by number of ranks."""
    folder = tmp_path_factory.mktemp("layouts")
    several = [ranks for ranks in PIECES if ranks > 1]
    run_on_ranks(0, "tests.programs.layouts", [str(folder), *map(str, several)], folder)
    found = {
        ranks: [
            torch.load(folder / f"{ranks}-{rank}.pt", weights_only=True)
            for rank in range(ranks)
        ]
        for ranks in several
    }
    return {1: [train_all(1)], **found}


@pytest.mark.parametrize("ranks", PIECES)
def test_trajectory_is_the_same_in_every_layout(
    ranks: int,
    reference: dict[str, States],
    trajectories: dict[int, list[dict[str, States]]],
) -> None:
    for run in runs(ranks):
        for rank, results in enumerate(trajectories[ranks]):
            label = f"{run.name}, pieces of {run.pieces}, rank {rank} of {ranks}"
            states = results[f"{run.name}, pieces of {run.pieces}"]
            assert len(states) == STEPS, label
            for step, (found, expected) in enumerate(
                zip(states, reference[run.name], strict=True)
            ):
                for key in found.keys() | expected.keys():
                    difference = (found[key].double() - expected[key].double()).abs()
                    assert float(difference.max()) <= LARGEST, (
                        f"{label}, {key}, step {step}"
                    )
                    assert float(difference.mean()) <= MEAN, (
                        f"{label}, {key}, step {step}"
                    )


def test_every_rank_has_the_same_multipliers_to_the_last_bit(
    trajectories: dict[int, list[dict[str, States]]],
) -> None:
    """Else they would drift apart: nothing brings them together again."""
    for first, *others in trajectories.values():
        for other in others:
            for name, states in other.items():
                for found, expected in zip(states, first[name], strict=True):
                    assert all(
                        torch.equal(found[key], expected[key]) for key in expected
                    ), name


def test_the_runs_learn_something(reference: dict[str, States]) -> None:
    """The comparison would not notice a run in which nothing moves."""
    for name, states in reference.items():
        start, end = states[0], states[-1]
        assert (end["weights"] - start["weights"]).abs().max() > 0.01, name
        assert torch.isfinite(end["weights"]).all(), name
        learned = {key: value for key, value in end.items() if key != "weights"}
        if not name.startswith(("none", "penalty")):
            assert any((value > 0.01).any() for value in learned.values()), name
    assert "pointwise, poisoned" in reference
