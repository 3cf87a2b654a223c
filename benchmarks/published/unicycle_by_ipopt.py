"""Closed loops of IPOPT from the fresh starts: benchmarks/published/unicycle.csv.

    pip install casadi
    python -m benchmarks.published.unicycle_by_ipopt      # goes on where it stopped; minutes

Each plan is the best of IPOPT's from eleven guesses: an even speed with five turns, and a drive to
the target that is drawn to one side or the other.
"""

from __future__ import annotations

import csv
from importlib import import_module
from typing import Any

import numpy as np
import torch

from .unicycle import (
    EFFORT,
    EVERY,
    FASTEST,
    HORIZON,
    LAST,
    LOOP,
    OBSTACLE,
    REFERENCE,
    SHARPEST,
    TARGET,
    THEIRS,
    advanced,
    cost,
    driven,
    margin,
    starts,
)

TURNS = (-0.75, -0.35, 0.0, 0.35, 0.75)
SIDES = (-1.0, -0.5, 0.0, 0.5, 1.0)
"""Both as shares of the sharpest turn."""


class Solver:
    """A plan from a state, by IPOPT."""

    def __init__(self) -> None:
        ca = import_module("casadi")
        self.opti = ca.Opti()
        self.states = self.opti.variable(3, HORIZON + 1)
        self.inputs = self.opti.variable(2, HORIZON)
        self.start = self.opti.parameter(3)
        total = 0
        self.opti.subject_to(self.states[:, 0] == self.start)
        for step in range(HORIZON):
            at, to = self.states[:, step], self.states[:, step + 1]
            speed, turn = self.inputs[0, step], self.inputs[1, step]
            change = ca.vertcat(speed * ca.cos(at[2]), speed * ca.sin(at[2]), turn)
            self.opti.subject_to(to == at + EVERY * change)
            self.opti.subject_to(ca.dot(ca.DM(OBSTACLE), to[:2] ** 2) >= 1)
            self.opti.subject_to(self.opti.bounded(0, speed, FASTEST))
            self.opti.subject_to(self.opti.bounded(-SHARPEST, turn, SHARPEST))
            off = to - ca.DM(TARGET)
            off = ca.vertcat(off[:2], ca.atan2(ca.sin(off[2]), ca.cos(off[2])))
            weights = ca.DM(LAST) + 1 if step == HORIZON - 1 else ca.DM([1, 1, 1])
            effort = EFFORT * ca.sumsqr(self.inputs[:, step])
            total += ca.dot(weights, off**2) + effort
        self.total = total
        self.opti.minimize(total)
        quiet = {"print_level": 0, "sb": "yes", "tol": 1e-8}
        self.opti.solver("ipopt", {"print_time": False, "expand": True}, quiet)

    def inputs_from(self, state: np.ndarray) -> np.ndarray:
        """The inputs (T, 2) of the best plan that is found."""
        self.opti.set_value(self.start, state)
        found: list[tuple[float, np.ndarray]] = []
        for guess in guesses(state):
            self.opti.set_initial(self.inputs, guess.T)
            self.opti.set_initial(self.states, path(state, guess).T)
            try:
                solved = self.opti.solve()
            except RuntimeError:  # IPOPT gave up: another guess is tried.
                continue
            found.append((solved.value(self.total), solved.value(self.inputs).T))
        return min(found, key=lambda each: each[0])[1]


def path(state: np.ndarray, inputs: np.ndarray) -> np.ndarray:
    """The states (T + 1, 3), the start among them."""
    start = torch.from_numpy(state)[None]
    after = driven(start, torch.from_numpy(inputs)[None])
    return torch.cat([start[:, None], after], 1)[0].numpy()


def guesses(state: np.ndarray) -> list[np.ndarray]:
    """Inputs (T, 2) that a search starts from."""
    even = np.full((HORIZON, 1), FASTEST / 2)
    found = [
        np.hstack([even, np.full((HORIZON, 1), SHARPEST * turn)]) for turn in TURNS
    ]
    return found + [towards(state, SHARPEST * side) for side in SIDES]


def towards(state: np.ndarray, side: float) -> np.ndarray:
    """A drive to the target with a turn to one side."""
    at, inputs = state.copy(), np.zeros((HORIZON, 2))
    for step in range(HORIZON):
        way = np.array(TARGET[:2]) - at[:2]
        angle = np.arctan2(way[1], way[0]) - at[2]
        angle = np.arctan2(np.sin(angle), np.cos(angle))
        left = EVERY * (HORIZON - step)
        speed = np.clip(np.linalg.norm(way) / left, 0, FASTEST)
        turn = np.clip(2 * angle + side, -SHARPEST, SHARPEST)
        inputs[step] = 0.5 * speed + 0.325 * FASTEST, turn
        at = path(at, inputs[step : step + 1])[-1]
    return inputs


def closed_loop(solver: Solver, start: np.ndarray) -> tuple[float, float]:
    """Cost and least margin."""
    states, inputs = [torch.from_numpy(start)[None]], []
    for _ in range(LOOP):
        plan = solver.inputs_from(states[-1][0].numpy())
        # IPOPT keeps bounds to 1e-8.
        step = plan[0].clip([0, -SHARPEST], [FASTEST, SHARPEST])
        inputs.append(torch.from_numpy(step)[None])
        states.append(advanced(states[-1], inputs[-1]))
    after = torch.stack(states[1:], 1)
    return float(cost(after, torch.stack(inputs, 1))), float(margin(after).min())


def main() -> None:
    solver = Solver()
    theirs, least = closed_loop(solver, np.array(THEIRS))
    print(f"from their start {theirs:.3f} (published 253.680), margin {least:.1e}")
    done: Any = []
    if REFERENCE.exists():
        done = REFERENCE.read_text().split()[1:]
    else:
        REFERENCE.write_text("start,cost,margin\n")
    with REFERENCE.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        for place, start in enumerate(starts().numpy()):
            if place < len(done):
                continue
            value, least = closed_loop(solver, start)
            writer.writerow([place, f"{value:.6f}", f"{least:.2e}"])
            file.flush()


if __name__ == "__main__":
    main()
