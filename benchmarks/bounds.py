"""Proofs of answers: what a bound proves of 833 unseen instances, against another solver.

    python benchmarks/bounds.py --seeds 0 1 2 3 4                  # DC3's convex problems: the CSV
    python benchmarks/bounds.py --problem FILE.npz --epochs 20     # one's own

A network is trained by Pointwise() for --epochs; then λ(x) by its bound for 20, from the run's mean
price. Every optimum is found once more by Clarabel (pip install cvxpy clarabel). A line for a seed,
what the answer is, and its dtype: the largest violation; the proved gap, mean and largest; the true
gap, mean; how many bounds are valid (at most the optimum plus 1e-7 of it, Clarabel's accuracy); and
milliseconds an answer. evidence/results/bounds.csv has the lines of the first command.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from importlib import import_module
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor

from pl_pointwise import Optimization, Pointwise, Training
from pl_pointwise.bounds import Solution
from pl_pointwise.correction import corrected, newton_corrected
from pl_pointwise.tasks.family.family import (
    Family,
    FamilyDataModule,
    FamilyModule,
    problems,
    split_of,
)

OUTPUT = Path(__file__).parent / "evidence/results/bounds.csv"
Row = dict[str, object]


def by_clarabel(family: Family, x: Tensor) -> Tensor:
    """(n,), the least objective of each instance."""
    cp, of = import_module("cvxpy"), problems(family)
    array = {name: None if v is None else v.numpy() for name, v in of._asdict().items()}
    y, given = cp.Variable(family.variables), cp.Parameter(family.equations)
    square = array["Q"] if array["Q"].ndim == 2 else np.diag(array["Q"])
    met = [array["A"] @ y == given]
    if array["H"] is None:
        met.append(array["G"] @ y <= array["h"])
    else:
        rows = zip(array["H"], array["G"], array["h"], strict=True)
        met += [cp.quad_form(y, cp.psd_wrap(H)) / 2 + g @ y <= h for H, g, h in rows]
    cost = cp.quad_form(y, cp.psd_wrap(square)) / 2 + array["p"] @ y
    program = cp.Problem(cp.Minimize(cost), met)
    found = []
    for each in x.numpy():
        given.value = each
        found.append(program.solve(solver="CLARABEL"))
    return torch.tensor(found, dtype=torch.float64)


def row(seed: int, name: str, found: Solution, best: Tensor, seconds: float) -> Row:
    """Gaps are shares of the optimum."""
    true = (found.objective - best) / best.abs()
    below = (best - found.bound) / best.abs()
    return {
        "seed": seed,
        "answer": name,
        "dtype": str(found.y.dtype)[6:],
        "violation": float(found.violation.max()),
        "proved, mean": float(found.gap.mean()),
        "proved, largest": float(found.gap.max()),
        "true, mean": float(true.mean()),
        "bound below, mean": float(below.mean()),
        "bound below, largest": float(below.max()),
        "valid": int((found.bound <= best + 1e-7 * best.abs()).sum()),
        "of": len(best),
        "ms": 1000 * seconds / len(best),
    }


def study(
    family: Family, problem: str | None, seed: int, epochs: int, best: Tensor
) -> list[Row]:
    seed_everything(seed, verbose=False)
    training = Training(Optimization(learning_rate=1e-3, schedule="linear"))
    module = FamilyModule(
        Pointwise(), family, training=training, bound=True, problem=problem
    )
    quiet = (
        "logger",
        "enable_checkpointing",
        "enable_progress_bar",
        "enable_model_summary",
    )
    options = {**dict.fromkeys(quiet, False), "limit_val_batches": 0}
    trainer = Trainer(max_epochs=epochs, accelerator="cpu", **options)
    begun = time.perf_counter()
    trainer.fit(module, FamilyDataModule(family, batch_size=200, seed=seed))
    print(f"seed {seed}: trained in {time.perf_counter() - begun:.0f} s", flush=True)
    module.eval()
    solver, x = module.solver, problems(family).x[split_of(family)["test"]]
    program, steps, rows = solver.program, solver.ascents, []
    for ascents in dict.fromkeys((0, steps)):
        solver.ascents = ascents
        name = "λ(x) alone" if not ascents else f"λ(x), Newton steps: {ascents}"
        for kind in (torch.float32, torch.float64):
            begun = time.perf_counter()
            found = solver(x.to(kind))
            rows.append(row(seed, name, found, best, time.perf_counter() - begun))
    with torch.no_grad():
        y = solver.model(x.float()).double()
    y = y - program.equalities(y, x) @ program.plus.T
    given = y, program.inequalities
    corrections = {
        "by Newton to 1e-8": lambda: newton_corrected(
            *given, program.slopes, within=program.null
        ),
        "by gradients to 1e-4": lambda: corrected(*given, 100, 1e-4, program.null),
        "by gradients to 1e-8": lambda: corrected(*given, 5000, 1e-8, program.null),
    }
    for name, correct in corrections.items():
        begun = time.perf_counter()
        answer = correct()
        seconds = time.perf_counter() - begun
        found = solver.proved(x, answer)
        rows.append(row(seed, f"network, corrected {name}", found, best, seconds))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problem", help="an .npz file; without: DC3's size")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--epochs", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("pl_pointwise", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    family = Family(100, 50, 50, 10_000)
    if arguments.problem:
        family = Family.of_file(arguments.problem)
    begun = time.perf_counter()
    best = by_clarabel(family, problems(family).x[split_of(family)["test"]])
    seconds = (time.perf_counter() - begun) / len(best)
    print(f"Clarabel: {1000 * seconds:.1f} ms an instance")
    rows: list[Row] = []
    for seed in arguments.seeds:
        rows += study(family, arguments.problem, seed, arguments.epochs, best)
        print(pd.DataFrame(rows).query("seed == @seed").to_string(), flush=True)
    if not arguments.problem:
        pd.DataFrame(rows).to_csv(OUTPUT, index=False, float_format="%.5g")


if __name__ == "__main__":
    main()
