"""What of the training records is not trained on is told, with its cause and the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from pl_pointwise.tasks.language_model.model.generation import Generation
from tests.tasks.conftest import quiet_trainer, write_rows
from tests.tasks.conversation.conftest import data_of, made, written
from tests.tasks.reranker.conftest import ms_marco_rows
from tests.tasks.reranker.conftest import of_files as of_files
from tests.tasks.reranker.conftest import tiny_tokenizer_dir as tiny_tokenizer_dir


def rows_of(count: int, role: str = "reference") -> list[dict[str, Any]]:
    return [
        {"prompt": f"Say {i}.", "answer": f"{i}.", "role": role} for i in range(count)
    ]


def test_what_a_fraction_holds_out_is_told_with_its_option(
    language_model_folder, tmp_path
) -> None:
    file = written(tmp_path, rows_of(20))
    data = data_of(
        file, language_model_folder, val_fraction=0.1, test_fraction=0.2, stage="fit"
    )
    assert data.not_trained_on() == [
        f"2 records of {file} are held out as val (data.preparation.val_fraction 0.1): set it to 0 "
        "to train on all.",
        f"4 records of {file} are held out as test (data.preparation.test_fraction 0.2): set it to "
        "0 to train on all.",
    ]
    assert data_of(file, language_model_folder, stage="fit").not_trained_on() == []
    held_out = str(write_rows(tmp_path / "val.jsonl", rows_of(3)))
    data = data_of(
        file, language_model_folder, val_fraction=0.1, val_file=held_out, stage="fit"
    )
    assert data.not_trained_on() == []


def test_only_files_that_something_is_held_out_of_are_named(
    language_model_folder, tmp_path
) -> None:
    """All records of new.jsonl were trained on, as they have to be, and it was named too."""
    new = str(write_rows(tmp_path / "new.jsonl", rows_of(6, "learn")))
    others = [{"prompt": f"Ask {i}?", "answer": f"{i}."} for i in range(20)]
    general = str(write_rows(tmp_path / "general.jsonl", others))
    data = data_of(
        None,
        language_model_folder,
        learn_file=new,
        keep_file=general,
        val_fraction=0.2,
        stage="fit",
    )
    (sentence,) = data.not_trained_on()
    assert sentence.startswith(f"4 records of {general} are held out as val ")
    assert new not in sentence


def test_records_that_cannot_be_used_are_told(language_model_folder, tmp_path) -> None:
    long = {"prompt": "Long.", "answer": "x" * 500, "role": "reference"}
    file = written(tmp_path, [*rows_of(8), {"question": 3}, "{half", long])
    data = data_of(
        file,
        language_model_folder,
        invalid="skip",
        max_prompt_length=50,
        max_length=200,
    )
    with pytest.warns(UserWarning, match="left out"):
        data.setup("fit")
    assert data.not_trained_on() == [
        f"2 of 11 records of {file} were left out: they cannot be used.",
        "1 of 9 training records were left out: they do not fit, or cannot be rendered; a warning "
        "above names the first.",
    ]


def test_own_answers_that_do_not_end_are_told(language_model_folder, tmp_path) -> None:
    """Seven of thirteen were left out by a warning above the table, and "protected" meant six."""
    generation = Generation(max_new_tokens=40)
    options = {
        "keep_tolerance": 0.1,
        "prefer_tolerance": None,
        "generation": generation,
    }
    options |= {"avoid_tolerance": None, "refuse_tolerance": None, "moved": False}
    module = made(language_model_folder, objective_roles=["keep"], **options)
    # No answers: the model's own.
    prompts = [{"prompt": row["prompt"]} for row in rows_of(12)]
    data = data_of(None, keep_file=written(tmp_path, prompts), own_answers=True)
    run = quiet_trainer(tmp_path, max_epochs=1, limit_val_batches=0)
    with pytest.warns(UserWarning, match="own_answers: left out"):
        run.fit(module, data)
    left = 12 - len(data.datasets["train"])
    assert 0 < left < 12
    assert data.not_trained_on() == [
        f"{left} of 12 kept answers were left out: the model's own is longer than 40 tokens "
        "(raise model.policy.generation.max_new_tokens), empty, or goes on with another turn."
    ]
    assert module.closing is not None
    assert data.not_trained_on()[0] in module.closing.not_trained


def test_queries_beyond_the_limit_are_told(of_files, tmp_path) -> None:
    data = of_files({"train": ms_marco_rows(10)}, max_queries=4, val_fraction=0.2)
    data.setup("fit")
    assert data.not_trained_on() == [
        f"2 records of {tmp_path / 'train.jsonl'} are held out as val (data.val_fraction 0.2): set "
        "it to 0 to train on all.",
        "4 of 8 training queries were left out: data.max_queries is 4.",
    ]
