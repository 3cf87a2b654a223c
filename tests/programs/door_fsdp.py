"""FSDP2 of ``Trainer``, resumed too, and of Accelerate: the program behind test_door_table.py.

``python -m tests.programs.door_fsdp FOLDER`` writes FOLDER/{one,two,resumed}.pt, and
``… FOLDER accelerate`` the first two of a loop of Accelerate's. Accelerate shards
on GPUs alone, so it is told here that CPUs may too; nothing else of it is changed.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.programs import door_loops, door_trainers
from tests.programs.door_loops import OfAccelerate
from tests.programs.door_trainers import Run
from tests.programs.launch import finished, fork_ranks, forked

SHARDED = {
    "version": 2,
    "auto_wrap_policy": "SIZE_BASED_WRAP",
    "min_num_params": 1,
    # A whole one needs a GPU, too: torch does not wait for what it gathers on a CPU.
    "state_dict_type": "SHARDED_STATE_DICT",
}
RUN = Run(double=True, saves=True)


def shard_on_cpus() -> None:
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    begin = AcceleratorState.__init__

    def with_sharding(
        self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any
    ) -> None:
        begin(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = with_sharding


def sharded_arguments(folder: Path, run: Run, kind: Any) -> dict[str, Any]:
    return {
        **plain_arguments(folder, run, kind),
        "fsdp": True,
        "fsdp_config": dict(SHARDED),
    }


def whole_outcome(model: nn.Module, loss: Any) -> dict[str, Any]:
    weights: Any = [weight.full_tensor().detach() for weight in model.parameters()]  # type: ignore[operator]
    return {"weights": weights, "multipliers": loss.multipliers["fit"].clone()}


plain_arguments = door_trainers.arguments


def train(folder: Path, run: Run, result: Path) -> None:
    torch.set_num_threads(1)
    if run.ranks > 1:
        shard_on_cpus()
        door_trainers.arguments = sharded_arguments
        door_trainers.outcome = whole_outcome
    found = door_trainers.train("Trainer", folder, run)
    if os.environ.get("RANK", "0") == "0":
        torch.save(found, result)


class ShardedByAccelerate(OfAccelerate):
    def prepare(self, model: nn.Module, optimizer: Any) -> None:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin

        shard_on_cpus()
        names = ("auto_wrap_policy", "min_num_params")
        settings: Any = {name: SHARDED[name] for name in names}
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **settings)
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        assert all(hasattr(weight, "full_tensor") for weight in self.model.parameters())


def train_by_accelerate(folder: Path, run: Run) -> None:
    torch.set_num_threads(1)
    kind = OfAccelerate
    if run.ranks > 1:
        kind, door_loops.outcome = ShardedByAccelerate, whole_outcome
    found = kind(folder, run).train()
    if os.environ.get("RANK", "0") == "0":
        torch.save(found, folder / f"{'one' if run.ranks == 1 else 'two'}.pt")


def compare_accelerate(folder: Path) -> None:
    whole = Run(double=True)
    code = finished(
        forked(lambda: train_by_accelerate(folder, whole), folder / "one.log")
    )
    assert code == 0, (folder / "one.log").read_text()
    fork_ranks(2, lambda: train_by_accelerate(folder, replace(whole, ranks=2)), folder)


def compare_trainers(main_folder: Path) -> None:
    one, two = main_folder / "one", main_folder / "two"
    log = main_folder / "one.log"
    assert finished(forked(lambda: train(one, RUN, one.with_suffix(".pt")), log)) == 0
    ranks = replace(RUN, ranks=2)
    fork_ranks(2, lambda: train(two, ranks, two.with_suffix(".pt")), main_folder)
    for step in (4, 6, 8):
        shutil.rmtree(two / "run" / f"checkpoint-{step}")
    again = replace(ranks, resumes="checkpoint-2")
    fork_ranks(2, lambda: train(two, again, main_folder / "resumed.pt"), main_folder)


if __name__ == "__main__":
    compare = compare_accelerate if sys.argv[2:] == ["accelerate"] else compare_trainers
    compare(Path(sys.argv[1]))
