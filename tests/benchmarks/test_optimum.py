"""The study of known optima: a small problem through the command, which goes on where it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("sklearn")

from benchmarks.optimum import Problem
from benchmarks.optimum.__main__ import main
from benchmarks.optimum.equations import convection, helmholtz
from benchmarks.optimum.run import PROBLEMS


def far() -> Problem:
    """(w − 2)² with w ≤ 1 for every sample: at the optimum w = 1, the objective is 1 and λ 2."""

    def terms(net: nn.Module, index: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        w = net(torch.ones(len(index), 1))[:, 0]
        return (w - 2).square(), {"c": w}

    problem = Problem(20, lambda: nn.Linear(1, 1), terms, {"c": 1.0})
    vars(problem)["least"] = 1.0
    return problem


def test_a_problem_is_run_once_and_judged_beside_its_optimum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PROBLEMS, "far", far)
    methods = ["Pointwise()", "hinge 1", "hinge 10"]
    command = [
        "--problem",
        "far",
        "--epochs",
        "30",
        "--output",
        str(tmp_path),
        "--methods",
    ]
    main([*command, *methods[:1], "--seeds", "0"])
    first = pd.read_csv(tmp_path / "optimum.csv")
    main([*command, *methods, "--seeds", "0"])
    found = pd.read_csv(tmp_path / "optimum.csv").set_index("method")
    assert list(found.index) == methods
    assert found["seconds"].iloc[0] == first["seconds"].iloc[0]
    assert list(found["violated"]) == [0, 1, 0]
    assert found.loc["Pointwise()", "above"] == pytest.approx(0, abs=0.25)
    assert found.loc["hinge 1", "above"] == pytest.approx(-0.75, abs=0.01)  # w = 1.5.
    assert (tmp_path / "optimum.png").stat().st_size > 0
    line = capsys.readouterr().out.strip().splitlines()[-1]
    assert line.startswith("| far | 30 | 0.000 · ")
    assert "| 10: 0.000 · " in line


def test_what_is_violated_is_counted_by_sample_and_of_members_only() -> None:
    values = torch.tensor([[0.0, 1.0], [0.0, 0.0], [2.0, 3.0], [9.0, 9.0]])

    def terms(net: nn.Module, index: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return index.float(), {"c": values[index], "e": values[index, 1]}

    def membership(index: Tensor) -> dict[str, Tensor]:
        return {"c": index < 3, "e": index < 2}

    of = {"equal": ("e",), "membership": membership}
    bounds, slack = {"c": 0.5, "e": 1.0}, {"c": 0.5, "e": 0.5}
    problem = Problem(4, nn.Identity, terms, bounds, slack, **of)
    found = problem.measure(nn.Identity())
    assert found == pytest.approx(
        {"violated": 2 / 5, "objective": 1.5, "equality": 0.5}
    )
    worst = Problem(4, nn.Identity, terms, bounds, None, **of).measure(nn.Identity())
    assert worst["violated"] == pytest.approx((0.5 + 0 + 2.5) / 3)


class Known(nn.Module):
    """The solution of an equation as a network."""

    def __init__(self, of: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.of = of

    def forward(self, at: Tensor) -> Tensor:
        return self.of(*at.unbind(1))[:, None]


@pytest.mark.parametrize(
    ("equation", "solution"),
    [
        (convection, lambda x, t: torch.sin(x - 5 * t)),
        (helmholtz, lambda x, y: torch.sin(torch.pi * x) * torch.sin(4 * torch.pi * y)),
    ],
)
def test_the_solution_of_an_equation_meets_it(equation: Any, solution: Any) -> None:
    """And a shifted one does not: residual, edges and error are of the same equation."""
    for in_loss in (True, False):
        problem = equation(in_loss)
        found = problem.measure(Known(solution))
        assert found == pytest.approx({"violated": 0, "objective": 0}, abs=1e-5)
        objective, values = problem.terms(
            Known(solution), torch.arange(problem.samples)
        )
        residual = objective.sqrt() if in_loss else values["residual"]
        assert float(residual.max()) < 1e-3  # Of terms of 170 in float32.
        other = problem.measure(Known(lambda *at: solution(*at) + 0.1))
        assert other["objective"] > 0.1
        assert other["violated"] > (0.1 if equation is helmholtz else 0.04)
