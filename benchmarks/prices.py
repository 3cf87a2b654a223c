"""Whether λ tells what a requirement costs: the dearest ones are loosened, and the fit repeated.

    python benchmarks/prices.py --problems margins retention budget --epochs 100
    python benchmarks/prices.py -- --config safety --config safety/demo ...

What follows -- is what pl-pointwise fit takes, of any task whose constraints are one-sided. λ_i is
said to be d(objective) / d(−ε_i), so that loosening the bounds of the ten samples with the largest
λ by δ should lower the mean objective by Σ λ_i δ / n, n the samples that the constraint is for. δ
is a share of the root mean square of the constraint's values. Printed is the predicted change, what
the repeated fit makes of it, and predicted over actual; the same seed draws the same batches. "The
same again" is the change that another seed makes, below which nothing can be seen.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from optimum import PROBLEMS, STEPS, Rows, Task
from torch import Tensor

from pl_pointwise import Pointwise, PointwiseModule
from pl_pointwise.cli import PointwiseCLI

DEAREST = 10
Fit = tuple[PointwiseModule, LightningDataModule, Trainer]
Build = Callable[[int], Fit]


def loosen(module: PointwiseModule, dearest: dict[str, Tensor], delta: dict[str, float]) -> None:
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
def measure(module: PointwiseModule, rows: Any) -> tuple[float, dict[str, int], dict[str, float]]:
    """The mean objective; of each constraint its samples and its values' root mean square."""
    module.eval()
    objectives, values = [], {name: [] for name in module.constraints}
    for batch in rows:
        outputs, masks = module(batch), module.membership(batch)
        everybody = torch.ones(len(batch["index"]), dtype=torch.bool)
        objectives.append(module.objective(outputs, batch)[masks.get("objective", everybody)])
        for name, value in module.constraint_values(outputs, batch).items():
            values[name].append(value[masks.get(name, everybody)].flatten())
    counts = {name: sum(len(part) for part in parts) for name, parts in values.items()}
    sizes = {name: float(torch.cat(parts).square().mean().sqrt()) for name, parts in values.items()}
    return float(torch.cat(objectives).mean()), counts, sizes


def fit(build: Build, seed: int, change: Callable[[PointwiseModule], None] | None = None) -> Fit:
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
        multipliers = {name: module.multipliers[name].flatten(1).sum(1) for name in counts}
        each = {name: value / counts[name] for name, value in multipliers.items()}
        bar = torch.cat(list(each.values())).sort(descending=True).values[DEAREST - 1]
        dearest = {name: (value >= max(bar, 1e-12)).nonzero()[:, 0] for name, value in each.items()}
        for share in shares:
            delta = {name: share * size for name, size in sizes.items()}
            predicted = -sum(float(each[n][i].sum()) * delta[n] for n, i in dearest.items())
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


QUIET = {
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def task(words: list[str]) -> Build:
    def build(seed: int) -> Fit:
        options = [*words, "--seed_everything", str(seed), "--trainer.limit_val_batches", "0"]
        options += [f"--trainer.{name}=false" for name in (*QUIET, "logger")]
        cli = PointwiseCLI(options, run=False)
        return cli.model, cli.datamodule, cli.trainer

    return build


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="*", default=[], choices=PROBLEMS)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--shares", nargs="+", type=float, default=[0.1, 0.3])
    parser.add_argument("fit", nargs="*", help="after --: the options of pl-pointwise fit")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("pl_pointwise", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in arguments.problems:
        print(name, flush=True)
        compare(problem(name, arguments.epochs), arguments.seeds, arguments.shares)
    if arguments.fit:
        print(" ".join(arguments.fit))
        compare(task(arguments.fit), arguments.seeds, arguments.shares)


if __name__ == "__main__":
    main()
