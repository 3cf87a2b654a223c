"""A unicycle drives around an obstacle: andreagoertzen/HardNet-plus-plus, mpc_obst.py, utils.py.

minimise Σₖ ‖sₖ − ŝ‖² + .1‖uₖ‖² + ‖s_T − ŝ‖²_P   over T = 10 steps of
    (x, y, θ)ₖ₊₁ = (x, y, θ)ₖ + .2 (v cos θ, v sin θ, ω),   sᵀQs ≥ 1,   0 ≤ v ≤ 2,   |ω| ≤ 1.5

In closed loop the first input of each plan is driven, 20 times, from 100 fresh starts of theirs.
A plan is its 20 inputs: the states follow from them, which leaves no equality to miss. How the
network that plans is trained is in unicycle_training.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

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
START_REGION = ((-4.0, -2.2), (-2.4, 2.4), (-0.45, 0.45))
"""In which loops start."""
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
    speed, turn = inputs.unbind(2)
    angle = start[:, 2:] + EVERY * turn.cumsum(1)
    # An interval is driven at the angle that it begins with.
    before = torch.cat([start[:, 2:], angle[:, :-1]], 1)
    x = start[:, :1] + EVERY * (speed * before.cos()).cumsum(1)
    y = start[:, 1:2] + EVERY * (speed * before.sin()).cumsum(1)
    return torch.stack([x, y, angle], 2)


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


def within_bounds(inputs: Tensor) -> Tensor:
    """Speeds and turns (…, 2), each moved to its nearest allowed value."""
    speed, turn = inputs.unbind(-1)
    turn = turn.clamp(-SHARPEST, SHARPEST)
    return torch.stack([speed.clamp(0, FASTEST), turn], -1)


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
    return outside(FRESH, START_REGION, STARTS, 0.2)


Planner = Callable[[Tensor], Tensor]
"""States (B, 3) to plans (B, T, 2), in float32."""


def planned(planner: Planner, state: Tensor, correct: bool) -> Tensor:
    """The inputs (B, T, 2) from states in float64; corrected, if asked for."""
    with torch.no_grad():
        inputs = planner(state.float()).double()
    if not correct:
        return inputs

    def violations(flat: Tensor) -> Tensor:
        found = limits(state, flat.reshape(-1, HORIZON, 2))
        return torch.cat([*found.values()], 1)

    moved = newton_corrected(inputs.flatten(1), violations)
    # Some plans through the middle of the obstacle have no nearest legal one: it turns, and stands.
    stuck = violations(moved).amax(1) > TOUCHED
    found = moved.reshape(-1, HORIZON, 2).clone()
    found[stuck, :, 0] = 0.0
    found[stuck, :, 1] = found[stuck, :, 1].clamp(-SHARPEST, SHARPEST)
    return found


@dataclass(frozen=True)
class Loops:
    """Closed loops: states (B, 20, 3), inputs (B, 20, 2), and the worst of all plans."""

    states: Tensor
    inputs: Tensor
    worst: float


def closed_loops(planner: Planner, start: Tensor, correct: bool) -> Loops:
    """The first input of each plan is driven, within its bounds, as theirs."""
    states, inputs, worst = [start], [], 0.0
    for _ in range(LOOP):
        plan = planned(planner, states[-1], correct)
        found = limits(states[-1], plan)
        worst = max(worst, *(float(v.max()) for v in found.values()))
        inputs.append(within_bounds(plan[:, 0]))
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
    weights: tuple[float, ...] = (10, 30, 100, 200, 1000)
    squared: tuple[float, ...] = (10, 100, 1000)
    """Weights of squared hinges: their soft penalty is a norm."""


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


def columns(planner: Planner, correct: bool) -> dict[str, float]:
    begun = time.process_time()
    of_all = closed_loops(planner, starts(), correct)
    spent = 1000 * (time.process_time() - begun) / (LOOP * STARTS)
    one = closed_loops(planner, torch.tensor([THEIRS]).double(), correct)
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
