"""Corrections beside each other: gradients, Newton, and the nearest feasible point by scipy.

    python benchmarks/corrections.py

On DC3's convex problems and SnareNet's two, of a network after 5 epochs (its answers violate a lot)
and after 60; 833 unseen instances in float64, one thread. A line: the largest violation; the mean
distance that answers were moved; the gap, as a share of the mean optimum; milliseconds an instance,
the median of three. scipy's SLSQP has 20 of the instances, and its gap is theirs alone.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from scipy.optimize import minimize
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.families import append
from benchmarks.published import nonconvex, qcqp
from benchmarks.published.runs import answers, inequalities, slopes, train
from pl_pointwise import Pointwise
from pl_pointwise.correction import corrected, newton_corrected
from pl_pointwise.tasks.family.family import (
    Family,
    cost,
    optimum,
    problems,
    split_of,
)

OUTPUT = Path(__file__).parent / "evidence/results/corrections.csv"
FEW = 20
EPOCHS = (5, 60)


def by_scipy(family: Family, y: Tensor) -> Tensor:
    """The nearest feasible points, in the coordinates of the null space."""
    null, rows = problems(family).null, []
    for row in y:

        def moved(z: object, row: Tensor = row) -> Tensor:
            return (row + null @ torch.as_tensor(z, dtype=null.dtype)).reshape(1, -1)

        found = minimize(
            lambda z: (z @ z) / 2,
            torch.zeros(null.shape[1], dtype=null.dtype).numpy(),
            jac=lambda z: z,
            constraints={
                "type": "ineq",
                "fun": lambda z, at=moved: -inequalities(family, at(z))[0].numpy(),
                "jac": lambda z, at=moved: -(slopes(family, at(z))[0] @ null).numpy(),
            },
            method="SLSQP",
            options={"ftol": 1e-12, "maxiter": 200},
        )
        rows.append(moved(found.x)[0])
    return torch.stack(rows)


def corrections(family: Family) -> dict[str, Callable[[Tensor], Tensor]]:
    null = problems(family).null

    def values(y: Tensor) -> Tensor:
        return inequalities(family, y)

    def of_y(y: Tensor) -> Tensor:
        return slopes(family, y)

    return {
        "none": lambda y: y,
        "gradient, 100 steps, 1e-4": lambda y: corrected(y, values, 100, 1e-4, null),
        "gradient, 5,000 steps, 1e-8": lambda y: corrected(y, values, 5000, 1e-8, null),
        "Newton, 1e-8": lambda y: newton_corrected(y, values, of_y, within=null),
        "Newton, one step": lambda y: newton_corrected(
            y, values, of_y, within=null, steps=1
        ),
        "nearest point, scipy": lambda y: by_scipy(family, y[:FEW]),
    }


def study(name: str, family: Family, epochs: int) -> list[dict[str, object]]:
    proxy = train(Pointwise(), family, epochs, batch=200, seed=0)
    of, part, rows = problems(family), split_of(family)["test"], []
    x, best = of.x[part], optimum(family)[part]
    y = answers(proxy, family, x, correct=False)
    for label, correct in corrections(family).items():
        rounds = 1 if "scipy" in label else 3
        spent = []
        for _ in range(rounds):
            begun = time.process_time()
            found = correct(y)
            spent.append(time.process_time() - begun)
        count = len(found)
        value = cost(found, of.Q, of.p, family.nonconvex)
        gap = (value - best[:count]).mean() / best[:count].mean().abs()
        excess = inequalities(family, found).clamp(min=0).amax()
        cells = {
            "family": name,
            "epochs": epochs,
            "correction": label,
            "instances": count,
            "violation, largest": f"{float(excess):.2g}",
            "moved, mean": f"{float((found - y[:count]).norm(dim=1).mean()):.4g}",
            "gap, %": f"{100 * float(gap):.4g}",
            "ms": f"{1000 * sorted(spent)[len(spent) // 2] / count:.3g}",
        }
        rows.append(cells)
    return rows


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("pl_pointwise", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    OUTPUT.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        families = {"DC3, convex": Family(100, 50, 50, 10_000)}
        for table in (nonconvex.TABLE, qcqp.TABLE):
            families[table.name] = table.family(Path(folder))
        for name, family in families.items():
            for epochs in EPOCHS:
                append(OUTPUT, study(name, family, epochs))


if __name__ == "__main__":
    main()
