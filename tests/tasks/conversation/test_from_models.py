"""What an answer to forget is to be like, and the model's own answers in a file's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pl_pointwise.errors import DataError
from tests.tasks.conftest import quiet_trainer, response_by_hand, save_llama
from tests.tasks.conversation.conftest import data_of, made, written


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


def test_own_answers_stand_in_the_place_of_the_files(language_model_folder, tmp_path) -> None:
    """Those that do not end are left out with a word; other roles keep what the file says."""
    rows = [{"prompt": f"{i}", "answer": "File.", "role": "keep"} for i in range(10)]
    rows += [{"prompt": "new", "answer": "New.", "role": "learn"}]
    module = made(language_model_folder, moved=False, keep_tolerance=0.05)

    def answers_to(prompts: list[dict[str, Any]], *, reference: bool) -> list[dict[str, Any]]:
        assert reference
        texts = [each["messages"][0]["content"] for each in prompts]
        return [{"answer": f"Mine {t}." * (t != "7"), "cut": t == "3"} for t in texts]

    module.answers_to = answers_to
    data = data_of(written(tmp_path, rows), language_model_folder, own_answers=True)
    with pytest.raises(DataError, match="own_answers needs the model"):
        data.setup("fit")
    trainer = quiet_trainer(tmp_path, max_epochs=0, limit_val_batches=0)
    with pytest.warns(UserWarning, match=r"left out 2 of 10 .*line 4: .*max_new_tokens"):
        trainer.fit(module, data)
    texts = [record.answers[0] for record in data.datasets["train"].records]
    assert texts == [f"Mine {i}." for i in range(10) if i not in (3, 7)] + ["New."]
