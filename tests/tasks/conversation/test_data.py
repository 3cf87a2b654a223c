"""The data module: batches, splits, files of several schemas, the shipped, what models say."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

from pl_pointwise.data import categories_of
from pl_pointwise.errors import DataError
from pl_pointwise.tasks import ConversationDataModule, ConversationModule
from pl_pointwise.tasks.conversation.module import ConversationEvaluation
from pl_pointwise.tasks.language_model.model.generation import Generation
from pl_pointwise.tasks.language_model.model.loading import Policy
from tests.tasks.conftest import (
    quiet_trainer,
    read_rows,
    response_by_hand,
    save_llama,
    shared_units,
    write_rows,
)
from tests.tasks.conversation.conftest import conversation_rows, data_of, made, written


def test_batch_says_what_is_asked_of_each_response(fitted, conversation_file) -> None:
    data = fitted(conversation_file, refusals=["No."])
    dataset = data.datasets["train"]
    batch = data.collate([dataset[i] | {"index": i} for i in range(4)])
    assert batch["roles"].tolist() == [[0, 1], [1, 1], [2, -1], [6, 1]]
    assert batch["prefer"].tolist() == [[0], [-1], [-1], [-1]]
    assert batch["avoid"].tolist() == [[1, -1], [0, 1], [-1, -1], [1, -1]]
    assert batch["refuse"].tolist() == [[-1], [-1], [0], [-1]]
    assert batch["relative"].nonzero().tolist() == [[1, 1]]
    assert batch["shift"][1, 1] == 0.5
    assert batch["shift"].isnan().sum() == 7
    kinds = [
        ConversationModule.prompt_kind(None, record) for record in batch["records"]
    ]
    assert kinds == ["", "", "unsafe", "benign"]
    assert data._encoder.tokenizer.batch_decode(dataset[2]["responses"]) == [
        "No.<|end|>"
    ]


def test_describe_shows_turns_tools_roles_and_bounds(fitted, tmp_path) -> None:
    hub = {"messages": [{"role": "user", "content": "Hi"}], "chosen_response": "yes"}
    hub |= {"rejected_response": "no", "category": "direct"}
    data = fitted([*conversation_rows(1)[:2], hub])
    first, second, third = (data.describe(i) for i in range(3))
    assert first["record"] == f"{tmp_path / 'rows.jsonl'}, line 1"
    assert first["prompt"] == "system: Be short.\nuser: call 0?"
    assert '"add"' in first["tools"]
    assert '"arguments"' in first["prefer 1"]
    assert second["avoid 2 (s̄_ref − 0.5)"] == "Not so."
    assert (third["kind"], third["prefer 1 (direct)"]) == ("avoid + prefer", "yes")


def test_splits_have_each_category_and_strata_each_kind(fitted) -> None:
    data = fitted(conversation_rows(10), val_fraction=0.2, test_fraction=0.3)
    data.setup("test")
    for name, count in (("train", 5), ("val", 2), ("test", 3)):
        expected = dict.fromkeys(("call", "never", "refuse", "rest"), count)
        assert Counter(categories_of(data.datasets[name])) == expected
    assert set(shared_units(data).values()) == {0}
    dataset = data.datasets["train"]
    assert sorted(Counter(dataset.strata).values()) == [5, 5, 5, 5]
    ranks = [rank for rank, kind in zip(dataset.ranks, dataset.categories, strict=True)
             if kind == "call"]  # fmt: skip
    assert sorted(ranks) == list(range(5))
    assert ranks != list(range(5))


def test_files_of_several_schemas_are_one_training_set(fitted, tmp_path) -> None:
    pairs = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(3)]
    alpaca = [
        {"instruction": f"Name {i}.", "input": "", "output": "Oak."} for i in range(2)
    ]
    table = pyarrow.Table.from_pylist(pairs)
    pyarrow.parquet.write_table(table, tmp_path / "pairs.parquet")
    files = [
        str(tmp_path / "pairs.parquet"),
        str(write_rows(tmp_path / "a.jsonl", alpaca)),
    ]
    kinds = [record.kind for record in fitted(files).datasets["train"].records]
    assert kinds == ["avoid + prefer"] * 3 + ["reference"] * 2


def test_the_file_of_a_role_gives_it_to_answers_without_one(tmp_path) -> None:
    role_of = {"train": "avoid", "learn": "learn", "keep": "keep", "forget": "forget"}
    files, expected = {}, {}
    for name, role in role_of.items():
        row = {"prompt": f"{name}?", "answer": "Yes."} | (
            {"around": -1.0} if name == "forget" else {}
        )
        own = {"prompt": f"{name}, its own?", "answer": "Yes.", "role": "prefer"}
        files[f"{name}_file"] = str(write_rows(tmp_path / f"{name}.jsonl", [row, own]))
        expected |= {row["prompt"]: [role], own["prompt"]: ["prefer"]}
    data = ConversationDataModule("unread", role="avoid", **files)
    records = [*data.task_records("train"), *data.task_records("val")]
    assert {
        record.messages[0]["content"]: [*record.roles] for record in records
    } == expected


def test_fingerprint_knows_roles_and_bounds(fitted) -> None:
    def fingerprint(**response: Any) -> str:
        row = {
            "prompt": "Hi",
            "responses": [{"role": "prefer", "content": "Yes."} | response],
        }
        return str(fitted([row]).datasets["train"].fingerprint)

    own = {"tolerance": -1}
    others: list[dict[str, Any]] = [{"role": "avoid"}, own, own | {"relative": True}]
    assert len({fingerprint(), *(fingerprint(**each) for each in others)}) == 4


def test_shipped_example_has_three_kinds_of_requirements(language_model_folder) -> None:
    data = ConversationDataModule(str(language_model_folder), source="example")
    records = data.task_records("train") + data.task_records("val")
    assert len({record.prompt for record in records}) == 40
    roles = Counter(
        response.role for record in records for response in record.responses
    )
    assert min(roles[role] for role in ("prefer", "avoid", "refuse", "reference")) >= 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "it needs train_file"),
        ({"source": "example", "val_file": "v.jsonl"}, "takes no files"),
        ({"source": "hub"}, "hub_path"),
        ({"train_file": "t", "role": "good"}, "role='good'"),
        ({"train_file": "t", "refusals": [" "]}, "blank"),
    ],
)
def test_options_that_cannot_be_are_refused(options, words) -> None:
    with pytest.raises(DataError, match=words):
        ConversationDataModule(**options)


@pytest.mark.parametrize("seed", range(3))
def test_the_records_of_the_page_train_as_they_are_printed(
    seed, fitted, tmp_path
) -> None:
    """No kind has two records, so all are trained on, with a word."""
    page = (Path(__file__).parents[3] / "docs/conversation.md").read_text(
        encoding="utf-8"
    )
    (tmp_path / "r.jsonl").write_text(
        page.partition("```json\n")[2].partition("```")[0]
    )
    with pytest.warns(UserWarning, match="no kind of record has two"):
        data = fitted(str(tmp_path / "r.jsonl"), val_fraction=0.1, seed=seed)
    assert len(data.datasets["train"]) == 5
    assert "val" not in data.datasets


def test_what_the_model_has_no_rows_for_is_refused(
    language_model_folder, conversation_file, tmp_path
) -> None:
    """At the first token there would be torch's IndexError."""
    lora = {"target_modules": ["q_proj", "embed_tokens"]}
    trained = ConversationModule(policy=Policy(str(language_model_folder), lora=lora))
    trained.model.positions = torch.nn.Embedding(32, 1)
    for said in (
        "a response .* positions, are 32",
        "the tokenizer writes .* model knows 99",
    ):
        with pytest.raises(DataError, match=f"line 1: {said}"):
            quiet_trainer(tmp_path).fit(trained, data_of(conversation_file))
        embeddings = trained.model.get_input_embeddings().base_layer
        embeddings.weight = torch.nn.Parameter(embeddings.weight[:99])


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


def test_own_answers_stand_in_the_place_of_the_files(
    language_model_folder, tmp_path
) -> None:
    """Other roles keep what the file says. Left out with a word are answers that do not end, are
    empty, or go on with a turn of somebody else.
    """
    rows = [{"prompt": f"{i}", "answer": "File.", "role": "keep"} for i in range(10)]
    rows += [{"prompt": "new", "answer": "New.", "role": "learn"}]
    module = made(language_model_folder, moved=False, keep_tolerance=0.05)

    def answers_to(
        prompts: list[dict[str, Any]], *, reference: bool
    ) -> list[dict[str, Any]]:
        assert reference
        texts = [each["messages"][0]["content"] for each in prompts]
        answers = {f"{i}": {"answer": f"Mine {i}.", "cut": i == 3} for i in range(10)}
        answers["5"]["answer"] += "<|end|>\n<|start|>user\nAnd then?"
        answers["7"]["answer"] = ""
        return [answers[t] for t in texts]

    module.answers_to = answers_to
    held_out = tmp_path / "val.jsonl"  # Of which the model is asked nothing.
    held_out.write_text(json.dumps({"prompt": "v", "answer": "Ok.", "role": "learn"}))
    options = {"own_answers": True, "val_file": str(held_out)}
    data = data_of(written(tmp_path, rows), language_model_folder, **options)
    with pytest.raises(DataError, match="own_answers needs the model"):
        data.setup("fit")
    trainer = quiet_trainer(tmp_path, max_epochs=0, limit_val_batches=0)
    with pytest.warns(
        UserWarning, match=r"left out 3 of 10 .*line 4: .*max_new_tokens"
    ):
        trainer.fit(module, data)
    texts = [record.answers[0] for record in data.datasets["train"].records]
    assert texts == [f"Mine {i}." for i in range(10) if i not in (3, 5, 7)] + ["New."]


def test_own_answers_are_those_of_the_evaluation(
    language_model_folder, tmp_path
) -> None:
    """Under bf16-mixed 11 of 26 were other texts than the untrained model's in `test`."""
    rows = [{"prompt": chr(97 + i % 26) * (1 + i // 2) + "?"} for i in range(48)]
    evaluation = {"answer_in": ["train"], "keep_tolerance": 0.05}
    evaluation |= {"prefer_tolerance": None, "avoid_tolerance": None}
    module = made(
        language_model_folder,
        moved=False,
        keep_tolerance=0.05,
        prefer_tolerance=None,
        avoid_tolerance=None,
        refuse_tolerance=None,
        objective_roles=["keep"],
        generation=Generation(max_new_tokens=64),
        evaluation=ConversationEvaluation(**evaluation, refuse_tolerance=None),
    )
    file = written(tmp_path, rows)
    data = data_of(None, keep_file=file, own_answers=True, eval_batch_size=5)
    trainer = quiet_trainer(tmp_path, max_epochs=0, precision="bf16-mixed")
    with pytest.warns(UserWarning, match="own_answers: left out"):
        trainer.fit(module, data)
    trainer.test(module, data, verbose=False)
    answers = read_rows(tmp_path / "answers/train.jsonl")
    assert len(answers) > 3
    for answer in answers:
        assert answer["before"] == answer["answer"]
        assert answer["before"].strip() == answer["wanted"]


@pytest.mark.parametrize(
    ("precision", "weights"),
    [("bf16-true", torch.bfloat16), ("64-true", torch.float64)],
)
def test_own_answers_are_written_in_the_precision_of_the_run(
    precision, weights, language_model_folder, tmp_path, caplog
) -> None:
    """Lightning converts the weights only after the data are set up."""
    caplog.set_level("INFO", logger="lightning.pytorch.utilities.rank_zero")
    module = made(language_model_folder, moved=False, keep_tolerance=0.05)
    seen: list[Any] = []

    def answers_to(prompts: list[Any], *, reference: bool) -> list[dict[str, Any]]:
        seen.extend((module.model.dtype, torch.get_default_dtype()))
        return [{"answer": "Mine.", "cut": False} for _ in prompts]

    module.answers_to = answers_to
    file = written(tmp_path, [{"prompt": "a", "role": "keep", "answer": "A."}])
    data = data_of(file, own_answers=True)
    trainer = quiet_trainer(tmp_path, max_epochs=0, precision=precision)
    trainer.fit(module, data)
    assert seen == [weights, weights]
    # In half precision an answer depends on its batch.
    assert ("policy.dtype float32" in caplog.text) == (precision == "bf16-true")
    assert torch.get_default_dtype() == torch.float32
