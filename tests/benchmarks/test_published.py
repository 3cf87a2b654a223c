"""Published tables: formulas as their authors have them, columns by hand, runs in miniature."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import gmean

from benchmarks.published import __main__ as published
from benchmarks.published import (
    integer,
    nlpoptnet,
    nonconvex,
    qcqp,
    unicycle,
    unicycle_training,
)
from benchmarks.published.runs import mean_prices, prices
from benchmarks.published.show import draw, summarise, write
from benchmarks.published.table import Judged, Table, sine, snarenet_columns
from pl_pointwise.tasks.family.family import (
    optimum,
    problems,
    program_of,
    split_of,
)

SMALL = (8, 6, 3)


def small(nonconvex: bool = True) -> Table:
    formula = partial(sine, 5, 240, SMALL)
    if not nonconvex:
        formula = partial(qcqp.formula, 240, SMALL)
    return Table(
        name="SnareNet, small",
        formula=formula,
        columns=snarenet_columns,
        nonconvex=nonconvex,
        published={"SnareNet": {"gap, geometric mean": 0.1, "gap, largest": 0.3}},
        source="nobody",
        file="nothing.ipynb",
        shown=("gap, geometric mean",),
        epochs=4,
        batch=20,
        weights=(30,),
    )


def test_the_formulas_are_their_authors() -> None:
    """numpy's global generator, as their files have it; and a number that a notebook prints."""
    np.random.seed(2025)
    square, linear = np.random.random(100), np.random.random(100)
    below = np.random.normal(loc=0, scale=1.0, size=(50, 100))
    ours = sine(2025, 3)
    assert np.array_equal(ours["Q"], square)
    assert np.array_equal(ours["p"], linear)
    assert np.array_equal(ours["G"], below)
    np.random.seed(2025)
    assert np.array_equal(qcqp.formula(3)["Q"], np.random.rand(100) * 0.5)
    for name, arrays in (("sine", sine(2025, 50)), ("QCQP", qcqp.formula(50))):
        y = arrays["X"] @ np.linalg.pinv(arrays["A"]).T
        value = y @ arrays["G"].T
        if name == "QCQP":
            value += np.einsum("bv,kv,bv->bk", y, arrays["H"] / 2, y)
        assert (value <= arrays["h"]).all(), name


def test_nlpopt_nets_optimum_at_the_middle_is_the_one_that_they_print(
    tmp_path: Path,
) -> None:
    program = program_of(nlpoptnet.TABLE.family(tmp_path))
    x = torch.from_numpy(nlpoptnet.rows(np.zeros((1, 50))))
    multipliers = program.ascend(x, torch.zeros(1, 250), 20)
    # Notebook_Table_01, of OSQP at 1e-5.
    assert program.dual(x, multipliers).item() == pytest.approx(-6.722404, abs=1e-5)


def test_the_optimum_of_a_sine_is_that_of_their_solver_from_their_start(
    tmp_path: Path,
) -> None:
    family = small().family(tmp_path)
    of, first = problems(family), split_of(family)["test"].start
    found = optimum(family)
    assert found[: split_of(family)["train"].stop].isnan().all()
    for row in range(first, first + 4):
        x = of.x[row]
        solved = minimize(
            lambda y: of.Q.numpy() @ (y * y) / 2 + of.p.numpy() @ np.sin(y),
            (of.plus @ x).numpy(),
            constraints=[
                {"type": "eq", "fun": lambda y, x=x: of.A.numpy() @ y - x.numpy()},
                {"type": "ineq", "fun": lambda y: of.h.numpy() - of.G.numpy() @ y},
            ],
            method="SLSQP",
            options={"ftol": 1e-10},
        )
        assert found[row].item() == pytest.approx(solved.fun, abs=1e-4)


@pytest.mark.parametrize("sine", [True, False])
def test_prices_are_multipliers_of_the_optimum(tmp_path: Path, sine: bool) -> None:
    """What the least objective loses for each unit of a bound, by moving the bound."""
    family = small(sine).family(tmp_path)
    x = problems(family).x[split_of(family)["val"]]
    found = prices(family, x)
    assert (found >= 0).all()
    torch.testing.assert_close(mean_prices(family), found.mean(0))
    k = int(found.mean(0).argmax())
    assert found[:, k].mean() > 1e-3
    moved = dict(small(sine).formula())
    moved["h"] = moved["h"] + 1e-3 * (np.arange(len(moved["h"])) == k)
    np.savez(tmp_path / "moved.npz", **moved)
    looser = type(family).of_file(tmp_path / "moved.npz", nonconvex=sine)
    part = split_of(family)["val"]
    gained = (optimum(family)[part] - optimum(looser)[part]) / 1e-3
    torch.testing.assert_close(gained, found[:, k], atol=5e-3, rtol=0.05)


def test_columns_are_those_of_their_code() -> None:
    draw = torch.Generator().manual_seed(0)
    gap = torch.rand(20, generator=draw).double()
    gap[3] = -0.1
    judged = Judged(
        gap + 1, torch.ones(20).double(), torch.rand(20, 3), torch.rand(20, 2)
    )
    found = snarenet_columns(judged)
    wanted = gmean(np.maximum(gap.numpy(), 1e-16))
    assert found["gap, geometric mean"] == pytest.approx(wanted)
    assert found["gap, largest"] == pytest.approx(gap.max().item())
    # Of NLPOpt-Net a share of the answer's own objective.
    best = torch.full((2000,), 2.0).double()
    judged = Judged(best * 1.25, best, torch.zeros(2000, 1), torch.zeros(2000, 1))
    assert nlpoptnet.columns(judged)["gap, %"] == pytest.approx(20)


@pytest.mark.parametrize("sine", [True, False])
def test_a_table_is_run_once_and_shown(tmp_path: Path, sine: bool) -> None:
    table, output = small(sine), tmp_path / "runs.csv"
    methods = published.methods_of(table)
    assert methods == ["Pointwise()", "a weight a constraint", "hinge 30"]
    published.study(output, table, methods[:2], [0], tmp_path)
    before = output.read_text()
    published.study(output, table, methods, [0], tmp_path)
    assert output.read_text().startswith(before)
    runs = published.read(output)
    wide = runs.pivot(index=["method", "correction"], columns="column", values="value")
    assert len(wide) == 6
    corrected = wide.xs("newton", level="correction")
    assert (corrected["infeasible"] == 0).all()
    assert corrected["inequality, largest"].max() <= 1e-8
    assert corrected["equality, largest"].max() <= 1e-10
    assert (wide.xs("none", level="correction")["worst, mean"] > 1e-6).any()
    published.forget(output, table.name, methods[:1], [0])
    left = published.read(output)
    assert set(left["method"]) == set(methods[1:])
    published.study(output, table, methods, [0], tmp_path)
    again = published.read(output).query("column != 'seconds'")
    columns = ["method", "correction", "column"]
    first = runs.query("column != 'seconds'").set_index(columns)["value"]
    second = again.set_index(columns)["value"].loc[first.index]
    steady = ~first.index.get_level_values("column").isin(["ms an answer"])
    np.testing.assert_allclose(first[steady], second[steady], rtol=1e-3, atol=1e-6)
    page = tmp_path / "page.md"
    page.write_text(
        "| SnareNet, small | b |\n\n"
        "| SnareNet, small | gap, geometric mean |\n|---|---|\n\nAfter.\n"
    )
    write({table.name: table}, output, page)
    assert "\n| SnareNet, published | 0.1 |" in page.read_text()
    assert page.read_text().startswith("| SnareNet, small | b |\n\n| SnareNet")
    assert page.read_text().endswith("|\n\nAfter.\n")
    shown = summarise(table, runs)
    assert "nobody" in shown
    assert "| SnareNet, published |" in shown
    draw({table.name: table}, output, tmp_path / "dots.png")
    assert (tmp_path / "dots.png").stat().st_size > 10_000


def test_integers_are_rounded_split_and_projected_as_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    split = pytest.importorskip("sklearn.model_selection").train_test_split
    rest, test = split(range(10_000), test_size=1000, random_state=42)
    np.random.seed(42)
    b = np.random.uniform(-1, 1, size=(10_000, 20))
    train, _ = split(rest, test_size=1000, random_state=42)
    ours = integer.splits(20)
    np.testing.assert_allclose(ours["test"].numpy(), b[test], atol=1e-6)
    np.testing.assert_allclose(ours["train"].numpy(), b[train], atol=1e-6)
    torch.manual_seed(0)
    module = integer.Integers(None, 20).eval()
    x = 3 * torch.randn(30, 20)
    x.requires_grad_()
    rounded = module.network.rounded(ours["test"][:30], x)
    torch.testing.assert_close(rounded, rounded.round(), atol=1e-5, rtol=0)
    assert ((rounded - x).abs() < 1).all()
    (slope,) = torch.autograd.grad(rounded.sum(), x)
    assert (slope.abs() > 0).all()
    # A network without training needs longer steps than theirs.
    monkeypatch.setattr(integer, "STEP", 0.3)
    found = integer.projected(module, ours["test"][:30])
    raw = module.network(ours["test"][:30]).detach()
    excess = [
        (y @ module.A.T - ours["test"][:30]).clamp(min=0).amax(1) for y in (raw, found)
    ]
    assert (excess[0] > 1e-6).any()
    assert excess[1].max() <= 1e-6


def test_a_unicycle_moves_costs_and_starts_as_theirs() -> None:
    """mpc_obst.py, step by step, and the first state that eval.py draws."""
    draw = np.random.default_rng(0)
    start, inputs = draw.normal(size=3), draw.normal(size=(10, 2))
    start[2] = 3.0  # Near half a turn: the angle off the target has to be wrapped.
    at, total, margins = start, 0.0, []
    for step, (speed, turn) in enumerate(inputs):
        slide = [speed * np.cos(at[2]), speed * np.sin(at[2]), turn]
        at = at + 0.2 * np.array(slide)
        off = at - np.array([3.5, 0, 0])
        off[2] = (off[2] + np.pi) % (2 * np.pi) - np.pi
        weights = np.array([11, 11, 2]) if step == 9 else np.ones(3)
        total += weights @ off**2 + 0.1 * (speed**2 + turn**2)
        margins.append(0.51020408 * at[0] ** 2 + 0.90702948 * at[1] ** 2 - 1)
    given = torch.from_numpy(inputs)[None]
    states = unicycle.driven(torch.from_numpy(start)[None], given)
    assert unicycle.cost(states, given).item() == pytest.approx(total)
    np.testing.assert_allclose(unicycle.margin(states)[0].numpy(), margins)
    draw = np.random.default_rng(101)
    first = [draw.uniform(-4, -2.2), draw.uniform(-2.4, 2.4), draw.uniform(-0.45, 0.45)]
    np.testing.assert_array_equal(unicycle.starts()[0].numpy(), first)


def test_plans_that_are_corrected_never_touch_the_obstacle() -> None:
    """Also those of a network that drives straight ahead, and did not train."""

    def ahead(state: torch.Tensor) -> torch.Tensor:
        return torch.tensor([2.5, 0.0]).expand(len(state), 10, 2)

    start = unicycle.starts()[:12]
    raw, found = (unicycle.closed_loops(ahead, start, c) for c in (False, True))
    assert unicycle.margin(raw.states).min() < -0.5
    assert raw.worst > 0.4
    assert unicycle.margin(found.states).min() > -unicycle.TOUCHED
    assert found.worst <= 1e-6
    speed, turn = found.inputs.unbind(2)
    assert speed.min() >= 0
    assert speed.max() <= 2
    assert turn.abs().max() <= 1.5


def test_a_plan_that_no_step_makes_legal_stands() -> None:
    """Straight at the middle of the obstacle, where both ways around it are as near."""
    state = torch.tensor([[-1.45, 0.0, 0.0]], dtype=torch.float64)

    def ahead(state: torch.Tensor) -> torch.Tensor:
        return torch.tensor([2.0, 0.0]).expand(len(state), 10, 2)

    plan = unicycle.planned(ahead, state, correct=True)
    assert max(float(v.max()) for v in unicycle.limits(state, plan).values()) <= 1e-6


def test_a_network_plans_within_the_bounds_of_its_inputs() -> None:
    """Also where its last layer is far beyond; and it reaches both bounds."""
    plan = unicycle_training.Plan()
    state = unicycle.starts().float()
    found = []
    for far in (-50.0, 50.0):
        torch.nn.init.constant_(plan.net[-1].bias, far)
        found.append(plan(state).detach())
    for value, speed, turn in zip(found, (0.0, 2.0), (-1.5, 1.5), strict=True):
        assert (value[..., 0] == speed).all()
        assert (value[..., 1] == turn).all()


def test_states_that_train_are_of_the_own_loops() -> None:
    """Of a network that drives straight ahead: until the obstacle, along whose edge they slide."""
    plan = unicycle_training.Plan()
    torch.nn.init.zeros_(plan.net[-1].weight)
    with torch.no_grad():
        plan.net[-1].bias.copy_(torch.tensor([50.0, 0.0]).repeat(10))
    states = unicycle_training.states_of_loops(plan, seed=3)
    assert (unicycle.margin(states) > 0).all()
    loops = states.reshape(20, -1, 3)
    angle = loops[:-1, :, 2]
    ahead = loops[:-1, :, :2] + 0.4 * torch.stack([angle.cos(), angle.sin()], 2)
    moved = (loops[1:, :, :2] - ahead).norm(dim=2) > 1e-5
    assert ((unicycle.margin(ahead) < 0.001) == moved).all()
    assert moved.any()
    assert (unicycle.margin(loops[1:])[moved] - 0.001).abs().max() < 1e-5
    assert (loops[:, :, 2] == loops[0, :, 2]).all()
    judged = {tuple(row) for row in unicycle.starts().float().tolist()}
    assert not judged & {tuple(row) for row in loops[0].tolist()}


@pytest.mark.parametrize("method", ["Pointwise(memory=False)", "squared hinge 100"])
def test_training_drives_nearer_to_the_target(method: str) -> None:
    torch.manual_seed(0)
    before = unicycle_training.Plan()
    after = unicycle_training.trained(method, 0, epochs=15)
    costs = []
    for plan in (before, after):
        found = unicycle.closed_loops(plan, unicycle.starts(), correct=False)
        costs.append(float(unicycle.cost(found.states, found.inputs).mean()))
    assert costs[1] < 0.7 * costs[0]


def test_ipopt_drove_from_every_start() -> None:
    assert len(unicycle.reference()) == len(unicycle.starts()) == 100
    assert (unicycle.reference() > 100).all()


def test_the_tables_have_names_of_their_own() -> None:
    names = list(published.TABLES)
    assert len(set(names)) == len(names) == 7
    assert nonconvex.TABLE.published["SnareNet"]["gap, geometric mean"] == 0.0790
