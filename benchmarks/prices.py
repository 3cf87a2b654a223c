"""Whether λ tells what a requirement costs: the dearest ones are loosened, and the fit repeated.

    python benchmarks/prices.py --problems margins retention budget --epochs 100
    python benchmarks/prices.py -- --config safety --config safety/demo ...

What follows -- is what pl-pointwise fit takes, of any task whose constraints are one-sided. λ_i is
said to be d(objective) / d(−ε_i), so that loosening the bounds of the ten samples with the largest
λ by δ should lower the mean objective by Σ λ_i δ / n, n the samples that the constraint is for. δ
is a share of the root mean square of the constraint's values. Printed is the predicted change, what
the repeated fit makes of it, and predicted over actual; the same seed draws the same batches. "The
same again" is the change that another seed makes, below which nothing can be seen.

    python benchmarks/prices.py --known margins retention "unlike units" family --epochs 100

compares with the prices of the optimum, by cvxpy or, of the family of programs, by dual ascent:
λ as the run leaves it, its mean over the last third of the steps, and the mean force ∂ψ/∂v, which
is what module.prices holds; of each the mean over the mean of the true ones, the correlation over
the samples, and how much of it is 0.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from optimum import PROBLEMS, STEPS, Rows, Task
from torch import Tensor

from pl_pointwise import Optimization, Pointwise, PointwiseModule, Training
from pl_pointwise.cli import PointwiseCLI
from pl_pointwise.lagrangian.prices import Prices
from pl_pointwise.tasks.family.family import (
    Family,
    FamilyDataModule,
    FamilyModule,
    problems,
    split_of,
)

DEAREST = 10
Fit = tuple[PointwiseModule, LightningDataModule, Trainer]
Build = Callable[[int], Fit]


def loosen(
    module: PointwiseModule, dearest: dict[str, Tensor], delta: dict[str, float]
) -> None:
    """From now on the samples ``dearest`` have bounds that are looser by ``delta``."""
    values_of = module.constraint_values

    def constraint_values(outputs: Any, batch: Any) -> dict[str, Tensor]:
        found = dict(values_of(outputs, batch))
        for name, samples in dearest.items():
            sign = -1.0 if module.constraints[name].at_most is not None else 1.0
            chosen = torch.isin(batch["index"].cpu(), samples).to(found[name])
            shift = sign * delta[name] * chosen
            found[name] = found[name] + shift.view(-1, *[1] * (found[name].ndim - 1))
        return found

    vars(module)["constraint_values"] = constraint_values


@torch.no_grad()
def measure(
    module: PointwiseModule, rows: Any
) -> tuple[float, dict[str, int], dict[str, float]]:
    """The mean objective; of each constraint its samples and its values' root mean square."""
    module.eval()
    objectives, values = [], {name: [] for name in module.constraints}
    for batch in rows:
        outputs, masks = module(batch), module.membership(batch)
        everybody = torch.ones(len(batch["index"]), dtype=torch.bool)
        objectives.append(
            module.objective(outputs, batch)[masks.get("objective", everybody)]
        )
        for name, value in module.constraint_values(outputs, batch).items():
            values[name].append(value[masks.get(name, everybody)].flatten())
    counts = {name: sum(len(part) for part in parts) for name, parts in values.items()}
    sizes = {
        name: float(torch.cat(parts).square().mean().sqrt())
        for name, parts in values.items()
    }
    return float(torch.cat(objectives).mean()), counts, sizes


def fit(
    build: Build, seed: int, change: Callable[[PointwiseModule], None] | None = None
) -> Fit:
    seed_everything(seed, verbose=False)
    module, data, trainer = build(seed)
    if change:
        change(module)
    trainer.fit(module, datamodule=data)
    return module, data, trainer


def compare(build: Build, seeds: list[int], shares: list[float]) -> None:
    ratios: dict[float, list[float]] = {share: [] for share in shares}
    objectives = []
    for seed in seeds:
        module, data, _ = fit(build, seed)
        rows = data.train_dataloader()
        before, counts, sizes = measure(module, rows)
        objectives.append(before)
        multipliers = {
            name: module.multipliers[name].flatten(1).sum(1) for name in counts
        }
        each = {name: value / counts[name] for name, value in multipliers.items()}
        bar = torch.cat(list(each.values())).sort(descending=True).values[DEAREST - 1]
        dearest = {
            name: (value >= max(bar, 1e-12)).nonzero()[:, 0]
            for name, value in each.items()
        }
        for share in shares:
            delta = {name: share * size for name, size in sizes.items()}
            predicted = -sum(
                float(each[n][i].sum()) * delta[n] for n, i in dearest.items()
            )
            module, *_ = fit(build, seed, lambda m, i=dearest, d=delta: loosen(m, i, d))
            actual = measure(module, rows)[0] - before
            ratios[share].append(predicted / actual if actual else float("nan"))
            print(
                f"seed {seed}, δ {share:g} of the values' size: objective {before:.5g}, predicted "
                f"{predicted:+.3g}, actual {actual:+.3g}, ratio {ratios[share][-1]:.3g}",
                flush=True,
            )
    for share in shares:
        print(f"δ {share:g}: median ratio {statistics.median(ratios[share]):.3g}")
    if len(seeds) > 1:
        print(f"the same again: {statistics.stdev(objectives):.3g} between seeds")


def problem(name: str, epochs: int) -> Build:
    def build(seed: int) -> Fit:
        described = PROBLEMS[name]()
        trainer = Trainer(max_epochs=epochs, accelerator="cpu", logger=False, **QUIET)
        data = Rows(described.samples, described.batch or described.samples // STEPS)
        return Task(described, Pointwise(), 1.0), data, trainer

    return build


# Against the prices of the optimum ----------------------------------------------------------------

SCALES = {
    "margins": {"c": 1.0},
    "retention": {"c": 1.0},
    "unlike units": {"nats": 1.0, "cap": 100.0, "margin": 0.01},
    "equalities": {"c": 1.0},
}
"""The problems of ``optimum`` with a strictly convex one: by constraint what its unit is."""
FAMILIES = {
    "family": Family(instances=3000),
    "family, published": Family(100, 50, 50, 10_000),
}


class Followed(Callback):
    """Means over the last third of a run of known length: of λ, and of the force."""

    def __init__(self) -> None:
        self.means: dict[str, Prices] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step < trainer.estimated_stepping_batches * 2 // 3:
            return
        measured, engine = pl_module.measured, pl_module._lagrangian
        if not self.means:
            self.means = {
                key: Prices(pl_module.multipliers.samples)
                for key in ("mean λ", "mean force")
            }
            for each in self.means.values():
                each._end = 1 << 62  # One block: the run's length is known.
        self.means["mean force"].add(measured, engine.in_force, {}, engine.dual_first)
        for name, multiplier in measured.multipliers.items():
            mask = measured.masks[name]
            self.means["mean λ"].add_forces(name, measured.index, multiplier, mask)


def known(name: str, epochs: int, seeds: list[int]) -> None:
    """Prints a line for every constraint with a price, of each estimate; medians over seeds."""
    rows: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for seed in seeds:
        followed = Followed()
        if name in FAMILIES:
            module, data, trainer = family(FAMILIES[name], epochs)
            truths = {"inequalities": prices_of_family(FAMILIES[name])}
        else:
            module, data, trainer = problem(name, epochs)(seed)
            truths = prices_of_problem(name)
        seed_everything(seed, verbose=False)
        trainer.callbacks.append(followed)  # type: ignore[attr-defined]
        trainer.fit(module, datamodule=data)
        for constraint, true in truths.items():
            if float(true.abs().mean()) < 1e-4:
                continue
            found = {"stored λ": module.multipliers[constraint]}
            found |= {key: of[constraint] for key, of in followed.means.items()}
            for key, each in found.items():
                rows.setdefault((constraint, key), []).append(
                    agreement(each.double(), true)
                )
    for (constraint, key), of in rows.items():
        ratio, correlation, zero = map(statistics.median, zip(*of, strict=True))
        print(
            f"| {name} | {constraint} | {key} | {ratio:.2f} | {correlation:.3f} | {zero:.2f} |",
            flush=True,
        )


def agreement(found: Tensor, true: Tensor) -> tuple[float, float, float]:
    """The ratio of the means; the correlation within the columns that have a price; zeros."""
    priced = true.abs().mean(0) > 1e-3 * true.abs().mean(0).max()
    found, true = found[:, priced], true[:, priced]
    of_columns = [
        float(np.corrcoef(mine, other)[0, 1])
        for mine, other in zip(found.T, true.T, strict=True)
        if mine.std() > 0
    ]
    ratio = float(found.mean() / true.mean())
    correlation = statistics.mean(of_columns) if of_columns else math.nan
    return ratio, correlation, float((found == 0).double().mean())


def prices_of_problem(name: str) -> dict[str, Tensor]:
    """(N, 1) by constraint: N times the multipliers that cvxpy finds, in the problem's units."""
    described, cp = PROBLEMS[name](), import_module("cvxpy")
    objective, met = described.optimum(cp)
    cp.Problem(cp.Minimize(objective), met).solve(solver="CLARABEL")
    return {
        constraint: described.samples
        * scale
        * torch.tensor(of.dual_value).double().view(-1, 1)
        for (constraint, scale), of in zip(SCALES[name].items(), met, strict=True)
    }


def prices_of_family(of: Family, steps: int = 20_000) -> Tensor:
    """(N, K), of each training instance by accelerated dual ascent: K times its multipliers."""
    numbers, train = problems(of), split_of(of)["train"]
    start = numbers.x[train] @ numbers.plus.T
    hessian, under = (
        (numbers.null.T * numbers.Q) @ numbers.null,
        numbers.G @ numbers.null,
    )
    slope = (start * numbers.Q + numbers.p) @ numbers.null
    inverse = torch.linalg.inv(hessian)
    curved = under @ inverse @ under.T
    linear = slope @ inverse @ under.T + numbers.h - start @ numbers.G.T
    rate = 1 / float(torch.linalg.eigvalsh(curved)[-1])
    ahead = multipliers = torch.zeros_like(linear)
    for step in range(steps):
        moved = (ahead - rate * (ahead @ curved + linear)).clamp(min=0)
        change, multipliers = moved - multipliers, moved
        # Starts again at times.
        ahead = moved + (step % 500) / (step % 500 + 3) * change
        if float(change.abs().max()) < 1e-9 and step % 500:
            break
    return len(numbers.h) * multipliers


def family(of: Family, epochs: int) -> Fit:
    training = Training(Optimization(learning_rate=1e-3, schedule="linear"))
    module = FamilyModule(Pointwise(), of, training=training)
    options = {**QUIET, "logger": False, "limit_val_batches": 0}
    trainer = Trainer(max_epochs=epochs, accelerator="cpu", **options)
    return module, FamilyDataModule(of, batch_size=200), trainer


QUIET = {
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def task(words: list[str]) -> Build:
    def build(seed: int) -> Fit:
        options = [
            *words,
            "--seed_everything",
            str(seed),
            "--trainer.limit_val_batches",
            "0",
        ]
        options += [f"--trainer.{name}=false" for name in (*QUIET, "logger")]
        cli = PointwiseCLI(options, run=False)
        return cli.model, cli.datamodule, cli.trainer

    return build


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="*", default=[], choices=PROBLEMS)
    parser.add_argument("--known", nargs="*", default=[], choices=[*SCALES, *FAMILIES])
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--shares", nargs="+", type=float, default=[0.1, 0.3])
    parser.add_argument(
        "fit", nargs="*", help="after --: the options of pl-pointwise fit"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("pl_pointwise", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if arguments.known:
        print(
            "| problem | constraint | of it | mean, of the true | correlation | zeros |"
        )
        print("|---|---|---|---|---|---|")
    for name in arguments.known:
        known(name, arguments.epochs, arguments.seeds)
    for name in arguments.problems:
        print(name, flush=True)
        compare(problem(name, arguments.epochs), arguments.seeds, arguments.shares)
    if arguments.fit:
        print(" ".join(arguments.fit))
        compare(task(arguments.fit), arguments.seeds, arguments.shares)


if __name__ == "__main__":
    main()
