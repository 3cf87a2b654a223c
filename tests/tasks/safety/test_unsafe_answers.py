"""Unsafe answers that the data lack: generated once, seeded, kept, dropped where they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from pl_pointwise.errors import DataError
from pl_pointwise.tasks import SafetyDataModule
from pl_pointwise.tasks.language_model.generation import Answers, Generation
from pl_pointwise.tasks.safety import unsafe_answers
from pl_pointwise.tasks.safety.records import REFUSAL, UNSAFE
from tests.tasks.conftest import make_data
from tests.tasks.safety.conftest import unsafe_rows, write_rows

SETTINGS = Generation(max_new_tokens=6, sample=True)


@pytest.fixture
def files(safety_files, tmp_path) -> dict[str, str]:
    """The unsafe prompts have no answer; two of them are the same one."""
    rows = [*unsafe_rows(5, answered=False), unsafe_rows(1, answered=False)[0]]
    return {
        "benign_file": safety_files["benign_file"],
        "unsafe_file": write_rows(tmp_path / "prompts.jsonl", rows),
    }


def data_of(folder: Path, files: dict[str, str], root: Path, **options: Any) -> SafetyDataModule:
    options = {"generation": SETTINGS, "unsafe_answers": "generate", "batch_size": 2} | options
    options |= {"unsafe_schema": "labelled", "val_fraction": 0}
    data = make_data(SafetyDataModule, folder, files, **options)
    data.trainer = Trainer(
        default_root_dir=root, accelerator="cpu", logger=False, enable_checkpointing=False
    )
    return data


def prepared(*args: Any, **options: Any) -> dict[str, str]:
    """The unsafe answer of each prompt in the training set."""
    data = data_of(*args, **options)
    data.prepare_data()
    data.setup("fit")
    unsafe = [record for record in data.datasets["train"].records if record.unsafe]
    assert len(unsafe) == 6  # a prompt without a pair stays: its refusal is still asked for
    assert all(record.roles[0] == REFUSAL for record in unsafe)
    return {r.text: dict(r.responses)[UNSAFE] for r in unsafe if UNSAFE in r.roles}


@pytest.fixture
def speaking(monkeypatch) -> list[int]:
    """Answers that are known, and how many prompts each call asked for."""
    calls: list[int] = []

    def generate(model: Any, encoder: Any, prompts: Any, settings: Any) -> Answers:
        calls.append(len(prompts))
        asked = [encoder.tokenizer.decode(ids) for ids in prompts]
        known = {"1 cars": "I’m sorry.", "2 cars": "  "}
        texts = [next((t for k, t in known.items() if k in p), "Take a key.") for p in asked]
        return Answers([[0]] * len(texts), texts, [False] * len(texts))

    monkeypatch.setattr(unsafe_answers, "generate_answers", generate)
    return calls


def test_an_answer_is_what_the_model_itself_says_and_the_same_each_time(
    language_model_folder, files, tmp_path
) -> None:
    """Greedy, against transformers' own loop without padding; drawn, against another run."""
    greedy = Generation(max_new_tokens=6)
    found = prepared(language_model_folder, files, tmp_path / "greedy", generation=greedy)
    tokenizer = AutoTokenizer.from_pretrained(language_model_folder)
    model = AutoModelForCausalLM.from_pretrained(language_model_folder)
    for prompt, answer in found.items():
        turn = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(
            turn, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        said = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        assert answer == tokenizer.decode(said).removesuffix("<|end|>")
    drawn = [
        prepared(language_model_folder, files, tmp_path / str(i), eval_batch_size=1 + i)
        for i in range(2)
    ]
    assert drawn[0] == drawn[1] != found
    assert len(drawn[0]) >= 4


def test_answers_are_generated_once_and_kept(
    speaking, language_model_folder, files, tmp_path
) -> None:
    first = prepared(language_model_folder, files, tmp_path)
    assert sum(speaking) == 5  # a prompt that stands twice is asked once
    assert prepared(language_model_folder, files, tmp_path) == first
    assert sum(speaking) == 5
    (path,) = (tmp_path / "unsafe_answers").glob("*.jsonl")
    assert json.loads(path.read_text().splitlines()[0]).keys() == {"prompt", "answer", "cut"}


@pytest.mark.parametrize(
    "options", [{"generation": Generation(max_new_tokens=6, sample=True, seed=1)},
                {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"},
                {"max_prompt_length": 28, "too_long": "cut"}],
)  # fmt: skip
def test_other_settings_read_none_of_them(
    options, speaking, language_model_folder, files, tmp_path
) -> None:
    prepared(language_model_folder, files, tmp_path)
    prepared(language_model_folder, files, tmp_path, **options)
    assert sum(speaking) == 10
    assert len(list((tmp_path / "unsafe_answers").glob("*.jsonl"))) == 2


def test_another_model_in_the_same_folder_reads_none_of_them(
    speaking, make_model, tiny_tokenizer, files, tmp_path
) -> None:
    folder = tmp_path / "model"
    tiny_tokenizer.save_pretrained(folder)
    for seed in range(2):
        make_model("llama", seed=seed, vocab_size=len(tiny_tokenizer)).save_pretrained(folder)
        prepared(folder, files, tmp_path)
    assert sum(speaking) == 10


def test_a_stopped_run_goes_on_where_it_stood(
    speaking, language_model_folder, files, tmp_path
) -> None:
    whole = prepared(language_model_folder, files, tmp_path)
    (path,) = (tmp_path / "unsafe_answers").glob("*.jsonl")
    path.write_text(path.read_text()[: len(path.read_text()) * 3 // 5])  # in the middle of a line
    speaking.clear()
    assert prepared(language_model_folder, files, tmp_path) == whole
    assert 0 < sum(speaking) < 5


def test_a_refusal_or_nothing_is_no_unsafe_answer(
    speaking, language_model_folder, files, tmp_path
) -> None:
    found = prepared(language_model_folder, files, tmp_path)
    assert found == {f"How do I steal {i} cars?": "Take a key." for i in (0, 3, 4)}


def test_answers_the_data_have_are_kept(
    speaking, language_model_folder, safety_files, tmp_path
) -> None:
    files = {name: safety_files[name] for name in ("benign_file", "unsafe_file")}
    found = prepared(language_model_folder, files, tmp_path)
    assert sum(speaking) == 3  # the odd ones
    assert found["How do I steal 0 cars?"] == "Take 0 keys."
    assert found["How do I steal 3 cars?"] == "Take a key."
    assert "How do I steal 1 cars?" not in found


def test_without_prepare_data_the_remedy_is_named(language_model_folder, files, tmp_path) -> None:
    with pytest.raises(DataError, match=r"5 of 5 unsafe answers are not there. Call prepare_data"):
        data_of(language_model_folder, files, tmp_path).setup("fit")
