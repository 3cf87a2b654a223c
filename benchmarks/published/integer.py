"""Integer programs: pnnl/L2O-pMINLP, run_qp.py and test/Experiments Tables.ipynb.

minimise ½xᵀQx + pᵀx  subject to  Ax ≤ b,  x integer;  b is the instance

Their networks, data and split; their layer LT rounds by a threshold that is learned and passes the
gradient straight through; their projection moves x along the violations' gradient, through the
rounding, 1,000 times at most.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn

from benchmarks.families import quiet_trainer
from pl_pointwise import (
    Constraint,
    Formulation,
    Optimization,
    Penalty,
    Pointwise,
    PointwiseDataModule,
    PointwiseModule,
    Training,
)

SOURCE = (
    "pnnl/L2O-pMINLP, test/Experiments Tables.ipynb: the first 100 test instances, one run of at "
    "most 200 epochs, weight 100; EX is Gurobi with 1,000 seconds an instance"
)
WIDTHS = {20: 64, 50: 128}
EPOCHS, BATCH, RATE, SLOPE = 150, 200, 1e-3, 10.0
HELD = 1000
ROUNDS, STEP, ALLOWED = 1000, 0.01, 1e-6
SHOWN = 100
"""Instances that their table has."""


@dataclass(frozen=True)
class IntegerTable:
    """Their programs with ``size`` variables and as many constraints."""

    size: int
    published: Mapping[str, Mapping[str, float]]
    source: str = SOURCE
    file: str = "L2O-pMINLP, Experiments Tables.ipynb"
    shown: tuple[str, ...] = ("objective", "infeasible, %")
    weights: tuple[float, ...] = field(default=(1, 3, 10, 100))

    @property
    def name(self) -> str:
        return f"L2O-pMINLP, {self.size} × {self.size}"


def _row(objective: float, infeasible: float) -> dict[str, float]:
    return {"objective": objective, "infeasible, %": infeasible}


TABLES = [
    IntegerTable(
        20,
        {
            "EX": _row(-5.120, 0),
            "RC": _row(-4.237, 1),
            "RC-P, projected": _row(-4.238, 0),
            "LT": _row(-4.302, 2),
            "LT-P, projected": _row(-4.301, 0),
        },
    ),
    IntegerTable(
        50,
        {
            "EX": _row(-15.928, 0),
            "RC": _row(-12.196, 1),
            "RC-P, projected": _row(-12.196, 0),
            "LT": _row(-12.977, 2),
            "LT-P, projected": _row(-12.977, 0),
        },
    ),
]


def numbers(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Q (n,), a diagonal, p (n,), A (n, n), float32."""
    draw = np.random.RandomState(17)
    found = (
        0.01 * draw.random_sample(size),
        0.1 * draw.random_sample(size),
        draw.normal(scale=0.1, size=(size, size)),
    )
    square, linear, matrix = (torch.from_numpy(each).float() for each in found)
    return square, linear, matrix


def splits(size: int) -> dict[str, Tensor]:
    """b of 8,000 instances to train on, 1,000 for validation, 1,000 for test, in their order."""
    b = np.random.RandomState(42).uniform(-1, 1, (10_000, size))
    # sklearn's train_test_split, twice with the seed 42.
    order = np.random.RandomState(42).permutation(len(b))
    test, rest = order[:HELD], order[HELD:]
    again = np.random.RandomState(42).permutation(len(rest))
    val, train = rest[again[:HELD]], rest[again[HELD:]]
    parts = {"train": train, "val": val, "test": test}
    return {name: torch.from_numpy(b[rows]).float() for name, rows in parts.items()}


class Rounding(nn.Module):
    """Their two networks: b ↦ x, and (b, x) ↦ a threshold for each variable."""

    def __init__(self, size: int) -> None:
        super().__init__()
        width = WIDTHS[size]
        self.solution = nn.Sequential()
        for pair in pairwise([size, *[width] * 5]):
            self.solution.extend([nn.Linear(*pair), nn.ReLU()])
        self.solution.append(nn.Linear(width, size))
        self.threshold = nn.Sequential()
        for pair in pairwise([2 * size, *[width] * 4]):
            block = [
                nn.Linear(*pair),
                nn.ReLU(),
                nn.BatchNorm1d(width),
                nn.Dropout(0.2),
            ]
            self.threshold.extend(block)
        self.threshold.append(nn.Linear(width, size))

    def forward(self, b: Tensor) -> Tensor:
        return self.rounded(b, self.solution(b))

    def rounded(self, b: Tensor, x: Tensor) -> Tensor:
        """Integers, (B, n): down, or up where the fraction is above the threshold."""
        threshold = self.threshold(torch.cat([b, x], 1)).sigmoid()
        down = x.detach().floor() + (x - x.detach())
        above = (x - down.detach()).detach() - threshold
        smooth = (SLOPE * above).sigmoid()
        up = (above >= 0).to(x.dtype) + (smooth - smooth.detach())
        return down + up


class Integers(PointwiseModule):
    def __init__(
        self,
        formulation: Formulation | None,
        size: int,
        training: Training | None = None,
    ) -> None:
        super().__init__(
            formulation=formulation,
            constraints={"rows": Constraint(at_most=0.0)},
            training=training or Training(),
        )
        self.network = Rounding(size)
        for name, value in zip("QpA", numbers(size), strict=True):
            self.register_buffer(name, value)

    def forward(self, batch: Any) -> Tensor:
        x: Tensor = self.network(batch["b"])
        return x

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.square() @ self.Q / 2 + outputs @ self.p

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"rows": outputs @ self.A.T - batch["b"]}


class Instances(PointwiseDataModule):
    def __init__(self, size: int, **options: Any) -> None:
        super().__init__(**options)
        self.size = size

    def setup(self, stage: str) -> None:
        for name, rows in splits(self.size).items():
            self.datasets[name] = [{"b": b} for b in rows]


def projected(module: Integers, b: Tensor) -> Tensor:
    """Their projection of every instance that violates, until it does not."""
    network = module.network
    x = network.solution(b).detach()
    answer = network.rounded(b, x).detach()
    left = torch.arange(len(b))
    for _ in range(ROUNDS):
        of = x[left].requires_grad_()
        found = network.rounded(b[left], of)
        excess = (found @ module.A.T - b[left]).clamp(min=0)
        answer[left] = found.detach()
        due = excess.detach().amax(1) >= ALLOWED
        if not due.any():
            break
        (slope,) = torch.autograd.grad(excess.sum(), of)
        x[left] = torch.where(due[:, None], of.detach() - STEP * slope, of.detach())
        left = left[due]
    else:
        answer[left] = network.rounded(b[left], x[left]).detach()
    return answer


def columns(module: Integers, b: Tensor, x: Tensor) -> dict[str, float]:
    with torch.no_grad():
        # Integers but for the rounding of the straight-through sum.
        x = x.round()
        value = module.objective(x, {"b": b})
        excess = (x @ module.A.T - b).clamp(min=0).amax(1)
    return {
        "objective": float(value[:SHOWN].mean()),
        "infeasible, %": 100 * float((excess[:SHOWN] > ALLOWED).float().mean()),
        "objective, all 1,000": float(value.mean()),
        "infeasible, %, all": 100 * float((excess > ALLOWED).float().mean()),
        "worst, mean": float(excess.mean()),
    }


def run(table: IntegerTable, method: str, seed: int) -> dict[str, dict[str, float]]:
    """Columns as the answers are, and projected."""
    begun = time.process_time()
    seed_everything(seed, verbose=False)
    formulation: Formulation = Pointwise()
    if method.startswith("hinge"):
        # Theirs sums over the constraints; a term here is their mean.
        weight = float(method.removeprefix("hinge ")) * table.size
        formulation = Penalty(weight=weight, shape="hinge")
    schedule = Training(Optimization(learning_rate=RATE, schedule="linear"))
    module = Integers(formulation, table.size, training=schedule)
    trainer = quiet_trainer(EPOCHS)
    trainer.fit(module, Instances(table.size, batch_size=BATCH, seed=seed))
    seconds = {"seconds": time.process_time() - begun}
    module.eval()
    b = splits(table.size)["test"]
    with torch.no_grad():
        raw = module.network(b)
    return {
        "none": columns(module, b, raw) | seconds,
        "projected": columns(module, b, projected(module, b)) | seconds,
    }
