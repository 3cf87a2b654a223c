"""Weights sharded over two ranks (FSDP2) train as whole ones in one process.

Sharded weights are put together by all ranks in every forward pass, so a rank that leaves one out
stops the others for good; their gradients are pieces, of which the norm is not that of the whole;
and a checkpoint is a folder of shards, or one file that only rank 0 fills.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

from pl_pointwise import Pointwise
from pl_pointwise.errors import TrainingError
from pl_pointwise.training.checks import check_settings
from tests.pl_pointwise import toy
from tests.pl_pointwise.toy import FORMULATIONS, Toy
from tests.programs.launch import run_on_ranks
from tests.programs.sharded import (
    EVERYTHING_OF_ONE_RANK,
    KINDS,
    POISON,
    RANKS,
    Shardable,
    clean,
    data,
    outcome,
    poisoned,
    runner,
    train,
)


@pytest.fixture(name="folder", scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(name="ranks", scope="module")
def results_of_two_ranks(folder: Path) -> list[dict[str, Any]]:
    run_on_ranks(0, "tests.programs.sharded", [str(folder)], folder)
    return [
        torch.load(folder / f"rank{rank}.pt", weights_only=True)
        for rank in range(RANKS)
    ]


def assert_same(
    found: dict[str, Any], expected: dict[str, Any], atol: float = 1e-6
) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=atol, msg=key)


@pytest.mark.parametrize(("kind", "pieces"), KINDS)
def test_sharded_equals_whole(
    kind: str, pieces: int | None, ranks: list[dict[str, Any]]
) -> None:
    expected = train(1, kind, pieces)
    assert expected["norm"] > 0
    for results in ranks:
        assert_same(results[f"{kind}, pieces of {pieces}"], expected)


@pytest.mark.parametrize("name", POISON)
def test_values_that_are_not_finite_are_left_out_of_every_shard(
    name: str, ranks: list[dict[str, Any]]
) -> None:
    defects, pieces = POISON[name]
    expected = poisoned(1, defects, pieces)
    assert expected["left_out"] + expected["skipped_steps"] > 0
    for results in ranks:
        assert_same(results[f"poison: {name}"], expected)


def test_step_in_which_a_rank_has_no_row_left_is_skipped(
    ranks: list[dict[str, Any]],
) -> None:
    """Whole weights could take it; shards cannot be put together without that rank."""
    whole = poisoned(1, EVERYTHING_OF_ONE_RANK, 2)
    assert (whole["skipped_steps"], whole["global_step"]) == (0, 4)
    for results in ranks:
        found = results["everything of one rank"]
        assert (found["skipped_steps"], found["global_step"]) == (2, 2)
        assert found["left_out"] == whole["left_out"]
        assert torch.isfinite(found["weights"]).all()


@pytest.mark.parametrize("form", ["shards", "whole"])
def test_resumed_equals_uninterrupted_from_a_folder_and_from_a_file(
    form: str, ranks: list[dict[str, Any]], folder: Path
) -> None:
    assert (folder / f"{form}.ckpt").is_dir() == (form == "shards")
    for results in ranks:
        uninterrupted, resumed = results[form]
        assert_same(resumed, uninterrupted, atol=0)
        assert uninterrupted["global_step"] == 6


def test_whole_checkpoint_resumes_in_one_process(
    ranks: list[dict[str, Any]], folder: Path
) -> None:
    module = Shardable(FORMULATIONS["by name"], partial=True, primal_steps=3)
    trainer = runner(1)
    trainer.fit(
        module, data(1, clean()), ckpt_path=folder / "whole.ckpt", weights_only=True
    )
    assert_same(outcome(module), ranks[0]["whole"][0])


def test_weights_left_out_of_the_shards_are_refused(
    ranks: list[dict[str, Any]],
) -> None:
    """Nothing would add up their gradients, and the ranks would drift apart in silence."""
    for results in ranks:
        assert results["half sharded"].startswith(
            "TrainingError: 1 of 2 trained weights"
        )
        assert "net.last.weight" in results["half sharded"]


def test_strategies_that_hide_gradients_are_refused() -> None:
    """Clipping would do nothing, or by a part of the norm, in silence."""
    deepspeed = object.__new__(DeepSpeedStrategy)  # Its constructor wants the package.
    for strategy in (deepspeed, FSDPStrategy()):
        with pytest.raises(TrainingError, match="ModelParallelStrategy"):
            under(strategy, Toy(Pointwise()))


def under(strategy: Any, module: Toy) -> None:
    """The check at the start of a fit; neither strategy runs on a CPU."""
    runner = toy.trainer()
    runner.strategy.connect(module)
    module.trainer = runner
    runner._accelerator_connector.strategy = strategy
    check_settings(module)


def test_tensor_parallelism_is_refused(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        assert results["tensor parallel"].startswith(
            "TrainingError: Tensor parallelism"
        )
