"""One network and schedule for every method; answers are asked before and after Newton steps."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import seed_everything
from torch import Tensor

from benchmarks.families import quiet_trainer
from pl_pointwise import Formulation, Optimization, Penalty, Pointwise, Training
from pl_pointwise.correction import complementary, newton_corrected
from pl_pointwise.tasks.family.family import (
    Family,
    FamilyDataModule,
    FamilyModule,
    Proxy,
    cost,
    optimum,
    problems,
    program_of,
    split_of,
    stationary_points,
)

from .table import Judged, Table, to_tensor

OURS, PRICED = "Pointwise()", "a weight a constraint"
RATE, TOLERANCE, PART = 1e-3, 1e-8, 100


class Weighed(FamilyModule):
    """Of each constraint the violation times a weight of its own."""

    weights: Tensor | None = None

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        found = super().constraint_values(outputs, batch)
        if self.weights is not None:
            # A term is the mean over a sample's K values.
            count = len(self.weights)
            found["inequalities"] = found["inequalities"] * self.weights * count
        return found


def mean_prices(family: Family) -> Tensor:
    """(K,), the mean over the validation instances of :func:`prices`: a solver's work."""
    return prices(family, problems(family).x[split_of(family)["val"]]).mean(0)


def prices(family: Family, x: Tensor) -> Tensor:
    """Multipliers of the inequalities at the optimum of each x, (B, K) ≥ 0."""
    of = problems(family)
    if not family.nonconvex:
        program = program_of(family)
        found = []
        for part in x.split(PART):
            none = part.new_zeros(len(part), family.inequalities)
            found.append(program.ascend(part, none, 50))
        return torch.cat(found)
    y = stationary_points(family, x)
    slope = (y * of.Q + of.p * y.cos()) @ of.null
    active = y @ of.G.T >= of.h - 1e-4
    slopes = torch.where(active[:, :, None], of.G @ of.null, 0)
    pulls = torch.where(active, -(slopes @ slope[:, :, None])[:, :, 0], -1)
    return complementary(slopes @ slopes.mT, pulls, active)


def formulation_of(method: str) -> Formulation:
    if method == OURS:
        return Pointwise()
    weight = 1.0 if method == PRICED else float(method.removeprefix("hinge "))
    return Penalty(weight=weight, shape="hinge")


def trained(table: Table, family: Family, method: str, seed: int) -> Proxy:
    """The network of a method after its training."""
    weights = None
    if method == PRICED:
        # Twice what the optimum asks for, so that it holds for instances above the mean; and a
        # floor for those whose price is 0, as else nothing keeps them.
        weights = (2 * mean_prices(family) + 0.2).float()
    formulation = formulation_of(method)
    return train(formulation, family, table.epochs, table.batch, seed, weights)


def train(
    formulation: Formulation,
    family: Family,
    epochs: int,
    batch: int,
    seed: int,
    weights: Tensor | None = None,
) -> Proxy:
    """A network after so many epochs, at the rate that all have."""
    seed_everything(seed, verbose=False)
    schedule = Training(Optimization(learning_rate=RATE, schedule="linear"))
    module = Weighed(formulation, family, training=schedule)
    module.weights = weights
    trainer = quiet_trainer(epochs)
    trainer.fit(module, FamilyDataModule(family, batch_size=batch, seed=seed))
    return module.proxy.eval()


@dataclass(frozen=True)
class Instances:
    """What is judged, and the best that is known of it."""

    x: Tensor
    best: Tensor


def instances(table: Table, family: Family) -> Instances:
    if table.judged is None:
        part = split_of(family)["test"]
        return Instances(problems(family).x[part], optimum(family)[part])
    # Of convex problems with linear constraints: by the bound, which Newton steps close.
    x, program = to_tensor(table.judged()), program_of(family)
    found = []
    for rows in x.split(PART):
        multipliers = program.ascend(
            rows, rows.new_zeros(len(rows), len(program.h)), 50
        )
        found.append(program.dual(rows, multipliers))
    return Instances(x, torch.cat(found))


@torch.no_grad()
def answers(proxy: Proxy, family: Family, x: Tensor, correct: bool) -> Tensor:
    """The network's answers within the equalities, in float64; corrected, if asked for."""
    of = problems(family)
    y = proxy(x.float()).double()
    y = y - (y @ of.A.T - x) @ of.plus.T
    if not correct:
        return y
    moved = newton_corrected(
        y,
        lambda y: inequalities(family, y),
        lambda y: slopes(family, y),
        tolerance=TOLERANCE,
        within=of.null,
    )
    # The sum of many moves along the null space rounds.
    return moved - (moved @ of.A.T - x) @ of.plus.T


def inequalities(family: Family, y: Tensor) -> Tensor:
    of = problems(family)
    linear = y @ of.G.T - of.h
    if of.H is None:
        return linear
    # Of the tables that are here all are diagonals.
    return linear + y.square() @ of.H.diagonal(dim1=1, dim2=2).T / 2


def slopes(family: Family, y: Tensor) -> Tensor:
    of = problems(family)
    if of.H is None:
        return of.G.expand(len(y), -1, -1)
    return of.G + of.H.diagonal(dim1=1, dim2=2) * y[:, None, :]


def judge(family: Family, judged: Instances, y: Tensor) -> Judged:
    of = problems(family)
    return Judged(
        objective=cost(y, of.Q, of.p, family.nonconvex),
        best=judged.best,
        inequality=inequalities(family, y).clamp(min=0),
        equality=(y @ of.A.T - judged.x).abs(),
    )


@dataclass(frozen=True)
class Run:
    """A trained network's answers, as they are and corrected, and the seconds of both."""

    raw: Judged
    corrected: Judged
    seconds: float
    milliseconds: float


def run(table: Table, family: Family, method: str, seed: int) -> Run:
    begun = time.process_time()
    proxy = trained(table, family, method, seed)
    seconds = time.process_time() - begun
    judged = instances(table, family)
    raw = judge(family, judged, answers(proxy, family, judged.x, correct=False))
    begun = time.process_time()
    y = answers(proxy, family, judged.x, correct=True)
    spent = 1000 * (time.process_time() - begun) / len(y)
    return Run(raw, judge(family, judged, y), seconds, spent)
