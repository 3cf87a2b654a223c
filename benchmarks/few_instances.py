"""Few training instances: which requirements hold on new ones, and what helps.

    python -m benchmarks.few_instances            (ten minutes)

Two small tasks whose requirement needs no label: nine quantiles of 200 rows that do not cross, and
a classifier of 60 points whose slope stays below 4 at each. Each is trained on its points and,
``drawn``, with the requirement at inputs that are drawn anew in every step; the objective always
sees the labelled rows alone. Measured on 2,000 new inputs: the share violated, the mean violation
and the objective. Writes a row for each run to evidence/results/few_instances.csv, whose means over
the seeds docs/few_instances.md has.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise, product
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.loops import Row, minimise, write
from pl_pointwise import Constraint, Formulation, Penalty, Pointwise, PointwiseLoss

STEPS_AN_EPOCH, EPOCHS, RATE, NEW = 10, 100, 1e-2, 2000
METHODS: dict[str, Callable[[], Formulation]] = {
    "Pointwise()": Pointwise,
    "Pointwise(memory=False)": lambda: Pointwise(memory=False),
}
for _weight in (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0):
    METHODS[f"hinge {_weight:g}"] = lambda w=_weight: Penalty(weight=w, shape="hinge")
STRICTER = ("Pointwise()", "Pointwise(memory=False)")
OUTPUT = Path(__file__).parent / "evidence/results/few_instances.csv"


@dataclass
class Task:
    """Labelled rows, and a requirement ``values ≤ bound`` that is a matter of the inputs alone.

    Args:
        draw: so many rows, x (n, D) and y (n,).
        objective: ℓ₀ (n,) of a network at rows.
        values: ℓ (n, K) of a network at inputs.
        stricter: the bound with a margin.
    """

    rows: int
    net: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    objective: Callable[[nn.Module, Tensor, Tensor], Tensor]
    values: Callable[[nn.Module, Tensor], Tensor]
    bound: float
    stricter: float


def network(*widths: int) -> nn.Module:
    parts: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        parts += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*parts[:-1])


def quantiles() -> Task:
    """Nine quantiles of noise that grows with x; the lower of two neighbours is not above."""
    levels = torch.linspace(0.1, 0.9, 9)

    def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = 2 * torch.rand(count, 3, generator=generator) - 1
        noise = torch.randn(count, generator=generator)
        return x, torch.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + (
            0.3 + 0.3 * x[:, 1].abs()
        ) * noise

    def objective(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        off = y[:, None] - net(x)
        return torch.maximum(levels * off, (levels - 1) * off).mean(1)

    def values(net: nn.Module, x: Tensor) -> Tensor:
        found = net(x)
        return found[:, :-1] - found[:, 1:]

    return Task(200, lambda: network(3, 32, 32, 9), draw, objective, values, 0.0, -0.01)


def slopes() -> Task:
    """Two interleaved classes; the slope of the logit is at most 4."""

    def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = 2 * torch.rand(count, 2, generator=generator) - 1
        noise = 0.2 * torch.randn(count, generator=generator)
        return x, (torch.sin(4 * x[:, 0]) * 0.6 + noise < x[:, 1]).float()

    def objective(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(net(x)[:, 0], y, reduction="none")

    def values(net: nn.Module, x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(net(at).sum(), at, create_graph=True)
        return slope.norm(dim=1, keepdim=True)

    return Task(60, lambda: network(2, 32, 32, 1), draw, objective, values, 4.0, 3.2)


def train(
    task: Task, formulation: Formulation, seed: int, drawn: bool, bound: float
) -> nn.Module:
    """Adam, a rate that falls to 0; drawn: the requirement at new inputs in every step."""
    generator = torch.Generator().manual_seed(seed)
    x, y = task.draw(task.rows, generator)
    torch.manual_seed(seed)
    net = task.net()
    steps, batch = EPOCHS * STEPS_AN_EPOCH, task.rows // STEPS_AN_EPOCH
    constraints = {"c": Constraint(at_most=bound)}
    constrained = PointwiseLoss(
        constraints,
        formulation,
        samples=None if drawn else task.rows,
        total_steps=steps,
    )

    def terms(index: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        at = task.draw(len(index), generator)[0] if drawn else x[index]
        return task.objective(net, x[index], y[index]), {"c": task.values(net, at)}

    orders = [torch.randperm(task.rows, generator=generator) for _ in range(EPOCHS)]
    batches = [index for order in orders for index in order.split(batch)]
    minimise(constrained, terms, net.parameters(), batches, RATE)
    return net


def measure(task: Task, net: nn.Module) -> Tensor:
    """The share violated, the mean violation and the objective at new inputs, (3,)."""
    x, y = task.draw(NEW, torch.Generator().manual_seed(12345))
    worst = (task.values(net, x).detach() - task.bound).amax(1)
    with torch.no_grad():
        objective = task.objective(net, x, y)
    return torch.stack(
        [(worst > 0).float().mean(), worst.clamp(min=0).mean(), objective.mean()]
    )


def runs(name_of_task: str, task: Task, seeds: int) -> Iterator[Row]:
    """Of each method, seed, and kind of inputs; ours with a stricter bound too."""
    for name, formulation in METHODS.items():
        bounds = (task.bound, task.stricter) if name in STRICTER else (task.bound,)
        for bound, drawn, seed in product(bounds, (False, True), range(seeds)):
            net = train(task, formulation(), seed, drawn, bound)
            share, size, cost = measure(task, net).tolist()
            yield {
                "task": name_of_task,
                "method": name,
                "bound": bound,
                "drawn": drawn,
                "seed": seed,
                "violated": share,
                "violation": size,
                "objective": cost,
            }


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    torch.set_num_threads(1)
    tasks = {"quantiles": quantiles(), "slopes": slopes()}
    each = (runs(name, task, given.seeds) for name, task in tasks.items())
    write(chain.from_iterable(each), given.output)


if __name__ == "__main__":
    main()
