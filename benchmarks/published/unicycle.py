"""A unicycle drives around an obstacle: andreagoertzen/HardNet-plus-plus, mpc_obst.py, utils.py.

minimise Σₖ ‖sₖ − ŝ‖² + .1‖uₖ‖² + ‖s_T − ŝ‖²_P   over T = 10 steps of
    (x, y, θ)ₖ₊₁ = (x, y, θ)ₖ + .2 (v cos θ, v sin θ, ω),   sᵀQs ≥ 1,   0 ≤ v ≤ 2,   |ω| ≤ 1.5

In closed loop the first input of each plan is driven, 20 times, from 100 fresh starts of theirs.
Their network trains on states of trajectories that a solver found; this one on states that are
drawn evenly outside the obstacle. A plan is its 20 inputs: the states follow from them, which
leaves no equality to miss.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn

from benchmarks.families import quiet_trainer
from pl_pointwise import (
    Constraint,
    Formulation,
    Optimization,
    Penalty,
    Pointwise,
    PointwiseDataModule,
    PointwiseModule,
    Training,
)
from pl_pointwise.correction import newton_corrected

HORIZON, EVERY, LOOP = 10, 0.2, 20
FASTEST, SHARPEST = 2.0, 1.5
TARGET = (3.5, 0.0, 0.0)
OBSTACLE = (0.51020408, 0.90702948)
"""Q, a diagonal."""
LAST = (10.0, 10.0, 1.0)
"""P, a diagonal."""
EFFORT = 0.1
STARTS, FRESH = 100, 101
"""Their fresh starts, and the seed of them."""
EPOCHS, BATCH, RATE, WIDTH = 150, 200, 1e-3, 200
DRAWN = 5_000
REGION = ((-4.0, 4.0), (-2.5, 2.5), (-1.5, 1.5))
"""In which states are drawn that train."""
TOUCHED = 1e-6
"""A margin below minus this is a collision."""
THEIRS = (-3.2, 0.3, -0.1)
"""The start of the closed loop that they print."""
REFERENCE = Path(__file__).with_name("unicycle.csv")


def advanced(state: Tensor, inputs: Tensor) -> Tensor:
    """States (B, 3) after one interval with inputs (B, 2)."""
    angle, speed, turn = state[:, 2], inputs[:, 0], inputs[:, 1]
    change = torch.stack([speed * angle.cos(), speed * angle.sin(), turn], 1)
    return state + EVERY * change


def driven(start: Tensor, inputs: Tensor) -> Tensor:
    """The states (B, T, 3) that inputs (B, T, 2) lead through, the start left out."""
    states = [start]
    for step in inputs.unbind(1):
        states.append(advanced(states[-1], step))
    return torch.stack(states[1:], 1)


def margin(states: Tensor) -> Tensor:
    """sᵀQs − 1 of each state (…, 3): below 0 within the obstacle."""
    return states[..., :2].square() @ states.new_tensor(OBSTACLE) - 1


def cost(states: Tensor, inputs: Tensor) -> Tensor:
    """(B,), of states (B, T, 3) and inputs (B, T, 2)."""
    off = states - states.new_tensor(TARGET)
    turned = torch.atan2(off[..., 2].sin(), off[..., 2].cos())
    off = torch.cat([off[..., :2], turned[..., None]], -1).square()
    last = off[:, -1] @ off.new_tensor(LAST)
    return off.sum((1, 2)) + last + EFFORT * inputs.square().sum((1, 2))


def limits(start: Tensor, inputs: Tensor) -> dict[str, Tensor]:
    """Violations of a plan by name: of the obstacle (B, T), of the inputs' bounds (B, 4T)."""
    speed, turn = inputs.unbind(2)
    bounds = [-speed, speed - FASTEST, turn - SHARPEST, -turn - SHARPEST]
    return {"obstacle": -margin(driven(start, inputs)), "inputs": torch.cat(bounds, 1)}


class Plan(PointwiseModule):
    """A state ↦ the inputs of ten steps: obstacle and bounds are requirements."""

    def __init__(
        self, formulation: Formulation | None, training: Training | None = None
    ) -> None:
        none_beyond = Constraint(at_most=0.0)
        super().__init__(
            formulation=formulation,
            constraints={"obstacle": none_beyond, "inputs": none_beyond},
            training=training or Training(),
        )
        self.net = nn.Sequential(
            nn.Linear(3, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, 2 * HORIZON),
        )

    def forward(self, batch: Any) -> Tensor:
        inputs: Tensor = self.net(batch["state"])
        return inputs.reshape(-1, HORIZON, 2)

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:
        return cost(driven(batch["state"], outputs), outputs)

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return limits(batch["state"], outputs)


Region = tuple[tuple[float, float], ...]


def outside(seed: int, region: Region, count: int, least: float) -> Tensor:
    """States (count, 3), drawn evenly within a region, whose margin is above ``least``."""
    low, high = np.array(region).T
    # One after the other, as theirs: more than enough of them.
    drawn = np.random.default_rng(seed).uniform(low, high, (3 * count, 3))
    states = torch.from_numpy(drawn)
    return states[margin(states) > least][:count]


def starts() -> Tensor:
    """Their fresh starts, (100, 3): eval.py."""
    region = ((-4.0, -2.2), (-2.4, 2.4), (-0.45, 0.45))
    return outside(FRESH, region, STARTS, 0.2)


class States(PointwiseDataModule):
    def setup(self, stage: str) -> None:
        drawn = outside(0, REGION, DRAWN, 0.0).float()
        self.datasets["train"] = [{"state": state} for state in drawn]


def planned(module: Plan, state: Tensor, correct: bool) -> Tensor:
    """The inputs (B, T, 2) from states in float64; corrected, if asked for."""
    with torch.no_grad():
        inputs = module({"state": state.float()}).double()
    if not correct:
        return inputs

    def violations(flat: Tensor) -> Tensor:
        found = limits(state, flat.reshape(-1, HORIZON, 2))
        return torch.cat([*found.values()], 1)

    moved = newton_corrected(inputs.flatten(1), violations)
    return moved.reshape(-1, HORIZON, 2)


@dataclass(frozen=True)
class Loops:
    """Closed loops: states (B, 20, 3), inputs (B, 20, 2), and the worst of all plans."""

    states: Tensor
    inputs: Tensor
    worst: float


def closed_loops(module: Plan, start: Tensor, correct: bool) -> Loops:
    """The first input of each plan is driven, within its bounds, as theirs."""
    states, inputs, worst = [start], [], 0.0
    for _ in range(LOOP):
        plan = planned(module, states[-1], correct)
        found = limits(states[-1], plan)
        worst = max(worst, *(float(v.max()) for v in found.values()))
        speed, turn = plan[:, 0].unbind(1)
        turn = turn.clamp(-SHARPEST, SHARPEST)
        inputs.append(torch.stack([speed.clamp(0, FASTEST), turn], 1))
        states.append(advanced(states[-1], inputs[-1]))
    return Loops(torch.stack(states[1:], 1), torch.stack(inputs, 1), worst)


@dataclass(frozen=True)
class LoopTable:
    """Closed loops, from the start of their notebook and from the fresh ones."""

    published: Mapping[str, Mapping[str, float]]
    name: str = "HardNet++, unicycle"
    source: str = (
        "andreagoertzen/HardNet-plus-plus, paper_figs/paper_figs.ipynb: one closed loop each; "
        "IPOPT's 100 were driven here"
    )
    file: str = "HardNet-plus-plus, paper_figs.ipynb"
    shown: tuple[str, ...] = ("cost, one loop", "cost", "above IPOPT, %", "collisions")
    weights: tuple[float, ...] = (1, 10, 100, 1000)


TABLE = LoopTable(
    {
        "IPOPT": {"cost, one loop": 253.680179},
        "HardNet++": {"cost, one loop": 255.781567},
        "soft penalty": {"cost, one loop": 382.576042},
        "DC3": {"cost, one loop": 279.796834},
    }
)


def reference() -> Tensor:
    """(100,), the cost of IPOPT's closed loop from each fresh start."""
    rows = np.loadtxt(REFERENCE, delimiter=",", skiprows=1)
    return torch.from_numpy(rows[:, 1])


def columns(module: Plan, correct: bool) -> dict[str, float]:
    begun = time.process_time()
    of_all = closed_loops(module, starts(), correct)
    spent = 1000 * (time.process_time() - begun) / (LOOP * STARTS)
    one = closed_loops(module, torch.tensor([THEIRS]).double(), correct)
    found, best = cost(of_all.states, of_all.inputs), reference()
    least = margin(of_all.states).amin(1)
    return {
        "cost, one loop": float(cost(one.states, one.inputs)),
        "cost": float(found.mean()),
        "above IPOPT, %": 100 * float(found.mean() / best.mean() - 1),
        "collisions": float((least < -TOUCHED).sum()),
        "margin, least": float(least.min()),
        "above IPOPT, %, largest": 100 * float((found / best - 1).max()),
        "violation of a plan, largest": of_all.worst,
        "ms an answer": spent,
    }


def trained(method: str, seed: int) -> Plan:
    """The network of a method after its training."""
    seed_everything(seed, verbose=False)
    formulation: Formulation = Pointwise()
    if method.startswith("hinge"):
        weight = float(method.removeprefix("hinge "))
        formulation = Penalty(weight=weight, shape="hinge")
    schedule = Training(Optimization(learning_rate=RATE, schedule="linear"))
    module = Plan(formulation, training=schedule)
    quiet_trainer(EPOCHS).fit(module, States(batch_size=BATCH, seed=seed))
    return module.eval()


def run(method: str, seed: int) -> dict[str, dict[str, float]]:
    """Columns of plans as they are, and corrected."""
    begun = time.process_time()
    module = trained(method, seed)
    seconds = {"seconds": time.process_time() - begun}
    return {
        "none": columns(module, correct=False) | seconds,
        "newton": columns(module, correct=True) | seconds,
    }
