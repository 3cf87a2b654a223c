"""A plain loop and a Trainer on several ranks: the program behind test_doors.py.

``python -m tests.programs.doors FOLDER`` forks one rank, then two, which write
FOLDER/{ranks}-{rank}.pt: what every case gave there, or the sentence with which it was refused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pl_pointwise import Constraint, Pointwise, PointwiseLoss
from pl_pointwise.errors import TrainingError
from tests.programs.launch import fork_ranks

ROWS = 24
BATCH = 8  # Over all ranks.
EPOCHS = 4


def problem() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)
    return x, x @ torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64) + 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(4, 6, dtype=torch.float64)
        self.last = nn.Linear(6, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(torch.tanh(self.hidden(x)))[:, 0]
        return outputs


def whole(weight: Tensor) -> Tensor:
    full = getattr(weight, "full_tensor", None)
    return (weight if full is None else full()).detach().clone()


class Loop:
    """The page's loop; each rank has every RANKSth sample of a step."""

    def __init__(
        self, wrap: Callable[[Net], Any], model_is_source: bool = True
    ) -> None:
        self.ranks = dist.get_world_size()
        self.rank = dist.get_rank()
        self.model = wrap(Net())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)
        self.x, self.y = problem()
        self.constrained = PointwiseLoss(
            {"fit": Constraint(at_most=0.2)},
            Pointwise(),
            samples=ROWS,
            parameters=self.model,
        )

    def values(self, index: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.model(self.x[index])
        # The objective pulls away from the constraint.
        return outputs.square(), (outputs - self.y[index]).abs()

    def loss(self, index: Tensor, **options: Any) -> Tensor:
        objective, fit = self.values(index)
        return self.constrained(objective, {"fit": fit}, index, **options)

    def step(self, index: Tensor, pieces: int = 1) -> None:
        own = index[self.rank :: self.ranks]
        self.optimizer.zero_grad()
        parts = own.chunk(pieces)
        for part in parts:
            (self.loss(part) / len(parts)).backward()
        self.optimizer.step()
        self.constrained.step()

    def train(self, first: int = 0, last: int = EPOCHS, pieces: int = 1) -> None:
        for epoch in range(first, last):
            generator = torch.Generator().manual_seed(epoch)
            for index in torch.randperm(ROWS, generator=generator).split(BATCH):
                self.step(index, pieces)

    def result(self) -> dict[str, Tensor]:
        found = {f"weight {n}": whole(w) for n, w in enumerate(self.model.parameters())}
        return found | {"multipliers": self.constrained.multipliers["fit"].clone()}


def replicated(net: Net, **options: Any) -> Any:
    return DistributedDataParallel(net, **options) if dist.get_world_size() > 1 else net


def sharded(net: Net) -> Any:
    if dist.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(net.hidden, mesh=mesh)
        fully_shard(net, mesh=mesh)
    return net


def half_sharded(net: Net) -> Any:
    if dist.get_world_size() > 1:
        fully_shard(net.hidden, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return net


def trained(wrap: Callable[[Net], Any], **options: Any) -> dict[str, Tensor]:
    loop = Loop(wrap)
    loop.train(**options)
    return loop.result()


def resumed(wrap: Callable[[Net], Any]) -> dict[str, Tensor]:
    """State and weights go on in other objects."""
    before = Loop(wrap)
    before.train(last=2)
    after = Loop(wrap)
    after.constrained.load_state_dict(before.constrained.state_dict())
    for new, old in zip(
        after.model.parameters(), before.model.parameters(), strict=True
    ):
        new.data.copy_(old.data)
    after.optimizer = torch.optim.Adam(after.model.parameters(), lr=0.02)
    after.optimizer.load_state_dict(before.optimizer.state_dict())
    after.train(first=2)
    return after.result()


class NoGraph(Loop):
    """In the first steps one rank's values are constants."""

    def values(self, index: Tensor) -> tuple[Tensor, Tensor]:
        objective, fit = super().values(index)
        if self.constrained.steps >= 3:
            return objective, fit
        if self.ranks > 1:
            return objective, torch.zeros_like(fit.detach()) if self.rank else fit
        return objective, torch.where(torch.arange(len(fit)) % 2 == 0, fit, 0.0)


def without_graph() -> dict[str, Tensor]:
    loop = NoGraph(replicated)
    loop.train()
    return loop.result()


CASES: dict[str, Callable[[], Any]] = {
    "plain": lambda: trained(replicated),
    "accumulated": lambda: trained(replicated, pieces=2),
    "compiled": lambda: trained(
        lambda net: torch.compile(replicated(net), backend="aot_eager")
    ),
    "resumed": lambda: resumed(replicated),
    "sharded": lambda: trained(sharded),
    "sharded, resumed": lambda: resumed(sharded),
    "no graph": without_graph,
    "static graph": lambda: trained(lambda net: replicated(net, static_graph=True)),
    "half sharded": lambda: trained(half_sharded),
    "not averaged": lambda: trained(lambda net: net),
}


def all_cases() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        try:
            found[name] = case()
        except TrainingError as error:
            found[name] = str(error)
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for ranks in (1, 2):

        def on_rank(ranks: int = ranks) -> None:
            dist.init_process_group("gloo", timeout=timedelta(seconds=60))
            torch.save(all_cases(), folder / f"{ranks}-{os.environ['RANK']}.pt")
            dist.destroy_process_group()

        fork_ranks(ranks, on_rank, folder)
