"""Runs: a method on a problem, through the package.

A run that the CSV file has is not repeated.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor

from pl_pointwise import (
    Formulation,
    Penalty,
    Pointwise,
    PointwiseDataModule,
    PointwiseModule,
    Relaxed,
    Training,
)
from pl_pointwise.errors import TrainingError

from .equations import convection, field_equation, helmholtz
from .problems import (
    STEPS,
    Problem,
    Terms,
    band,
    capped,
    equalities,
    kept_answers,
    margins,
    programs,
    retaught,
    retention,
    unlike_units,
)

PROBLEMS: dict[str, Callable[[], Problem]] = {
    "margins": margins,
    "margins, 15 contradict": lambda: margins(15),
    "retention": retention,
    "unlike units": unlike_units,
    "softmax with a cap": capped,
    "equalities": equalities,
    "budget": lambda: retaught(learn=True),
    "from zero": lambda: retaught(learn=False),
    "band 2000": lambda: band(2000, (1, 3, 10, 30)),
    "band 20000": lambda: band(20000, (1, 3)),
    "table, 60": lambda: kept_answers(60, None, (10, 30, 100)),
    "table, SGD": lambda: kept_answers(1200, 0.9, (10, 30, 100)),
    "field": field_equation,
    "convection": lambda: convection(in_loss=False),
    "convection, in the loss": lambda: convection(in_loss=True),
    "Helmholtz": lambda: helmholtz(in_loss=False),
    "Helmholtz, in the loss": lambda: helmholtz(in_loss=True),
    "programs": lambda: programs(in_loss=False),
    "programs, equalities": lambda: programs(in_loss=True),
}
WEIGHTS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"),
    False,
)
KEYS = ("problem", "epochs", "method", "unit", "seed")
METHODS: dict[str, Callable[[], Formulation]] = {
    "Pointwise()": Pointwise,
    "Relaxed(price=10)": lambda: Relaxed(price=10.0),
}
for _weight in WEIGHTS:
    METHODS[f"hinge {_weight:g}"] = lambda w=_weight: Penalty(weight=w, shape="hinge")
    METHODS[f"squared {_weight:g}"] = lambda w=_weight: Penalty(
        weight=w, shape="squared_hinge"
    )


class Task(PointwiseModule):
    """A problem as a task, its constraints in another unit."""

    def __init__(
        self, problem: Problem, formulation: Formulation | None, unit: float
    ) -> None:
        constraints, training = problem.constraints(unit), Training(problem.training)
        super().__init__(
            formulation=formulation, constraints=constraints, training=training
        )
        self.problem, self.unit, self.net = problem, unit, problem.net()

    def configure_optimizers(self) -> Any:
        if self.problem.momentum is None:
            return super().configure_optimizers()
        return torch.optim.SGD(self.parameters(), 0.1, momentum=self.problem.momentum)

    def forward(self, batch: Any) -> Terms:
        return self.problem.terms(self.net, batch["index"])

    def objective(self, outputs: Terms, batch: Any) -> Tensor:
        return outputs[0]

    def constraint_values(self, outputs: Terms, batch: Any) -> dict[str, Tensor]:
        return {name: self.unit * value for name, value in outputs[1].items()}

    def membership(self, batch: Any) -> dict[str, Tensor]:
        return self.problem.membership(batch["index"])


class Rows(PointwiseDataModule):
    def __init__(self, samples: int, batch: int) -> None:
        super().__init__(batch_size=batch)
        self.datasets = {"train": [{"row": i} for i in range(samples)]}


def run(
    problem: Problem, method: str, epochs: int, seed: int, unit: float
) -> dict[str, float]:
    """Trains; what is violated, the objective, and by which share it is above the optimum."""
    seed_everything(seed, verbose=False)
    begun = time.perf_counter()
    module = Task(problem, METHODS[method](), unit)
    trainer = Trainer(max_epochs=epochs, accelerator="cpu", **QUIET)
    rows = Rows(problem.samples, problem.batch or problem.samples // STEPS)
    with suppress(TrainingError):  # It diverged: so its values say.
        trainer.fit(module, rows)
    found = {"seconds": time.perf_counter() - begun} | problem.measure(module.net)
    if problem.least is not None:
        found["above"] = (found["objective"] - problem.least) / abs(problem.least)
    return {name: float(f"{value:.5g}") for name, value in found.items()}


def quiet() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def sweep(
    path: Path,
    trials: Iterable[tuple[str, int | None]],
    methods: list[str],
    seeds: list[int],
    units: list[float],
) -> pd.DataFrame:
    """Each method on each problem, for so many epochs or the problem's own lengths.

    A row of the CSV file ``path`` is a run. In another unit of the constraints a hinge is one of
    another weight, which is not run.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = pd.read_csv(path).to_dict("records") if path.exists() else []
    done = {tuple(row[name] for name in KEYS) for row in rows}
    built = cache(lambda name: PROBLEMS[name]())
    for name, length in trials:
        problem = built(name)
        for epochs in problem.lengths if length is None else (length,):
            for seed, method, unit in product(seeds, methods, units):
                key = (name, epochs, method, unit, seed)
                if key not in done and (unit == 1 or not method.startswith("hinge")):
                    found = run(problem, method, epochs, seed, unit)
                    rows.append(dict(zip(KEYS, key, strict=True)) | found)
                    print(*key, found, flush=True)
                    pd.DataFrame(rows).to_csv(path, index=False)
    return pd.DataFrame(rows)
