"""A bound on groups is on the mean of each group, whatever part of it a batch holds.

Pushed sample by sample, a service level of 90 % over 30 days ended with stocks of the worst days:
50 % above the optimum. The reference here is written from the definition: last values by sample,
their mean by group, ψ of the means weighed by the groups' sizes, and autograd through it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pl_pointwise import Average, Constraint, Penalty, Pointwise, PointwiseLoss, Relaxed
from pl_pointwise.data import IndexedDataset
from pl_pointwise.errors import DataError, TrainingError
from pl_pointwise.lagrangian.group_means import GroupMeans
from tests.pl_pointwise.toy import PAIRS, Toy, ToyData, ToyRows, fit, trainer

GROUPS = torch.tensor([0, 2, 1, 1, 0, 2, 2, 2, 3, 0, 1, 1])
N = len(GROUPS)


# ψ of the means ---------------------------------------------


def augmented(v: Tensor, multiplier: Tensor, alpha: float = 0.7) -> Tensor:
    shifted = (v + multiplier / (2 * alpha)).clamp(min=0)
    return alpha * shifted.square() - multiplier.square() / (4 * alpha)


def soft_margin(v: Tensor, multiplier: Tensor) -> Tensor:
    """The printed relaxed ψ with a linear cost of 0.5."""
    s = multiplier + 2 * 0.7 * v
    capped = 0.5 * v - (multiplier - 0.5).square() / (4 * 0.7)
    return torch.where(s > 0.5, capped, augmented(v, multiplier))


PSI: dict[str, tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = {
    "pointwise": (Pointwise(alpha=0.7), augmented),
    "standard": (Pointwise(alpha=None), lambda v, multiplier: multiplier * v),
    "relaxed": (Relaxed(alpha=0.7, beta=0.5, cost="linear"), soft_margin),
    "hinge": (Penalty(weight=3.0, shape="hinge"), lambda v, _: 3 * v.clamp(min=0)),
    "squared": (
        Penalty(weight=3.0, shape="squared_hinge"),
        lambda v, _: 3 * v.clamp(min=0) ** 2,
    ),
}


@pytest.mark.parametrize("kind", PSI)
def test_of_whole_groups_loss_and_gradient_are_those_of_psi_of_their_means(
    kind: str,
) -> None:
    """Two columns, an interval, and a mask, in which a group weighs as many as it has samples."""
    formulation, psi = PSI[kind]
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(
        N, 2, generator=generator, dtype=torch.float64
    ).requires_grad_()
    mask = torch.rand(N, 2, generator=generator) < 0.7
    mask[0], mask[8] = torch.tensor([True, False]), True
    bound = Constraint(at_least=-0.2, at_most=0.3)
    loss = PointwiseLoss({"c": bound}, formulation, samples=N, groups=GROUPS)
    multiplier = (
        torch.rand(4, 4, generator=generator, dtype=torch.float64).float().double()
    )
    if kind not in ("hinge", "squared"):
        loss.multipliers.set("c", multiplier)
    order = torch.randperm(N, generator=generator)
    found = loss(
        torch.zeros(N).double(), {"c": values[order]}, order, masks={"c": mask[order]}
    )

    v = torch.cat([values - 0.3, -0.2 - values], 1)
    wide = mask.repeat(1, 2)
    inner = wide.double() / mask.sum(1, keepdim=True).clamp(min=1)
    expected = torch.zeros((), dtype=torch.float64)
    for group in range(4):
        for column in range(4):
            rows = (group == GROUPS) & wide[:, column]
            if rows.any():
                mean = v[rows, column].mean()
                share = inner[rows, column].sum() / mask.any(1).sum()
                expected = expected + share * psi(mean, multiplier[group, column])
    torch.testing.assert_close(found, expected)
    # Of one value a sample the gradient is that of the mean; of a mask each sample's part.
    whole = PointwiseLoss({"c": bound}, formulation, samples=N, groups=GROUPS)
    if kind not in ("hinge", "squared"):
        whole.multipliers.set("c", multiplier)
    found = whole(torch.zeros(N).double(), {"c": values}, torch.arange(N))
    means = torch.stack([v[group == GROUPS].mean(0) for group in range(4)])
    sizes = torch.bincount(GROUPS)[:, None] / N
    expected = (sizes * psi(means, multiplier)).sum() / 2
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(loss, values)[0] for loss in (found, expected))
    torch.testing.assert_close(*gradients)
    assert expected.abs() > 0.01


class ByHand:
    """Weights w of z = x·w, a bound z ≤ 0.1 on each group's mean, α 0.7 and η 1.4."""

    def __init__(self, rows: ToyRows) -> None:
        self.rows = rows
        self.weights = torch.full((4,), 0.3, dtype=torch.float64, requires_grad=True)
        self.last = torch.full((N,), math.nan, dtype=torch.float64)
        self.multiplier = torch.zeros(4, dtype=torch.float64)

    def step(self, batches: list[list[int]]) -> None:
        """Micro-batches of one step; the mean has the values of all that came before."""
        gradient, last = torch.zeros(4).double(), self.last.clone()
        for batch in batches:
            z = self.rows.x[batch] @ self.weights
            last[batch] = z.detach() - 0.1
            loss = (z - self.rows.y[batch]).square().mean()
            for row, sample in enumerate(batch):
                group = GROUPS[sample]
                mean = last[group == GROUPS].nanmean()
                force = (self.multiplier[group] + 1.4 * mean).clamp(min=0)
                loss = loss + force * z[row] / len(batch)
            gradient += torch.autograd.grad(loss, self.weights)[0] / len(batches)
        self.last = last
        with torch.no_grad():
            self.weights -= 0.05 * gradient
        samples = torch.tensor(
            sorted({sample for batch in batches for sample in batch})
        )
        for group in range(4):
            part = (GROUPS[samples] == group).sum() / (group == GROUPS).sum()
            if part:
                mean = last[group == GROUPS].nanmean()
                # A step of λ is towards max(v, −λ/2α), in proportion to the part.
                ascent = torch.maximum(mean, -self.multiplier[group] / 1.4)
                moved = (self.multiplier[group] + 1.4 * part * ascent).clamp(min=0)
                self.multiplier[group] = moved.float().double()


class Loop:
    """The same by the package."""

    def __init__(self, rows: ToyRows, formulation: Any = None, **options: Any) -> None:
        self.rows = rows
        self.weights = torch.full((4,), 0.3, dtype=torch.float64, requires_grad=True)
        self.loss = PointwiseLoss(
            {"c": Constraint(at_most=0.1)},
            formulation or Pointwise(alpha=0.7),
            samples=N,
            **{"groups": GROUPS, **options},
        )

    def loss_of(self, batch: list[int], **options: Any) -> Tensor:
        z = self.rows.x[batch] @ self.weights
        objective = (z - self.rows.y[batch]).square()
        return self.loss(objective, {"c": z}, torch.tensor(batch), **options)

    def step(self, batches: list[list[int]]) -> None:
        self.weights.grad = None
        for batch in batches:
            (self.loss_of(batch) / len(batches)).backward()
        with torch.no_grad():
            self.weights -= 0.05 * self.weights.grad
        self.loss.step()


def batches_of(epochs: int, size: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(N, generator=generator) for _ in range(epochs)]
    return [part.tolist() for order in orders for part in order.split(size)]


@pytest.mark.parametrize("pieces", [1, 2])
def test_of_parts_of_groups_the_last_values_stand_for_the_others(pieces: int) -> None:
    """A loss with keep=False, or before skip(), leaves nothing behind."""
    rows = ToyRows(N)
    expected, found = ByHand(rows), Loop(rows)
    batches = batches_of(6, 5 // pieces)
    for start in range(0, len(batches) - pieces + 1, pieces):
        step = batches[start : start + pieces]
        found.loss_of([0, 3, 8], keep=False)
        found.loss.skip()
        found.loss_of([1, 2])
        found.loss.skip()
        expected.step(step)
        found.step(step)
        torch.testing.assert_close(found.weights, expected.weights)
    multiplier = found.loss.multipliers["c"][:, 0].double()
    torch.testing.assert_close(multiplier, expected.multiplier, rtol=1e-5, atol=1e-7)
    assert 0 < (multiplier > 0).sum() < 4  # Both sides of a bound.


def test_a_closure_sees_the_means_at_its_own_weights() -> None:
    """The loss of a whole batch, computed again at other weights, is that of these weights."""
    loop, every = Loop(ToyRows(N)), [*range(N)]
    loop.loss_of(every, keep=False)
    with torch.no_grad():
        loop.weights += 1.0
    again = float(loop.loss_of(every, keep=False).detach())
    loop.loss.skip()
    fresh = Loop(ToyRows(N))
    with torch.no_grad():
        fresh.weights += 1.0
    assert again == float(fresh.loss_of(every).detach())


def test_a_loss_that_does_not_count_leaves_no_values() -> None:
    """Its samples 3 and 11 are of the group of sample 2, whose mean they would have moved."""
    found, expected = Loop(ToyRows(N)), Loop(ToyRows(N))
    found.loss_of([3, 11, 9], keep=False)
    for loop in (found, expected):
        loop.step([[2, 0]])
    assert torch.equal(found.weights, expected.weights)


def test_the_unit_and_the_size_are_of_the_groups_that_violate() -> None:
    """Λ = ‖∇ mean ℓ₀‖ / ‖∇ mean v over the samples of these groups‖, r the mean of their means."""
    loop, rows = Loop(ToyRows(N), Pointwise()), ToyRows(N)
    loop.loss_of([*range(N)])
    z = rows.x @ loop.weights
    v = z - 0.1
    means = torch.stack([v[group == GROUPS].mean() for group in range(4)])
    violated = (means > 0)[GROUPS]
    assert 0 < violated.sum() < N
    assert ((v > 0) != violated).any()
    (of_objective,) = torch.autograd.grad((z - rows.y).square().mean(), loop.weights)
    size = means[GROUPS][violated].mean()
    unit = of_objective.norm() / rows.x[violated].mean(0).norm()
    assert loop.loss._lagrangian.units.unit("c") == pytest.approx(float(unit))
    scale = loop.loss._lagrangian.in_force["c"].scale  # type: ignore[attr-defined]
    assert scale.reach == pytest.approx(float(size))
    assert scale.margin == 0  # A mean over samples is no noise to keep away from.


def test_the_kept_sums_are_those_of_the_values() -> None:
    """Values of 10⁹ that came first leave no rounding once an epoch is over."""
    means, generator = GroupMeans(GROUPS), torch.Generator().manual_seed(0)
    mask = torch.ones(N, 1, dtype=torch.bool)
    means.put(torch.arange(N), 1e9 * torch.randn(N, 1, generator=generator), mask)
    for _ in range(3):
        values = torch.randn(N, 1, generator=generator, dtype=torch.float64)
        for part in torch.randperm(N, generator=generator).split(5):
            means.put(part, values[part], mask[part])
    for group in range(4):
        expected = values[group == GROUPS].mean(0)
        torch.testing.assert_close(
            means.of(torch.tensor([group]))[0], expected, rtol=0, atol=1e-12
        )


# Adaptive, in a module, over a resume ---------------------------------------------


def run_of(loop: Loop, batches: list[list[int]]) -> Loop:
    for batch in batches:
        loop.step([batch])
    return loop


class InUnits(Loop):
    """With the bounded value in another unit."""

    unit = 1.0

    def loss_of(self, batch: list[int], **options: Any) -> Tensor:
        z = self.rows.x[batch] @ self.weights
        objective = (z - self.rows.y[batch]).square()
        values = {"c": self.unit * (z - 0.1) + 0.1}
        return self.loss(objective, values, torch.tensor(batch), **options)


@pytest.mark.parametrize("unit", [0.01, 100.0])
def test_of_another_unit_nothing_changes(unit: float) -> None:
    loops = [InUnits(ToyRows(N), Pointwise()) for _ in range(2)]
    loops[1].unit = unit
    for loop in loops:
        run_of(loop, batches_of(20, 4))
    torch.testing.assert_close(loops[0].weights, loops[1].weights, rtol=1e-4, atol=1e-5)
    multipliers = [loop.loss.multipliers["c"] for loop in loops]
    assert multipliers[0].any()
    torch.testing.assert_close(
        multipliers[0], multipliers[1] * unit, rtol=1e-3, atol=1e-5
    )


@pytest.mark.parametrize("at", [4, 6])
def test_a_state_goes_on_to_the_bit(at: int) -> None:
    """Within an epoch too, of which half of the values are of before."""
    batches = batches_of(5, 5)
    whole = run_of(Loop(ToyRows(N), Pointwise(), primal_steps=2), batches[:at])
    file = io.BytesIO()
    torch.save(whole.loss.state_dict(), file)
    file.seek(0)
    resumed = Loop(ToyRows(N), Pointwise(), primal_steps=2)
    resumed.loss.load_state_dict(torch.load(file, weights_only=True))
    resumed.weights.data.copy_(whole.weights.data)
    for loop in (whole, resumed):
        run_of(loop, batches[at:])
    assert torch.equal(whole.weights, resumed.weights)
    assert torch.equal(whole.loss.multipliers["c"], resumed.loss.multipliers["c"])


def test_a_state_of_before_the_means_still_loads() -> None:
    batches = batches_of(5, 5)
    whole = run_of(Loop(ToyRows(N), Pointwise()), batches[:4])
    state = whole.loss.state_dict()
    del state["group_means"]
    resumed = Loop(ToyRows(N), Pointwise())
    resumed.loss.load_state_dict(state)
    run_of(resumed, batches[4:])
    assert resumed.loss.multipliers["c"].shape == (4, 1)
    wrong = whole.loss.state_dict()
    wrong["group_means"]["followed"]["c"]["values"] = torch.zeros(3, 1)
    with pytest.raises(TrainingError, match="values of"):
        Loop(ToyRows(N), Pointwise()).loss.load_state_dict(wrong)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(
    "formulation", [Pointwise(), Penalty(weight=2.0, shape="squared_hinge")]
)
def test_micro_batches_of_a_module_are_one_batch(
    formulation: Any, partial: bool
) -> None:
    rows = IndexedDataset(ToyRows(N, partial=partial), groups=GROUPS)
    modules = [
        fit(
            Toy(formulation, partial=partial, micro_batch_size=size),
            rows,
            batch_size=5,
            epochs=5,
        )
        for size in (None, 2)
    ]
    for found, expected in zip(
        *(module.parameters() for module in modules), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_a_module_resumes_within_an_epoch_to_the_bit(tmp_path: Path) -> None:
    rows = IndexedDataset(ToyRows(N), groups=GROUPS)
    data: Any = {"batch_size": 5}
    whole = Toy(Pointwise())
    trainer(max_epochs=6).fit(whole, ToyData(rows, **data))
    begun = Toy(Pointwise())
    runner = trainer(max_steps=7)
    runner.fit(begun, ToyData(rows, **data))
    runner.save_checkpoint(tmp_path / "part.ckpt")
    resumed = Toy(Pointwise())
    trainer(max_epochs=6).fit(
        resumed, ToyData(rows, **data), ckpt_path=tmp_path / "part.ckpt"
    )
    for found, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, expected)
    torch.testing.assert_close(resumed.multipliers, whole.multipliers, rtol=0, atol=0)
    assert resumed.multipliers["pair"].shape == (4, PAIRS)


def test_each_sample_may_be_bounded_under_its_own_name() -> None:
    """As in a loop without groups, but for λ: the first step, in which it is 0, is the same."""
    bounds = {"c": Constraint(at_most=0.1, each_sample=True)}
    plain, shared = Loop(ToyRows(N)), Loop(ToyRows(N))
    plain.loss = PointwiseLoss(bounds, Pointwise(alpha=0.7), samples=N)
    shared.loss = PointwiseLoss(bounds, Pointwise(alpha=0.7), samples=N, groups=GROUPS)
    for loop in (plain, shared):
        loop.loss_of([*range(N)]).backward()
    assert torch.equal(plain.weights.grad, shared.weights.grad)
    by_mean = Loop(ToyRows(N))
    by_mean.loss_of([*range(N)]).backward()
    assert not torch.allclose(by_mean.weights.grad, shared.weights.grad)
    for loop in (shared, by_mean):
        loop.loss.step()
    v = ToyRows(N).x.sum(1) * 0.3 - 0.1
    means = torch.stack([v[group == GROUPS].mean() for group in range(4)])
    for loop in (shared, by_mean):  # λ follows the mean either way.
        found = loop.loss.multipliers["c"][:, 0]
        torch.testing.assert_close(found, (1.4 * means).clamp(min=0).float())


# What is reported ---------------------------------------------


class Evaluated(Toy):
    """z itself, under an interval, an equality and a bound on each sample."""

    def __init__(self) -> None:
        bounds = {
            "band": Constraint(at_least=-0.1, at_most=0.1),
            "equal": Constraint(equals=0.05),
            "each": Constraint(at_most=0.1, each_sample=True),
        }
        super().__init__(Pointwise(), bounds)

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        pair = outputs[:, None] * batch["x"][:, :2]
        return {"band": pair, "equal": outputs, "each": outputs}


def test_an_evaluation_judges_the_mean_of_each_held_out_group() -> None:
    held_out, numbers = ToyRows(9, seed=3), torch.tensor([5, 1, 1, 5, 5, 0, 1, 0, 0])
    data = ToyData(
        IndexedDataset(ToyRows(N), groups=GROUPS),
        IndexedDataset(held_out, groups=numbers),
        batch_size=4,
    )
    module, runner = Evaluated(), trainer(max_epochs=1)
    runner.fit(module, data)
    logged = runner.validate(module, data, verbose=False)[0]
    with torch.no_grad():
        z = torch.tanh(held_out.x @ module.first) @ module.last
    present = [0, 1, 5]
    pair = torch.stack(
        [(z[:, None] * held_out.x[:, :2])[numbers == g].mean(0) for g in present]
    )
    violations = {
        "band": torch.maximum(pair - 0.1, -0.1 - pair).flatten(),
        "equal": torch.stack([(z[numbers == g].mean() - 0.05).abs() for g in present]),
        "each": z - 0.1,
    }
    for name, expected in violations.items():
        found = module.violations["val"][name]
        torch.testing.assert_close(
            found.sort().values, expected.sort().values, check_dtype=False
        )
        assert logged[f"val/{name}/violated"] == pytest.approx(
            float((expected > 0).double().mean())
        )
        assert logged[f"val/{name}/mean"] == pytest.approx(
            float(expected.mean()), abs=1e-6
        )
    held = module._evaluator.held_out()
    assert held is not None
    assert len(held.worst["band"]) == len(held.worst["equal"]) == 3
    assert len(held.worst["each"]) == 9


def test_held_out_data_without_groups_are_told(caplog: Any) -> None:
    data = ToyData(
        IndexedDataset(ToyRows(N), groups=GROUPS), ToyRows(9, seed=3), batch_size=4
    )
    module, runner = Evaluated(), trainer(max_epochs=1)
    runner.fit(module, data)
    assert caplog.text.count("data of val have no groups") == 1
    assert len(module.violations["val"]["equal"]) == 9


def test_the_report_counts_groups() -> None:
    loop = run_of(Loop(ToyRows(N), Pointwise()), batches_of(30, 4))
    values = ToyRows(9, seed=3).x @ loop.weights.detach()
    with pytest.raises(DataError, match="report\\(held_out, groups=…\\)"):
        loop.loss.report({"c": values})
    numbers = [0, 0, 0, 1, 1, 1, 2, 2, 2]
    closing = loop.loss.report({"c": values}, groups=numbers)
    (row,) = closing.rows
    expected = values.view(3, 3).mean(1) > 0.1
    assert (row.of, row.held_of, row.held_violated) == (4, 3, int(expected.sum()))
    means = torch.stack(
        [
            loop.loss._lagrangian.means.judged("c").values[g == GROUPS].mean()
            for g in range(4)
        ]
    )
    assert row.violated == int((means > 0).sum())
    assert row.worst == pytest.approx(0.1 + float(means.max()))
    assert row.multipliers == int((loop.loss.multipliers["c"] > 0).sum())
    assert row.price is not None
    assert "c ≤ 0.1, mean of groups" in str(closing)


def test_what_makes_no_sense_is_refused() -> None:
    equal = {"c": Constraint(equals=0.1)}
    with pytest.raises(TrainingError, match=r"acts on \|ℓ − c\|.*each_sample=True"):
        PointwiseLoss(
            equal, Penalty(weight=1.0, shape="hinge"), samples=N, groups=GROUPS
        )
    with pytest.raises(TrainingError, match='"dual_first" with groups'):
        PointwiseLoss(equal, Pointwise(), samples=N, groups=GROUPS, order="dual_first")
    # Of the whole batch, as ever.
    PointwiseLoss(equal, Average(), samples=N, groups=GROUPS)


# The optimum ---------------------------------------------

ITEMS, DAYS, LEVEL = 12, 20, 0.9


class Inventory:
    """Stocks that serve a share of each item's demand on average over its days, at least cost."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        size = 0.5 + torch.rand(ITEMS, 1, generator=generator, dtype=torch.float64)
        uniform = torch.rand(ITEMS, DAYS, generator=generator, dtype=torch.float64)
        demand = -size * uniform.clamp(min=1e-9).log()
        self.demand = demand / demand.mean(1, keepdim=True)  # In each item's own scale.
        self.cost = 0.5 + torch.rand(ITEMS, generator=generator, dtype=torch.float64)

    def served(self, stock: Tensor) -> Tensor:
        """(ITEMS, DAYS)"""
        return torch.minimum(stock[:, None], self.demand)

    def optimum(self) -> Tensor:
        """Of each item by bisection: what is served rises with its stock."""
        low = torch.zeros(ITEMS, dtype=torch.float64)
        high = self.demand.amax(1)
        for _ in range(60):
            middle = (low + high) / 2
            enough = self.served(middle).mean(1) >= LEVEL
            low, high = (
                torch.where(enough, low, middle),
                torch.where(enough, middle, high),
            )
        return high

    def trained(self, bound: Constraint, epochs: int = 100) -> Tensor:
        raw = torch.zeros(ITEMS, dtype=torch.float64, requires_grad=True)
        optimizer, steps = torch.optim.Adam([raw], lr=0.05), 6 * epochs
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        item = torch.arange(ITEMS).repeat_interleave(DAYS)
        loss = PointwiseLoss(
            {"served": bound}, Pointwise(), samples=len(item), groups=item
        )
        generator = torch.Generator().manual_seed(5)
        for _ in range(epochs):
            for batch in torch.randperm(len(item), generator=generator).chunk(6):
                stock = torch.nn.functional.softplus(3 * raw)
                values = torch.minimum(stock[item[batch]], self.demand.flatten()[batch])
                objective = (self.cost * stock).mean().expand(len(batch))
                optimizer.zero_grad()
                loss(objective, {"served": values}, batch).backward()
                optimizer.step()
                schedule.step()
                loss.step()
        return torch.nn.functional.softplus(3 * raw.detach())


def test_a_service_level_is_met_at_the_known_optimum() -> None:
    """Sample by sample, stocks are those of the largest days."""
    problem = Inventory()
    best = (problem.cost * problem.optimum()).mean()
    stock = problem.trained(Constraint(at_least=LEVEL))
    gap = float((problem.cost * stock).mean() / best - 1)
    short = (LEVEL - problem.served(stock).mean(1)).clamp(min=0)
    assert abs(gap) < 0.03
    assert short.mean() < 0.001
    each = problem.trained(Constraint(at_least=LEVEL, each_sample=True))
    assert (problem.cost * each).mean() / best - 1 > 0.2
