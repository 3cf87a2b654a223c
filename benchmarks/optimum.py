"""Every formulation on problems whose constrained optimum is known: what is paid, what is violated.

    python benchmarks/optimum.py --output results/optimum          (all: hours; needs cvxpy)
    python benchmarks/optimum.py --problems margins band --epochs 30 --units 1

Convex problems are solved by cvxpy; of the others the objective itself is shown.  Ten steps an
epoch, Adam, a rate that falls to 0.  A constraint is stated in units of .01, 1 and 100: the problem
stays the same, so the result should.  Violated: by more than .02 of its unit, in the band at all.
The multipliers of the convex problems stand beside the exact ones: their sums, and the median of
λ/λ* over the ten dearest samples of each constraint.  Writes optimum.csv and optimum.png.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from lightning.pytorch import Trainer, seed_everything
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

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
from pl_pointwise.compare.plots import BLUE, CYAN, GREEN, ORANGE, RED

MARGIN = 0.02
STEPS = 10
Values = Callable[[nn.Module, Tensor], dict[str, Tensor]]
Optimum = tuple[float, list[np.ndarray]]
"""The objective, and for each constraint, in the order of the bounds, a multiplier a sample."""


@dataclass
class Problem:
    """Minimise mean ``objective`` under ``values`` ≤ ``bounds``, on ``samples`` samples."""

    samples: int
    net: Callable[[], nn.Module]
    objective: Callable[[nn.Module, Tensor], Tensor]
    values: Values
    bounds: dict[str, float]
    units: dict[str, float] = field(default_factory=lambda: {"c": 1.0})
    solve: Callable[[], Optimum] | None = None
    held_out: tuple[int, Values, Callable[[nn.Module, Tensor], Tensor]] | None = None
    learning_rate: float = 0.03
    epochs: int | None = None
    batch: int | None = None
    equality: bool = False


class Task(PointwiseModule):
    """A problem as a task, its constraints in another unit."""

    def __init__(self, problem: Problem, formulation: Formulation | None, unit: float) -> None:
        constraints = {
            name: Constraint(equals=b * unit) if problem.equality else Constraint(at_most=b * unit)
            for name, b in problem.bounds.items()
        }
        training = Training(Optimization(problem.learning_rate, 0.0, "linear"))
        super().__init__(formulation=formulation, constraints=constraints, training=training)
        self.problem, self.unit, self.net = problem, unit, problem.net()

    def forward(self, batch: Any) -> Tensor:
        return batch["index"]

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:
        return self.problem.objective(self.net, outputs)

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {n: self.unit * v for n, v in self.problem.values(self.net, outputs).items()}


class Rows(PointwiseDataModule):
    def __init__(self, samples: int, batch: int) -> None:
        super().__init__(batch_size=batch)
        self.datasets = {"train": [{"row": i} for i in range(samples)]}


# Problems ---------------------------------------------------------------------------------------


def _linear(inputs: int, outputs: int) -> nn.Module:
    net = nn.Linear(inputs, outputs)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    return net


def _digits(seed: int, count: int = 400) -> tuple[Tensor, Tensor, Tensor]:
    """Digits, the same transposed, and their labels."""
    digits = load_digits()
    chosen = np.random.default_rng(seed).permutation(len(digits.data))[:count]
    upright = torch.tensor(digits.data[chosen] / 16, dtype=torch.float32)
    turned = upright.view(-1, 8, 8).transpose(1, 2).reshape(-1, 64)
    return upright, turned, torch.tensor(digits.target[chosen])


def _pair(contradicting: int = 0) -> tuple[Tensor, Tensor]:
    digits = load_digits()
    keep = np.isin(digits.target, [3, 8])
    x = torch.tensor(digits.data[keep][:300] / 16, dtype=torch.float32)
    y = torch.tensor(np.where(digits.target[keep][:300] == 3, 1.0, -1.0), dtype=torch.float32)
    return torch.cat([x, x[:contradicting]]), torch.cat([y, -y[:contradicting]])


def _solved(problem: Any) -> Optimum:
    """The optimum of a mean over the samples: there λ of a sample is so many times cvxpy's."""
    value = problem.solve(solver="CLARABEL")
    return float(value), [c.dual_value * c.size for c in problem.constraints]


def margins(contradicting: int = 0) -> Problem:
    """The smallest weights that tell two digits apart with a margin of 1."""
    x, y = _pair(contradicting)

    def solve() -> Optimum:
        import cvxpy as cp

        w, b = cp.Variable(64), cp.Variable()
        met = [cp.multiply(y.numpy(), x.numpy() @ w + b) >= 1]
        return _solved(cp.Problem(cp.Minimize(cp.sum_squares(w)), met))

    return Problem(
        len(x),
        lambda: _linear(64, 1),
        lambda net, i: net.weight.square().sum().expand(len(i)),
        lambda net, i: {"c": -net(x[i])[:, 0] * y[i]},
        {"c": -1.0},
        solve=None if contradicting else solve,
    )


def retention() -> Problem:
    """Learn turned digits; the cross-entropy of each upright one stays below .7."""
    upright, turned, y = _digits(0)
    regular = 1e-3

    def solve() -> Optimum:
        import cvxpy as cp

        w, b, labels = cp.Variable((64, 10)), cp.Variable(10), np.eye(10)[y.numpy()]

        def entropy(x: Tensor) -> Any:
            z = x.numpy() @ w + np.ones((len(x), 1)) @ cp.reshape(b, (1, 10), order="C")
            return cp.log_sum_exp(z, axis=1) - cp.sum(cp.multiply(labels, z), axis=1)

        cost = cp.sum(entropy(turned)) / len(y) + regular * cp.sum_squares(w)
        problem = cp.Problem(cp.Minimize(cost), [entropy(upright) <= 0.7])
        return _solved(problem)

    return Problem(
        len(y),
        lambda: _linear(64, 10),
        lambda net, i: (
            cross_entropy(net(turned[i]), y[i], reduction="none")
            + regular * net.weight.square().sum()
        ),
        lambda net, i: {"c": cross_entropy(net(upright[i]), y[i], reduction="none")},
        {"c": 0.7},
        solve=solve,
    )


def unlike_units() -> Problem:
    """Three constraints in units of 1, .01 and 100, one of them nearly met at the start."""
    x, _, y = _digits(1)

    def solve() -> Optimum:
        import cvxpy as cp

        w, b, labels = cp.Variable((64, 10)), cp.Variable(10), np.eye(10)[y.numpy()]
        z = x.numpy() @ w + np.ones((len(x), 1)) @ cp.reshape(b, (1, 10), order="C")
        right = cp.sum(cp.multiply(labels, z), axis=1)
        met = [cp.log_sum_exp(z, axis=1) - right <= 1.3, cp.max(cp.abs(z), axis=1) <= 5, right >= 0]
        return _solved(cp.Problem(cp.Minimize(cp.sum_squares(w)), met))

    def values(net: nn.Module, i: Tensor) -> dict[str, Tensor]:
        z = net(x[i])
        right = z.gather(1, y[i][:, None])[:, 0]
        entropy = cross_entropy(z, y[i], reduction="none")
        return {"nats": entropy, "cap": 1e-2 * z.abs().amax(1), "margin": -1e2 * right}

    return Problem(
        len(y),
        lambda: _linear(64, 10),
        lambda net, i: net.weight.square().sum().expand(len(i)),
        values,
        {"nats": 1.3, "cap": 0.05, "margin": 0.0},
        {"nats": 1.0, "cap": 1e-2, "margin": 1e2},
        solve=solve,
    )


def equalities() -> Problem:
    """The smallest weights whose output is a given number for each of 40 samples."""
    x = _digits(4, 40)[0]
    y = torch.randn(40, generator=torch.Generator().manual_seed(0))

    def solve() -> Optimum:
        design = torch.cat([x, torch.ones(40, 1)], 1).double()
        import cvxpy as cp

        w = cp.Variable(65)
        met = [design.numpy() @ w == y.numpy()]
        return _solved(cp.Problem(cp.Minimize(cp.sum_squares(w[:64])), met))

    return Problem(
        40,
        lambda: _linear(64, 1),
        lambda net, i: net.weight.square().sum().expand(len(i)),
        lambda net, i: {"c": net(x[i])[:, 0] - y[i]},
        {"c": 0.0},
        solve=solve,
        equality=True,
    )


def _taught() -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor, Tensor]:
    """A small network that knows upright digits, its log-probabilities of them, and the digits."""
    upright, turned, y = _digits(2)
    torch.manual_seed(0)
    net = _small()
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(200):
        optimizer.zero_grad()
        cross_entropy(net(upright), y).backward()
        optimizer.step()
    with torch.no_grad():
        return net.state_dict(), net(upright).log_softmax(-1), upright, turned, y


def _small(state: dict[str, Tensor] | None = None) -> nn.Module:
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    if state is not None:
        net.load_state_dict(state)
    return net


def budget() -> Problem:
    """A network learns turned digits within a KL of .05 on each upright one: objective → 0."""
    state, reference, upright, turned, y = _taught()
    return Problem(
        len(y),
        lambda: _small(state),
        lambda net, i: cross_entropy(net(turned[i]), y[i], reduction="none"),
        lambda net, i: {"c": _kl(net(upright[i]), reference[i])},
        {"c": 0.05},
        {"c": 0.05},
    )


def from_zero() -> Problem:
    """The language tasks' shape: the objective is the KL to the start, 0 there."""
    state, reference, upright, turned, y = _taught()
    return Problem(
        len(y),
        lambda: _small(state),
        lambda net, i: _kl(net(upright[i]), reference[i]),
        lambda net, i: {"c": cross_entropy(net(turned[i]), y[i], reduction="none")},
        {"c": 0.5},
    )


def _kl(logits: Tensor, reference: Tensor) -> Tensor:
    found = kl_div(logits.log_softmax(-1), reference, reduction="none", log_target=True)
    return found.sum(-1)


def band(learning_rate: float = 3e-3) -> Problem:
    """A forecast that must lie in each sample's own band, which the truth does: new inputs too."""
    generator, parts = torch.Generator().manual_seed(0), []
    for count in (600, 300, 600):
        x = torch.rand(count, 6, generator=generator) * 2 - 1
        truth = 2 * x[:, 0] + torch.sin(3 * x[:, 1]) * x[:, 2] + x[:, 3] ** 2
        width = 0.15 + 0.5 * torch.rand(count, generator=generator)
        noise = 0.6 * torch.randn(count, generator=generator)
        outliers = 2.0 * (torch.rand(count, generator=generator) < 0.2)
        parts.append((x, truth + noise + outliers, truth - width, truth + width))

    def values_of(part: tuple[Tensor, ...]) -> Values:
        x, _, low, high = part

        def values(net: nn.Module, i: Tensor) -> dict[str, Tensor]:
            found = net(x[i])[:, 0]
            return {"c": torch.stack([found - high[i], low[i] - found], 1)}

        return values

    def cost_of(part: tuple[Tensor, ...]) -> Callable[[nn.Module, Tensor], Tensor]:
        return lambda net, i: (net(part[0][i])[:, 0] - part[1][i]).square()

    def net() -> nn.Module:
        layers = [nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)]
        return nn.Sequential(*layers)

    return Problem(
        600,
        net,
        cost_of(parts[0]),
        values_of(parts[0]),
        {"c": 0.0},
        held_out=(600, values_of(parts[2]), cost_of(parts[2])),
        learning_rate=learning_rate,
        epochs=40,
        batch=32,
    )


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "margins": margins,
    "margins, 15 contradict": lambda: margins(15),
    "retention": retention,
    "unlike units": unlike_units,
    "equalities": equalities,
    "budget": budget,
    "from zero": from_zero,
    "band": band,
    "band, rate .01": lambda: band(1e-2),
}
METHODS: dict[str, Callable[[], Formulation | None]] = {
    "Pointwise()": Pointwise,
    "Relaxed(price=10)": lambda: Relaxed(price=10.0),
    "Pointwise(alpha=1, dual_lr=.1)": lambda: Pointwise(alpha=1.0, dual_lr=0.1),
    "Pointwise(alpha=10, dual_lr=20)": lambda: Pointwise(alpha=10.0, dual_lr=20.0),
    'Average(alpha="adaptive")': lambda: Average(alpha="adaptive"),
    "Average(dual_lr=.1)": Average,
}
for _weight in (0.1, 1.0, 10.0, 100.0, 1000.0):
    METHODS[f"hinge {_weight:g}"] = lambda w=_weight: Penalty(weight=w, shape="hinge")
    METHODS[f"squared hinge {_weight:g}"] = lambda w=_weight: Penalty(
        weight=w, shape="squared_hinge"
    )
COLOURS = {"Pointwise()": BLUE, "Relaxed(price=10)": GREEN, 'Average(alpha="adaptive")': ORANGE}


# Runs -------------------------------------------------------------------------------------------


def run(
    problem: Problem,
    formulation: Formulation | None,
    unit: float,
    epochs: int,
    optimum: Optimum | None,
) -> dict[str, float]:
    """Trains; objective and shares violated, on training samples and held-out ones if there are."""
    seed_everything(0, verbose=False)
    module = Task(problem, formulation, unit)
    trainer = Trainer(
        max_epochs=problem.epochs or epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, Rows(problem.samples, problem.batch or problem.samples // STEPS))
    parts = {"": (problem.samples, problem.values, problem.objective)}
    parts |= {"held-out ": problem.held_out} if problem.held_out else {}
    found: dict[str, float] = {}
    with torch.no_grad():
        for part, (count, values, objective) in parts.items():
            index = torch.arange(count)
            found[f"{part}objective"] = float(objective(module.net, index).mean())
            excess = []
            for name, value in values(module.net, index).items():
                violation = (value - problem.bounds[name]) / problem.units[name]
                excess.append((violation.abs() if problem.equality else violation).flatten())
            margin = 0.0 if problem.held_out else MARGIN
            found[f"{part}violated"] = float((torch.cat(excess) > margin).float().mean())
    if optimum is None:
        return found
    found["above"] = found["objective"] / optimum[0] - 1
    if not isinstance(formulation, Pointwise):
        return found
    pairs = [
        (exact, unit * problem.units[name] * module.multipliers[name][:, 0].numpy())
        for name, exact in zip(problem.bounds, optimum[1], strict=True)
        if np.abs(exact).max() > 1e-3
    ]
    found["sum of λ/λ*"] = float(
        sum(np.abs(learned).sum() for _, learned in pairs)
        / sum(np.abs(exact).sum() for exact, _ in pairs)
    )
    dearest = [np.argsort(-np.abs(exact))[:10] for exact, _ in pairs]
    ratios = [learned[i] / exact[i] for i, (exact, learned) in zip(dearest, pairs, strict=True)]
    found["dearest λ/λ*"] = float(np.median(np.concatenate(ratios)))
    return found


def draw(table: pd.DataFrame, path: Path) -> None:
    """What is paid against the share violated, a point a run of the longest; sweeps as lines."""
    problems = list(dict.fromkeys(table["problem"]))
    columns = min(3, len(problems))
    lines = -(-len(problems) // columns)
    figure = Figure(figsize=(4 * columns, 3.4 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for panel, name in zip(panels, problems, strict=False):
        rows = table[table["problem"] == name]
        rows = rows[rows["epochs"] == rows["epochs"].max()]
        known, held_out = (
            column in rows and rows[column].notna().all()
            for column in ("above", "held-out objective")
        )
        part = "held-out " if held_out else ""
        paid = "above" if known else f"{part}objective"
        for family, colour in (("hinge", RED), ("squared hinge", CYAN)):
            sweep = rows[rows["method"].str.startswith(f"{family} ")]
            panel.plot(sweep[f"{part}violated"], sweep[paid], ".-", color=colour, label=family)
        for method, colour in COLOURS.items():
            own = rows[rows["method"] == method]
            panel.plot(own[f"{part}violated"], own[paid], "o", color=colour, label=method)
        panel.set(title=f"{name}{', new inputs' if held_out else ''}", xlim=(-0.02, None))
        panel.set(xlabel="share violated", ylabel="above the optimum" if known else "objective")
        if known:
            panel.set_yscale("symlog", linthresh=0.1)
            panel.axhline(0, color="black", linewidth=0.8)
    for panel in panels[len(problems) :]:
        panel.set_axis_off()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=PROBLEMS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--epochs", nargs="+", type=int, default=[6, 10, 30, 100])
    parser.add_argument("--units", nargs="+", type=float, default=[0.01, 1.0, 100.0])
    parser.add_argument("--output", type=Path, default=Path("results/optimum"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("pl_pointwise").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in arguments.problems:
        problem = PROBLEMS[name]()
        optimum = problem.solve() if problem.solve else None
        for epochs in arguments.epochs if problem.epochs is None else [problem.epochs]:
            for method in arguments.methods:
                for unit in arguments.units:
                    found = run(problem, METHODS[method](), unit, epochs, optimum)
                    row = {"problem": name, "epochs": epochs, "method": method, "unit": unit}
                    rows.append(row | found)
                    print(*row.values(), {k: round(v, 4) for k, v in found.items()}, flush=True)
                    pd.DataFrame(rows).to_csv(arguments.output / "optimum.csv", index=False)
    draw(pd.DataFrame(rows), arguments.output / "optimum.png")


if __name__ == "__main__":
    main()
