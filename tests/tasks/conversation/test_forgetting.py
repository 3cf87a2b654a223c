"""What an answer to forget is to be like."""

from __future__ import annotations

from pathlib import Path

import pytest

from pl_pointwise.errors import DataError
from tests.tasks.conftest import response_by_hand, save_llama
from tests.tasks.conversation.conftest import made


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same kind that never learned an answer."""
    return save_llama(tmp_path_factory.mktemp("other"), seed=5)


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
