"""Problems of Hock and Schittkowski's collection, through the module's own training loop.

Test Examples for Nonlinear Programming Codes, Lecture Notes in Economics and Mathematical Systems
187, Springer 1981: problem, starting point, solution and objective are theirs; the multipliers of
71 are those that Ipopt's documentation prints, and the others follow from stationarity, which is
tested for all of them.

All are solved in one run, each problem a sample with variables of its own: its objective, the
inequalities g(x) ≤ 0 as one vector-valued constraint, bounds on x among them, and the equalities
h(x) = 0 as another. Of P problems, n with a constraint of that kind and K values in this one, the
module prices f/P + λ·g/(nK), so the multiplier of the program is λ·P/(nK).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from pl_pointwise import Constraint, Pointwise, PointwiseModule, Training
from tests.pl_pointwise.quasi_newton import QuasiNewton
from tests.pl_pointwise.toy import ToyData, trainer

Function = Callable[[Tensor], Any]


@dataclass
class Problem:
    """min f(x) subject to g(x) ≤ 0 and h(x) = 0.

    ``multipliers``, where they are published: of g and h, for f + Σ μ g + Σ ν h.
    """

    start: list[float]
    objective: Function
    x: list[float]
    f: float
    inequalities: Function | None = None
    equalities: Function | None = None
    multipliers: dict[str, list[float]] = field(default_factory=dict)


PROBLEMS = {
    "6": Problem(
        [-1.2, 1],
        lambda x: (1 - x[0]) ** 2,
        [1, 1],
        0,
        equalities=lambda x: [10 * (x[1] - x[0] ** 2)],
    ),
    "7": Problem(
        [2, 2],
        lambda x: torch.log(1 + x[0] ** 2) - x[1],
        [0, 3**0.5],
        -(3**0.5),
        equalities=lambda x: [(1 + x[0] ** 2) ** 2 + x[1] ** 2 - 4],
    ),
    "21": Problem(
        [-1, -1],
        lambda x: 0.01 * x[0] ** 2 + x[1] ** 2 - 100,
        [2, 0],
        -99.96,
        inequalities=lambda x: [10 - 10 * x[0] + x[1], 2 - x[0], x[0] - 50, -50 - x[1], x[1] - 50],
    ),
    "26": Problem(
        [-2.6, 2, 2],
        lambda x: (x[0] - x[1]) ** 2 + (x[1] - x[2]) ** 4,
        [1, 1, 1],
        0,
        equalities=lambda x: [(1 + x[1] ** 2) * x[0] + x[2] ** 4 - 3],
    ),
    "28": Problem(
        [-4, 1, 1],
        lambda x: (x[0] + x[1]) ** 2 + (x[1] + x[2]) ** 2,
        [0.5, -0.5, 0.5],
        0,
        equalities=lambda x: [x[0] + 2 * x[1] + 3 * x[2] - 1],
    ),
    "35": Problem(
        [0.5, 0.5, 0.5],
        lambda x: (
            9
            - 8 * x[0]
            - 6 * x[1]
            - 4 * x[2]
            + 2 * x[0] ** 2
            + 2 * x[1] ** 2
            + x[2] ** 2
            + 2 * x[0] * x[1]
            + 2 * x[0] * x[2]
        ),
        [4 / 3, 7 / 9, 4 / 9],
        1 / 9,
        inequalities=lambda x: [x[0] + x[1] + 2 * x[2] - 3, -x[0], -x[1], -x[2]],
        multipliers={"inequalities": [2 / 9, 0, 0, 0]},
    ),
    "39": Problem(
        [2, 2, 2, 2],
        lambda x: -x[0],
        [1, 1, 0, 0],
        -1,
        equalities=lambda x: [x[1] - x[0] ** 3 - x[2] ** 2, x[0] ** 2 - x[1] - x[3] ** 2],
        multipliers={"equalities": [-1, -1]},
    ),
    "40": Problem(
        [0.8, 0.8, 0.8, 0.8],
        lambda x: -x[0] * x[1] * x[2] * x[3],
        [2 ** (-1 / 3), 2 ** (-1 / 2), 2 ** (-11 / 12), 2 ** (-1 / 4)],
        -0.25,
        equalities=lambda x: [
            x[0] ** 3 + x[1] ** 2 - 1,
            x[0] ** 2 * x[3] - x[2],
            x[3] ** 2 - x[1],
        ],
    ),
    "43": Problem(
        [0, 0, 0, 0],
        lambda x: (
            x[0] ** 2
            + x[1] ** 2
            + 2 * x[2] ** 2
            + x[3] ** 2
            - 5 * x[0]
            - 5 * x[1]
            - 21 * x[2]
            + 7 * x[3]
        ),
        [0, 1, 2, -1],
        -44,
        inequalities=lambda x: [
            x[0] ** 2 + x[1] ** 2 + x[2] ** 2 + x[3] ** 2 + x[0] - x[1] + x[2] - x[3] - 8,
            x[0] ** 2 + 2 * x[1] ** 2 + x[2] ** 2 + 2 * x[3] ** 2 - x[0] - x[3] - 10,
            2 * x[0] ** 2 + x[1] ** 2 + x[2] ** 2 + 2 * x[0] - x[1] - x[3] - 5,
        ],
        multipliers={"inequalities": [1, 0, 2]},
    ),
    "48": Problem(
        [3, 5, -3, 2, -2],
        lambda x: (x[0] - 1) ** 2 + (x[1] - x[2]) ** 2 + (x[3] - x[4]) ** 2,
        [1, 1, 1, 1, 1],
        0,
        equalities=lambda x: [x.sum() - 5, x[2] - 2 * (x[3] + x[4]) + 3],
    ),
    "50": Problem(
        [35, -31, 11, 5, -5],
        lambda x: (x[0] - x[1]) ** 2 + (x[1] - x[2]) ** 2 + (x[2] - x[3]) ** 4 + (x[3] - x[4]) ** 2,
        [1, 1, 1, 1, 1],
        0,
        equalities=lambda x: [
            x[0] + 2 * x[1] + 3 * x[2] - 6,
            x[1] + 2 * x[2] + 3 * x[3] - 6,
            x[2] + 2 * x[3] + 3 * x[4] - 6,
        ],
    ),
    "51": Problem(
        [2.5, 0.5, 2, -1, 0.5],
        lambda x: (x[0] - x[1]) ** 2 + (x[1] + x[2] - 2) ** 2 + (x[3] - 1) ** 2 + (x[4] - 1) ** 2,
        [1, 1, 1, 1, 1],
        0,
        equalities=lambda x: [x[0] + 3 * x[1] - 4, x[2] + x[3] - 2 * x[4], x[1] - x[4]],
    ),
    "52": Problem(
        [2, 2, 2, 2, 2],
        lambda x: (
            (4 * x[0] - x[1]) ** 2 + (x[1] + x[2] - 2) ** 2 + (x[3] - 1) ** 2 + (x[4] - 1) ** 2
        ),
        [-33 / 349, 11 / 349, 180 / 349, -158 / 349, 11 / 349],
        1859 / 349,
        equalities=lambda x: [x[0] + 3 * x[1], x[2] + x[3] - 2 * x[4], x[1] - x[4]],
    ),
    "71": Problem(
        [1, 5, 5, 1],
        lambda x: x[0] * x[3] * (x[0] + x[1] + x[2]) + x[2],
        [1, 4.7429994, 3.8211503, 1.3794082],
        17.0140173,
        inequalities=lambda x: [25 - x.prod(), *(1 - x), *(x - 5)],
        equalities=lambda x: [x.square().sum() - 40],
        multipliers={
            "inequalities": [0.55229366, 1.0878712, 0, 0, 0, 0, 0, 0, 0],
            "equalities": [0.1614686],
        },
    ),
    "76": Problem(
        [0.5, 0.5, 0.5, 0.5],
        lambda x: (
            x[0] ** 2
            + 0.5 * x[1] ** 2
            + x[2] ** 2
            + 0.5 * x[3] ** 2
            - x[0] * x[2]
            + x[2] * x[3]
            - x[0]
            - 3 * x[1]
            + x[2]
            - x[3]
        ),
        [0.2727273, 2.090909, 0, 0.5454545],
        -4.681818,
        inequalities=lambda x: [
            x[0] + 2 * x[1] + x[2] + x[3] - 5,
            3 * x[0] + x[1] + 2 * x[2] - x[3] - 4,
            1.5 - x[1] - 4 * x[2],
            *(-x),
        ],
    ),
}


NAMES = list(PROBLEMS)
KINDS = {"inequalities": Constraint(at_most=0.0), "equalities": Constraint(equals=0.0)}


def values_of(problem: Problem, kind: str, x: Tensor) -> Tensor:
    """(K,), empty where the problem has none of the kind."""
    function = getattr(problem, kind)
    return x[:0] if function is None else torch.stack(list(function(x)))


WIDTHS = {
    kind: torch.tensor([len(values_of(p, kind, torch.tensor(p.start))) for p in PROBLEMS.values()])
    for kind in KINDS
}


class Numbers:
    """One sample a problem."""

    def __len__(self) -> int:
        return len(NAMES)

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        return {"problem": torch.tensor(position)}


class Collection(PointwiseModule):
    def __init__(self, alpha: float, primal_steps: int) -> None:
        super().__init__(
            formulation=Pointwise(alpha=alpha, dual_lr=2 * alpha),
            constraints=KINDS,
            training=Training(primal_steps=primal_steps),
        )
        starts = (torch.tensor(p.start, dtype=torch.float64) for p in PROBLEMS.values())
        self.x = torch.nn.ParameterList([torch.nn.Parameter(x) for x in starts])

    def forward(self, batch: Any) -> list[tuple[Problem, Tensor]]:
        return [(PROBLEMS[NAMES[i]], self.x[i]) for i in batch["problem"].tolist()]

    def objective(self, outputs: Any, batch: Any) -> Tensor:
        return torch.stack([problem.objective(x) for problem, x in outputs])

    def constraint_values(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        return {
            kind: torch.stack(
                [
                    torch.nn.functional.pad(found, (0, int(WIDTHS[kind].max()) - len(found)))
                    for found in (values_of(problem, kind, x) for problem, x in outputs)
                ]
            )
            for kind in KINDS
        }

    def membership(self, batch: Any) -> dict[str, Tensor]:
        return {
            kind: torch.arange(int(widths.max())) < widths[batch["problem"]][:, None]
            for kind, widths in WIDTHS.items()
        }

    def configure_optimizers(self) -> Any:
        return QuasiNewton(self.x)


@dataclass
class Solution:
    """Of one problem, in the units of the program."""

    x: Tensor
    multipliers: dict[str, Tensor]


@pytest.fixture(scope="module")
def solutions() -> dict[str, Solution]:
    """Of all problems, after 336 steps of the weights and 21 of the multipliers."""
    alpha = 30.0
    module = Collection(alpha, primal_steps=16)
    trainer(max_epochs=336, log_every_n_steps=10**6).fit(
        module, ToyData(Numbers(), batch_size=len(NAMES))
    )
    found = {}
    for i, name in enumerate(NAMES):
        scaled = {}
        for kind, widths in WIDTHS.items():
            width, carried = int(widths[i]), int((widths > 0).sum())
            table = module.multipliers[kind][i, :width].double()
            scaled[kind] = table * len(NAMES) / (carried * max(1, width))
        found[name] = Solution(module.x[i].detach(), scaled)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_solution_is_the_published_one(name: str, solutions: dict[str, Solution]) -> None:
    """To 1e-6 in f and x; 26 to 1e-3 in x, where f is flat to the fourth power."""
    problem, found = PROBLEMS[name], solutions[name]
    assert float(problem.objective(found.x)) == pytest.approx(problem.f, rel=1e-6, abs=1e-6)
    published = torch.tensor(problem.x, dtype=torch.float64)
    atol = 1e-3 if name == "26" else 1e-6
    torch.testing.assert_close(found.x, published, rtol=0, atol=atol)
    assert (values_of(problem, "inequalities", found.x) < 1e-6).all()
    assert (values_of(problem, "equalities", found.x).abs() < 1e-6).all()


@pytest.mark.parametrize("name", NAMES)
def test_multipliers_are_those_of_the_program(name: str, solutions: dict[str, Solution]) -> None:
    """∇f + Σ μ ∇g + Σ ν ∇h = 0, μ ≥ 0, μ g = 0 to 1e-5; and the published ones to 2e-6.

    ν has the sign of h: in 71 the equality's .1614686 is that of Σx² − 40.
    """
    problem, found = PROBLEMS[name], solutions[name]
    x = found.x.clone().requires_grad_()
    total = problem.objective(x)
    for kind in KINDS:
        total = total + (found.multipliers[kind] * values_of(problem, kind, x)).sum()
    (slope,) = torch.autograd.grad(total, x)
    torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-5)
    inner = values_of(problem, "inequalities", found.x)
    assert (found.multipliers["inequalities"] >= 0).all()
    assert ((found.multipliers["inequalities"] * inner).abs() < 1e-5).all()
    for kind, published in problem.multipliers.items():
        known = torch.tensor(published, dtype=torch.float64)
        torch.testing.assert_close(found.multipliers[kind], known, rtol=2e-6, atol=2e-6)
