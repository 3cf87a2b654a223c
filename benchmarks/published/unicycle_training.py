"""The unicycle's network, and how it trains: on states of its own closed loops, drawn anew.

A controller meets the states that its own inputs lead to. So every epoch drives loops of the
present network from fresh starts, and trains on the states that they pass: no solver is asked.
No state comes twice, so a multiplier would be of another state by the time it is used: the rule is
that without memory (docs/few_instances.md).
"""

from __future__ import annotations

import time

import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn

from pl_pointwise import Constraint, Formulation, Penalty, Pointwise, PointwiseLoss

from .unicycle import (
    FASTEST,
    HORIZON,
    LOOP,
    SHARPEST,
    START_REGION,
    advanced,
    columns,
    cost,
    driven,
    margin,
    outside,
    within_bounds,
)

EPOCHS, BATCH, RATE, WIDTH = 300, 1000, 1e-3, 200
WITHOUT_MEMORY = "Pointwise(memory=False)"
DRIVEN = 1000
"""Loops an epoch, each from a start of its own."""
SPREAD = (2.3, 1.4)
"""What positions are divided by, so that the network reads numbers near 1."""
BEYOND = 0.02
"""How far the last layer reaches beyond the inputs' bounds, as a share of their width."""


class Plan(nn.Module):
    """States (B, 3) ↦ the inputs of ten steps (B, T, 2), within their bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, 2 * HORIZON),
        )

    def forward(self, state: Tensor) -> Tensor:
        angle = state[:, 2:]
        place = state[:, :2] / state.new_tensor(SPREAD)
        read = torch.cat([place, angle.cos(), angle.sin()], 1)
        least = state.new_tensor([0.0, -SHARPEST])
        most = state.new_tensor([FASTEST, SHARPEST])
        # A sigmoid alone never reaches a bound, and the best speed is the highest.
        width = (1 + 2 * BEYOND) * (most - least)
        reach = self.net(read).reshape(-1, HORIZON, 2).sigmoid() * width
        return within_bounds(least - BEYOND * (most - least) + reach)


@torch.no_grad()
def states_of_loops(plan: Plan, seed: int) -> Tensor:
    """The states (n, 3) that loops from fresh starts pass, none within the obstacle."""
    passed = [outside(seed, START_REGION, DRIVEN, 0.2).float()]
    for _ in range(LOOP - 1):
        after = advanced(passed[-1], plan(passed[-1])[:, 0])
        passed.append(moved_out(after))
    return torch.cat(passed)


def moved_out(states: Tensor) -> Tensor:
    """States within the obstacle at its edge, as far as a corrected plan would have gone."""
    # sᵀQs = 1.001: no rounding puts it inside.
    size = (margin(states) + 1).clamp(min=1e-6)
    stretch = (1.001 / size).sqrt().clamp(min=1)[:, None]
    return torch.cat([states[:, :2] * stretch, states[:, 2:]], 1)


def formulation_of(method: str) -> Formulation:
    shape, _, weight = method.rpartition(" ")
    if shape == "hinge":
        return Penalty(weight=float(weight), shape="hinge")
    if shape == "squared hinge":
        return Penalty(weight=float(weight), shape="squared_hinge")
    return Pointwise(memory=method != WITHOUT_MEMORY)


def trained(method: str, seed: int, epochs: int = EPOCHS) -> Plan:
    """The network of a method after its training."""
    seed_everything(seed, verbose=False)
    plan = Plan()
    samples = DRIVEN * LOOP
    constrained = PointwiseLoss(
        {"obstacle": Constraint(at_most=0.0)},
        formulation_of(method),
        samples=samples,
        total_steps=epochs * samples // BATCH,
    )
    optimizer = torch.optim.AdamW(plan.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(
        optimizer, start_factor=1.0, end_factor=0.0, total_iters=epochs
    )
    for epoch in range(epochs):
        # Seeds of their own for every epoch and run, other than the judged starts'.
        states = states_of_loops(plan, seed=10_000 * (seed + 1) + epoch)
        for rows in torch.randperm(len(states)).split(BATCH):
            start = states[rows]
            inputs = plan(start)
            path = driven(start, inputs)
            values = {"obstacle": -margin(path)}
            loss = constrained(cost(path, inputs), values, rows)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            constrained.step()
        schedule.step()
    return plan.eval()


def run(method: str, seed: int) -> dict[str, dict[str, float]]:
    """Columns of plans as they are, and corrected."""
    begun = time.process_time()
    plan = trained(method, seed)
    seconds = {"seconds": time.process_time() - begun}
    return {
        "none": columns(plan, correct=False) | seconds,
        "newton": columns(plan, correct=True) | seconds,
    }
