"""Records become batches: split by prompt, cut only where allowed, refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer

from pl_pointwise.data import categories_of
from pl_pointwise.errors import DataError
from pl_pointwise.tasks import When2CallDataModule
from pl_pointwise.tasks.language_model.data import EncodedResponses, Preparation
from pl_pointwise.tasks.language_model.text.conversations import ConversationEncoder
from pl_pointwise.tasks.language_model.text.pairs import grouped
from pl_pointwise.tasks.when2call.data import (
    CATEGORIES,
    choices_of,
    parse_choice,
    parse_pair,
    parse_preference,
    parse_question,
)
from tests.tasks.conftest import build_tokenizer, make_data, write_rows, written_files
from tests.tasks.when2call.conftest import (
    TOOL,
    choice_row,
    choice_rows,
    preference_row,
    preference_rows,
)

ENCODER = ConversationEncoder(build_tokenizer())
LIMITS: dict[str, Any] = {"max_prompt_length": 1000, "max_length": 2000}


@pytest.fixture
def module(
    language_model_folder: Path, tmp_path: Path
) -> Callable[..., When2CallDataModule]:
    """module(option=rows or path, …, stage=…, **options) → data, set up for that stage."""

    def make(**options: Any) -> Any:
        files = {
            name: options.pop(name) for name in list(options) if name.endswith("_file")
        }
        files = written_files(tmp_path, files)
        return make_data(When2CallDataModule, language_model_folder, files, **options)

    return make


def dataset(
    row: dict[str, Any], parse=parse_preference, **options: Any
) -> EncodedResponses:
    return EncodedResponses(
        [parse(row, "t.jsonl, line 3")], ENCODER, **LIMITS | options
    )


# One form of a tool call ------------------------------------------------------------------------


def test_training_and_evaluation_render_a_tool_call_to_the_same_tokens() -> None:
    """The published evaluation leaves one model's calls bare, and so scores another text."""
    trained = dataset(preference_row(chosen="tool_call"))[0]["responses"][0]
    judged = dataset(choice_row(correct="tool_call"), parse_choice)[0]
    assert judged["responses"][0].tolist() == trained.tolist()
    assert choices_of(judged["record"])[0] == CATEGORIES.index("tool_call")


# Reading ------------------------------------------------------------------------------------------


def without(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}


ROW, QUESTION = preference_row(), choice_row()
BAD_PREFERENCES = [
    (without(ROW, "tools"), 'field "tools" is missing'),
    (ROW | {"history": [["a", "b"]]}, 'field "history" is .* not read'),
]
BAD_CHOICES = [
    (QUESTION | {"correct_answer": "joke"}, "is 'joke'"),
    (QUESTION | {"system": "Be short."}, 'field "system" is .* not read'),
    (without(QUESTION, "answers"), '"answers" is missing'),
    (
        QUESTION | {"answers": QUESTION["answers"] | {"tool_call": "add"}},
        "is not a tool call",
    ),
]


@pytest.mark.parametrize(
    ("row", "message", "option"),
    [(*bad, "train_file") for bad in BAD_PREFERENCES]
    + [(*bad, "mcq_file") for bad in BAD_CHOICES],
)
def test_bad_record_is_refused_by_file_and_line(row, message, option, module) -> None:
    good = ROW if option == "train_file" else QUESTION
    data = module(**{option: [good, row]}, val_fraction=0)
    with pytest.raises(DataError, match=message) as caught:
        data.setup("fit" if option == "train_file" else "test")
    assert f"{option}.jsonl, line 2" in str(caught.value)
    assert "invalid: skip" in str(caught.value)


def test_a_folder_in_the_hubs_layout_is_read_like_the_hub(
    language_model_folder, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "When2Call"
    (folder / "train").mkdir(parents=True)
    (folder / "test").mkdir()
    write_rows(folder / "train/pref.jsonl", preference_rows(4))
    write_rows(folder / "test/mcq.jsonl", choice_rows(3))
    (folder / "README.md").write_text(
        "---\nconfigs:\n"
        "- {config_name: train_pref, data_files: [{split: train, path: train/pref.jsonl}]}\n"
        "- {config_name: test, data_files: [{split: mcq, path: test/mcq.jsonl}]}\n---\n"
    )
    own = Preparation(val_fraction=0.25)
    data = When2CallDataModule(
        str(language_model_folder), hub_path=str(folder), preparation=own
    )
    data.prepare_data()
    data.setup()
    sizes = {name: len(rows) for name, rows in data.datasets.items()}
    assert sizes == {"train": 6, "val": 2, "test": 2, "mcq": 3}


def test_the_published_questions_are_read_with_all_their_fields() -> None:
    """Every one was refused for a field that says how it was made."""
    published = {
        "uuid": "7",
        "source": "a",
        "source_id": "b",
        "target_tool": '{"name": "add"}',
    }
    published |= {"held_out_param": "the day"}
    (row,) = choice_rows(1)
    assert len(parse_choice({**row, **published}, "here").responses) == 4
    assert parse_question({**row, **published}, "here").responses == ()


def test_plain_pairs_are_read() -> None:
    row = {"system": "Be brief.", "input": "1 + 2?", "chosen": "3", "rejected": "4"}
    record = parse_pair(row, "here")
    assert [message["role"] for message in record.messages] == ["system", "user"]
    assert record.answers == ["3", "4"]


# Splitting and grouping ---------------------------------------------------------------------------


def test_grouping_gathers_the_rejected_answers_of_one_prompt_and_chosen_answer() -> (
    None
):
    rows = [parse_preference(row, "x") for row in preference_rows(3)]
    other = parse_preference(preference_row("0 + 0?", "cannot_answer", "direct"), "x")
    found = grouped([*rows, other, rows[0]])  # a row that stands twice counts once
    assert [len(record.answers) for record in found] == [3, 3, 3, 2]
    assert found[0].answers[0] == rows[0].answers[0]
    assert choices_of(found[0]) == [*choices_of(rows[0]), choices_of(rows[1])[1]]


def test_missing_rejected_answers_are_absent_from_the_batch(module) -> None:
    data = module(
        train_file=preference_rows(3)[:5], val_fraction=0, group_rejected=True
    )
    data.setup("fit")
    rows = data.datasets["train"]
    batch = data.collate([{**rows[i], "index": i} for i in (2, 0)])
    assert (batch["response_lengths"] > 0).tolist() == [[True, True, False], [True] * 3]
    assert batch["roles"].tolist() == [[0, 1, -1], [0, 1, 1]]
    # and so in a batch none of whose samples has three
    assert data.collate([{**rows[2], "index": 2}])["response_lengths"].shape == (1, 3)


def test_multiple_choice_knows_the_right_behaviour_and_questions_know_none(
    module,
) -> None:
    questions = [{"question": "1 + 1?", "tools": [TOOL]}]
    data = module(mcq_file=choice_rows(4), predict_file=questions, stage="test")
    data.setup("predict")
    right = ["tool_call", "request_for_info", "cannot_answer", "cannot_answer"]
    assert categories_of(data.datasets["mcq"]) == right
    assert categories_of(data.datasets["predict"]) is None
    pair = {"input": "1 + 2?", "chosen": "3", "rejected": "4"}
    data = module(train_file=[pair], schema="pairs", val_fraction=0.0, stage="fit")
    assert categories_of(data.datasets["train"]) is None


# Lengths ------------------------------------------------------------------------------------------


def test_a_prompt_to_answer_is_never_left_out(module) -> None:
    limits = {"max_prompt_length": 160, "val_fraction": 0}
    question = {"question": "1 + 1? " * 9, "tools": [TOOL]}
    data = module(predict_file=[question], invalid="skip", **limits)
    with pytest.raises(DataError, match=r"predict_file.jsonl, line 1: the prompt has"):
        data.setup("predict")


# Stages -------------------------------------------------------------------------------------------


def test_test_runs_held_out_training_and_multiple_choice_data(
    when2call_files, module
) -> None:
    data = module(**when2call_files)
    data.trainer = Trainer(logger=False, accelerator="cpu", enable_checkpointing=False)
    data.setup("test")
    loaders = data.test_dataloader()
    assert list(loaders) == ["test", "train", "mcq"]
    batch = next(iter(loaders["mcq"]))
    assert batch["response_lengths"].shape == (4, 4)
    assert all(
        record.choice and choices_of(record)[0] > 0 for record in batch["records"]
    )
    assert [bool(record.tools) for record in batch["records"]] == [
        True,
        True,
        True,
        False,
    ]
    assert not any(record.choice for record in next(iter(loaders["train"]))["records"])


def test_multiple_choice_alone_can_be_tested(module) -> None:
    data = module(mcq_file=choice_rows(4), stage="test")
    assert list(data.datasets) == ["mcq"]
    with pytest.raises(DataError, match="Set train_file"):
        data.setup("fit")
