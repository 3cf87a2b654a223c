"""Draws docs/curves.png: what a healthy run looks like, and two that are not.

python docs/curves.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

from pl_pointwise import Constraint, Pointwise, PointwiseLoss
from pl_pointwise.compare.plots import BLUE, ORANGE, RED
from pl_pointwise.report.history import Curves

EPOCHS, BATCH = 100, 10


def train(contradicting: int, falling: bool, rate: float) -> Curves:
    """A line through 60 points, none of which may be off by more than 0.1.

    Args:
        contradicting: points that are moved by 1, so that no line meets them and their neighbours.
        falling: whether the learning rate falls to 0.
        rate: the learning rate at the start.
    """
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=draw)
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.03 * torch.randn(60, generator=draw)
    y[:contradicting] += 1
    weights = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.Adam([weights], rate)
    end = 0.0 if falling else 1.0
    steps = EPOCHS * len(x) // BATCH
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, end, total_iters=steps)
    constrained = PointwiseLoss(
        {"fit": Constraint(at_most=0.1)}, Pointwise(), samples=len(x)
    )
    for _ in range(EPOCHS):
        for index in torch.randperm(len(x), generator=draw).split(BATCH):
            error = (x[index] @ weights - y[index]).abs()
            objective = weights.square().sum().expand(len(index))
            loss = constrained(objective, {"fit": error}, index)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            constrained.step()
    return constrained.history.curves()


def main() -> None:
    runs = {
        "healthy": train(0, falling=True, rate=0.1),
        "out of reach": train(6, falling=True, rate=0.1),
        "the rate does not fall": train(0, falling=False, rate=0.3),
    }
    figure, panels = plt.subplots(
        3, 3, figsize=(9, 6), sharex=True, layout="constrained"
    )
    for column, (title, curves) in enumerate(runs.items()):
        rows = (
            ("share violated", curves.violated["fit"], RED),
            ("mean λ", curves.multiplier["fit"], BLUE),
            ("objective", curves.objective, ORANGE),
        )
        panels[0, column].set_title(title, fontweight="bold")
        for axes, (name, values, colour) in zip(panels[:, column], rows, strict=True):
            axes.plot(curves.steps, values, color=colour)
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_ylim(bottom=0)
            if not column:
                axes.set_ylabel(name)
        panels[-1, column].set_xlabel("step")
    figure.savefig(Path(__file__).parent / "curves.png", dpi=100)


if __name__ == "__main__":
    main()
