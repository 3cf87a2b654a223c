"""Kills a small run and resumes it, as often as asked; the program behind test_interruption.py.

``python -m tests.programs.interrupted FOLDER KILLS SEED`` writes FOLDER/report.json. It imports
everything once and forks a process for every run, because importing takes longer than training. It
trains nothing itself: a fork of a process that has used autograd cannot.
"""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from pl_pointwise.callbacks import SaveOnTermination
from pl_pointwise.training.checkpoints import PART
from tests.pl_pointwise.toy import (
    At,
    ToyData,
    multipliers_of,
    thresholds_of,
    trainer,
    weights_of,
)
from tests.pl_pointwise.training.test_checkpoints import HELD_OUT, ROWS, Hard
from tests.programs.launch import finished, forked

EPOCHS = 5
KILLS_A_RUN = 5


class Heavy(Hard):
    """Heavy enough that most of the time goes into writing checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ballast", torch.zeros(500_000))


def run(folder: Path, *callbacks: Any, periodic: bool = True) -> None:
    """Trains to the end, from the last checkpoint if there is one, and writes what came out."""
    resumed = any(folder.glob("*.ckpt"))
    torch.manual_seed(os.getpid() if resumed else 0)
    saver = ModelCheckpoint(
        dirpath=folder,
        filename="{step}",
        every_n_train_steps=1,
        save_last=True,
        save_top_k=1,
    )
    module = Heavy()
    runner = trainer(
        max_epochs=EPOCHS,
        enable_checkpointing=True,
        default_root_dir=folder,
        callbacks=[*callbacks, *([saver] if periodic else [])],
    )
    data = ToyData(ROWS, HELD_OUT, batch_size=4)
    runner.fit(module, data, ckpt_path="last" if periodic else None, weights_only=True)
    outcome = {"weights": weights_of(module), "global_step": runner.global_step}
    torch.save(
        outcome | multipliers_of(module) | thresholds_of(module), folder / "outcome.pt"
    )


class Report:
    """What was interrupted, and how it ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts = {"kills": 0, "kills while writing": 0, "runs": 0}
        self.failures: list[str] = []
        place = self.place("uninterrupted")
        started = time.monotonic()
        code = finished(forked(lambda: run(place), place / "log"))
        self.duration = time.monotonic() - started
        if code:
            raise SystemExit((place / "log").read_text())
        self.expected: dict[str, Any] = torch.load(
            place / "outcome.pt", weights_only=True
        )

    def place(self, name: str) -> Path:
        place = self.folder / name
        place.mkdir()
        return place

    def complete(self, place: Path, name: str, act: Callable[[], Any]) -> None:
        """Runs to the end, and compares with the run that nothing interrupted."""
        self.counts["runs"] += 1
        code = finished(forked(act, place / "log"))
        if code:
            self.failures.append(
                f"{name}: resume ended with {code}\n{(place / 'log').read_text()}"
            )
            return
        found = torch.load(place / "outcome.pt", weights_only=True)
        for key, value in self.expected.items():
            same = (
                torch.equal(found[key], value)
                if torch.is_tensor(value)
                else found[key] == value
            )
            if not same:
                self.failures.append(
                    f"{name}: {key} is {found[key]}, uninterrupted {value}"
                )
        shutil.rmtree(place)


def kill_at_random(report: Report, kills: int, chance: random.Random) -> None:
    """SIGKILL, wherever the run happens to be, KILLS_A_RUN times before it may finish."""
    while report.counts["kills"] < kills:
        name = f"after {report.counts['kills']} kills"
        place = report.place(name.replace(" ", "-"))
        killed = 0
        while killed < min(KILLS_A_RUN, kills - report.counts["kills"] + killed):
            child = forked(partial(run, place), place / "log")
            time.sleep(chance.uniform(0, report.duration / 2))
            os.kill(child, signal.SIGKILL)
            code = finished(child)
            if code == 0:  # It was quicker: the rest of this run is there already.
                break
            if code != -signal.SIGKILL:
                report.failures.append(
                    f"{name}: ended with {code}\n{(place / 'log').read_text()}"
                )
                return
            killed += 1
            report.counts["kills"] += 1
            report.counts["kills while writing"] += any(place.glob(f"*{PART}"))
        report.complete(place, name, partial(run, place))


def kill_while_writing(report: Report, save: int) -> None:
    """SIGKILL in the middle of the n-th checkpoint's bytes."""
    name = f"writing checkpoint {save}"
    place = report.place(name.replace(" ", "-"))
    whole, calls = torch.save, []

    def torn(checkpoint: Any, file: Any, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) < save:
            whole(checkpoint, file, *arguments)
            return
        file.write(b"half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def act() -> None:
        torch.save = torn  # type: ignore[assignment]
        run(place)

    code = finished(forked(act, place / "log"))
    if code != -signal.SIGKILL or not any(place.glob(f"*{PART}")):
        report.failures.append(f"{name}: ended with {code}, {list(place.iterdir())}")
    report.counts["kills"] += 1
    report.counts["kills while writing"] += 1
    report.complete(place, name, lambda: run(place))


def terminate(report: Report, batches: int) -> None:
    """SIGTERM after so many batches; no other checkpoint is written."""
    name = f"SIGTERM after {batches} batches"
    place = report.place(name.replace(" ", "-"))

    def act(*callbacks: Any) -> None:
        run(place, SaveOnTermination(str(place)), *callbacks, periodic=False)

    def stop(_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    code = finished(forked(lambda: act(At(batches, stop)), place / "log"))
    if code != 143 or not any(place.glob("terminated-*.ckpt")):
        log = (place / "log").read_text()
        report.failures.append(
            f"{name}: exit code {code}, {list(place.iterdir())}\n{log}"
        )
    report.complete(place, name, act)


def fill_the_disk(report: Report) -> None:
    """No file may grow beyond a limit that checkpoints reach: writing fails as on a full disk."""
    name = "full disk"
    place = report.place("full-disk")

    def fill(_: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    code = finished(forked(lambda: run(place, At(6, fill)), place / "log"))
    log = (place / "log").read_text()
    if code != 1 or "could not be written" not in log or "TrainingError" not in log:
        report.failures.append(f"{name}: exit code {code}\n{log}")
    if any(place.glob(f"*{PART}")):
        report.failures.append(f"{name}: left {list(place.iterdir())}")
    stored = torch.load(place / "last.ckpt", weights_only=True)["global_step"]
    if stored != 5:
        report.failures.append(f"{name}: the last checkpoint is of step {stored}")
    report.complete(place, name, lambda: run(place))


if __name__ == "__main__":
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    report = Report(folder)
    kill_at_random(report, kills, random.Random(seed))
    # The first of all, and a step's second, over the last.ckpt of before.
    for save in (1, 6):
        kill_while_writing(report, save)
    for batches in (1, 4, 10):  # The first, the last of an epoch, one in mid-epoch.
        terminate(report, batches)
    fill_the_disk(report)
    summary = {
        "counts": report.counts,
        "failures": report.failures,
        "seconds": report.duration,
    }
    (folder / "report.json").write_text(json.dumps(summary))
