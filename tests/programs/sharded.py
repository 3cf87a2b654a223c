"""Sharded weights (FSDP2) on two ranks: the program behind test_sharded.py.

``python -m tests.programs.sharded FOLDER`` forks two ranks, which write FOLDER/rank{r}.pt.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.pl_pointwise import toy
from tests.pl_pointwise.toy import (
    FORMULATIONS,
    At,
    ToyData,
    ToyRows,
    initial_weights,
    multipliers_of,
    thresholds_of,
)
from tests.pl_pointwise.training.test_non_finite import (
    GRADIENT_NAN,
    OBJECTIVE_NAN,
    PAIR_NAN,
    Defective,
    Fragile,
)
from tests.programs.launch import fork_ranks
from tests.programs.two_ranks import InOrder

RANKS = 2
GLOBAL_BATCH = 8
ROWS = 21
EPOCHS = 2
SAVED_AT = 4  # of 6: in the middle of the second epoch


class Net(torch.nn.Module):
    """The toy's model out of modules, which is what can be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(4, 5, bias=False, dtype=torch.float64)
        self.last = torch.nn.Linear(5, 1, bias=False, dtype=torch.float64)
        first, last = initial_weights()
        with torch.no_grad():
            self.hidden.weight.copy_(first.T)
            self.last.weight.copy_(last[None])

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(torch.tanh(self.hidden(x)))[:, 0]
        return outputs


class Shardable(Fragile):
    """The toy with Adam, sharded where the strategy says so; its rows may be defective."""

    def __init__(self, formulation: Any, whole: bool = True, **options: Any) -> None:
        super().__init__(formulation, gradient_clip_val=0.5, **options)
        del self.first, self.last
        self.net, self.whole = Net(), whole

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is None or isinstance(self.net.hidden.weight, DTensor):
            return
        fully_shard(self.net.hidden, mesh=mesh["data_parallel"])
        if self.whole:
            fully_shard(self.net, mesh=mesh["data_parallel"])

    def forward(self, batch: Any) -> Tensor:
        outputs: Tensor = self.net(batch["x"])
        return outputs

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def runner(
    ranks: int, distributed: bool = False, tensor_parallel: int = 1, **options: Any
) -> Any:
    options = {"max_epochs": EPOCHS, **options}
    if ranks == 1:
        return toy.trainer(**options)
    strategy = ModelParallelStrategy(
        data_parallel_size=ranks // tensor_parallel,
        tensor_parallel_size=tensor_parallel,
        save_distributed_checkpoint=distributed,
        timeout=timedelta(seconds=60),
    )
    return toy.trainer(devices=ranks, strategy=strategy, **options)


def outcome(module: Shardable) -> dict[str, Any]:
    """Whole weights, which every rank has to ask for, and multipliers."""
    whole = [
        p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()
    ]
    return {
        "weights": torch.cat([p.detach().flatten() for p in whole]),
        "global_step": module.trainer.global_step,
        "skipped_steps": module._stepper.repairs.skipped_steps,
        "left_out": module._stepper.repairs.left_out,
        "norm": float(module.trainer.callback_metrics["running/gradient_norm"]),
        **multipliers_of(module),
        **thresholds_of(module),
    }


def data(ranks: int, rows: ToyRows) -> ToyData:
    return ToyData(rows, batch_size=GLOBAL_BATCH // ranks)


def clean() -> ToyRows:
    return Defective(ROWS, {}, partial=True)


def train(ranks: int, kind: str, pieces: int | None) -> dict[str, Any]:
    module = Shardable(FORMULATIONS[kind], partial=True, micro_batch_size=pieces)
    runner(ranks).fit(module, data(ranks, clean()))
    return outcome(module)


def poisoned(ranks: int, defects: dict[int, int], pieces: int | None) -> dict[str, Any]:
    """In order, so that rank 1 has the odd rows."""
    source = InOrder(Defective(16, defects), batch_size=GLOBAL_BATCH // ranks)
    module = Shardable(FORMULATIONS["by name"], micro_batch_size=pieces)
    runner(ranks).fit(module, source)
    return outcome(module)


def resumed(ranks: int, folder: Path, distributed: bool) -> list[dict[str, Any]]:
    """An uninterrupted run, and one resumed from the middle of it."""
    path = folder / f"{'shards' if distributed else 'whole'}.ckpt"
    saver = At(SAVED_AT, lambda trainer: trainer.save_checkpoint(path))
    found = []
    for checkpoint in (None, path):
        module = Shardable(FORMULATIONS["by name"], partial=True, primal_steps=3)
        callbacks = [] if checkpoint else [saver]
        torch.manual_seed(len(found))
        trainer = runner(ranks, distributed, callbacks=callbacks)
        trainer.fit(
            module, data(ranks, clean()), ckpt_path=checkpoint, weights_only=True
        )
        found.append(outcome(module))
    return found


def refused(ranks: int, whole: bool, tensor_parallel: int) -> str:
    trainer = runner(ranks, tensor_parallel=tensor_parallel)
    try:
        trainer.fit(Shardable(FORMULATIONS["pointwise"], whole), data(ranks, clean()))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


KINDS: list[tuple[str, int | None]] = [
    ("penalty", 3),
    ("average augmented", None),
    ("cvar augmented", 3),
    ("pointwise", None),
    ("pointwise", 3),
    ("by name", 3),
]
"""Formulations in each of their forms, and micro-batches; all others: test_layouts.py."""

POISON: dict[str, tuple[dict[int, int], int | None]] = {
    "some of both ranks": ({1: OBJECTIVE_NAN, 4: PAIR_NAN, 9: PAIR_NAN}, None),
    "a micro-batch of one rank": ({1: OBJECTIVE_NAN, 3: PAIR_NAN}, 2),
    "a gradient": ({3: GRADIENT_NAN}, None),
}
EVERYTHING_OF_ONE_RANK = {
    1: OBJECTIVE_NAN,
    3: PAIR_NAN,
    5: OBJECTIVE_NAN,
    7: OBJECTIVE_NAN,
}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)

    def on_rank() -> None:
        results: dict[str, Any] = {}
        for kind, pieces in KINDS:
            results[f"{kind}, pieces of {pieces}"] = train(RANKS, kind, pieces)
        for name, (defects, pieces) in POISON.items():
            results[f"poison: {name}"] = poisoned(RANKS, defects, pieces)
        results["everything of one rank"] = poisoned(RANKS, EVERYTHING_OF_ONE_RANK, 2)
        results["shards"] = resumed(RANKS, folder, True)
        results["whole"] = resumed(RANKS, folder, False)
        results["half sharded"] = refused(RANKS, whole=False, tensor_parallel=1)
        results["tensor parallel"] = refused(RANKS, whole=True, tensor_parallel=RANKS)
        torch.save(results, folder / f"rank{os.environ['RANK']}.pt")

    fork_ranks(RANKS, on_rank, folder)
