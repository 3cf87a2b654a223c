"""However a run stops, and wherever: resumed, it ends as the run that did not, to the last bit.

The module is test_checkpoints.py's: dropout, windows of three steps, a growing α, Adam, a
scheduler and a plateau, which is judged once an epoch, four batches an epoch. What cannot be
resumed exactly is refused.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.exceptions import SIGTERMException

from pl_pointwise import Penalty, Pointwise
from pl_pointwise.callbacks import SaveOnTermination
from pl_pointwise.errors import TrainingError
from tests.pl_pointwise.toy import (
    At,
    Seen,
    Toy,
    ToyData,
    ToyRows,
    assert_identical_run,
    trainer,
)
from tests.pl_pointwise.training.test_checkpoints import HELD_OUT, ROWS, Hard, train

WITHIN, AT_THE_END = 6, 8
"""Batches before the stop, of four an epoch."""


def start(
    folder: Path, *callbacks: Any, workers: int = 0, module: Any = None, **options: Any
) -> tuple[Any, Seen, Callable[..., None]]:
    """A trainer, what it will have seen, and the call that starts it."""
    seen = Seen()
    saves = any(
        isinstance(each, (ModelCheckpoint, SaveOnTermination)) for each in callbacks
    )
    options = {"max_epochs": 3, "enable_checkpointing": saves, **options}
    runner = trainer(callbacks=[seen, *callbacks], default_root_dir=folder, **options)

    def fit(path: Any = None) -> None:
        torch.manual_seed(0 if path is None else 1234)
        data = ToyData(ROWS, HELD_OUT, batch_size=4, num_workers=workers)
        runner.fit(module or Hard(), data, ckpt_path=path, weights_only=path and True)

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
        callbacks = [At(batches, _terminate), SaveOnTermination()]
    elif kind == "by hand":
        callbacks = [At(batches, lambda runner: runner.save_checkpoint(path))]
    elif kind == "every_n_train_steps":
        kept: Any = {"filename": "{step}", "save_top_k": -1}
        callbacks = [ModelCheckpoint(folder, every_n_train_steps=batches // 2, **kept)]
        path = folder / f"step={batches}.ckpt"
    runner, seen, fit = start(folder, *callbacks, **options)
    if kind in ("an exception", "KeyboardInterrupt", "SIGTERM"):
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises((RuntimeError, SystemExit, SIGTERMException)):
            fit()
        signal.signal(signal.SIGINT, before)
        (path,) = folder.glob(
            "**/terminated-*.ckpt" if kind == "SIGTERM" else "**/*.ckpt"
        )
    else:
        fit()
        if not path.exists():
            runner.save_checkpoint(path)
    return path, seen.batches


def _raise(error: BaseException) -> None:
    raise error


def _terminate(_: Any) -> None:
    signal.raise_signal(signal.SIGTERM)


def _on_exception(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(
        dirpath=folder, save_on_exception=True, every_n_epochs=100, save_top_k=-1
    )


STOPS = [
    "max_steps",
    "max_time",
    "should_stop",
    "an exception",
    "SIGTERM",
    "every_n_train_steps",
]
SELDOM = [*STOPS, "max_steps alone", "KeyboardInterrupt", "by hand"]


def assert_resumes(
    kind: str, batches: int, folder: Path, epochs: int, **options: Any
) -> None:
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
@pytest.mark.parametrize(
    ("kind", "epochs", "workers"),
    [
        *((kind, 3, 0) for kind in STOPS),
        *(
            pytest.param(kind, epochs, workers, marks=pytest.mark.slow)
            for kind in SELDOM
            for epochs, workers in [(5, 0), (5, 2)]
        ),
    ],
)
def test_a_stop_resumes_exactly(
    kind: str, epochs: int, workers: int, batches: int, tmp_path: Path
) -> None:
    """The rest of an epoch cut short was dropped, and its end judged a plateau twice."""
    assert_resumes(kind, batches, tmp_path, epochs=epochs, workers=workers)


# In the midst of something ------------------------------------------------------------------------


class Torn(Hard):
    """Fails in a step, before or after the weights have moved."""

    place = "objective"

    def objective(self, outputs: Any, batch: Any) -> Any:
        if self.place == "objective" and self.global_step == WITHIN:
            raise RuntimeError("in mid-step")
        return super().objective(outputs, batch)

    def on_fit_start(self) -> None:
        step = self._lagrangian.take

        def torn(*arguments: Any) -> Any:
            if self.place == "dual step" and self.global_step == WITHIN:
                raise RuntimeError("in mid-step")
            return step(*arguments)

        self._lagrangian.take = torn  # type: ignore[method-assign]


@pytest.mark.parametrize("place", ["objective", "dual step"])
def test_a_checkpoint_written_within_a_step_is_refused(
    place: str, tmp_path: Path
) -> None:
    """save_on_exception wrote new weights beside old multipliers; the resume repeated the batch."""
    module = Torn()
    module.place = place
    _, _, fit = start(tmp_path, _on_exception(tmp_path), module=module)
    with pytest.raises(RuntimeError, match="in mid-step"):
        fit()
    (path,) = tmp_path.glob("*.ckpt")
    _, _, fit = start(tmp_path)
    with pytest.raises(TrainingError, match=r"within step [67]:.*the one before"):
        fit(path)


class Drawing(ToyRows):
    """Rows that draw random numbers."""

    fingerprint = "drawing"

    def __getitem__(self, position: int) -> dict[str, Any]:
        row = super().__getitem__(position)
        noise = torch.randn(4) + random.random() + float(np.random.rand())
        return {**row, "x": row["x"] + noise}


def train_on(
    rows: Any, workers: int, *callbacks: Any, path: Any = None, **options: Any
) -> Any:
    data = ToyData(rows, HELD_OUT, batch_size=4, num_workers=workers)
    return train(data, *callbacks, checkpoint=path, max_epochs=3, **options)[0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batches", [2, 4])
def test_rows_that_draw_draw_the_same_after_a_resume(
    batches: int, workers: int, tmp_path: Path
) -> None:
    """A resume at an epoch's end was another run: workers start anew, from another state."""
    path, rows = tmp_path / "saved.ckpt", Drawing(13, partial=True)
    save = At(batches, lambda runner: runner.save_checkpoint(path))
    uninterrupted = train_on(rows, workers, save)
    assert_identical_run(train_on(rows, workers, path=path), uninterrupted)
    if workers:
        assert_identical_run(train_on(rows, 1), uninterrupted)


def test_multipliers_changed_after_the_fit_are_what_goes_on(tmp_path: Path) -> None:
    runner, _, fit = start(tmp_path, max_epochs=2)
    fit()
    module = runner.lightning_module
    assert module.multipliers["pair"].any()
    for table in module.multipliers.values():
        table.zero_()
    runner.save_checkpoint(tmp_path / "reset.ckpt")
    resumed, _, fit = start(tmp_path, max_epochs=2)
    fit(tmp_path / "reset.ckpt")
    assert not resumed.lightning_module.multipliers["pair"].any()


# Which run a file of SaveOnTermination belongs to ---------------------------------------------


def terminated(folder: Path, module: Any = None, **options: Any) -> Any:
    """A run that is terminated after six batches, unless it continues from there."""
    stop, module = At(WITHIN, _terminate), module or Toy(Pointwise())
    _, seen, fit = start(folder, stop, SaveOnTermination(), module=module, **options)
    with suppress(SIGTERMException):
        fit()
    return seen.batches


def test_a_run_continues_its_own_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows of a comparison both continued from the one file of the working folder."""
    monkeypatch.chdir(tmp_path)
    others = Toy(Penalty(weight=1.0)), Toy(Pointwise(), learning_rate=0.01)
    folder = tmp_path / "run"
    assert len(terminated(folder)) == WITHIN
    (own,) = folder.glob("checkpoints/terminated-*.ckpt")
    kept = own.read_bytes()
    for other in others:
        assert len(terminated(folder, other)) == WITHIN  # From its start.
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    assert len(terminated(folder)) == WITHIN
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert own.read_bytes() == kept
    assert len(list(folder.glob("checkpoints/terminated-*"))) == 4
    assert [name.name for name in tmp_path.iterdir()] == ["run"]
    assert len(terminated(folder, max_epochs=2)) == 2  # The rest of the eight.
    assert not own.exists()


def test_a_longer_run_is_the_same_run(tmp_path: Path) -> None:
    terminated(tmp_path, max_epochs=2)
    # and is terminated once more
    assert len(terminated(tmp_path, max_epochs=2 + 1)) == 6


def test_trying_the_code_and_testing_leave_the_file_alone(tmp_path: Path) -> None:
    """fast_dev_run continued from it and removed it; so did ``test`` with the same callbacks."""
    terminated(tmp_path)
    (own,) = tmp_path.glob("checkpoints/terminated-*.ckpt")
    assert len(terminated(tmp_path, fast_dev_run=2)) == 2
    runner, *_ = start(tmp_path, SaveOnTermination())
    runner.test(Toy(Pointwise()), ToyData(ROWS, HELD_OUT, batch_size=4), verbose=False)
    assert own.exists()


def test_termination_of_a_foreign_module_is_refused(tmp_path: Path) -> None:
    _, _, fit = start(tmp_path, SaveOnTermination(), module=BoringModel())
    with pytest.raises(
        TrainingError, match=r"of a PointwiseModule.*OnExceptionCheckpoint"
    ):
        fit()


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork"])
@pytest.mark.parametrize("stage", ["fit", "test"])
def test_processes_that_keep_the_multipliers_are_refused(
    strategy: str, stage: str
) -> None:
    """After the fit the multipliers of the module at hand were empty; after a test, violations."""
    module = Toy(Pointwise())
    module.trainer = trainer(strategy=strategy, devices=2)
    with pytest.raises(TrainingError, match=r"multipliers.*strategy=\"ddp\""):
        module.setup(stage)
    module.setup("predict")
