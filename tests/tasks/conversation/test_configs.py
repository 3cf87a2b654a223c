"""Every packaged configuration runs, in process, on a tiny model.

Only the model, the device and the length of the run are replaced, and of all but the example the
data; every other key is the shipped one.
"""

from __future__ import annotations

from shutil import copytree
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from pl_pointwise.tasks import ConversationModule
from tests.tasks.conftest import (
    QUIET_RUN,
    comparison,
    comparisons,
    train,
    trained,
    words,
)


@pytest.fixture
def tiny(language_model_folder) -> list[str]:
    """Arguments that put a tiny model and a short run in place."""
    init = {"model.init_args.policy.model_name": str(language_model_folder)}
    init |= {"model.init_args.policy.generation.max_new_tokens": "3"}
    init |= {"trainer.limit_train_batches": "2"}
    # The tiny tokenizer has a token a byte.
    init |= {"data.init_args.preparation.max_prompt_length": "2000"}
    init |= {
        "data.init_args.preparation.max_length": "3000",
        "data.init_args.batch_size": "4",
    }
    return words(init | QUIET_RUN)


@pytest.fixture
def short(tiny, language_model_folder, tmp_path_factory) -> list[str]:
    """And of a recipe."""
    like = str(
        copytree(language_model_folder, tmp_path_factory.mktemp("before") / "model")
    )
    return [*tiny, "--trainer.max_epochs", "1", "--data.init_args.forget_like", like]


@pytest.mark.parametrize("name", trained("conversation"))
def test_packaged_config_trains(
    name, tiny, conversation_file, tmp_path, capsys
) -> None:
    data = ["--data.init_args.train_file", conversation_file]
    data = [] if name == "conversation/example" else data
    train(
        "conversation",
        name,
        [*tiny, *data, "--trainer.max_epochs", "1"],
        tmp_path / "run",
    )


@pytest.mark.parametrize("name", comparisons("conversation"))
def test_packaged_comparison_runs(
    name, tiny, conversation_file, runs_alone, tmp_path, capsys
) -> None:
    data = [
        "--data.init_args.train_file",
        conversation_file,
        "--trainer.max_steps",
        "1",
    ]
    for row in comparison(name, [*tiny, *data], tmp_path / "results"):
        assert 0 <= float(row["train/all_met"]) <= 1
        assert float(row["train/avoid/max"]) >= float(row["train/avoid/cvar95"])


@pytest.mark.parametrize("name", ["keep/own", "keep/greedy"])
def test_the_models_own_answer_is_kept_by_one_more_option(
    name, short, tmp_path, monkeypatch, capsys
) -> None:
    """A model of random weights never ends an answer: refused; so the answers are given here."""
    with pytest.raises(SystemExit):
        train("keep", name, short, tmp_path)
    assert "raise policy.generation.max_new_tokens" in capsys.readouterr().err

    def yes(
        module: Any, prompts: list[Any], *, reference: bool = False
    ) -> list[dict[str, Any]]:
        return [{"answer": "Yes.", "refused": False, "cut": False} for _ in prompts]

    monkeypatch.setattr(ConversationModule, "answers_to", yes)
    train("keep", name, short, tmp_path)


@pytest.mark.parametrize("task", ["keep", "forget"])
def test_a_recipe_ends_in_a_model_for_plain_transformers(
    task, short, tmp_path, capsys
) -> None:
    train(task, task, short, tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path / "export")


@pytest.mark.parametrize(
    "task", [pytest.param("keep", marks=pytest.mark.slow), "forget"]
)
def test_rivals_run_in_one_switch(task, short, runs_alone, tmp_path, capsys) -> None:
    quick = [
        "--trainer.callbacks",
        "null",
        "--model.init_args.evaluation.answer_in",
        "[]",
    ]
    for row in comparison(f"{task}/rivals", [*short, *quick], tmp_path / "results"):
        assert 0 <= float(row["train/keep/violated"]) <= 1
