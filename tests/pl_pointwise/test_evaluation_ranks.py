"""Two ranks evaluate together: what one of them found, and what both log, is of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.programs.evaluation_ranks import MERGED, UPDATED_BY_ONE, World, results
from tests.programs.launch import run_on_ranks


@pytest.fixture(name="ranks", scope="module")
def results_of_two_ranks(
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("evaluation")
    run_on_ranks(2, "tests.programs.evaluation_ranks", [str(folder)], folder)
    return [
        torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)
    ]


def test_a_metric_that_one_rank_updated_is_computed_on_all(
    ranks: list[dict[str, Any]],
) -> None:
    """The other rank left it out, and the first waited in its collective until the job died."""
    for found in ranks:
        assert found["logged"]["val/mean"] == UPDATED_BY_ONE
        assert found["logged"]["val/pairs"] == 2 * UPDATED_BY_ONE
        assert "val/never" not in found["logged"]


def test_a_mean_over_samples_counts_each_once_and_keeps_its_values_on_every_rank(
    ranks: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Of five samples both ranks bring the first, and one of them the only one of "one odd"."""
    for found in [*ranks, results(World(ranks=1, folder=tmp_path))]:
        assert found["odd"] == {
            "odd": [[0, 1, 2, 3, 4], [0, 1, 0, 1, 0]],
            "one odd": [[UPDATED_BY_ONE], [1]],
        }
        assert found["logged"]["val/odd"] == pytest.approx(0.4)
        assert found["logged"]["val/one odd"] == 1


def test_what_is_logged_is_that_of_one_rank_and_without_advice(
    ranks: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Five warnings asked for ``sync_dist=True`` of values that were of all ranks already."""
    single = results(World(ranks=1, folder=tmp_path))
    for found in ranks:
        assert found["advice"] == []
        assert found["logged"] == ranks[0]["logged"]
        assert found["logged"] == pytest.approx(single["logged"], rel=1e-4, abs=1e-6)
        assert {"val/fit/violated", "dual/fit/step"} <= found["logged"].keys()


def test_a_nan_behind_a_batchnorm_leaves_out_the_samples_of_its_rank(
    ranks: list[dict[str, Any]],
) -> None:
    for found in ranks:
        # The three of its rank in each of two epochs.
        assert found["left out"] == [6, 0]
        assert found["finite"]
        assert torch.equal(found["weights"], ranks[0]["weights"])
        for name, table in found["multipliers"].items():
            assert torch.equal(table, ranks[0]["multipliers"][name])
            assert not table[3].any()
            assert table.any()


def test_violations_of_both_ranks_are_merged_also_when_one_is_empty(
    ranks: list[dict[str, Any]],
) -> None:
    for place, case in enumerate(MERGED):
        rows: dict[int, torch.Tensor] = {}
        for index, violation in [*case[0], *case[1]]:
            rows |= dict(zip(index, violation, strict=True))
        for of_rank in (found["merged"][place] for found in ranks):
            assert of_rank["index"].tolist() == sorted(rows)
            for row, index in enumerate(sorted(rows)):
                values = of_rank["violation"][row][of_rank["mask"][row]]
                assert values.tolist() == pytest.approx(rows[index].tolist(), abs=1e-7)
