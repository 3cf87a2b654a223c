"""A row of the table of doors: the program behind test_door_table.py.

``python -m tests.programs.door_table FOLDER DOOR [COLUMN …]`` trains in a process of its own for
each run that a column compares, and writes FOLDER/RUN.pt: weights, multipliers, and those of a
plain loop over the same batches.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.programs import door_loops, door_trainers
from tests.programs.door_trainers import Run
from tests.programs.launch import finished, fork_ranks, forked

STATED = Run(double=True, stated=True)
RUNS: dict[str, Run] = {
    "plain": Run(),
    "whole batches": STATED,
    "micro-batches": replace(STATED, pieces=2),
    "bf16": Run(bf16=True),
    "compiled": Run(double=True, compiled=True, rows=14),
    "one rank": Run(double=True),
    "two ranks": Run(double=True, ranks=2),
}
COLUMNS: dict[str, list[str]] = {
    "plain": ["plain"],
    "accumulated": ["whole batches", "micro-batches"],
    "bf16": ["plain", "bf16"],
    "compiled": ["compiled"],
    "resumed": ["plain", "resumed"],
    "killed": ["plain", "killed"],
    "two ranks": ["one rank", "two ranks"],
}
"""The runs that a column compares."""
DOORS = [*door_trainers.KINDS, *door_loops.LOOPS]


def train(door: str, folder: Path, run: Run, result: Path) -> None:
    kinds: Any = door_loops if door in door_loops.LOOPS else door_trainers
    torch.set_num_threads(1)
    folder.mkdir(exist_ok=True)
    found = kinds.train(door, folder, run)
    if os.environ.get("RANK", "0") == "0":
        torch.save(found, result)


def child(door: str, folder: Path, run: Run, result: Path, code: int = 0) -> None:
    log = result.with_suffix(".log")
    found = finished(forked(lambda: train(door, folder, run, result), log))
    assert found == code, f"{door}, {run}: exit code {found}\n{log.read_text()[-4000:]}"


def checkpoints(folder: Path) -> list[Path]:
    """In the order of their steps."""
    return sorted((folder / "run").glob("*-[0-9]"))


def run_once(door: str, name: str, folder: Path) -> None:
    own, result = folder / name, folder / f"{name}.pt"
    if name == "killed":
        loop = door in door_loops.LOOPS
        child(
            door,
            own,
            Run(saves=True, dies_at=1 if loop else 6),
            result,
            -signal.SIGKILL,
        )
        assert not result.exists()
        child(door, own, Run(saves=True, resumes=True), result)
    elif name == "resumed":
        child(door, own, Run(saves=True), result)
        for later in checkpoints(own)[1:]:
            shutil.rmtree(later) if later.is_dir() else later.unlink()
        child(door, own, Run(resumes=checkpoints(own)[0].name), result)
    elif RUNS[name].ranks > 1:
        fork_ranks(2, lambda: train(door, own, RUNS[name], result), folder)
    else:
        child(door, own, RUNS[name], result)


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    main_folder, main_door, *wanted = sys.argv[1:]
    if main_door not in door_loops.LOOPS:
        # Once for all forks.
        import transformers.models.bert.modeling_bert
        import transformers.models.llama.modeling_llama  # noqa: F401
    names = [name for column in wanted or COLUMNS for name in COLUMNS[column]]
    for each in dict.fromkeys(names):
        run_once(main_door, each, Path(main_folder))
