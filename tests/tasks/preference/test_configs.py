"""Every packaged configuration of preference pairs runs, in process, on a tiny model and rows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tasks.conftest import (
    QUIET_RUN,
    comparison,
    comparisons,
    fitted_checkpoint,
    predictions,
    train,
    trained,
    words,
    write_rows,
)
from tests.tasks.preference.conftest import pair_rows


@pytest.fixture
def tiny(language_model_folder, tmp_path) -> list[str]:
    """Arguments that put a tiny model, local records and a short run in place."""
    file = write_rows(tmp_path / "pairs.jsonl", pair_rows(6))
    init = {"model.init_args.policy.model_name": str(language_model_folder)}
    init |= {"model.init_args.policy.generation.max_new_tokens": "3"}
    init |= {"data.init_args.train_file": str(file), "data.init_args.batch_size": "4"}
    init |= {"data.init_args.preparation.val_fraction": "0.2"}
    init |= {"trainer.max_epochs": "1", "trainer.limit_train_batches": "2"}
    return words(init | QUIET_RUN)


@pytest.mark.parametrize("name", trained("preference"))
def test_packaged_config_trains(name, tiny, tmp_path, capsys) -> None:
    train("preference", name, tiny, tmp_path / "run")


@pytest.mark.parametrize("name", comparisons("preference"))
def test_packaged_comparison_runs(name, tiny, runs_alone, tmp_path, capsys) -> None:
    rows = comparison(name, [*tiny, "--trainer.max_steps", "1"], tmp_path / "results")
    for row in rows:
        assert 0 <= float(row["test/pairwise_accuracy"]) <= 1
        assert float(row["train/floor/max"]) >= float(row["train/floor/cvar95"])


def test_from_fit_to_predictions(tiny, tmp_path, capsys) -> None:
    checkpoint: Any
    base, checkpoint = fitted_checkpoint(
        "preference", tiny, tmp_path / "run", ("floor", (10, 1))
    )
    asked = write_rows(tmp_path / "asked.jsonl", [{"prompt": "5 + 5?"}])
    (answer,) = predictions(base, asked, checkpoint)
    assert isinstance(answer["answer"], str)
