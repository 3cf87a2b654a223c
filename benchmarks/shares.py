"""At most a share of the samples may violate a bound: a recall at the least loss of the negatives.

    python -m benchmarks.shares            (a minute or two)

A linear score in the plane, a direction and an offset: at least 95 % or 80 % of 400 positives have
to be above 0, at the least mean softplus of the scores of 400 negatives. Of a direction the best
offset is a quantile of the positives (Neyman and Pearson's test), so a grid of directions gives the
optimum. ``CVaR`` bounds the mean of the worst 5 % or 20 % instead.

Writes a row of each kind of positives, share, method, length and seed: ``above`` is the objective
over the optimum, minus 1; ``violated`` the share of the positives below 0.
"""

from __future__ import annotations

import argparse
import math
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import softplus

from benchmarks.loops import Row, minimise, write
from pl_pointwise import Constraint, CVaR, Formulation, Pointwise, PointwiseLoss

OUTPUT = Path(__file__).parent / "evidence/results/shares.csv"
SAMPLES, STEPS_AN_EPOCH, RATE, DIRECTIONS = 400, 10, 0.03, 1441
SHARES = (0.05, 0.2)
KINDS = ("normal", "3 % of them far off", "heavy tails")
RUNS = (("Pointwise()", 10), ("Pointwise()", 100), ("CVaR", 100))
"""Method and epochs."""


def draw(kind: str, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Positives and negatives, (samples, 2) each, in a random order."""
    generator = torch.Generator().manual_seed(seed)

    def normal(columns: int = 2) -> Tensor:
        return torch.randn(samples, columns, generator=generator, dtype=torch.float64)

    deviation = normal()
    if kind == "heavy tails":  # Student's t of two degrees of freedom.
        deviation /= (normal().square().sum(1, keepdim=True) / 2).sqrt()
    positives = torch.tensor([1.5, 0.5]) + deviation * torch.tensor([1.0, 0.6])
    if kind == "3 % of them far off":
        positives[: round(0.03 * samples)] -= torch.tensor([10.0, 0.0])
    return positives, normal() * torch.tensor([0.7, 1.2])


def score(points: Tensor, angle: Tensor, offset: Tensor | float = 0.0) -> Tensor:
    return points @ torch.stack([angle.cos(), angle.sin()]) + offset


def optimum(positives: Tensor, negatives: Tensor, share: float) -> float:
    """The least objective with at most a share of the positives below 0."""
    objectives = []
    allowed = math.floor(share * len(positives) + 1e-9)
    for angle in torch.linspace(-math.pi, math.pi, DIRECTIONS, dtype=torch.float64):
        offset = -score(positives, angle).sort().values[allowed]
        objectives.append(float(softplus(score(negatives, angle, offset)).mean()))
    return min(objectives)


def formulation_and_bound(method: str, share: float) -> tuple[Formulation, Constraint]:
    if method == "CVaR":
        return CVaR(level=1 - share, alpha="adaptive"), Constraint(at_least=0.0)
    return Pointwise(), Constraint(at_least=0.0, share=share)


def train(
    positives: Tensor,
    negatives: Tensor,
    formulation: Formulation,
    bound: Constraint,
    epochs: int,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Angle and offset, by Adam and a rate that falls to 0."""
    weights = torch.tensor([0.3, 0.0], dtype=torch.float64, requires_grad=True)
    steps = epochs * STEPS_AN_EPOCH
    constrained = PointwiseLoss(
        {"recall": bound}, formulation, samples=len(positives), total_steps=steps
    )
    generator = torch.Generator().manual_seed(100 + seed)

    def terms(index: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        angle, offset = weights
        recall = score(positives[index], angle, offset)
        return softplus(score(negatives[index], angle, offset)), {"recall": recall}

    orders = [
        torch.randperm(len(positives), generator=generator) for _ in range(epochs)
    ]
    batches = [index for order in orders for index in order.chunk(STEPS_AN_EPOCH)]
    minimise(constrained, terms, [weights], batches, RATE)
    angle, offset = weights.detach()
    return angle, offset


def run(
    kind: str, share: float, method: str, epochs: int, seed: int, samples: int = SAMPLES
) -> Row:
    positives, negatives = draw(kind, samples, seed)
    formulation, bound = formulation_and_bound(method, share)
    angle, offset = train(positives, negatives, formulation, bound, epochs, seed)
    objective = float(softplus(score(negatives, angle, offset)).mean())
    below = score(positives, angle, offset) < 0
    return {
        "positives": kind,
        "share": share,
        "method": method,
        "epochs": epochs,
        "seed": seed,
        "above": objective / optimum(positives, negatives, share) - 1,
        "violated": float(below.double().mean()),
    }


def main(arguments: list[str] | None = None) -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    planned = product(RUNS, KINDS, SHARES, given.seeds)
    rows = (
        run(kind, share, method, epochs, seed, given.samples)
        for (method, epochs), kind, share, seed in planned
    )
    write(rows, given.output)


if __name__ == "__main__":
    main()
