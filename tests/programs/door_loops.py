"""A plain loop, Accelerate and Fabric as the page has them: rows of the table of doors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from pl_pointwise import Constraint, PointwiseLoss
from tests.programs.door_trainers import Regression, Run, die, outcome

EPOCHS = 2
BOUNDS = {"fit": Constraint(at_most=0.2)}


def rows_of(run: Run) -> TensorDataset:
    torch.manual_seed(0)
    x = torch.randn(16, 3)[: run.rows].to(run.dtype)
    return TensorDataset(x, x.sum(1) + 1, torch.arange(run.rows))


def precision(run: Run) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=run.bf16)


def order(run: Run, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(epoch)
    return torch.randperm(run.rows, generator=generator).tolist()


def fresh_model(run: Run) -> nn.Module:
    torch.manual_seed(1)
    return Regression().to(run.dtype)


class Loop:
    """Plain PyTorch; a checkpoint is one file, which is renamed when it is whole."""

    def __init__(self, folder: Path, run: Run) -> None:
        self.folder, self.run = folder, run
        self.seen: list[list[tuple[Tensor, ...]]] = []
        model = fresh_model(run)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        self.prepare(model, optimizer)
        self.constrained = PointwiseLoss(
            BOUNDS, run.formulation, samples=run.rows, parameters=self.model
        )

    def prepare(self, model: nn.Module, optimizer: Any) -> None:
        if self.run.ranks > 1:
            torch.distributed.init_process_group("gloo")
            model = nn.parallel.DistributedDataParallel(model)
        self.model, self.optimizer = self.compiled(model), optimizer

    def compiled(self, model: nn.Module) -> Any:
        return torch.compile(model, backend="aot_eager") if self.run.compiled else model

    def loader(self, rows: Any) -> Any:
        """Every rank has its own rows of a step."""
        if self.run.ranks > 1:
            rank, steps = torch.distributed.get_rank(), torch.arange(len(rows))
            rows = Subset(rows, steps[rank :: self.run.ranks].tolist())
        return DataLoader(rows, self.run.size)

    def context(self, last: bool) -> Any:
        """Of a micro-batch."""
        return nullcontext()

    def autocast(self) -> Any:
        return precision(self.run)

    def backward(self, loss: Tensor) -> None:
        (loss / self.run.pieces).backward()

    def save(self, path: Path, epoch: int) -> None:
        state = {
            "weights": self.model.state_dict(),
            "multipliers": self.constrained.state_dict(),
        }
        part = path.with_suffix(".part")
        torch.save(state | {"optimizer": self.optimizer.state_dict()}, part)
        if self.run.dies_at == epoch:
            die()
        part.replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.constrained.load_state_dict(state["multipliers"])

    def losses(self, batch: tuple[Tensor, ...]) -> Tensor:
        x, y, index = batch
        with self.autocast():
            found = self.model(x)["logits"].to(y.dtype)
            values = {"fit": (found - y).abs()}
        return self.constrained(found.square(), values, index)

    def epoch(self, epoch: int) -> None:
        pieces = self.run.pieces
        for number, batch in enumerate(
            self.loader(Subset(rows_of(self.run), order(self.run, epoch)))
        ):
            last = number % pieces == pieces - 1
            if number % pieces == 0:
                self.optimizer.zero_grad()
                self.seen.append([])
            self.seen[-1].append(tuple(batch))
            with self.context(last):
                self.backward(self.losses(batch))
                if last:
                    self.optimizer.step()
                    self.constrained.step()

    def train(self) -> dict[str, Any]:
        whole = sorted(self.folder.glob("epoch-?"))
        first = 0
        if self.run.resumes:
            self.load(whole[-1])
            first = len(whole)
        for epoch in range(first, EPOCHS):
            self.epoch(epoch)
            if self.run.saves:
                self.folder.mkdir(exist_ok=True)
                self.save(self.folder / f"epoch-{epoch}", epoch)
        found = outcome(self.model, self.constrained)
        if self.run.ranks == 1 and not self.run.resumes:
            found["replayed"] = self.replayed()
        return found

    def replayed(self) -> dict[str, Any]:
        """A loop without any of this, over the batches that were seen."""
        model = fresh_model(self.run)
        loss = PointwiseLoss(BOUNDS, self.run.formulation, samples=self.run.rows)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for window in self.seen:
            optimizer.zero_grad()
            for x, y, index in window:
                with precision(self.run):
                    found = model(x)["logits"].to(y.dtype)
                values = {"fit": (found - y).abs()}
                (loss(found.square(), values, index) / len(window)).backward()
            optimizer.step()
            loss.step()
        return outcome(model, loss)


class OfAccelerate(Loop):
    """A checkpoint is a folder, which is renamed when it is whole."""

    def prepare(self, model: nn.Module, optimizer: Any) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=self.run.pieces,
            mixed_precision="bf16" if self.run.bf16 else "no",
        )
        self.model, self.optimizer = self.accelerator.prepare(
            self.compiled(model), optimizer
        )

    def loader(self, rows: Any) -> Any:
        return self.accelerator.prepare(DataLoader(rows, self.run.size))

    def context(self, last: bool) -> Any:
        return self.accelerator.accumulate(self.model)

    def autocast(self) -> Any:
        return self.accelerator.autocast()

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def save(self, path: Path, epoch: int) -> None:
        self.registered()
        part = path.with_suffix(".part")
        self.accelerator.save_state(str(part))
        if self.run.dies_at == epoch:
            die()
        part.rename(path)

    def load(self, path: Path) -> None:
        self.registered()
        self.accelerator.load_state(str(path))

    def registered(self) -> None:
        if not self.accelerator._custom_objects:
            self.accelerator.register_for_checkpointing(self.constrained)


class OfFabric(Loop):
    def prepare(self, model: nn.Module, optimizer: Any) -> None:
        from lightning import Fabric

        options: dict[str, Any] = {"accelerator": "cpu", "devices": self.run.ranks}
        if self.run.ranks > 1:
            options["strategy"] = "ddp"
        self.fabric = Fabric(
            precision="bf16-mixed" if self.run.bf16 else None, **options
        )
        self.fabric.launch()
        self.model, self.optimizer = self.fabric.setup(self.compiled(model), optimizer)

    def loader(self, rows: Any) -> Any:
        return self.fabric.setup_dataloaders(DataLoader(rows, self.run.size))

    def context(self, last: bool) -> Any:
        if self.run.pieces == 1:
            return nullcontext()
        return self.fabric.no_backward_sync(self.model, enabled=not last)

    def autocast(self) -> Any:
        return self.fabric.autocast()

    def backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss / self.run.pieces)

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def save(self, path: Path, epoch: int) -> None:
        part = path.with_suffix(".part")
        self.fabric.save(
            part, {**self.state(), "multipliers": self.constrained.state_dict()}
        )
        if self.run.dies_at == epoch:
            die()
        part.replace(path)

    def load(self, path: Path) -> None:
        rest = self.fabric.load(path, self.state(), weights_only=True)
        self.constrained.load_state_dict(rest["multipliers"])


LOOPS: dict[str, Callable[[Path, Run], Loop]] = {
    "plain loop": Loop,
    "Accelerate": OfAccelerate,
    "Fabric": OfFabric,
}


def train(name: str, folder: Path, run: Run) -> dict[str, Any]:
    return LOOPS[name](folder / "run", run).train()
