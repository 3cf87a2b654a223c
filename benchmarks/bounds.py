"""Proofs of answers: what a bound proves of 833 unseen instances, against another solver.

    python benchmarks/bounds.py --seeds 0 1 2 3 4                  # DC3's convex problems
    python benchmarks/bounds.py --problem FILE.npz --epochs 20     # one's own

A network is trained by Pointwise() for --epochs; then λ(x) by its bound for 20, from the run's mean
price. Every optimum is found once more by Clarabel (pip install cvxpy clarabel). A line for a seed,
what the answer is, and its dtype: the largest violation; the proved gap, mean and largest; the true
gap, mean; how many bounds are valid (at most the optimum plus 1e-7 of it, Clarabel's accuracy); and
milliseconds an answer.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from importlib import import_module

import numpy as np
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


def line(seed: int, name: str, found: Solution, best: Tensor, seconds: float) -> None:
    true = (found.objective - best) / best.abs()
    valid = int((found.bound <= best + 1e-7 * best.abs()).sum())
    cells = [
        str(seed),
        name,
        str(found.y.dtype)[6:],
        f"{float(found.violation.max()):.1e}",
    ]
    cells += [
        f"{100 * float(found.gap.mean()):.4f} %",
        f"{100 * float(found.gap.max()):.4f} %",
    ]
    cells += [f"{100 * float(true.mean()):.4f} %", f"{valid} of {len(best)}"]
    print(f"| {' | '.join(cells)} | {1000 * seconds / len(best):.2f} |", flush=True)


def study(
    family: Family, problem: str | None, seed: int, epochs: int, best: Tensor
) -> None:
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
    program, steps = solver.program, solver.ascents
    for ascents in dict.fromkeys((0, steps)):
        solver.ascents = ascents
        name = "λ(x) alone" if not ascents else f"λ(x), Newton steps: {ascents}"
        for kind in (torch.float32, torch.float64):
            begun = time.perf_counter()
            found = solver(x.to(kind))
            line(seed, name, found, best, time.perf_counter() - begun)
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
        line(
            seed, f"network, corrected {name}", solver.proved(x, answer), best, seconds
        )


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
    print(
        f"Clarabel: {1000 * (time.perf_counter() - begun) / len(best):.1f} ms an instance"
    )
    print(
        "| seed | answer | dtype | violation | proved, mean | largest | true | valid | ms |"
    )
    print("|---" * 9 + "|")
    for seed in arguments.seeds:
        study(family, arguments.problem, seed, arguments.epochs, best)


if __name__ == "__main__":
    main()
