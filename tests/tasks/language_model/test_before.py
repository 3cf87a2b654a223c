"""Before and after: the starting model beside the trained one, in `test` and at a fit's end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from transformers import AutoModelForCausalLM, AutoTokenizer

from pl_pointwise.report.of_test import page_of_test
from pl_pointwise.task import notes_of
from pl_pointwise.tasks import ConversationModule
from pl_pointwise.tasks.conversation.module import ConversationEvaluation
from pl_pointwise.tasks.language_model.before import place_of
from pl_pointwise.tasks.language_model.model.adapters import Lora
from pl_pointwise.tasks.language_model.text.records import Record
from tests.tasks.conftest import quiet_trainer, read_rows
from tests.tasks.conversation.conftest import conversation_rows, data_of, made, written

ROWS = [
    {"prompt": "Say a.", "answer": "A.", "role": "learn"},
    {"prompt": "Say b.", "answer": "B.", "role": "prefer"},
    {"prompt": "Say c.", "answer": "C.", "role": "reference"},
    {"prompt": "Say d.", "answer": "D.", "role": "keep"},
    {"prompt": "Say e.", "responses": [{"role": "refuse"}]},
]


def module_of(folder: Path, rate: float = 0.05, **options: Any) -> ConversationModule:
    """Trained so that answers change; ``rate`` 0 leaves the model as it is."""
    options = {"keep_tolerance": 0.1, "moved": False} | options
    module = made(folder, **options)
    module.training_settings.optimization.learning_rate = rate
    return module


def fitted(module: Any, data: Any, root: Path, **options: Any) -> Any:
    run = quiet_trainer(root, **{"max_epochs": 6, "limit_val_batches": 0, **options})
    run.fit(module, data)
    return run


def greedy(folder: Path, prompt: str, tokens: int) -> str:
    """What transformers itself makes of a prompt."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    turns = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    options = {
        "do_sample": False,
        "max_new_tokens": tokens,
        "eos_token_id": end,
        "pad_token_id": 0,
    }
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[
        0, ids.shape[1] :
    ]
    return str(tokenizer.decode(found)).removesuffix("<|end|>")


def test_the_columns_of_before_are_those_of_the_model_as_it_starts(
    language_model_folder, tmp_path
) -> None:
    evaluation = ConversationEvaluation(answer_in=["train"])
    data = data_of(written(tmp_path, conversation_rows(3)))
    start = module_of(language_model_folder, evaluation=evaluation)
    expected = quiet_trainer(tmp_path).test(start, data, verbose=False)
    expected = {name: value for part in expected for name, value in part.items()}
    module = module_of(language_model_folder, evaluation=evaluation)
    run = fitted(module, data, tmp_path)
    run.test(module, data, verbose=False)
    found = {name: float(value) for name, value in run.callback_metrics.items()}
    before = {
        n.removeprefix("before_"): v
        for n, v in found.items()
        if n.startswith("before_")
    }
    there = {name for name in expected if not name.startswith("before_")} - {
        "train/flipped"
    }
    assert set(before) == there
    for name, value in before.items():
        assert value == pytest.approx(expected[name], abs=1e-5), name
    assert found["train/prefer/mean"] != pytest.approx(
        before["train/prefer/mean"], abs=0.01
    )
    assert before["train/kl"] == pytest.approx(0, abs=1e-6)
    # Certificates and cards are of the trained model.
    assert list(module.evaluated) == ["train"]


def test_a_line_of_the_answers_has_what_people_read(
    language_model_folder, tmp_path
) -> None:
    evaluation = ConversationEvaluation(answer_in=["train"])
    module = module_of(language_model_folder, evaluation=evaluation)
    file = written(tmp_path, ROWS)
    data = data_of(file, language_model_folder)
    run = fitted(module, data, tmp_path, max_epochs=20)
    run.test(module, data, verbose=False)
    lines = read_rows(tmp_path / "answers/train.jsonl")
    assert [line["prompt"] for line in lines] == [row["prompt"] for row in ROWS]
    assert [(line["file"], line["line"]) for line in lines] == [
        (file, n) for n in range(1, 6)
    ]
    wanted = [*"ABCD"]
    assert [line["wanted"] for line in lines[:4]] == [f"{letter}." for letter in wanted]
    assert "cannot" in lines[4]["wanted"]
    for line in lines:
        assert (
            line["before"] == greedy(language_model_folder, line["prompt"], 4).strip()
        )
    assert [("flipped" in line, "exact" in line) for line in lines] == [
        *[(False, True)] * 2,
        *[(True, False)] * 2,
        (False, True),
    ]
    flipped = [line["answer"] != line["before"] for line in lines[2:4]]
    assert [line["flipped"] for line in lines[2:4]] == flipped
    assert any(flipped)
    assert run.callback_metrics["train/flipped"] == pytest.approx(sum(flipped) / 2)
    assert list(lines[2])[:5] == ["index", "prompt", "wanted", "before", "answer"]


@pytest.mark.parametrize("lora", [Lora(r=4, lora_alpha=8, lora_dropout=0.2), None])
def test_a_fit_says_how_many_answers_that_are_to_stay_are_others_now(
    lora, language_model_folder, tmp_path
) -> None:
    """With all weights trained too, and after a resume, which the answers of before outlive."""
    rows = [ROWS[0], *({**ROWS[2], "prompt": f"Say {i}."} for i in range(20))]
    options = {"lora": lora, "objective": "cross_entropy", "objective_roles": ["learn"]}
    names = ("prefer", "avoid", "refuse", "keep")
    options |= {f"{name}_tolerance": None for name in names}
    data = data_of(written(tmp_path, rows), language_model_folder, batch_size=32)
    still = module_of(language_model_folder, 0.0, **options)
    fitted(still, data, tmp_path)
    assert still.closing_sentences() == []
    module = module_of(language_model_folder, **options)
    run = fitted(module, data, tmp_path)
    [said] = module.closing_sentences()
    assert said.startswith(
        "16 of 16 reference answers that were tried are other texts now"
    )
    assert "role keep" in said
    assert said in module.closing.sentences
    path = tmp_path / "stopped.ckpt"
    run.save_checkpoint(path)
    resumed = module_of(language_model_folder, **options)
    longer = quiet_trainer(tmp_path, max_epochs=7, limit_val_batches=0)
    longer.fit(resumed, data, ckpt_path=path, weights_only=True)
    assert resumed.closing_sentences() == [said]


def test_without_the_answers_of_before_nothing_is_said_of_them(
    language_model_folder, tmp_path
) -> None:
    options = {"lora": None, "objective": "cross_entropy", "keep_tolerance": None}
    module = module_of(language_model_folder, **options, prefer_tolerance=None)
    data = data_of(written(tmp_path, ROWS[:3]), language_model_folder)
    fitted(module, data, tmp_path)
    notes_of(module).kept = {}  # As of a checkpoint that an earlier version wrote.
    assert module.closing_sentences() == []
    assert module.starting_model() is None
    found = quiet_trainer(tmp_path).test(module, data, verbose=False)
    assert not any(name.startswith("before_") for part in found for name in part)


def test_switched_off_nothing_of_before_is_measured(
    language_model_folder, tmp_path
) -> None:
    evaluation = ConversationEvaluation(answer_in=["train"], before=False)
    module = module_of(language_model_folder, evaluation=evaluation)
    data = data_of(written(tmp_path, conversation_rows(3)))
    run = fitted(module, data, tmp_path)
    assert module.closing_sentences() == []
    run.test(module, data, verbose=False)
    assert not any(name.startswith("before_") for name in run.callback_metrics)
    assert "before" not in read_rows(tmp_path / "answers/train.jsonl")[0]
    assert "train/flipped" not in run.callback_metrics


def test_the_fit_is_the_same_with_and_without(language_model_folder, tmp_path) -> None:
    """Also where all weights are trained, and answers are generated before the first step."""
    found = []
    for before in (True, False):
        for lora in (Lora(r=4, lora_alpha=8, lora_dropout=0.3), None):
            seed_everything(3, verbose=False)
            evaluation = ConversationEvaluation(before=before)
            options = {
                "lora": lora,
                "objective": "cross_entropy",
                "evaluation": evaluation,
            }
            module = module_of(language_model_folder, keep_tolerance=None, **options)
            data = data_of(
                written(tmp_path, [*ROWS[:3], ROWS[4]]), language_model_folder
            )
            fitted(module, data, tmp_path)
            weights = [
                p.detach().flatten() for p in module.parameters() if p.requires_grad
            ]
            found.append((torch.cat(weights), torch.rand(1)))
    for with_it, without in ((found[0], found[2]), (found[1], found[3])):
        assert torch.equal(with_it[0], without[0])
        assert torch.equal(with_it[1], without[1])


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("a, b.jsonl, line 3", {"file": "a, b.jsonl", "line": 3}),
        ("x.csv, record 12", {"file": "x.csv", "line": 12}),
        ("embedded corpus", {"file": "embedded corpus"}),
    ],
)
def test_the_place_of_a_record_is_its_file_and_line(where, expected) -> None:
    assert place_of(Record([], [], (), where)) == expected


def test_the_page_of_a_test_has_every_answer_beside_what_was_before_and_wanted(
    language_model_folder, tmp_path
) -> None:
    evaluation = ConversationEvaluation(answer_in=["train"])
    path = written(tmp_path, ROWS)
    module, data = (
        module_of(language_model_folder, evaluation=evaluation),
        data_of(path),
    )
    run = fitted(module, data, tmp_path)
    run.test(module, data, verbose=False)
    shown = [
        each
        for each in page_of_test(module, run, {}, "").samples
        if each.after is not None
    ]
    lines = {row["index"]: row for row in read_rows(tmp_path / "answers/train.jsonl")}
    assert {each.index for each in shown} == set(lines)
    for each in shown:
        row = lines[each.index]
        assert each.after == row["answer"]
        assert each.before == row["before"]
        assert each.wanted == row.get("wanted")
        assert each.fields["prompt"] == row["prompt"]
        assert each.source == f"{Path(row['file']).name}, line {row['line']}"
    assert any(each.constraint for each in shown)
