"""Families of optimisation problems, at the size that DC3 published: methods side by side.

    python benchmarks/families.py                                    # all of it: hours on one core
    python benchmarks/families.py --problem convex --method "Pointwise()" --seeds 0 1
    python benchmarks/families.py --table                            # the table and the plot alone

A network maps x to y. Every method has the same network, data, learning rate and epochs; nothing is
tuned. Judged are 833 instances that did not train, with and without 100 correction steps. A row of
the CSV is a finished run, which is not repeated. ``cooper`` is tried where it is installed.
"""

from __future__ import annotations

import argparse
import csv
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor, nn

from pl_pointwise import (
    Average,
    Formulation,
    Optimization,
    Penalty,
    Pointwise,
    Relaxed,
    Training,
)
from pl_pointwise.correction import Corrected
from pl_pointwise.tasks.family.family import (
    BEYOND,
    Family,
    FamilyDataModule,
    FamilyModule,
    Proxy,
    cost,
    optimum,
    problems,
    split_of,
)

RESULTS = Path(__file__).parent / "evidence/results"
CORRECTION, RATE, BATCH, EPOCHS, MARGIN = 100, 1e-3, 200, 150, 0.03
ALLOWED = 1e-4
"""The largest violation that a corrected answer may have."""
WEIGHTS = (1, 3, 10, 30, 100, 300, 1000)
UNITS = (0.01, 100.0)
SIZE = {"variables": 100, "equations": 50, "inequalities": 50, "instances": 10_000}


@dataclass(frozen=True)
class Problem:
    family: Family
    equalities: Any = "completion"


PROBLEMS = {
    "convex": Problem(Family(**SIZE)),
    "nonconvex": Problem(Family(**SIZE, nonconvex=True)),
    "equalities in the loss": Problem(Family(**SIZE), "loss"),
}


@dataclass(frozen=True)
class Method:
    formulation: Callable[[], Formulation]
    margin: float = 0.0
    unit: float = 1.0  # What the constraints are multiplied by in training.


def _penalty(weight: float, shape: Any, margin: float = 0.0) -> Method:
    return Method(lambda: Penalty(weight=weight, shape=shape), margin)


METHODS = {
    "Pointwise()": Method(Pointwise),
    "Relaxed(price=10)": Method(lambda: Relaxed(price=10.0)),
    **{f"hinge {w}": _penalty(w, "hinge") for w in WEIGHTS},
    **{f"squared hinge {w}": _penalty(w, "squared_hinge") for w in WEIGHTS},
    "Average": Method(lambda: Average(dual_lr=1.0)),
    "Pointwise(), margin": Method(Pointwise, MARGIN),
    **{f"hinge {w}, margin": _penalty(w, "hinge", MARGIN) for w in (30, 100)},
    **{
        f"Pointwise(), violations × {unit:g}": Method(Pointwise, unit=unit)
        for unit in UNITS
    },
}
COOPER = "cooper, indexed multipliers"
COOPERS = {COOPER: 1.0, **{f"cooper, violations × {unit:g}": unit for unit in UNITS}}
"""With the unit of its constraints."""

PUBLISHED = [
    # problem, method, objective, worst inequality, mean |equality|: results_summary.dict of
    # locuslab/DC3, five seeds; test instances, after correction where the method has one.
    ("convex", "OSQP, published", -15.05, 0.0, 0.0),
    ("convex", "DC3, published", -13.46, 0.0002, 0.0),
    ("convex", "completion, supervised, published", -14.68, 0.89, 0.0),
    ("convex", "soft penalty, published", -12.57, 0.0, 0.133),
    ("nonconvex", "IPOPT, published", -11.59, 0.0, 0.0),
    ("nonconvex", "DC3, published", -10.66, None, 0.0),
    ("nonconvex", "completion, supervised, published", -10.99, 0.87, 0.0),
]


# Runs -------------------------------------------------------------------------------------------


class InUnit(FamilyModule):
    """The constraints in another unit."""

    unit = 1.0

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        found = super().constraint_values(outputs, batch)
        return {name: self.unit * values for name, values in found.items()}


def quiet_trainer(epochs: int) -> Trainer:
    """A trainer that evaluates, saves and prints nothing."""
    return Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )


def trained(problem: Problem, method: Method, seed: int, epochs: int) -> Proxy:
    """The network after a training with the package."""
    seed_everything(seed, verbose=False)
    module = InUnit(
        method.formulation(),
        problem.family,
        equalities=problem.equalities,
        margin=method.margin,
        training=Training(Optimization(learning_rate=RATE, schedule="linear")),
    )
    module.unit = method.unit
    trainer = quiet_trainer(epochs)
    trainer.fit(module, FamilyDataModule(problem.family, batch_size=BATCH, seed=seed))
    return module.proxy.eval()


def indexed(kind: Any, samples: int, columns: int) -> Any:
    """cooper's constraint with a multiplier for each sample and column."""
    import cooper

    return cooper.Constraint(
        constraint_type=kind,
        formulation_type=cooper.formulations.AugmentedLagrangian,
        multiplier=cooper.multipliers.IndexedMultiplier(samples * columns),
        penalty_coefficient=cooper.penalty_coefficients.DensePenaltyCoefficient(
            torch.tensor(1.0)
        ),
    )


def trained_by_cooper(problem: Problem, unit: float, seed: int, epochs: int) -> Proxy:
    """The same by cooper 1.0: an augmented Lagrangian with indexed multipliers.

    Its penalty coefficient and the rate of its multipliers are 1, as nothing else is said.
    """
    import cooper

    torch.manual_seed(seed)
    of, train = problems(problem.family), split_of(problem.family)["train"]
    proxy, x = Proxy(problem.family, problem.equalities), of.x[train].float()

    class Minimization(cooper.ConstrainedMinimizationProblem):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            types = cooper.ConstraintType
            self.below = indexed(types.INEQUALITY, len(x), len(of.h))
            if problem.equalities == "loss":
                self.equal = indexed(types.EQUALITY, len(x), of.x.shape[1])

        def compute_cmp_state(self, rows: Tensor) -> Any:
            y = proxy(x[rows])
            found = {self.below: proxy.inequalities(y, x[rows])}
            if problem.equalities == "loss":
                found[self.equal] = proxy.equalities(y, x[rows])
            states = {}
            for each, values in found.items():
                count = values.shape[1]
                features = (rows[:, None] * count + torch.arange(count)).flatten()
                states[each] = cooper.ConstraintState(
                    violation=unit * values.flatten(), constraint_features=features
                )
            # Its Lagrangian sums over constraints, so the objective is the batch's sum too.
            return cooper.CMPState(
                loss=proxy.objective(y).sum(), observed_constraints=states
            )

    cmp = Minimization()
    primal = torch.optim.AdamW(proxy.parameters(), lr=RATE, weight_decay=0.0)
    dual = torch.optim.SGD(cmp.dual_parameters(), lr=1.0, maximize=True)
    optimizer = cooper.optim.AlternatingDualPrimalOptimizer(
        cmp=cmp, primal_optimizers=primal, dual_optimizers=dual
    )
    steps = epochs * -(-len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.LinearLR(primal, 1.0, 0.0, steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(BATCH):
            optimizer.roll(compute_cmp_state_kwargs={"rows": rows})
            schedule.step()
    return proxy.eval()


class Exact(nn.Module):
    """A network whose answers are projected onto the equalities: what completion does by itself."""

    def __init__(self, proxy: Proxy) -> None:
        super().__init__()
        self.proxy = proxy

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proxy(x)
        return y - self.proxy.equalities(y, x) @ self.proxy.plus.T


def measure(problem: Problem, proxy: Proxy, steps: int) -> dict[str, float]:
    """What the test instances show, in float64, after so many correction steps."""
    family, of = problem.family, problems(problem.family)
    part = split_of(family)["test"]
    x, best = of.x[part], optimum(family)[part].mean()
    with torch.no_grad():
        # Half of what is allowed: the float32 of the steps rounds.
        corrected = Corrected(
            Exact(proxy), proxy.inequalities, steps, ALLOWED / 2, proxy.null
        )
        y = (corrected if steps else proxy)(x.float()).double()
        excess = (y @ of.G.T - of.h).clamp(min=0).amax(1)
        values = cost(y, of.Q, of.p, family.nonconvex)
        off = (y @ of.A.T - x).abs()
    return {
        "objective": float(values.mean()),
        "gap": float((values.mean() - best) / best.abs()),
        "worst": float(excess.mean()),
        "largest": float(excess.max()),
        "beyond": float((excess > BEYOND).double().mean()),
        "equality": float(off.mean()),
        "worst equality": float(off.amax(1).mean()),
    }


def study(
    output: Path,
    names: Sequence[str],
    methods: Sequence[str],
    seeds: Sequence[int],
    epochs: int,
) -> None:
    """Runs what the CSV lacks."""
    for name in names:
        for method in methods:
            for seed in seeds:
                table = read(output)
                same = (table["problem"] == name) & (table["method"] == method)
                if (same & (table["seed"] == seed) & (table["epochs"] == epochs)).any():
                    continue
                started = time.perf_counter()
                if method in COOPERS:
                    proxy = trained_by_cooper(
                        PROBLEMS[name], COOPERS[method], seed, epochs
                    )
                else:
                    proxy = trained(PROBLEMS[name], METHODS[method], seed, epochs)
                seconds = time.perf_counter() - started
                key = {
                    "problem": name,
                    "method": method,
                    "seed": seed,
                    "epochs": epochs,
                }
                rows = []
                for steps in (0, CORRECTION):
                    found = measure(PROBLEMS[name], proxy, steps)
                    short = {column: f"{value:.6g}" for column, value in found.items()}
                    rows.append(
                        {
                            **key,
                            "correction": steps,
                            **short,
                            "seconds": f"{seconds:.0f}",
                        }
                    )
                append(output, rows)


def read(path: Path) -> pd.DataFrame:
    """The rows so far."""
    columns = ["problem", "method", "seed", "epochs", "correction"]
    return pd.read_csv(path) if path.exists() else pd.DataFrame(columns=columns)


def append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        if fresh:
            writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print(*row.values(), flush=True)


# Table and plot ---------------------------------------------------------------------------------


def summarise(table: pd.DataFrame) -> str:
    """Means over the seeds as Markdown, with the published rows."""
    head = "problem|method|correction|seeds|objective|gap %|worst inequality|beyond|equality"
    lines = [f"| {' | '.join(head.split('|'))} |", "|---" * (head.count("|") + 1) + "|"]
    for problem in dict.fromkeys([*table["problem"], *(row[0] for row in PUBLISHED)]):
        own = table[table["problem"] == problem]
        for (method, steps), rows in own.groupby(["method", "correction"], sort=False):
            of = rows.mean(numeric_only=True)
            cells = [problem, method, steps, len(rows), f"{of['objective']:.4f}"]
            cells += [
                f"{100 * of['gap']:.2f}",
                f"{of['worst']:.4f}",
                f"{of['beyond']:.2f}",
            ]
            lines.append(f"| {' | '.join(map(str, cells))} | {of['equality']:.4f} |")
        for name, method, objective, worst, equality in PUBLISHED:
            if name == problem:
                shown = "" if worst is None else f"{worst:g}"
                lines.append(
                    f"| {name} | {method} | | 5 | {objective} | | {shown} | | {equality:g} |"
                )
    return "\n".join(lines)


def draw(table: pd.DataFrame, problem: str, path: Path) -> None:
    """Gap to the optimum against the worst violation, unseen instances, both logarithmic."""
    from matplotlib.figure import Figure

    own = table[(table["problem"] == problem) & (table["correction"] == 0)]
    points = own.groupby("method", sort=False)[["gap", "worst"]].mean()
    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    panel = figure.subplots()
    panel.loglog()
    for shape, colour in (("hinge", "#D55E00"), ("squared hinge", "#56B4E9")):
        sweep = [f"{shape} {w}" for w in WEIGHTS if f"{shape} {w}" in points.index]
        # A hinge that is too light is below the optimum by violating: its distance is drawn.
        xs, ys = points.loc[sweep, "gap"].abs(), points.loc[sweep, "worst"]
        panel.plot(xs, ys, "o-", color=colour, label=f"{shape}, by weight")
        for name, x, y in zip(sweep, xs, ys, strict=True):
            place = {"xytext": (-2, 5), "textcoords": "offset points", "ha": "center"}
            panel.annotate(name.split()[-1], (x, y), fontsize="small", **place)
    rest = {"Pointwise()": ("*", "#0072B2"), "Pointwise(), margin": ("P", "#0072B2")}
    rest |= {"Relaxed(price=10)": ("^", "#009E73"), "Average": ("s", "#E69F00")}
    rest |= {"hinge 30, margin": ("P", "#D55E00"), COOPER: ("D", "#CC79A7")}
    for name, (marker, colour) in rest.items():
        if name in points.index:
            x, y = points.loc[name].abs()
            size = 16 if marker == "*" else 8
            panel.plot([x], [y], marker, color=colour, markersize=size, label=name)
    for name in (each for each in COOPERS if each != COOPER and each in points.index):
        x, y = points.loc[name].abs()
        panel.plot([x], [y], "D", color="#CC79A7", markersize=8, fillstyle="none")
        panel.annotate(
            name.split(", ")[1], (x, y), xytext=(-30, -16), textcoords="offset points"
        )
    panel.set_xlabel("distance to the optimum, relative (lower is better)")
    panel.set_ylabel("worst violation, mean (lower is better)")
    panel.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [*METHODS, *COOPERS]
    parser.add_argument("--problem", nargs="+", choices=PROBLEMS, default=[*PROBLEMS])
    parser.add_argument("--method", nargs="+", choices=known, help="without: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--output", type=Path, default=RESULTS / "families.csv")
    parser.add_argument("--table", action="store_true", help="no run: table and plot")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("pl_pointwise", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not given.table:
        installed = [*METHODS, *(COOPERS if find_spec("cooper") else [])]
        study(
            given.output,
            given.problem,
            given.method or installed,
            given.seeds,
            given.epochs,
        )
        return
    table = read(given.output)
    print(summarise(table))
    for problem in table["problem"].unique():
        file = f"{given.output.stem}-{problem.replace(' ', '_')}.png"
        draw(table, problem, given.output.with_name(file))


if __name__ == "__main__":
    main()
