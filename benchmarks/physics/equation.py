"""What an equation of the benchmark gives, and its two forms: tolerances, and a weighted sum.

All points of an equation are one table (N, D); each condition applies to some of its rows. A form
is a Task of benchmarks/tasks, so that all members, a method with a seed each, train at once.
Shapes: M members, N points, D coordinates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.tasks.task import Parameters, Task, Terms, layers, network, slope
from pl_pointwise import Constraint

EQUATION, DATA = "equation", "data"
TOLERANCE = 1e-3
"""Of each condition, in its own unit: the size of its largest term."""
DEVIATIONS = 3.0
"""The tolerance of noisy data, in standard deviations of the noise."""
WIDTH = 32
RATE = 5e-3


@dataclass
class Equation:
    """Conditions on a function u of one or two coordinates, whose solution is known.

    Args:
        low: the corner of the domain, (D,).
        high: the opposite corner.
        points: by condition where it holds, (n, D).
        conditions: what each condition bounds at all points, (M, N), with its sign: 0 at the
            solution. Its arguments are the parameters, the points (M, N, D), which have
            gradients, and u there (M, N).
        units: of each condition: the size of its largest term.
        solution: of points (…, D).
        measured: u at the points of "data", with noise, (n,); empty where there are none.
        noise: its standard deviation.
        unknown: numbers to find beside u, by name, with where they start and what they are.
    """

    low: Tensor
    high: Tensor
    points: dict[str, Tensor]
    conditions: Callable[[Parameters, Tensor, Tensor], dict[str, Tensor]]
    units: dict[str, float]
    solution: Callable[[Tensor], Tensor]
    measured: Tensor = field(default_factory=lambda: torch.zeros(0))
    noise: float = 0.0
    unknown: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = torch.cat(list(self.points.values()))
        counts = torch.tensor([len(each) for each in self.points.values()])
        owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
        self.membership = {name: owner == k for k, name in enumerate(self.points)}
        self.targets = torch.zeros(len(self.rows))
        if DATA in self.points:
            self.targets[self.membership[DATA]] = self.measured

    def start(self, generator: torch.Generator) -> Parameters:
        drawn = layers(generator, self.rows.shape[1], WIDTH, WIDTH, 1)
        own = {name: torch.tensor(first) for name, (first, _) in self.unknown.items()}
        dtype = self.rows.dtype
        return {name: value.to(dtype) for name, value in (drawn | own).items()}

    def u(self, parameters: Parameters, at: Tensor) -> Tensor:
        """(M, N, D) ↦ (M, N); the network reads coordinates within ±1."""
        middle, half = (self.high + self.low) / 2, (self.high - self.low) / 2
        return network(parameters, (at - middle) / half)[..., 0]

    def residuals(self, parameters: Parameters, index: Tensor) -> dict[str, Tensor]:
        """Of each condition at the rows ``index``, (M, B)."""
        with torch.enable_grad():
            at = self.rows[index].clone().requires_grad_()
            u = self.u(parameters, at)
            found = self.conditions(parameters, at, u)
        if DATA in self.points:
            found[DATA] = u - self.targets[index]
        return found

    def error(self, parameters: Parameters) -> Tensor:
        """Of each member, (M,): ‖u − solution‖ / ‖solution‖ on a grid."""
        lines = [
            torch.linspace(float(low), float(high), 101 if len(self.low) == 1 else 41)
            for low, high in zip(self.low, self.high, strict=True)
        ]
        grid = torch.cartesian_prod(*lines).reshape(-1, len(lines)).to(self.rows.dtype)
        members = len(next(iter(parameters.values())))
        with torch.no_grad():
            found = self.u(parameters, grid.expand(members, -1, -1))
        exact = self.solution(grid)
        return (found - exact).norm(dim=1) / exact.norm()


def in_tolerances(
    equation: Equation,
    tolerance: float = TOLERANCE,
    factors: dict[str, float] | None = None,
    bounded_data: bool = True,
) -> Task:
    """Every condition is a requirement, in its own unit; the objective is the data's square, or 0.

    Args:
        equation: what is solved.
        tolerance: of each condition but noisy data, in its unit.
        factors: other units: what a condition and its tolerance are multiplied by.
        bounded_data: whether noisy data are a requirement too, not the objective alone.
    """
    scale = dict.fromkeys(equation.units, 1.0) | (factors or {})
    bounds = {name: tolerance * unit for name, unit in equation.units.items()}
    if equation.noise:
        bounds[DATA] = DEVIATIONS * equation.noise
    if not bounded_data:
        del bounds[DATA]
    membership = {name: equation.membership[name] for name in bounds}
    if equation.noise:
        membership["objective"] = equation.membership[DATA]

    def terms(parameters: Parameters, index: Tensor) -> Terms:
        found = equation.residuals(parameters, index)
        objective = 0 * found[EQUATION]
        if equation.noise:
            objective = found[DATA].square()
        return objective, {name: scale[name] * found[name] for name in bounds}

    return _task(
        equation,
        terms,
        {name: within(scale[name] * of) for name, of in bounds.items()},
        membership,
    )


def within(bound: float) -> Constraint:
    """−bound ≤ ℓ ≤ bound, of a value with its sign: |ℓ| has a kink where it should come to rest."""
    return Constraint(at_least=-bound, at_most=bound)


def as_weighted_sum(
    equation: Equation, factors: dict[str, float] | None = None
) -> Task:
    """The mean square of the equation, and of each other condition times one weight."""
    scale = dict.fromkeys(equation.units, 1.0) | (factors or {})
    names = [name for name in equation.units if name != EQUATION]
    membership = {name: equation.membership[name] for name in names}
    membership["objective"] = equation.membership[EQUATION]

    def terms(parameters: Parameters, index: Tensor) -> Terms:
        found = equation.residuals(parameters, index)
        values = {name: scale[name] * found[name] for name in names}
        return (scale[EQUATION] * found[EQUATION]).square(), values

    constraints = {name: Constraint(equals=0.0) for name in names}
    return _task(equation, terms, constraints, membership)


def _task(
    equation: Equation,
    terms: Callable[[Parameters, Tensor], Terms],
    constraints: dict[str, Constraint],
    membership: dict[str, Tensor],
) -> Task:
    """One step an epoch, of all points."""
    return Task(
        len(equation.rows),
        equation.start,
        terms,
        constraints,
        dict.fromkeys(constraints, 0.0),
        membership=membership,
        batch=len(equation.rows),
        rate=RATE,
    )


# Points and derivatives --------------------------------------------------------------------------


def inside(count: int, low: Tensor, high: Tensor) -> Tensor:
    """(count, D), spread evenly by a Sobol sequence."""
    drawn = torch.quasirandom.SobolEngine(len(low), scramble=True, seed=0).draw(count)
    return low + (high - low) * drawn.to(low.dtype)


def on_side(count: int, low: Tensor, high: Tensor, axis: int, at: Tensor) -> Tensor:
    """(count, D) on the side where the coordinate ``axis`` has the value ``at``."""
    found = inside(count, low, high)
    found[:, axis] = at
    return found


def twice(values: Tensor, at: Tensor, axis: int) -> Tensor:
    """The second derivative of each value in one coordinate: (M, N)."""
    return slope(slope(values, at)[..., axis], at)[..., axis]
