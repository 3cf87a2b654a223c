"""Corrections beside each other: gradients, Newton, and the nearest feasible point by scipy.

    python benchmarks/corrections.py                # problems, then plans: minutes on one core
    python benchmarks/corrections.py --plans        # the plans alone

On DC3's convex problems and SnareNet's two, of a network after 5 epochs (its answers violate a lot)
and after 60; 833 unseen instances in float64, one thread. A line: the largest violation; the mean
distance that answers were moved; the gap, as a share of the mean optimum; milliseconds an instance,
the median of three. scipy's SLSQP has 20 of the instances, and its gap is theirs alone. Plans are
those of HardNet++'s unicycle (andreagoertzen/HardNet-plus-plus, mpc_obst.py): 20 steps from its
starts, random inputs, states and inputs then off by 0.1; they have no objective here.
"""

from __future__ import annotations

import argparse
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


STEPS, EVERY, PLANS = 20, 0.2, 100
OBSTACLE = (0.51020408, 0.90702948)


def moved(state: Tensor, inputs: Tensor) -> Tensor:
    """The state of a unicycle, (..., 3), after an interval with inputs (..., 2): speed and turn."""
    angle, speed, turn = state[..., 2], inputs[..., 0], inputs[..., 1]
    change = torch.stack([speed * angle.cos(), speed * angle.sin(), turn], -1)
    return state + EVERY * change


def plans() -> tuple[Tensor, Tensor]:
    """Starts (B, 3), and plans that are nearly driven from them, (B, 100)."""
    draw = torch.Generator().manual_seed(0)

    def uniform(low: list[float], high: list[float], *shape: int) -> Tensor:
        share = torch.rand(*shape, len(low), generator=draw).double()
        return torch.tensor(low) + share * (torch.tensor(high) - torch.tensor(low))

    start = uniform([-4.0, -2.4, -0.45], [-2.2, 2.4, 0.45], PLANS)
    inputs = uniform([0.0, -1.5], [2.0, 1.5], PLANS, STEPS)
    states = [start]
    for step in range(STEPS):
        states.append(moved(states[-1], inputs[:, step]))
    y = torch.cat([torch.stack(states[1:], 1).flatten(1), inputs.flatten(1)], 1)
    return start, y + 0.1 * torch.randn(y.shape, generator=draw).double()


def parts(y: Tensor) -> tuple[Tensor, Tensor]:
    """States (B, T, 3) and inputs (B, T, 2) of plans."""
    states, inputs = y.split([3 * STEPS, 2 * STEPS], 1)
    return states.reshape(-1, STEPS, 3), inputs.reshape(-1, STEPS, 2)


def study_of_plans() -> list[dict[str, object]]:
    start, y = plans()
    axes = torch.tensor(OBSTACLE).double()

    def dynamics(y: Tensor) -> Tensor:
        states, inputs = parts(y)
        before = torch.cat([start[:, None], states[:, :-1]], 1)
        return (states - moved(before, inputs)).flatten(1)

    def limits(y: Tensor) -> Tensor:
        states, inputs = parts(y)
        obstacle = 1 - (states[:, :, :2].square() * axes).sum(2)
        speed, turn = inputs.unbind(2)
        return torch.cat([obstacle, -speed, speed - 2, turn - 1.5, -1.5 - turn], 1)

    def both(y: Tensor) -> Tensor:
        return torch.cat([limits(y), dynamics(y).abs()], 1)

    tried: dict[str, Callable[[], Tensor]] = {
        "none": lambda: y,
        "gradient, 100 steps": lambda: corrected(y, both, 100, 1e-8),
        "gradient, 2,000 steps": lambda: corrected(y, both, 2000, 1e-8),
        "Newton, 10 steps": lambda: newton_corrected(
            y, limits, equalities=dynamics, steps=10
        ),
    }
    rows: list[dict[str, object]] = []
    for label, correct in tried.items():
        begun = time.process_time()
        found = correct()
        spent = 1000 * (time.process_time() - begun) / PLANS
        cells = {
            "family": "plans",
            "epochs": 0,
            "correction": label,
            "instances": PLANS,
            "violation, largest": f"{float(both(found).amax()):.2g}",
            "moved, mean": f"{float((found - y).norm(dim=1).mean()):.4g}",
            "gap, %": "",
            "ms": f"{spent:.3g}",
        }
        rows.append(cells)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", action="store_true", help="the plans alone")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.plans:
        append(OUTPUT, study_of_plans())
        return
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
    append(OUTPUT, study_of_plans())


if __name__ == "__main__":
    main()
