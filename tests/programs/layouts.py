"""One run in every layout of ranks and micro-batches: the program behind test_layouts.py.

``python -m tests.programs.layouts FOLDER RANKS…`` forks so many ranks for each number of ranks
and writes FOLDER/{ranks}-{rank}.pt, what every run gave there. Every process runs all formulations,
because starting it takes longer than all of them.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from pl_pointwise import Pointwise
from tests.pl_pointwise import toy
from tests.pl_pointwise.toy import (
    FORMULATIONS,
    Toy,
    ToyData,
    ToyRows,
    multipliers_of,
    thresholds_of,
    weights_of,
)
from tests.pl_pointwise.training.test_non_finite import (
    FIT_MINUS_INF,
    OBJECTIVE_NAN,
    PAIR_NAN,
    Defective,
    Fragile,
)
from tests.programs.launch import fork_ranks, on_ranks

GLOBAL_BATCH = 8
# 8, 8 and 5: the last is 3 + 3 rows on two ranks, 2 + 2 + 2 + 2 on four, some padding
ROWS = 21
EPOCHS = 2
STEPS = 6

PIECES: dict[int, list[int | None]] = {1: [3], 2: [None, 3], 4: [None]}
"""Micro-batch sizes by number of ranks; 3 divides neither 8 nor the 4 of each of two ranks."""

KINDS: dict[str, Any] = {**FORMULATIONS, "adaptive": Pointwise()}
FEW = ("average augmented", "cvar", "adaptive")
"""Those that ranks train in one piece: two ranks train all of them in pieces."""
POISONED = ("average augmented", "pointwise", "adaptive")


@dataclass
class Run:
    """A formulation, in one layout; with ``poison``, on rows some of which are not finite."""

    kind: str
    pieces: int | None
    poison: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind}{', poisoned' if self.poison else ''}"

    def train(self, ranks: int) -> list[dict[str, torch.Tensor]]:
        """Weights and multipliers after every step."""
        options: Any = {"micro_batch_size": self.pieces, "gradient_clip_val": 0.5}
        if self.poison:
            defects = {
                1: OBJECTIVE_NAN,
                4: FIT_MINUS_INF,
                9: PAIR_NAN,
                20: OBJECTIVE_NAN,
            }
            module: Toy = Fragile(KINDS[self.kind], **options)
            rows: ToyRows = Defective(ROWS, defects)
        else:
            module = Toy(KINDS[self.kind], partial=True, **options)
            rows = ToyRows(ROWS, seed=2, partial=True)
        trajectory = Trajectory()
        runner = toy.trainer(
            max_epochs=EPOCHS, callbacks=[trajectory], **on_ranks(ranks)
        )
        runner.fit(module, ToyData(rows, batch_size=GLOBAL_BATCH // ranks))
        return trajectory.states


class Trajectory(Callback):
    """Weights and multipliers after every step."""

    def __init__(self) -> None:
        self.states: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        duals = multipliers_of(pl_module) | thresholds_of(pl_module)
        self.states.append({"weights": weights_of(pl_module)} | duals)


REFERENCE = [
    *(Run(kind, None) for kind in KINDS),
    *(Run(kind, None, True) for kind in POISONED),
]
"""Of one rank."""


def runs(ranks: int) -> list[Run]:
    """All runs on so many ranks."""
    found = [
        Run(run.kind, pieces, run.poison)
        for run in REFERENCE
        for pieces in PIECES[ranks]
    ]
    return [run for run in found if run.pieces or run.kind in FEW]


def train_all(ranks: int) -> dict[str, list[dict[str, torch.Tensor]]]:
    """The trajectory of every run, by its name and its micro-batch size."""
    return {
        f"{run.name}, pieces of {run.pieces}": run.train(ranks) for run in runs(ranks)
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for ranks in map(int, sys.argv[2:]):

        def on_rank(ranks: int = ranks) -> None:
            torch.save(train_all(ranks), folder / f"{ranks}-{os.environ['RANK']}.pt")

        fork_ranks(ranks, on_rank, folder)
