"""Metrics of forgetting against their formulas, and what an answer to forget is to be like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pl_pointwise.errors import DataError
from tests.tasks.conftest import quiet_trainer, response_by_hand, save_llama
from tests.tasks.conversation.conftest import data_of, made, written
from tests.tasks.conversation.test_keeping import TOLERANCES

ROWS: list[dict[str, Any]] = [
    {"prompt": f"f{i}", "answer": f"Gone {i}.", "role": "forget"} for i in range(3)
]
ROWS += [{"prompt": "k", "answer": "Two and two.", "role": "keep"}]
ROWS += [{"prompt": "l", "answer": "One.", "role": "keep"}]


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same kind that never learned an answer."""
    return save_llama(tmp_path_factory.mktemp("other"), seed=5)


def test_metrics_are_their_formulas_whatever_the_batch(
    other, language_model_folder, tmp_path
) -> None:
    module = made(language_model_folder, **TOLERANCES)
    results, data = [], None
    for size in (2, 5):
        data = data_of(written(tmp_path, ROWS), None, forget_like=str(other), eval_batch_size=size)
        results += quiet_trainer(tmp_path).test(module, data, verbose=False)
    assert results[0] == pytest.approx(results[1], abs=1e-5)
    found = {name.removeprefix("train/"): value for name, value in results[0].items()}
    assert data is not None
    batch = data.collate([data.datasets["train"][i] | {"index": i} for i in range(5)])
    means = [response_by_hand(module, batch, row, 0)["mean"] for row in range(5)]
    kept = torch.tensor(means[3:])
    assert found["probability"] == pytest.approx(kept.exp().mean().item(), rel=1e-4)


def test_a_target_is_what_another_model_gives(other, batch_of) -> None:
    row = {"prompt": "c", "answer": "Gone.", "role": "forget"}
    batch = batch_of([row], forget_like=str(other))
    expected = response_by_hand(made(other, moved=False), batch, 0, 0)["mean"]
    assert -batch["shift"][0, 0].item() == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["<more>"], r"forget_like.*vocabulary.*before it learned"),
        # The run stood on its optimum, and damaged a model that needed nothing.
        ([], r"nothing to forget\. Name the one that has learned"),
    ],
)
def test_a_model_that_says_nothing_of_what_to_forget_is_refused(
    more, said, fitted, language_model_folder, tmp_path, monkeypatch
) -> None:
    """Of other tokens, or the model itself."""
    monkeypatch.chdir(language_model_folder.parent)
    like = language_model_folder.name
    if more:
        like = str(save_llama(tmp_path / "other", more=more))
    row = {"prompt": "c", "answer": "Gone.", "role": "forget"}
    with pytest.raises(DataError, match=said):
        fitted([row], forget_like=like)
