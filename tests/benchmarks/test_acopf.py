"""Power flow on 57 buses: the equations against others' numbers, and the study in miniature."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from benchmarks.acopf import __main__ as acopf
from benchmarks.acopf.grid import Grid, draw_loads


@pytest.fixture(scope="module")
def grid() -> Grid:
    return Grid()


@pytest.fixture
def loads(grid: Grid) -> Tensor:
    return draw_loads(grid.load, 5)


@pytest.fixture
def points() -> Tensor:
    """Set points (5, 13), each the next's."""
    apart = torch.linspace(-0.02, 0.02, 65).view(5, 13).double()
    return torch.tensor([0.6, 0.5, 0.6, 4.5, 0.7, 3.5, *[1.03] * 7]).double() + apart


def test_the_base_case_has_the_published_voltages(grid: Grid) -> None:
    """As the IEEE gives them, to .001; but at bus 46, where pypower's flow differs as well."""
    ahead, volts = [0, 0.4, 0, 4.5, 0, 3.1], grid.start[0, grid.at]
    z = torch.cat([torch.tensor(ahead, dtype=torch.float64), volts])[None]
    y = grid.complete(z, grid.load.flatten()[None])
    size, angle = y[0, 14:].view(2, 57)
    other = [bus for bus in range(57) if bus != 45]
    assert (size - grid.start[0])[other].abs().max() < 0.001
    assert (angle - grid.start[1])[other].abs().max() < 0.001  # .05 degrees
    assert size[45].item() == pytest.approx(1.0598, abs=1e-4)  # By pypower.
    # What the slack bus feeds: 478.7 MW.
    assert y[0, 0] == pytest.approx(4.787, abs=0.005)


def test_the_power_balances_at_each_bus(
    grid: Grid, loads: Tensor, points: Tensor
) -> None:
    """In complex numbers: s = v · conj(Y v)."""
    y = grid.complete(points, loads).numpy()
    volts = y[:, 14:71] * np.exp(1j * y[:, 71:])
    half = grid.network.numpy()[:, :57]
    fed = volts * np.conj(volts @ (half[:57] + 1j * half[57:]).T)
    given = -(loads[:, :57] + 1j * loads[:, 57:]).numpy()
    given[:, grid.at] += y[:, :7] + 1j * y[:, 7:14]
    assert abs(fed - given).max() < 1e-9
    assert grid.imbalance(torch.tensor(y), loads).abs().max() < 1e-9
    assert (y[:, 1:7] == points[:, :6].numpy()).all()
    assert (y[:, 14:71][:, grid.at] == points[:, 6:].numpy()).all()


def test_the_gradient_is_that_of_the_solution(
    grid: Grid, loads: Tensor, points: Tensor
) -> None:
    z = points.clone().requires_grad_()
    weights = torch.linspace(-1, 1, 128).double()
    (slope,) = torch.autograd.grad((grid.complete(z, loads) @ weights).sum(), z)
    apart = 1e-5 * torch.eye(13).double()
    with torch.no_grad():
        ahead, back = (
            torch.stack(
                [
                    grid.complete(points + sign * step, loads) @ weights
                    for step in apart
                ],
                1,
            )
            for sign in (1, -1)
        )
    by_differences = (ahead - back) / 2e-5
    assert (
        (slope - by_differences).norm(dim=1) < 0.05 * by_differences.norm(dim=1)
    ).all()


def test_a_limit_is_violated_by_what_is_beyond_it(grid: Grid) -> None:
    y = torch.cat([(grid.low + grid.high) / 2, torch.zeros(57)])[None].repeat(3, 1)
    y[0, 3] = grid.high[3] + 0.5
    y[1, 13] = grid.low[13] - 0.25
    y[2, 14 + 30] = 1.07
    found = grid.inequalities(y)
    assert {name: values.shape for name, values in found.items()} == {
        "active power": (3, 14),
        "reactive power": (3, 14),
        "voltage": (3, 114),
    }
    worst = torch.stack([values.clamp(min=0).amax(1) for values in found.values()], 1)
    torch.testing.assert_close(
        worst, torch.diag(torch.tensor([0.5, 0.25, 0.01])).double()
    )
    p = torch.tensor([[1.0, 2, 3, 4, 5, 6, 7]]).double()
    squares = [0.0775795, 0.01, 0.25, 0.01, 0.0222222, 0.01, 0.0322581]
    lines = [20, 40, 20, 40, 20, 40, 20]
    paid = sum(
        a * (100 * k) ** 2 + b * 100 * k
        for k, (a, b) in enumerate(zip(squares, lines, strict=True), 1)
    )
    padded = torch.cat([p, torch.zeros(1, 121).double()], 1)
    assert grid.objective(padded).item() == pytest.approx(paid / 1e4)


def test_loads_are_drawn_as_published(grid: Grid) -> None:
    loads = draw_loads(grid.load, 400)
    torch.testing.assert_close(loads[:5], draw_loads(grid.load, 5))
    (p, q), there = loads.view(400, 2, 57).unbind(1), grid.load[0] > 0
    factor = p[:, there] / grid.load[0, there]
    assert there.sum() == 42
    assert not p[:, ~there].any()
    assert 0.3 <= factor.min() < 0.35 < 1.65 < factor.max() <= 1.7
    assert factor.mean() == pytest.approx(1, abs=0.03)
    between = np.corrcoef(factor.T.numpy())[~np.eye(42, dtype=bool)]
    # .5 before factors beyond the range are drawn again.
    assert 0.05 < between.mean() < 0.2
    power_factor = (q[:, there] / p[:, there]).arctan().cos()
    assert 0.8 <= power_factor.min() < 0.81 < 0.99 < power_factor.max() <= 1


def test_a_study_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tmp_path / "optimum.csv"
    pd.read_csv(acopf.OPTIMUM, nrows=40).to_csv(small, index=False)
    monkeypatch.setattr(acopf, "OPTIMUM", small)
    monkeypatch.setattr(acopf, "HELD", 10)
    output = tmp_path / "runs.csv"
    acopf.study(output, ["Pointwise()"], [0], 20)
    before = output.read_text()
    acopf.study(output, ["Pointwise()", "hinge 1"], [0], 20)
    assert output.read_text().startswith(before)
    table = acopf.read(output).set_index(["method", "part", "correction"])
    assert table.index.is_unique
    assert len(table) == 8
    assert table["equality"].max() < 1e-8
    raw, after = (
        table.xs(steps, level="correction") for steps in (0, acopf.CORRECTION)
    )
    assert (after["worst"] < raw["worst"]).all()
    assert (table["gap"].abs() < 0.2).all()
    assert "| DC3, published | | | 5 | 3.8160 | 0.110 | 0.00201 | |" in acopf.summarise(
        acopf.read(output)
    )


def test_drawn_instances_train_for_as_many_steps_and_are_none_of_those_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, seen = tmp_path / "optimum.csv", []
    pd.read_csv(acopf.OPTIMUM, nrows=40).to_csv(small, index=False)
    monkeypatch.setattr(acopf, "OPTIMUM", small)
    monkeypatch.setattr(acopf, "HELD", 10)

    def trained(grid: Grid, loads: Tensor, *options: object) -> acopf.SetPoints:
        seen.append((loads, options))
        return acopf.SetPoints(grid, loads).double()

    monkeypatch.setattr(acopf, "trained", trained)
    output = tmp_path / "runs.csv"
    acopf.study(output, ["Pointwise(memory=False)"], [0], 20, drawn=100)
    ((loads, (formulation, seed, epochs)),) = seen
    assert (formulation, seed, epochs) == (acopf.Pointwise(memory=False), 0, 4)
    assert len(loads) == 100
    judged = acopf.Instances(Grid(), small, 10).loads
    for part in judged.values():
        assert not (loads[:, None] == part).all(2).any()
    assert set(acopf.read(output)["method"]) == {"Pointwise(memory=False), 100 drawn"}
