"""A run that is killed anywhere resumes, and ends as the run that nothing interrupted.

Weights, multipliers and steps are compared to the last bit; a sample stepped twice or left out, a
dual step missed, a random number drawn once more would show. The run is the one of
test_checkpoints.py, saved after every batch, heavy enough to be caught while it writes.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.plugins import AsyncCheckpointIO

from pl_pointwise import Pointwise
from pl_pointwise.errors import TrainingError
from pl_pointwise.training.checkpoints import WholeCheckpointIO
from tests.pl_pointwise.toy import Toy, ToyRows, assert_identical_run, fit
from tests.pl_pointwise.training.test_checkpoints import Hard, Saver, data, train
from tests.programs.launch import run_on_ranks


def interrupt(folder: Path, kills: int, timeout: float) -> dict[str, int]:
    """Runs tests/programs/interrupted.py and gives what it counted."""
    run_on_ranks(
        0, "tests.programs.interrupted", [str(folder), str(kills), "0"], folder, timeout
    )
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    assert not report["failures"], "\n".join(report["failures"])
    counts: dict[str, int] = report["counts"]
    return counts


def test_interrupted_anywhere_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    """Five kills at random and two in mid-write; SIGTERM; a disk that is full."""
    counts = interrupt(tmp_path, kills=5, timeout=250)
    assert counts["kills"] == 7
    assert counts["runs"] >= 7


@pytest.mark.slow
def test_a_hundred_kills(tmp_path: Path) -> None:
    counts = interrupt(tmp_path, kills=100, timeout=3000)
    assert counts["kills"] == 102
    assert counts["kills while writing"] > 10


def test_resumed_from_a_resumed_run_in_mid_epoch(tmp_path: Path) -> None:
    """Resumed from the last batch of an epoch, Lightning leaves the next epoch uncounted, and what
    was saved in it trained another order, or was refused, when resumed in its turn."""
    first = Saver("on_train_batch_end", tmp_path)
    uninterrupted, batches = train(data(), first, max_epochs=3)
    for start in (4, 6, 8):
        folder = tmp_path / str(start)
        folder.mkdir()
        second = Saver("on_train_batch_end", folder)
        train(data(), second, checkpoint=first.paths[start - 1], max_epochs=3)
        for batch in (1, 2):
            resumed, rest = train(
                data(), checkpoint=second.paths[batch - 1], max_epochs=3
            )
            assert rest == batches[start + batch :]
            assert_identical_run(resumed, uninterrupted)


# Writing a checkpoint -----------------------------------------------------------------------------


def test_checkpoint_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    module = fit(Toy(Pointwise()), ToyRows(7))
    module.trainer.save_checkpoint(path)
    before = path.read_bytes()

    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(
        TrainingError, match=r"last\.ckpt could not be written.*No space left"
    ):
        module.trainer.save_checkpoint(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


def test_checkpoints_elsewhere_are_written_as_lightning_does() -> None:
    path = "memory://folder/last.ckpt"
    module = fit(Toy(Pointwise()), ToyRows(7))
    module.trainer.save_checkpoint(path)
    assert_identical_run(Toy.load_from_checkpoint(path, weights_only=True), module)


def test_module_leaves_a_checkpoint_io_of_the_user_alone() -> None:
    plugin = AsyncCheckpointIO()
    module, _ = train(data(held_out=False), module=Hard(), plugins=[plugin])
    assert module.trainer.strategy.checkpoint_io is plugin
    module, _ = train(data(held_out=False), module=Hard())
    assert isinstance(module.trainer.strategy.checkpoint_io, WholeCheckpointIO)
