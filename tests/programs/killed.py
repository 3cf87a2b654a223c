"""A Trainer, or a plain loop, killed at random and resumed until it ends: behind test_killed.py.

``python -m tests.programs.killed FOLDER DOOR KILLS`` kills runs until there were so many kills,
and fails where a run that was killed ends in other weights or multipliers than one that was not.
Prints the kills, how many fell within a save, and the runs that they belong to.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.pl_pointwise.test_doors import Plain
from tests.pl_pointwise.test_trainer_doors import made
from tests.programs.launch import finished, forked

EPOCHS = 6


def train_trainer(folder: Path) -> None:
    trainer = made(
        folder,
        num_train_epochs=EPOCHS,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        optim="adamw_torch",
        lr_scheduler_type="linear",
    )
    begun = any(
        (each / "trainer_state.json").exists() for each in folder.glob("checkpoint-*")
    )
    if not begun:  # Nothing was whole: from the start.
        shutil.rmtree(folder, ignore_errors=True)
    trainer.train(resume_from_checkpoint=begun or None)
    weights = [weight.detach() for weight in trainer.model.parameters()]
    keep(folder, weights, trainer.constrained.multipliers["fit"])


def train_loop(folder: Path) -> None:
    """One file, which is replaced whole."""
    loop, last = Plain(parameters="model"), folder / "last.pt"
    folder.mkdir(exist_ok=True)
    first = 0
    if last.exists():
        state = torch.load(last, weights_only=True)
        loop.net.load_state_dict(state["weights"])
        loop.loss.load_state_dict(state["multipliers"], steps=state["step"])
        first = state["step"]
    batches = [
        rows
        for epoch in range(EPOCHS)
        for rows in torch.randperm(
            24, generator=torch.Generator().manual_seed(epoch)
        ).split(4)
    ]
    for step, rows in enumerate(batches[first:], first + 1):
        loop.step(rows)
        time.sleep(0.01)
        part = folder / "last.pt.part"
        state = {"weights": loop.net.state_dict(), "step": step}
        torch.save(state | {"multipliers": loop.loss.state_dict()}, part)
        part.replace(last)
    assert not loop.said, loop.said
    keep(
        folder,
        [w.detach() for w in loop.net.parameters()],
        loop.loss.multipliers["fit"],
    )


def keep(folder: Path, weights: list[Tensor], multipliers: Tensor) -> None:
    torch.save([*weights, multipliers], folder / "end.pt.part")
    (folder / "end.pt.part").replace(folder / "end.pt")


DOORS: dict[str, Any] = {"trainer": train_trainer, "loop": train_loop}


def child_of(door: str, folder: Path) -> int:
    return forked(lambda: DOORS[door](folder), folder.with_suffix(".log"))


def main(folder: Path, door: str, wanted: int) -> None:
    logging.disable(logging.WARNING)
    draw = random.Random(0)
    whole = folder / "whole"
    begun = time.monotonic()
    assert finished(child_of(door, whole)) == 0, whole.with_suffix(".log").read_text()
    took = time.monotonic() - begun
    expected = torch.load(whole / "end.pt")
    kills = within = runs = 0
    while kills < wanted:
        runs += 1
        run = folder / f"run-{runs}"
        while not (run / "end.pt").exists():
            child = child_of(door, run)
            if kills < wanted:
                time.sleep(draw.uniform(0.1, 0.7) * took)
                os.kill(child, signal.SIGKILL)
            code = finished(child)
            assert code in (0, -signal.SIGKILL), run.with_suffix(".log").read_text()[
                -3000:
            ]
            kills += code != 0
            halves = any(run.rglob("*.part"))
            steps = [*run.glob("checkpoint-*")]
            halves |= any(not (each / "trainer_state.json").exists() for each in steps)
            within += bool(code) and halves
        for found, other in zip(torch.load(run / "end.pt"), expected, strict=True):
            assert torch.equal(found, other), f"{run}: {(found - other).abs().max()}"
        shutil.rmtree(run)
    print(
        f"{door}: {kills} kills, {within} within a save, {runs} runs, all as the whole one"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
