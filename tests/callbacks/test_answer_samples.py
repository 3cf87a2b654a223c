"""AnswerSamples writes what the model says, and leaves the run as it is to the last bit."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from pl_pointwise import Pointwise
from pl_pointwise.callbacks import AnswerSamples, SaveOnTermination
from tests.callbacks.answering import Answering
from tests.pl_pointwise.toy import At, ToyData, ToyRows, weights_of
from tests.tasks.conftest import language_model_folder, quiet_trainer
from tests.tasks.conversation.conftest import TOOL, conversation_rows, write_rows
from tests.tasks.conversation.test_module import ADAPTERS, data_of, made

__all__ = ["language_model_folder"]  # A fixture of the tasks' tests.

PROMPTS: list[Any] = [
    "Who are you?",
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}],
    {"messages": [{"role": "user", "content": "Add."}], "tools": [TOOL]},
]


@pytest.fixture(name="file")
def conversations(tmp_path: Path) -> str:
    return str(write_rows(tmp_path / "rows.jsonl", conversation_rows(2)))


def run(
    folder: Path,
    file: str,
    root: Path,
    callbacks: Any,
    path: Any = None,
    **options: Any,
) -> Any:
    torch.manual_seed(7)
    lora = {**vars(ADAPTERS), "lora_dropout": 0.3}
    module = made(folder, lora=lora, formulation=Pointwise(alpha=1.0))
    torch.manual_seed(8)
    data = data_of(file, val_fraction=0.0, batch_size=4)
    runner = quiet_trainer(root, callbacks=callbacks, max_epochs=3, **options)
    runner.fit(module, data, ckpt_path=path)
    return module


def written(root: Path) -> list[dict[str, Any]]:
    (path,) = root.rglob("answers.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_run_is_the_same_to_the_last_bit(
    language_model_folder, file, tmp_path
) -> None:
    samples = AnswerSamples(PROMPTS, per_category=1, data="train")
    found = run(language_model_folder, file, tmp_path / "with", [samples])
    expected = run(language_model_folder, file, tmp_path / "without", [])
    assert torch.equal(weights_of(found), weights_of(expected))
    for name, table in expected.multipliers.items():
        assert torch.equal(found.multipliers[name], table)
    assert all(part.training for part in found.modules())
    # Three prompts of one's own, and the first of each of four categories.
    rows = written(tmp_path / "with")
    steps = [row["step"] for row in rows]
    assert steps == [step for step in (0, 2, 4, 6) for _ in range(7)]
    assert [row.get("index") for row in rows[:7]] == [None, None, None, 0, 1, 2, 3]
    assert rows[4]["category"] == "never"
    assert rows[0]["prompt"] == "Who are you?"
    assert "Be short." in rows[1]["prompt"]
    assert all(
        isinstance(row["answer"], str) and row["refused"] is False for row in rows
    )


def test_a_resumed_run_writes_what_comes_after_its_checkpoint(
    language_model_folder, file, tmp_path
) -> None:
    path, root = tmp_path / "run.ckpt", tmp_path / "run"
    save = At(2, lambda trainer: trainer.save_checkpoint(path))
    run(language_model_folder, file, root, [AnswerSamples(["Hi"]), save])
    assert [row["step"] for row in written(root / "answer-samples")] == [0, 2, 4, 6]
    run(language_model_folder, file, root, [AnswerSamples(["Hi"])], path)
    assert [row["step"] for row in written(root / "answer-samples-1")] == [2, 4, 6]


def test_it_writes_beside_the_logger(language_model_folder, file, tmp_path) -> None:
    logger = CSVLogger(tmp_path)
    samples = AnswerSamples(["Hi"], every_n_epochs=2)
    run(language_model_folder, file, tmp_path, [samples], logger=logger)
    (path,) = Path(logger.log_dir).rglob("answers.jsonl")
    assert path.parent.name == "answer-samples"
    assert [row["step"] for row in written(tmp_path)] == [0, 4, 6]
    assert [row["epoch"] for row in written(tmp_path)] == [0, 1, 2]


def test_without_held_out_records_those_trained_on_are_asked(
    language_model_folder, file, tmp_path
) -> None:
    run(language_model_folder, file, tmp_path, [AnswerSamples(per_category=1)])
    assert {row["index"] for row in written(tmp_path) if row["step"] == 0} == {
        0,
        1,
        2,
        3,
    }


def answered(
    root: Path, samples: AnswerSamples, *more: Any, **options: Any
) -> list[int]:
    """The steps at which a run of 4 steps an epoch, of a module that only says so, answered."""
    runner = quiet_trainer(
        root, callbacks=[samples, *more], **{"max_epochs": 3, **options}
    )
    with suppress(SIGTERMException):
        runner.fit(Answering(Pointwise()), ToyData(ToyRows(8), batch_size=2))
    return [row["step"] for row in written(root)]


def stop(trainer: Any) -> None:
    trainer.should_stop = True


def terminate(trainer: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def nobody_listens_to_sigterm() -> Iterator[None]:
    """Lightning leaves a handler that is there, as one that another test's program has set."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


NONE: dict[str, Any] = {"every_n_epochs": None}


@pytest.mark.parametrize(
    ("options", "more", "of_trainer", "steps"),
    [
        (NONE, [], {}, [0, 12]),
        ({}, [], {}, [0, 4, 8, 12]),
        ({"every_n_epochs": 2}, [], {}, [0, 8, 12]),
        ({"every_n_epochs": 10}, [], {"max_steps": 6}, [0, 6]),
        ({}, [], {"max_steps": 6}, [0, 4, 6]),
        (NONE, [At(7, stop)], {"min_epochs": 0}, [0, 7]),
        (NONE, [At(7, terminate)], {}, [0, 7]),
        (
            NONE,
            [At(7, terminate), SaveOnTermination()],
            {"enable_checkpointing": True, "max_epochs": 4},
            [0, 7],
        ),
        ({"every_n_steps": 3, **NONE}, [], {}, [0, 3, 6, 9, 12]),
        ({"every_n_steps": 5, "every_n_epochs": 2}, [], {}, [0, 5, 8, 10, 12]),
    ],
    ids=[
        *("neither", "epochs", "not its turn", "max_steps", "max_steps on the way"),
        *("stopped by a callback", "SIGTERM", "SIGTERM and saved", "steps", "both"),
    ],
)
@pytest.mark.usefixtures("nobody_listens_to_sigterm")
def test_the_last_step_is_always_answered_and_none_twice(
    options: Any, more: Any, of_trainer: Any, steps: list[int], tmp_path: Path
) -> None:
    """`make demo` showed answers from before training only: ten epochs did not divide its eight."""
    samples = AnswerSamples(["Hi"], **options)
    for each in more:  # A parameter is made once, and counts on.
        each.count = 0
    assert answered(tmp_path, samples, *more, **of_trainer) == steps


def test_a_limit_of_time_is_followed_by_answers(tmp_path: Path) -> None:
    timer = Timer({"days": 1})

    def expire(_: Any) -> None:
        timer._duration = 0.0

    assert answered(tmp_path, AnswerSamples(["Hi"], **NONE), At(3, expire), timer) == [
        0,
        3,
    ]


def test_a_second_fit_answers_from_its_start(tmp_path: Path) -> None:
    samples = AnswerSamples(["Hi"], **NONE)
    assert answered(tmp_path / "one", samples) == [0, 12]
    assert answered(tmp_path / "two", samples) == [0, 12]


def test_a_task_of_ones_own_answers_in_evaluation_mode(tmp_path: Path) -> None:
    module = Answering(Pointwise())
    samples = AnswerSamples(["Hi"], per_category=0)
    runner = quiet_trainer(tmp_path, callbacks=[samples], max_epochs=1)
    runner.fit(module, ToyData(ToyRows(4), batch_size=2))
    assert module.modes == (False, False)
    assert module.training


def test_bad_options_are_refused(language_model_folder, file, tmp_path) -> None:
    with pytest.raises(ValueError, match="which prompts"):
        AnswerSamples()
    with pytest.raises(ValueError, match="every_n_steps=0"):
        AnswerSamples(["Hi"], every_n_steps=0)
    samples = AnswerSamples(per_category=1, data="mcq")
    with pytest.raises(ValueError, match=r"data='mcq': choose one of train"):
        run(language_model_folder, file, tmp_path, [samples])
