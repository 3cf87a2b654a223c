"""Optimal power flow on 57 buses, the setting of DC3 (Donti et al., 2021): methods side by side.

    python -m benchmarks.acopf
    python -m benchmarks.acopf --method "Pointwise()" "hinge 1" --seeds 0 1
    python -m benchmarks.acopf --method "Pointwise(memory=False)" --drawn 40000
    python -m benchmarks.acopf --table

A network maps the loads to the generators' set points; the power flow completes the solution, so
that every equality holds. 1,000 instances train, 100 choose, 100 judge, with and without correction
steps. Every method has the same network, data, learning rate and epochs; nothing is tuned. A row of
the CSV is a finished run, which is not repeated.

A load needs no solver to be trained on: with --drawn as many more are drawn and train instead, for
as many steps, so that a tenth of the epochs sees ten times as many.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor, nn

from benchmarks.families import ALLOWED, BEYOND, RESULTS, append, read
from benchmarks.optimum.run import QUIET, quiet
from pl_pointwise import (
    Average,
    Constraint,
    Formulation,
    Optimization,
    Penalty,
    Pointwise,
    PointwiseDataModule,
    PointwiseModule,
    Relaxed,
    Training,
)
from pl_pointwise.correction import corrected

from .grid import Grid, draw_loads
from .solve import DRAWN, OPTIMUM

HELD, WIDTH, BATCH, EPOCHS, RATE, CORRECTION = 100, 200, 50, 400, 3e-3, 100
WEIGHTS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
METHODS: dict[str, Callable[[], Formulation]] = {
    "Pointwise()": Pointwise,
    "Pointwise(memory=False)": lambda: Pointwise(memory=False),
    "Relaxed(price=10)": lambda: Relaxed(price=10.0),
    "Average": lambda: Average(dual_lr=1.0),
}
for _weight in WEIGHTS:
    METHODS[f"hinge {_weight:g}"] = lambda w=_weight: Penalty(
        weight=float(w), shape="hinge"
    )
PUBLISHED = [
    # method, objective, worst inequality, largest |equality|: results_summary.dict of locuslab/DC3,
    # 100 test instances of its own drawing, five seeds, corrected.
    ("MIPS of pypower", 3.81181, 0.0, 4e-7),
    ("DC3", 3.8160, 0.00201, 7e-5),
    ("DC3 without correction in training", 3.82372, 0.00281, 6e-6),
    ("DC3 without completion", 3.6722, 0.0, 0.136),
    ("network with a soft penalty", 3.69257, 0.0, 0.158),
    ("completion, supervised", 3.81056, 0.149, 1e-5),
]


class Instances:
    """The loads of each part, (N, 2 · buses), and their least cost; those held out come first."""

    def __init__(self, grid: Grid, path: Path, held: int) -> None:
        table = pd.read_csv(path)
        loads = draw_loads(grid.load, DRAWN)[torch.tensor(table["drawn"].to_list())]
        best = torch.tensor(table["objective"].to_list(), dtype=torch.float64)
        parts = {
            "val": slice(held),
            "test": slice(held, 2 * held),
            "train": slice(2 * held, None),
        }
        self.loads = {name: loads[part] for name, part in parts.items()}
        self.best = {name: best[part] for name, part in parts.items()}


class SetPoints(nn.Module):
    """The network: loads ↦ z, within the limits of its own: (B, 2 N) ↦ (B, 2 G − 1)."""

    def __init__(self, grid: Grid, loads: Tensor, width: int = WIDTH) -> None:
        super().__init__()
        # Per unit, as they are: a large load weighs more than a small one, as it does in the grid.
        self.mean = nn.Buffer(loads.mean(0))
        self.low, self.high = (
            nn.Buffer(grid.low[grid.free]),
            nn.Buffer(grid.high[grid.free]),
        )
        self.network = nn.Sequential(
            nn.Linear(loads.shape[1], width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, len(self.low)),
        )

    def forward(self, loads: Tensor) -> Tensor:
        share = self.network(loads - self.mean).sigmoid()
        return self.low + share * (self.high - self.low)


class PowerFlow(PointwiseModule):
    """Set points for every load: the least cost, each limit a constraint of each instance."""

    def __init__(
        self, formulation: Formulation | None, grid: Grid, loads: Tensor
    ) -> None:
        limits = ("active power", "reactive power", "voltage")
        super().__init__(
            formulation=formulation,
            constraints={name: Constraint(at_most=0.0) for name in limits},
            training=Training(Optimization(learning_rate=RATE, schedule="linear")),
        )
        self.grid, self.points = grid, SetPoints(grid, loads)

    def forward(self, batch: Any) -> Tensor:
        return self.grid.complete(self.points(batch["loads"]), batch["loads"])

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:
        return self.grid.objective(outputs)

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return self.grid.inequalities(outputs)


class Loads(PointwiseDataModule):
    def __init__(self, loads: Tensor, batch: int, seed: int) -> None:
        super().__init__(batch_size=batch, seed=seed)
        self.datasets = {"train": [{"loads": each} for each in loads]}


def trained(
    grid: Grid, loads: Tensor, formulation: Formulation, seed: int, epochs: int
) -> SetPoints:
    """The network after a training with the package."""
    seed_everything(seed, verbose=False)
    module = PowerFlow(formulation, copy.deepcopy(grid), loads).float()
    trainer = Trainer(max_epochs=epochs, accelerator="cpu", **QUIET)
    trainer.fit(module, Loads(loads.float(), BATCH, seed))
    return module.points.double().eval()


def measure(
    grid: Grid, points: SetPoints, loads: Tensor, best: Tensor, steps: int
) -> dict[str, float]:
    """What the instances show after so many correction steps of the set points."""

    def violations(z: Tensor) -> Tensor:
        return torch.cat([*grid.inequalities(grid.complete(z, loads)).values()], 1)

    with torch.no_grad():
        z = points(loads)
        z = corrected(z, violations, steps, ALLOWED / 2) if steps else z
        y = grid.complete(z, loads)
        excess, value = violations(z).clamp(min=0), grid.objective(y)
    worst = excess.amax(1)
    return {
        "objective": float(value.mean()),
        "gap": float((value.mean() - best.mean()) / best.mean()),
        "worst": float(worst.mean()),
        "largest": float(worst.max()),
        "beyond": float((worst > BEYOND).double().mean()),
        "equality": float(grid.imbalance(y, loads).abs().max()),
    }


def study(
    output: Path,
    methods: Sequence[str],
    seeds: Sequence[int],
    epochs: int,
    drawn: int = 0,
) -> None:
    """Runs what the CSV lacks."""
    grid = Grid()
    instances = Instances(grid, OPTIMUM, HELD)
    loads = instances.loads["train"]
    if drawn:
        epochs = round(epochs * len(loads) / drawn)
        loads = draw_loads(grid.load, DRAWN + drawn)[DRAWN:]  # None that is judged.
    for kind in methods:
        method = f"{kind}, {drawn:,} drawn" if drawn else kind
        for seed in seeds:
            table = read(output)
            same = (table["method"] == method) & (table["seed"] == seed)
            if (same & (table["epochs"] == epochs)).any():
                continue
            points = trained(grid, loads, METHODS[kind](), seed, epochs)
            rows: list[dict[str, Any]] = []
            for part in ("val", "test"):
                for steps in (0, CORRECTION):
                    key = {
                        "method": method,
                        "seed": seed,
                        "epochs": epochs,
                        "part": part,
                    }
                    known = instances.loads[part], instances.best[part]
                    found = measure(grid, points, *known, steps)
                    short = {name: f"{value:.6g}" for name, value in found.items()}
                    rows.append({**key, "correction": steps, **short})
            append(output, rows)


# Table ------------------------------------------------------------------------------------------


def summarise(table: pd.DataFrame) -> str:
    """Means over the seeds of the test instances as Markdown, with the published rows."""
    head = (
        "method|epochs|correction|seeds|objective|gap %|worst inequality|beyond".split(
            "|"
        )
    )
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    own = table[table["part"] == "test"]
    for (method, epochs, steps), rows in own.groupby(
        ["method", "epochs", "correction"], sort=False
    ):
        of = rows.mean(numeric_only=True)
        cells = [
            f"{of['objective']:.4f}",
            f"{100 * of['gap']:.3f}",
            f"{of['worst']:.5f}",
        ]
        cells += [f"{of['beyond']:.2f}"]
        lines.append(
            f"| {method} | {epochs} | {steps} | {len(rows)} | {' | '.join(cells)} |"
        )
    least = PUBLISHED[0][1]
    for method, objective, worst, _ in PUBLISHED:
        cells = [
            f"{objective:.4f}",
            f"{100 * (objective / least - 1):.3f}",
            f"{worst:.5f}",
        ]
        lines.append(f"| {method}, published | | | 5 | {' | '.join(cells)} | |")
    return "\n".join(lines)


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("--method", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument(
        "--drawn", type=int, default=0, help="instances that are drawn to train on"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "acopf.csv")
    parser.add_argument("--table", action="store_true", help="no run: the table")
    given = parser.parse_args()
    if not given.table:
        study(given.output, given.method, given.seeds, given.epochs, given.drawn)
    print(summarise(read(given.output)))


if __name__ == "__main__":
    quiet()
    main()
