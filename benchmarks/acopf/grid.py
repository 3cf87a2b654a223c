"""A power grid: its data, the loads, what they and the set points make of voltages, and its limits.

All in per unit of 100 MVA, angles in radians; rows of a batch are instances. The data are those of
the IEEE's test case of 57 buses (public; ``solve.py`` writes them), the loads are drawn as DC3 did.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

DATA = Path(__file__).parent / "case57.json"
SEED, SPREAD, LEAST_FACTOR = 17, 0.7, 0.8
STEPS, DIFFERENTIATED = 60, 4
PRECISION = {torch.float64: 1e-9, torch.float32: 1e-4}


class Grid(nn.Module):
    """The buses, branches and generators of a file as buffers, float64 unless converted.

    A solution y is (p_g, q_g, |v|, angle), (B, 2 G + 2 N); the first generator is the slack bus.
    The other generators' p_g and all generators' |v| are chosen, z (B, 2 G − 1); the rest follows.
    """

    cost: Tensor  # (G, 3): p² , p, 1
    low: Tensor  # (2 G + N,): of p_g, q_g, |v|
    high: Tensor
    start: Tensor  # (2, N): |v| and angle of the base case
    network: Tensor  # (2 N, 2 N): (Re v, Im v) ↦ (Re i, Im i)
    inverse: Tensor  # Of the power flow's Jacobian in the base case.
    load: Tensor  # (2, N): p and q of the base case

    def __init__(self, path: Path = DATA) -> None:
        super().__init__()
        case: dict[str, Any] = json.loads(path.read_text())
        bus, gen = np.array(case["bus"]), np.array(case["gen"])
        self.buses, self.generators = len(bus), len(gen)
        at = [int(each) for each in gen[:, 0]]
        self.at, self.others = at, [each for each in range(len(bus)) if each not in at]
        self.rest = [each for each in range(len(bus)) if each != at[0]]
        limits = gen[:, 1:5].reshape(-1, 2, 2)  # generator, p or q, low or high
        low, high = (
            np.r_[limits[:, 0, i], limits[:, 1, i], bus[:, 6 + i]] for i in (0, 1)
        )
        y = admittance(bus, np.array(case["branch"]))
        network = np.block([[y.real, -y.imag], [y.imag, y.real]])
        given = {"cost": gen[:, 5:8], "low": low, "high": high, "start": bus[:, 4:6].T}
        given |= {"network": network, "load": bus[:, :2].T}
        for name, value in given.items():
            self.register_buffer(name, torch.tensor(value))
        base = self.start.flatten()[None]
        jacobian = torch.func.jacrev(lambda state: self._balance(state)[0])(base)[:, 0]
        self.register_buffer("inverse", torch.linalg.inv(jacobian[:, self.unknown]))

    @cached_property
    def unknown(self) -> list[int]:
        """Of (|v|, angle): those that the power flow finds."""
        return self.others + [self.buses + each for each in self.rest]

    @cached_property
    def due(self) -> list[int]:
        """Of (p, q): those that are given, p but at the slack, q where no generator is."""
        return self.rest + [self.buses + each for each in self.others]

    @cached_property
    def free(self) -> Tensor:
        """Of (p_g, q_g, |v|): those that are chosen."""
        return torch.tensor(
            [
                *range(1, self.generators),
                *(2 * self.generators + each for each in self.at),
            ]
        )

    def power(self, state: Tensor) -> Tensor:
        """What the buses feed into the lines, (p, q): (B, 2 N) of (|v|, angle) ↦ (B, 2 N)."""
        size, angle = state.chunk(2, 1)
        re, im = size * angle.cos(), size * angle.sin()
        current_re, current_im = (torch.cat([re, im], 1) @ self.network.T).chunk(2, 1)
        return torch.cat(
            [re * current_re + im * current_im, im * current_re - re * current_im], 1
        )

    def _balance(self, state: Tensor) -> Tensor:
        """Of the power, what is given."""
        return self.power(state)[:, self.due]

    def complete(self, z: Tensor, loads: Tensor) -> Tensor:
        """The solution with z, which holds the balance of power at each bus: (B, 2 G + 2 N).

        Newton's method with the Jacobian of the base case, whose inverse is constant: a contraction
        here, by about .1 a step. Only the last steps are differentiated, which is the implicit
        function's derivative up to the contraction to that power.
        """
        ahead, volts = z.split([self.generators - 1, self.generators], 1)
        fed = -loads.index_add(1, torch.tensor(self.at[1:]), ahead, alpha=-1.0)
        due = fed[:, self.due]
        chosen = (
            self.start.flatten()
            .repeat(len(z), 1)
            .index_copy(1, torch.tensor(self.at), volts)
        )
        where, found = torch.tensor(self.unknown), chosen[:, self.unknown]
        with torch.no_grad():
            for _ in range(STEPS):
                off = self._balance(chosen.index_copy(1, where, found)) - due
                if not off.abs().max() > PRECISION[off.dtype]:
                    break
                found = found - off @ self.inverse.T
        for _ in range(DIFFERENTIATED):
            off = self._balance(chosen.index_copy(1, where, found)) - due
            found = found - off @ self.inverse.T
        state = chosen.index_copy(1, where, found)
        needed = self.power(state) + loads
        p, q = needed[:, self.at], needed[:, [self.buses + each for each in self.at]]
        return torch.cat([p[:, :1], ahead, q, state], 1)

    def objective(self, y: Tensor) -> Tensor:
        """The cost in 10⁴ $/h, as DC3 gives it: (B,)."""
        p = y[:, : self.generators] * 100
        return (
            torch.stack([p.square(), p, torch.ones_like(p)], 2)
            .mul(self.cost)
            .sum((1, 2))
            / 1e4
        )

    def inequalities(self, y: Tensor) -> dict[str, Tensor]:
        """By how much p_g, q_g and |v| are beyond their limits, (B, 2 G) twice and (B, 2 N)."""
        sizes = [self.generators, self.generators, self.buses]
        given = y[:, : sum(sizes)]
        over, under = (
            (given - self.high).split(sizes, 1),
            (self.low - given).split(sizes, 1),
        )
        names = ("active power", "reactive power", "voltage")
        return {n: torch.cat(v, 1) for n, *v in zip(names, over, under, strict=True)}

    def imbalance(self, y: Tensor, loads: Tensor) -> Tensor:
        """What is missing of p and q at each bus: (B, 2 N)."""
        given = y.split([self.generators, self.generators, 2 * self.buses], 1)
        fed = torch.zeros_like(loads)
        fed[:, self.at] = given[0]
        fed[:, [self.buses + each for each in self.at]] = given[1]
        return self.power(given[2]) - fed + loads


def admittance(bus: np.ndarray, branch: np.ndarray) -> np.ndarray:
    """The bus admittance matrix, (N, N); branch: from, to, r, x, b, ratio (0: none), angle."""
    start, end = branch[:, 0].astype(int), branch[:, 1].astype(int)
    series = 1 / (branch[:, 2] + 1j * branch[:, 3])
    tap = np.where(branch[:, 5] == 0, 1, branch[:, 5]) * np.exp(1j * branch[:, 6])
    own = series + 0.5j * branch[:, 4]
    y = np.diag(bus[:, 2] + 1j * bus[:, 3])
    np.add.at(y, (start, start), own / abs(tap) ** 2)
    np.add.at(y, (end, end), own)
    np.add.at(y, (start, end), -series / tap.conj())
    np.add.at(y, (end, start), -series / tap)
    return y


def draw_loads(base: Tensor, count: int) -> Tensor:
    """(count, 2 N): the base case's p times a normal factor within ±70 %, correlated by a half.

    q by a power factor of .8 to 1; DC3 has the same distribution, by another generator.
    """
    p, q = base.numpy()
    where, random = np.flatnonzero(p > 0), np.random.RandomState(SEED)
    deviation, found = SPREAD / 1.645 * 0.5**0.5, np.zeros((count, 2, len(p)))
    done = 0
    while done < count:
        factor = 1 + deviation * (random.normal() + random.normal(size=len(where)))
        if (abs(factor - 1) < SPREAD).all():
            found[done, 0, where] = p[where] * factor
            angle = np.arccos(random.uniform(LEAST_FACTOR, 1, len(where)))
            found[done, 1, where] = (
                found[done, 0, where] * np.tan(angle) * np.sign(q[where])
            )
            done += 1
    return torch.from_numpy(found.reshape(count, -1))
