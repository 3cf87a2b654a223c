"""However a run stops, and wherever: resumed, it ends as the run that did not, to the last bit.

The module is test_checkpoints.py's: dropout, windows of three steps, a growing α, Adam and a
scheduler, four batches an epoch. What cannot be resumed exactly is refused.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from pl_pointwise.callbacks import SaveOnTermination
from tests.pl_pointwise.test_checkpoints import HELD_OUT, ROWS, Hard
from tests.pl_pointwise.toy import At, Seen, ToyData, assert_identical_run, trainer

WITHIN, AT_THE_END = 6, 8
"""Batches before the stop, of four an epoch."""


def start(
    folder: Path, *callbacks: Any, workers: int = 0, module: Any = None, **options: Any
) -> tuple[Any, Seen, Callable[..., None]]:
    """A trainer, what it will have seen, and the call that starts it."""
    seen = Seen()
    options = {"max_epochs": 3, "enable_checkpointing": True} | options
    if not any(isinstance(callback, ModelCheckpoint) for callback in callbacks):
        options["enable_checkpointing"] = any(
            isinstance(callback, SaveOnTermination) for callback in callbacks
        )
    runner = trainer(callbacks=[seen, *callbacks], default_root_dir=folder, **options)

    def fit(path: Any = None) -> None:
        torch.manual_seed(0 if path is None else 1234)
        data = ToyData(ROWS, HELD_OUT, batch_size=4, num_workers=workers)
        weights_only = None if path is None else True
        runner.fit(module or Hard(), data, ckpt_path=path, weights_only=weights_only)

    return runner, seen, fit


def stopped_by(
    kind: str, batches: int, folder: Path, **options: Any
) -> tuple[Path, list[tuple[int, list[int]]]]:
    """The checkpoint of a run that stopped after so many batches, and the batches it saw."""
    path = folder / "stopped.ckpt"
    callbacks: list[Any] = []
    if kind == "max_steps":
        options |= {"max_steps": batches}
    elif kind == "max_steps alone":
        options |= {"max_steps": batches, "max_epochs": -1}
    elif kind == "max_time":
        timer = Timer(timedelta(days=1))
        callbacks = [At(batches, lambda _: setattr(timer, "_duration", 0.0)), timer]
    elif kind == "should_stop":
        callbacks = [At(batches, lambda runner: setattr(runner, "should_stop", True))]
    elif kind in ("an exception", "KeyboardInterrupt"):
        error = RuntimeError("stop") if kind == "an exception" else KeyboardInterrupt()
        callbacks = [At(batches, lambda _: _raise(error)), _on_exception(folder)]
    elif kind == "SIGTERM":
        callbacks = [
            At(batches, lambda _: signal.raise_signal(signal.SIGTERM)),
            SaveOnTermination(),
        ]
    elif kind == "by hand":
        callbacks = [At(batches, lambda runner: runner.save_checkpoint(path))]
    elif kind == "every_n_train_steps":
        callbacks = [
            ModelCheckpoint(
                dirpath=folder, filename="{step}", every_n_train_steps=batches // 2, save_top_k=-1
            )
        ]
        path = folder / f"step={batches}.ckpt"
    elif kind == "max_epochs":
        options |= {"max_epochs": batches // 4}
    runner, seen, fit = start(folder, *callbacks, **options)
    if kind in ("an exception", "KeyboardInterrupt", "SIGTERM"):
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises((RuntimeError, SystemExit, SIGTERMException)):
            fit()
        signal.signal(signal.SIGINT, before)
        (path,) = folder.glob("**/*.ckpt")
    else:
        fit()
        if not path.exists():
            runner.save_checkpoint(path)
    return path, seen.batches


def _raise(error: BaseException) -> None:
    raise error


def _on_exception(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(
        dirpath=folder, save_on_exception=True, every_n_epochs=100, save_top_k=-1
    )


STOPS = [
    "max_steps",
    "max_steps alone",
    "max_time",
    "should_stop",
    "an exception",
    "KeyboardInterrupt",
    "SIGTERM",
    "by hand",
    "every_n_train_steps",
]


def assert_resumes(kind: str, batches: int, folder: Path, epochs: int, **options: Any) -> None:
    path, before = stopped_by(kind, batches, folder, **options)
    uninterrupted, whole, fit = start(folder / "whole", max_epochs=epochs, **options)
    fit()
    resumed, rest, fit = start(folder / "resumed", max_epochs=epochs, **options)
    fit(path)
    assert before[:batches] + rest.batches == whole.batches
    assert_identical_run(resumed.lightning_module, uninterrupted.lightning_module)
    assert resumed.current_epoch == uninterrupted.current_epoch
    assert resumed.global_step == uninterrupted.global_step


@pytest.mark.parametrize("batches", [WITHIN, AT_THE_END], ids=["within", "at the end"])
@pytest.mark.parametrize("kind", STOPS)
def test_a_stop_resumes_exactly(kind: str, batches: int, tmp_path: Path) -> None:
    """The rest of an epoch cut short was dropped without a word, and a window of steps closed
    early by the end of the fit stayed closed."""
    assert_resumes(kind, batches, tmp_path, epochs=3)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batches", [WITHIN, AT_THE_END], ids=["within", "at the end"])
@pytest.mark.parametrize("kind", STOPS)
def test_a_stop_resumes_exactly_into_a_longer_run(
    kind: str, batches: int, workers: int, tmp_path: Path
) -> None:
    assert_resumes(kind, batches, tmp_path, epochs=5, workers=workers)
