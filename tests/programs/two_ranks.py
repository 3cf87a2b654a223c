"""Scenarios that run on any number of ranks, and the program that runs them all on two.

``python -m tests.programs.two_ranks FOLDER`` is one rank; test_ranks.py starts two of it, with
the environment that torchrun would set, and runs the same scenarios in one process. Starting a
process costs more than all scenarios together, so each pair of processes runs all of them.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from pl_pointwise import Average, CVaR, Pointwise, PointwiseLoss, Tilted
from pl_pointwise.callbacks import SaveOnTermination
from pl_pointwise.data import IndexedDataset
from pl_pointwise.errors import TrainingError
from pl_pointwise.report.closing_table import Closing
from tests.pl_pointwise import toy
from tests.pl_pointwise.toy import (
    CONSTRAINTS,
    FORMULATIONS,
    INTERVALS,
    PAIRS,
    SHARED,
    At,
    Judged,
    Seen,
    Steep,
    Toy,
    ToyData,
    ToyRows,
    initial_weights,
    multipliers_of,
    stack,
    weights_of,
)
from tests.pl_pointwise.training.test_non_finite import (
    GRADIENT_NAN,
    OBJECTIVE_NAN,
    PAIR_NAN,
    Defective,
    Fragile,
)
from tests.programs.launch import on_ranks

GLOBAL_BATCH = 6
# batches of 6, 6 and 1: on two ranks the last is one row and one of padding
UNEVEN = 13


@dataclass
class World:
    ranks: int
    folder: Path

    @property
    def batch_size(self) -> int:
        return GLOBAL_BATCH // self.ranks

    def trainer(self, **options: Any) -> Trainer:
        return toy.trainer(**on_ranks(self.ranks), **options)

    def train(
        self, module: Toy, rows: Any, ckpt_path: Any = None, **options: Any
    ) -> dict[str, Any]:
        seen = Seen()
        callbacks = [seen, *options.pop("callbacks", [])]
        trainer = self.trainer(callbacks=callbacks, **{"max_epochs": 3, **options})
        data = rows
        if not isinstance(rows, (ToyData, DataLoader)):
            data = ToyData(rows, batch_size=self.batch_size)
        trainer.fit(module, data, ckpt_path=ckpt_path)
        return {
            "weights": weights_of(module),
            "multipliers": multipliers_of(module),
            "thresholds": dict(module.thresholds),
            "batches": seen.batches,
            "global_step": trainer.global_step,
            "left_out": module._stepper.repairs.left_out,
            "skipped_steps": module._stepper.repairs.skipped_steps,
            "logged": {k: float(v) for k, v in trainer.callback_metrics.items()},
            "closing": numbers_of(module.closing) if module.closing else [],
        }


def numbers_of(closing: Closing) -> list[float]:
    """All numbers of a closing table; −1 where there is none."""
    found: list[Any] = [closing.steps, *closing.objective]
    for row in closing.rows:
        found += [
            row.violated,
            row.of,
            row.worst,
            row.most,
            row.multipliers,
            row.multiplier,
        ]
    return [-1.0 if value is None else float(value) for value in found]


Scenario = Callable[[World], Any]
SCENARIOS: dict[str, Scenario] = {}


def scenario(make: Scenario) -> Scenario:
    SCENARIOS[make.__name__] = make
    return make


def partial_rows(count: int = UNEVEN) -> ToyRows:
    return ToyRows(count, seed=2, partial=True)


def training(
    name: str,
    formulation: Any,
    *constraints: Any,
    kind: type[Toy] = Toy,
    **options: Any,
) -> None:
    """Registers a plain training scenario."""

    def run(world: World) -> Any:
        return world.train(
            kind(formulation, *constraints, partial=True, **options), partial_rows()
        )

    SCENARIOS[name] = run


# Every formulation on two ranks, whole and in pieces: test_layouts.py.
training("pointwise", FORMULATIONS["pointwise"])
training("pointwise, a share may violate", Pointwise(), SHARED)
CLIPPED: Any = {"order": "dual_first", "gradient_clip_val": 0.3}
for name in ("average augmented", "cvar augmented", "by name"):
    training(f"{name}, intervals", FORMULATIONS[name], INTERVALS, **CLIPPED)
    training(f"{name}, three steps", FORMULATIONS[name], primal_steps=3)
IN_PIECES: Any = {"kind": Judged, "micro_batch_size": 2, "order": "dual_first"}
for name in ("average augmented", "pointwise", "relaxed linear"):
    training(f"{name}, judged", FORMULATIONS[name], **IN_PIECES)


@scenario
def grouped(world: World) -> Any:
    rows = IndexedDataset(
        partial_rows(), groups=[number % 4 for number in range(UNEVEN)]
    )
    return world.train(Toy(FORMULATIONS["pointwise"], partial=True), rows)


@scenario
def tilted_and_steep(world: World) -> Any:
    """The largest violation is on one rank, and the other's exponentials need it."""
    module = Steep(Tilted(tilt=2.0, dual_lr=0.5), partial=True, learning_rate=1e-12)
    return world.train(module, partial_rows(), max_epochs=1)


class InOrder(ToyData):
    """Not shuffled: of two ranks, rank 1 has the odd samples."""

    def train_dataloader(self) -> Any:
        loader = super().train_dataloader()
        loader.sampler.shuffle = False
        return loader


def without_odd(world: World, names: Sequence[str], kind: str, size: int | None) -> Any:
    rows = partial_rows()
    for name in names:
        rows.has[name][1::2] = False
    module = Toy(FORMULATIONS[kind], partial=True, micro_batch_size=size)
    return world.train(module, InOrder(rows, batch_size=world.batch_size))


for names in (("fit",), ("pair",), ("objective", "fit", "pair")):
    for kind, size in (("tilted", 2), ("pointwise", None)):
        run = partial(without_odd, names=names, kind=kind, size=size)
        SCENARIOS[f"{kind}, rank 1 without {'+'.join(names)}, pieces of {size}"] = run


def poisoned(world: World, defects: dict[int, int], kind: str, size: int | None) -> Any:
    data = InOrder(Defective(12, defects), batch_size=world.batch_size)
    return world.train(Fragile(FORMULATIONS[kind], micro_batch_size=size), data)


# Of the first batch all of rank 1's rows, of the second one of rank 0's.
DEFECTS = {1: OBJECTIVE_NAN, 3: PAIR_NAN, 5: OBJECTIVE_NAN, 8: PAIR_NAN}
for kind, size in (("tilted augmented", 2), ("cvar", None), ("pointwise", 2)):
    run = partial(poisoned, defects=DEFECTS, kind=kind, size=size)
    SCENARIOS[f"{kind}, rank 1 poisoned"] = run


@scenario
def gradient_of_one_rank(world: World) -> Any:
    return poisoned(world, {3: GRADIENT_NAN}, "by name", None)


@scenario
def everything_skipped(world: World) -> Any:
    try:
        poisoned(world, dict.fromkeys(range(12), OBJECTIVE_NAN), "pointwise", 2)
    except TrainingError as error:
        return str(error)
    return None


def foreign(world: World, count: int) -> Any:
    rows = IndexedDataset(partial_rows(count))
    rank = torch.distributed.get_rank() if world.ranks > 1 else 0
    sampler = DistributedSampler(
        rows, num_replicas=world.ranks, rank=rank, shuffle=False
    )
    loader = DataLoader(rows, world.batch_size, sampler=sampler, collate_fn=stack)
    return world.train(Toy(Pointwise(), partial=True), loader)


@scenario
def foreign_sampler(world: World) -> Any:
    try:
        return foreign(world, UNEVEN)
    except TrainingError as error:
        return str(error)


@scenario
def disjoint_foreign_sampler(world: World) -> Any:
    return foreign(world, UNEVEN - 1)


@scenario
def evaluation(world: World) -> Any:
    module = Toy(Pointwise(), partial=True)
    data = ToyData(
        ToyRows(9, seed=3, partial=True),
        ToyRows(UNEVEN, seed=4, partial=True),
        batch_size=world.batch_size,
    )
    runner = world.trainer()
    runner.test(module, data, verbose=False)
    figures = {key: float(value) for key, value in runner.callback_metrics.items()}
    pooled = {
        f"{stage}/{name}": values.sort().values
        for stage, by_name in module.violations.items()
        for name, values in by_name.items()
    }
    rows = {
        f"{stage}/{name}": [found.index, found.violation, found.mask]
        for stage, by_name in module.evaluated.items()
        for name, found in by_name.items()
    }
    return {"figures": figures, "pooled": pooled, "rows": rows}


class Predicting(Toy):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch["index"]


@scenario
def prediction(world: World) -> Any:
    data = ToyData(ToyRows(4), ToyRows(UNEVEN), batch_size=world.batch_size)
    return torch.cat(world.trainer().predict(Predicting(None), data)).tolist()


class Synchronising(Toy):
    """Notes for every backward pass whether DDP would synchronise its gradients."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.synchronised: list[bool] = []

    def manual_backward(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        self.synchronised.append(
            getattr(self.trainer.strategy.model, "require_backward_grad_sync", True)
        )
        super().manual_backward(loss, *arguments, **options)


@scenario
def synchronisation(world: World) -> Any:
    module = Synchronising(Average(alpha=1.0), micro_batch_size=1)
    world.train(module, ToyRows(6), max_epochs=1)
    return module.synchronised


# Checkpoints -------------------------------------------------------------------------------------


def resumable(dropout: float) -> Toy:
    formulation = {
        "fit": CVaR(level=0.4, threshold_lr=0.05, alpha=1.0, dual_lr=0.5),
        "pair": Pointwise(alpha=1.0, dual_lr=0.5),
    }
    return Toy(formulation, partial=True, dropout=dropout, primal_steps=2)


def resumed(world: World, dropout: float, workers: int = 0) -> Any:
    """An uninterrupted run, and runs resumed in mid-epoch (batch 4) and after an epoch (6)."""

    def data() -> ToyData:
        return ToyData(partial_rows(), batch_size=world.batch_size, num_workers=workers)

    paths = [
        world.folder / f"{world.ranks}-{dropout}-{workers}-{at}.ckpt" for at in (4, 6)
    ]
    savers = [
        At(at, lambda trainer, path=path: trainer.save_checkpoint(path))
        for at, path in zip((4, 6), paths, strict=True)
    ]
    torch.manual_seed(torch.distributed.get_rank() if world.ranks > 1 else 0)
    outcomes = [world.train(resumable(dropout), data(), callbacks=savers)]
    for path in paths:
        torch.manual_seed(99)
        outcomes.append(world.train(resumable(dropout), data(), ckpt_path=path))
    return outcomes


SCENARIOS["resumed_with_dropout"] = partial(resumed, dropout=0.4)
SCENARIOS["resumed_with_workers"] = partial(resumed, dropout=0.4, workers=1)
SCENARIOS["resumed_without_dropout"] = partial(resumed, dropout=0.0)


@scenario
def terminated(world: World) -> Any:
    """SIGTERM reaches one rank, in the middle of the second epoch; the next run goes on."""

    def stop(trainer: Trainer) -> None:
        if trainer.global_rank == world.ranks - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def run(*callbacks: Any) -> Any:
        saver = SaveOnTermination(str(world.folder / "terminated"))
        return world.train(
            resumable(0.4),
            partial_rows(),
            callbacks=[saver, *callbacks],
            enable_checkpointing=True,
            default_root_dir=world.folder,
        )

    torch.manual_seed(world.ranks)
    outcomes = [world.train(resumable(0.4), partial_rows())]
    torch.manual_seed(world.ranks)
    try:
        run(At(4, stop))
    except SIGTERMException as end:
        outcomes.append(end.code)
    torch.manual_seed(99)
    return [*outcomes, run()]


@scenario
def stopped(world: World) -> Any:
    """Stopped by max_steps within the second epoch, saved after that, and resumed."""

    def run(**options: Any) -> tuple[Any, Any]:
        module = resumable(0.4)
        return module, world.train(module, partial_rows(), **options)

    path = world.folder / f"{world.ranks}-stopped.ckpt"
    torch.manual_seed(world.ranks)
    outcomes = [run()[1]]
    torch.manual_seed(world.ranks)
    module, _ = run(max_steps=5)
    module.trainer.save_checkpoint(path)
    torch.manual_seed(99)
    return [*outcomes, run(ckpt_path=path)[1]]


LOOP = {
    "pointwise": Pointwise(),
    "average": Average(alpha="adaptive"),
    "cvar": CVaR(level=0.5),
}


@scenario
def loop_of_ones_own(world: World) -> Any:
    """PointwiseLoss in plain torch: each rank has its part of every batch, of unlike sizes."""
    if world.ranks > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    rank, rows, found = (
        world.ranks > 1 and torch.distributed.get_rank(),
        ToyRows(12, seed=2),
        {},
    )
    for name, formulation in LOOP.items():
        weights = [w.clone().requires_grad_() for w in initial_weights()]
        loss = PointwiseLoss(CONSTRAINTS, formulation, samples=12, parameters=weights)
        optimizer = torch.optim.SGD(weights, lr=0.05)
        for start in [0, 3, 6, 9] * 5:
            batch = list(range(start, start + 3))[rank :: world.ranks]
            x, z = rows.x[batch], torch.tanh(rows.x[batch] @ weights[0]) @ weights[1]
            values = {"fit": z, "pair": z[:, None] * x[:, :PAIRS]}
            optimizer.zero_grad()
            loss((z - rows.y[batch]).square(), values, torch.tensor(batch)).backward()
            # As DistributedDataParallel does.
            for weight in weights if world.ranks > 1 else ():
                torch.distributed.all_reduce(weight.grad)
                weight.grad /= world.ranks
            optimizer.step()
            loss.step()
        found[name] = (
            torch.cat([w.detach().flatten() for w in weights]),
            {**loss.multipliers},
        )
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    world = World(ranks=2, folder=Path(sys.argv[1]))
    results = {name: run(world) for name, run in SCENARIOS.items()}
    torch.save(results, world.folder / f"rank{os.environ['RANK']}.pt")
