"""``Pointwise()``: α and λ in the unit of the gradients, by hand, in any unit, under any layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pl_pointwise import (
    Average,
    Constraint,
    CVaR,
    Formulation,
    Penalty,
    Pointwise,
    PointwiseLoss,
    Relaxed,
)
from pl_pointwise.formulations import Scale
from pl_pointwise.lagrangian import gradient_units
from pl_pointwise.lagrangian.gradient_units import GradientUnits
from pl_pointwise.lagrangian.terms import Measured
from tests.pl_pointwise.test_running_statistics import Normed
from tests.pl_pointwise.toy import (
    At,
    Toy,
    ToyData,
    ToyRows,
    assert_identical_run,
    assert_same_run,
    fit,
    initial_weights,
    trainer,
    weights_of,
)

ONE = dict.fromkeys(["fit", "other"], Constraint(at_most=0.0))
BOUND = {"fit": Constraint(at_most=-0.3)}
BOUNDS = [{"at_most": -0.3}, {"equals": -0.3}, {"at_least": -0.2, "at_most": 0.1}]
CHANGES = [{"unit": 100.0}, {"unit": 0.01}, {"shift": 1e3}, {"objective_unit": 100.0}]


def by_hand(
    rows: ToyRows, steps: int, rate: float, total: int = 0
) -> tuple[Tensor, Tensor]:
    """The rule for the constraint "fit" on one batch of all rows, plain SGD: weights and λ.

    total: steps of the run that these are the first of.
    """
    weights = [w.clone().requires_grad_() for w in initial_weights()]
    multipliers = torch.zeros(len(rows), dtype=torch.float64)
    unit, size, mean, falls, largest = torch.zeros(()), torch.zeros(()), 0.0, 1.0, 1.0
    share, first = 1.0, 0.0
    for step in range(steps):
        z = torch.tanh(rows.x @ weights[0]) @ weights[1]
        objective, v = (z - rows.y).square().mean(), z + 0.3
        violated = v.detach() > 0
        if step in (0, 1, 2, 4, 8):
            parts = [objective, v[violated].mean()]
            norms = [
                torch.cat(
                    [
                        g.flatten()
                        for g in torch.autograd.grad(p, weights, retain_graph=True)
                    ]
                )
                .norm()
                .item()
                for p in parts
            ]
            now = norms[0] / norms[1]
            unit = now if step == 0 else (unit + now) / 2
            first = now if step == 0 else first
        typical = v.detach()[violated].mean()
        size = typical if step == 0 else size
        waiting = max(10.0, share**2 * total / 25)
        lead = 2 * min(1.0, 20 / waiting)
        # An epoch is one step.
        most = 10.0 if total <= 10 else 1.0
        of_few = lead * min(unit, first) * min(1 / share, most)
        strength = max(lead * largest / falls * unit + mean, of_few)
        strength = min(strength, 100 * unit)
        aimed = v.detach() / size + 0.25
        pull = (multipliers + strength * aimed.clamp(max=1)).clamp(min=0)
        loss = objective + (pull * v).mean()  # Of the gradient of ψ: ∂ψ/∂v is the pull.
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= rate * gradient
        in_play = violated | (multipliers > 0)
        mean += (float(multipliers[in_play].mean()) - mean) / min(step + 1, 20)
        share += (float(in_play.double().mean()) - share) / min(step + 1, 10)
        now = float(v.detach().clamp(min=0).mean())
        falls = now if step == 0 else falls + (now - falls) / min(step + 1, 10)
        # An epoch of one step counts as ten, and moves λ by a tenth.
        largest = falls if step == 0 else max(0.9 * largest, falls)
        dual_step = min(0.6 * strength, 10 * unit) / waiting * aimed.clamp(-1, 1)
        multipliers = (multipliers + dual_step).clamp(min=0).float().double()
        size = size + (typical - size) / min(step + 1, 20)
    return torch.cat([w.detach().flatten() for w in weights]), multipliers


def state_of(module: Toy, name: str = "fit") -> dict[str, Any]:
    return module._lagrangian.units.state_dict()["states"][name]


def test_a_run_is_the_rule_by_hand() -> None:
    rows, steps, rate = ToyRows(9), 12, 1e-3
    module = Toy(Pointwise(), BOUND, learning_rate=rate)
    fit(module, rows, epochs=steps, batch_size=9)
    weights, multipliers = by_hand(rows, steps, rate, steps)
    assert (multipliers > 0).any()
    torch.testing.assert_close(weights_of(module), weights, rtol=1e-6, atol=1e-7)
    found = module.multipliers["fit"][:, 0].double()
    torch.testing.assert_close(found, multipliers, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [None, 3])
def test_the_module_tells_the_rule_how_long_the_run_is(size: int | None) -> None:
    """Whole batches and micro-batches alike; a run without an end has no length."""
    rows = ToyRows(9)
    module = fit(
        Toy(Pointwise(), BOUND, micro_batch_size=size), rows, epochs=3, batch_size=3
    )
    assert module._lagrangian.total_steps == 9
    longer = fit(Toy(Pointwise(), BOUND), rows, epochs=3, batch_size=3, max_steps=5)
    assert longer._lagrangian.total_steps == 5


def test_the_first_steps_of_a_long_run_are_the_rule_by_hand() -> None:
    """In a loop of one's own, whose length is told."""
    rows, rate, total = ToyRows(9), 1e-3, 3000
    weights = [w.clone().requires_grad_() for w in initial_weights()]
    constrained = PointwiseLoss(BOUND, Pointwise(), samples=9, total_steps=total)
    optimizer = torch.optim.SGD(weights, rate)
    for _ in range(12):
        z = torch.tanh(rows.x @ weights[0]) @ weights[1]
        loss = constrained((z - rows.y).square(), {"fit": z}, torch.arange(9))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        constrained.step()
    expected, multipliers = by_hand(rows, 12, rate, total)
    found = torch.cat([w.detach().flatten() for w in weights])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    of_loss = constrained.multipliers["fit"][:, 0].double()
    torch.testing.assert_close(of_loss, multipliers, rtol=1e-5, atol=1e-5)
    short, _ = by_hand(rows, 12, rate)
    assert not torch.allclose(short, expected, atol=1e-5)


def loop(
    formulation: Formulation, samples: int | None, order: str = "simultaneous"
) -> Any:
    """Thirty steps of three batches by hand: the weights, and the loss."""
    rows, weights = ToyRows(9), [w.clone().requires_grad_() for w in initial_weights()]
    constrained = PointwiseLoss(BOUND, formulation, samples=samples, order=order)
    optimizer = torch.optim.SGD(weights, 1e-2)
    for step in range(30):
        index = torch.arange(3) + 3 * (step % 3)
        z = torch.tanh(rows.x[index] @ weights[0]) @ weights[1]
        loss = constrained((z - rows.y[index]).square(), {"fit": z}, index)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        constrained.step()
    return torch.cat([w.detach().flatten() for w in weights]), constrained


def test_without_memory_a_training_set_is_a_stream_to_the_bit() -> None:
    """It keeps no multiplier, whatever the order of the steps."""
    of_stream, _ = loop(Pointwise(), None)
    weights, constrained = loop(Pointwise(memory=False), 9)
    assert torch.equal(weights, of_stream)
    assert not constrained.multipliers
    assert not constrained.dual_steps
    assert torch.equal(loop(Pointwise(memory=False), 9, "dual_first")[0], of_stream)
    assert not torch.equal(loop(Pointwise(), 9)[0], of_stream)
    assert [row.multipliers for row in constrained.report().rows] == [None]


def test_a_module_without_memory_needs_no_index_and_takes_micro_batches(
    tmp_path: Path,
) -> None:
    rows, path = ToyRows(11), tmp_path / "at.ckpt"
    whole = fit(Toy(Pointwise(memory=False), BOUND), rows, epochs=4)
    pieces = fit(
        Toy(Pointwise(memory=False), BOUND, micro_batch_size=3), rows, epochs=4
    )
    assert_same_run(pieces, whole, atol=1e-5)
    assert not whole.multipliers
    module = Toy(Pointwise(memory=False), BOUND)
    fit(module, rows, epochs=4, callbacks=[At(5, lambda t: t.save_checkpoint(path))])
    resumed = Toy(Pointwise(memory=False), BOUND)
    trainer(max_epochs=4).fit(resumed, ToyData(rows, batch_size=4), ckpt_path=path)
    assert_identical_run(resumed, whole)
    loaded = Toy.load_from_checkpoint(path, weights_only=True)
    assert loaded.formulations["fit"] == Pointwise(memory=False)


def test_without_memory_only_the_rule_sets_the_force() -> None:
    with pytest.raises(ValueError, match="squared_hinge"):
        Pointwise(alpha=1.0, memory=False)
    with pytest.raises(ValueError, match="squared_hinge"):
        Pointwise(alpha=None, memory=False)
    with pytest.raises(ValueError, match="True or False"):
        Pointwise(memory=0)  # type: ignore[arg-type]
    assert Pointwise(memory=False) != Pointwise()


class Scaled(Toy):
    """The toy with its objective shifted and scaled, its constraints in another unit, and Adam."""

    objective_unit = 1.0
    shift = 0.0
    unit = 1.0

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:
        return self.shift + self.objective_unit * super().objective(outputs, batch)

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        values = super().constraint_values(outputs, batch)
        return {name: self.unit * value for name, value in values.items()}

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2, eps=1e-12)


FORMULATIONS = {
    "pointwise": Pointwise(),
    "relaxed": Relaxed(price=5.0),
    "average": Average(alpha="adaptive"),
    "CVaR": CVaR(level=0.5, alpha="adaptive"),
}


@pytest.mark.parametrize("formulation", FORMULATIONS.values(), ids=FORMULATIONS)
@pytest.mark.parametrize("change", CHANGES, ids=str)
@pytest.mark.parametrize("bound", BOUNDS, ids=str)
def test_units_change_nothing(
    formulation: Formulation, change: dict[str, float], bound: dict[str, float]
) -> None:
    """A user states ε and nothing else, whatever ℓ₀ and ℓ are measured in."""
    runs = []
    for changed in ({}, change):
        unit = changed.get("unit", 1.0)
        constraint = Constraint(**{side: value * unit for side, value in bound.items()})
        module = Scaled(formulation, {"fit": constraint})
        vars(module).update(changed)
        fit(module, ToyRows(11), epochs=8)
        pull = module.multipliers["fit"] * unit / changed.get("objective_unit", 1.0)
        runs.append((weights_of(module), pull))
    assert runs[0][1].abs().max() > 0
    torch.testing.assert_close(runs[1][0], runs[0][0], rtol=0, atol=1e-4)
    torch.testing.assert_close(runs[1][1], runs[0][1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("size", [1, 3])
def test_micro_batches_measure_what_the_batch_does(size: int) -> None:
    rows = ToyRows(11, partial=True)
    whole = fit(Toy(Pointwise(), partial=True), rows)
    pieces = fit(Toy(Pointwise(), partial=True, micro_batch_size=size), rows)
    assert_same_run(pieces, whole, atol=1e-5)
    assert state_of(pieces, "pair")["unit"] == pytest.approx(
        state_of(whole, "pair")["unit"]
    )


class Counting(Normed):
    """Its passes counted: steps, forward and backward."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.passes = {"forward": 0, "backward": 0}

    def forward(self, batch: Any) -> Tensor:
        self.passes["forward"] += 1
        return super().forward(batch)

    def on_after_backward(self) -> None:
        self.passes["backward"] += 1


@pytest.mark.parametrize("formulation", FORMULATIONS.values(), ids=FORMULATIONS)
def test_a_step_of_one_forward_pass_measures_in_its_graph(
    formulation: Formulation,
) -> None:
    """Steps 0, 1, 2, 4 and 8 of 12: the same run to the bit, without their two passes more."""
    runs = []
    for shared in (True, False):
        module = Counting(formulation, BOUND, dropout=0.3)
        module._stepper.shares_graph = shared
        torch.manual_seed(3)
        runs.append(fit(module, ToyRows(11), epochs=4, batch_size=4))
    assert runs[0].passes == {"forward": 12, "backward": 22}
    assert runs[1].passes["forward"] == 22
    assert_identical_run(*runs)


def test_what_nobody_violates_is_not_differentiated_and_pulls_nothing() -> None:
    """Nor does the rule need a unit there."""
    module = fit(Counting(Pointwise(), {"fit": Constraint(at_most=50.0)}), ToyRows(11))
    assert module.passes == {"forward": 9, "backward": 9}
    assert torch.equal(
        weights_of(module), weights_of(fit(Counting(None, {}), ToyRows(11)))
    )
    assert not module.multipliers["fit"].any()


class KeepsNoGraph(Counting):
    def backward(self, loss: Tensor, *_: Any, **options: Any) -> None:  # type: ignore[override]
        loss.backward()


class TakesNoOption(Counting):
    def backward(self, loss: Tensor) -> None:  # type: ignore[override]
        loss.backward()


class Donated(Counting):
    """As a compiled graph refuses it that has been differentiated before."""

    def backward(self, loss: Tensor, *_: Any, **options: Any) -> None:  # type: ignore[override]
        if options.get("retain_graph"):
            raise RuntimeError(
                "This backward function was compiled with donated buffers."
            )
        loss.backward()


@pytest.mark.parametrize("kind", [KeepsNoGraph, TakesNoOption, Donated])
def test_a_graph_for_one_backward_pass_is_made_anew_to_measure(
    kind: type[Counting],
) -> None:
    module = fit(kind(Pointwise(), BOUND), ToyRows(11), epochs=4, batch_size=4)
    assert not module._stepper.shares_graph
    assert_identical_run(
        module, fit(Counting(Pointwise(), BOUND), ToyRows(11), epochs=4)
    )


def test_stopped_and_resumed_is_uninterrupted(tmp_path: Path) -> None:
    rows, path = ToyRows(11), tmp_path / "at.ckpt"
    whole, resumed = (Toy(Pointwise(), dropout=0.3) for _ in range(2))
    torch.manual_seed(3)
    fit(whole, rows, epochs=4, callbacks=[At(5, lambda t: t.save_checkpoint(path))])
    data = ToyData(rows, batch_size=4)
    trainer(max_epochs=4).fit(resumed, data, ckpt_path=path, weights_only=True)
    assert_identical_run(resumed, whole)
    units = [module._lagrangian.units.state_dict() for module in (resumed, whole)]
    assert units[0] == units[1]


def test_measuring_draws_no_random_number_of_the_fit() -> None:
    after = []
    for formulation in (Pointwise(), Penalty(weight=1.0)):
        torch.manual_seed(3)
        fit(Toy(formulation, dropout=0.4), ToyRows(9))
        after.append(torch.rand(3))
    assert torch.equal(*after)


def test_an_objective_without_a_gradient_lets_the_constraints_pull() -> None:
    """At its minimum, or a constant: the requirement alone is followed, whatever its unit."""

    class Constant(Toy):
        def objective(self, outputs: Tensor, batch: Any) -> Tensor:
            return torch.ones(len(outputs), dtype=outputs.dtype) + 0 * outputs

    start = torch.cat([w.flatten() for w in initial_weights()])
    module = fit(Constant(Pointwise(), BOUND, learning_rate=1e-3), ToyRows(9))
    assert not torch.equal(weights_of(module), start)
    assert torch.isfinite(weights_of(module)).all()


def test_price_is_the_most_that_a_sample_pulls() -> None:
    """In multiples of Λ, where nothing can be met."""
    module = fit(
        Toy(Relaxed(price=2.0), {"fit": Constraint(at_most=-50.0)}),
        ToyRows(9),
        epochs=9,
    )
    formulation = module.in_force("fit")
    unit = state_of(module)["unit"]
    v = torch.full((1,), 60.0, requires_grad=True)
    (pull,) = torch.autograd.grad(formulation.lagrangian(v, torch.zeros(1)).sum(), v)
    assert float(pull) == pytest.approx(2.0 * unit, rel=0.3)  # Λ moved since the step.
    assert float(module.multipliers["fit"].max()) <= 2.001 * unit


def measured_of(values: Tensor, multipliers: Tensor | None) -> Measured:
    """A step that measured these values of the constraint "fit"."""
    return Measured(
        index=torch.arange(len(values)),
        objective=torch.zeros(len(values)),
        followed={"fit": values},
        judged={"fit": values},
        masks={"fit": torch.ones_like(values, dtype=torch.bool)},
        multipliers={} if multipliers is None else {"fit": multipliers},
        counts={"fit": len(values)},
        lagrangian=0.0,
        gradient_norm=1.0,
    )


@pytest.mark.parametrize(
    "formulation", [Pointwise(), Average(alpha="adaptive")], ids=str
)
def test_an_equality_is_missed_on_either_side(formulation: Formulation) -> None:
    formulations, units = {"fit": formulation.for_equality()}, GradientUnits()
    values = torch.tensor([[-2.0], [1.0]])
    multipliers = torch.zeros(2, 1) if formulation.scope == "sample" else None
    measured = measured_of(values, multipliers)
    units.add(measured, formulations, units.in_force(formulations, ONE), 1.0)
    assert units.state_dict()["states"]["fit"]["size"] == pytest.approx(1.5)


def test_measurements_are_few_and_start_with_the_first_violation() -> None:
    units, declared = (
        GradientUnits(),
        {"fit": Pointwise(), "other": Penalty(weight=1.0)},
    )
    due = [step for step in range(400) if units.due(declared, step)]
    # Of two passes each.
    assert due == [0, 1, 2, 4, 8, 16, 32, 64, 128, 195, 262, 329, 396]
    late = GradientUnits()
    assert (
        late.due(declared, 0)
        == late.due(declared, 1)
        == late.due(declared, 2)
        == ["fit"]
    )
    values = torch.ones(2, 1)
    late.add(
        measured_of(values, 0 * values), {"fit": Pointwise()}, {"fit": Pointwise()}, 1.0
    )
    assert late.due(declared, 3) == ["fit"]
    late.measure("fit", 6.0, 0.0, 0.5)  # No gradient: it waits for the next turn.
    assert [step for step in range(4, 12) if late.due(declared, step)] == [4, 8]
    units.measure("fit", float("nan"), 1.0, 1.0)
    assert units.not_finite == 1
    units.measure("fit", 6.0, 2.0, 0.5)
    units.measure("fit", float("inf"), 2.0, 0.5)
    assert units.in_force(declared, ONE)["fit"].augmentation == pytest.approx(
        2 * 3.0 / (2 * 0.5)
    )
    assert units.in_force(declared, ONE)["other"] is declared["other"]


@pytest.mark.parametrize(
    ("mean", "pull", "step"),
    [(0.0, 18.0, 10.8), (6.0, 12.0, 7.2), (60.0, 66.0, 30.0), (1e6, 300.0, 30.0)],
)
def test_alpha_follows_the_multipliers(mean: float, pull: float, step: float) -> None:
    """Λ = 3, r = .5, M = m. Satisfied without a multiplier has no part.

    Where one of three pushes, without a multiplier, it does so three times as hard: 2Λ in all.
    """
    units, declared = GradientUnits(), {"fit": Pointwise()}
    units.measure("fit", 6.0, 2.0, 0.5)
    values = torch.tensor([[0.5], [-0.5], [-9.0]])
    multipliers = torch.tensor([[0.0], [2 * mean], [0.0]])
    units.add(
        measured_of(values, multipliers), declared, units.in_force(declared, ONE), 1.0
    )
    now = units.in_force(declared, ONE)["fit"]
    assert now.augmentation == pytest.approx(pull / (2 * 0.5))
    assert now.step_size == pytest.approx(step / 0.5)


@pytest.mark.parametrize(
    ("steps", "part"), [(1.0, 0.1), (5.0, 0.5), (10.0, 1.0), (math.inf, 1.0)], ids=str
)
def test_an_epoch_of_few_steps_moves_multipliers_by_a_part(
    steps: float, part: float
) -> None:
    """The force is the same. For an interval the update is half, for an equality a quarter."""
    units, declared = GradientUnits(), {"fit": Pointwise()}
    units.measure("fit", 6.0, 2.0, 0.5)
    now = units.in_force(declared, ONE, steps)["fit"]
    assert now.augmentation == pytest.approx(6.0)
    assert now.step_size == pytest.approx(part * 7.2)
    interval = units.in_force(
        declared, {"fit": Constraint(at_least=0.0, at_most=1.0)}, steps
    )
    equality = units.in_force({"fit": Pointwise().for_equality()}, ONE, steps)
    for other, divisor in ((interval["fit"], 2), (equality["fit"], 4)):
        assert other.augmentation == now.augmentation
        assert other.step_size == pytest.approx(now.step_size / divisor)


def waits(total_steps: int | None, share: float, **options: Any) -> tuple[float, float]:
    """P/Λ, and the part of an update that an epoch of 20 steps moves λ by."""
    formulation = options.get("formulation", Pointwise())
    units, declared = GradientUnits(), {"fit": formulation}
    constraints = {"fit": options.get("constraint", Constraint(at_most=0.0))}
    units.measure("fit", 6.0, 2.0, 0.5)
    for _ in range(30):
        values = torch.full((20, constraints["fit"].sides), -0.5)
        values[: round(20 * share), 0] = 0.5
        force = units.in_force(declared, constraints)
        units.add(measured_of(values, 0 * values), declared, force, 20.0)
    found = units.in_force(declared, constraints, 20.0, total_steps)["fit"]
    pull = 2 * found.augmentation * 0.5
    return pull / 3.0, found.step_size * 0.5 / (0.6 * pull)


def test_in_a_long_run_multipliers_wait_while_most_samples_violate() -> None:
    """W = max(10, s²T/25); the first push is 2Λ·20/W, and 2Λ at most."""
    for short in (None, 1, 250):
        assert waits(short, 1.0) == pytest.approx((2.0, 1.0))
    assert waits(500, 1.0) == pytest.approx((2.0, 1.0))  # W = 20.
    assert waits(1250, 1.0) == pytest.approx((2.0 * 20 / 50, 20 / 50))
    assert waits(4000, 1.0) == pytest.approx((2.0 * 20 / 160, 20 / 160))
    assert waits(4000, 0.5) == pytest.approx((2.0 * 20 / 40, 20 / 40))
    assert waits(4000, 0.1) == pytest.approx((2.0, 1.0))  # Few wait no more.
    interval = Constraint(at_least=-9.0, at_most=0.0)
    # Every sample violates one side.
    of_interval = waits(4000, 1.0, constraint=interval)
    assert of_interval == pytest.approx((2.0 * 20 / 160, 20 / 160 / 2))
    equality = waits(4000, 1.0, formulation=Pointwise().for_equality())
    assert equality == pytest.approx((2.0, 1 / 4))


def forces(shares: list[float], steps_an_epoch: float, sides: int = 1) -> list[float]:
    """P/Λ after each step, in which that share of the samples was violated by .5.

    sides: 2 of an interval, of which they violate the upper one.
    """
    units, declared, found = GradientUnits(), {"fit": Pointwise()}, []
    interval = {"fit": Constraint(at_least=-9.0, at_most=0.0)}
    constraints = interval if sides == 2 else ONE
    units.measure("fit", 6.0, 2.0, 0.5)
    for share in shares:
        values = torch.full((20, sides), -0.5)
        values[: round(20 * share), 0] = 0.5
        force = units.in_force(declared, constraints, steps_an_epoch)
        units.add(
            measured_of(values, torch.zeros(20, sides)), declared, force, steps_an_epoch
        )
        found.append(units.in_force(declared, constraints)["fit"].augmentation / 3.0)
    return found


def test_the_force_grows_as_violations_fall_and_not_while_they_stay() -> None:
    """As M/m, m over ten steps; M is forgotten within epochs, not in a stream."""
    assert forces([1.0] * 30, 10.0) == pytest.approx([2.0] * 30)
    fallen = forces([1.0] * 10 + [0.1] * 200, math.inf)
    assert fallen[10] == pytest.approx(2.0 / (0.9 + 0.1 * 0.1))
    assert fallen[-1] == pytest.approx(2.0 / 0.1, rel=1e-3)
    assert max(forces([1.0] * 10 + [0.0] * 200, math.inf)) == pytest.approx(100.0)


def test_the_largest_violation_is_forgotten_within_an_epoch_and_a_half() -> None:
    """Where all samples stay violated, by a tenth: P/r falls as r does, so P is compared."""

    def strengths(steps_an_epoch: float) -> list[float]:
        units, declared, found = GradientUnits(), {"fit": Pointwise()}, []
        units.measure("fit", 6.0, 2.0, 0.5)
        for size in [0.5] * 10 + [0.05] * 200:
            force = units.in_force(declared, ONE, steps_an_epoch)
            values = torch.full((20, 1), size)
            units.add(
                measured_of(values, torch.zeros(20, 1)), declared, force, steps_an_epoch
            )
            scale = units.in_force(declared, ONE)["fit"].scale
            found.append(2 * scale.alpha * scale.reach / 3.0)
        return found

    kept, forgotten = strengths(math.inf), strengths(20.0)
    assert kept[-1] == pytest.approx(2.0 / 0.1, rel=1e-3)
    # M is 0.5 after step 10; an epoch of 20 steps, hence 30 in which a part e is left.
    assert forgotten[39] / kept[39] == pytest.approx((1 - 1 / 30) ** 30)
    assert forgotten[-1] == pytest.approx(2.0, rel=1e-2)


def test_few_samples_push_as_hard_together_as_all_would() -> None:
    """2Λ over their share, of the last ten steps: a tenth at least, whatever their number is."""
    assert forces([0.2] * 30, math.inf) == pytest.approx([10.0] * 30)
    assert forces([0.2] * 30, 5.0) == pytest.approx([10.0] * 30)
    assert forces([0.05] * 3, math.inf) == pytest.approx([20.0] * 3)
    # Of its samples.
    assert forces([0.2] * 9, math.inf, sides=2) == pytest.approx([10.0] * 9)
    # Met at the start: seldom, then a fifth.
    late = forces([0.0] * 30 + [0.2] * 30, math.inf)
    assert late[30:35] == pytest.approx([20.0] * 5)
    assert late[36] == pytest.approx(10.0 / (1 - 0.9**7))
    assert late[-1] == pytest.approx(10.0, rel=0.05)


@pytest.mark.parametrize("first", [0.0, 1e-6, 2.0])
def test_few_samples_push_by_the_objective_as_it_was_at_the_start(first: float) -> None:
    """At its minimum it has no gradient: what it has later is of the push, which it may not set."""
    units, declared = GradientUnits(), {"fit": Pointwise()}
    units.measure("fit", first, 2.0, 0.5)
    for _ in range(60):  # The unit halves its distance to 3.
        units.measure("fit", 6.0, 2.0, 0.5)
    values = torch.full((20, 1), -0.5)
    values[:4] = 0.5
    for _ in range(30):
        force = units.in_force(declared, ONE)
        units.add(measured_of(values, 0 * values), declared, force, 7.0)
    found = units.in_force(declared, ONE)["fit"]
    # Of all samples 2Λ; of a fifth of them five times the first of 2Λ.
    expected = max(2.0 * 3.0, 2.0 * first / 2.0 * 5)
    assert 2 * found.augmentation * 0.5 == pytest.approx(expected)
    resumed = GradientUnits()
    resumed.load_state_dict(units.state_dict())
    assert resumed.in_force(declared, ONE)["fit"] == found


@pytest.mark.parametrize(
    ("epochs", "push"),
    [
        (1, 20.0),
        (10, 20.0),
        (11, 2.0),
        (30, 2.0),
        (500, 2.0),
        (None, 20.0),
    ],
)
def test_in_a_long_run_few_samples_push_as_each_of_many(
    epochs: int | None, push: float
) -> None:
    """Ten times as hard in ten epochs at most, as λ has no time there."""
    units, declared = GradientUnits(), {"fit": Pointwise()}
    units.measure("fit", 6.0, 2.0, 0.5)
    values = torch.full((20, 1), -0.5)
    values[0] = 0.5
    for _ in range(10):
        force = units.in_force(declared, ONE)
        units.add(measured_of(values, 0 * values), declared, force, 7.0)
    for between, expected in ((7.0, push), (math.inf, 20.0)):  # A stream has no epoch.
        total = None if epochs is None else 7 * epochs
        found = units.in_force(declared, ONE, between, total)["fit"]
        assert 2 * found.augmentation * 0.5 / 3.0 == pytest.approx(expected)


def test_samples_with_a_multiplier_push_too_and_a_price_is_of_them_all() -> None:
    """One of four is violated and another has a λ: a half has to balance the objective."""
    units, declared = GradientUnits(), {"fit": Relaxed(price=4.0)}
    units.measure("fit", 6.0, 2.0, 0.5)
    values = torch.tensor([[0.5], [-0.5], [-9.0], [-9.0]])
    multipliers = torch.tensor([[0.0], [0.5], [0.0], [0.0]])
    before = units.in_force(declared, ONE)["fit"]
    assert before.beta_in_force == pytest.approx(4.0 * 3.0)
    units.add(measured_of(values, multipliers), declared, {"fit": before}, 1.0)
    now = units.in_force(declared, ONE)["fit"]
    assert now.beta_in_force == pytest.approx(4.0 * 3.0 * 2)
    assert 2 * now.augmentation * 0.5 == pytest.approx(2 * 3.0 * 2)


def test_a_state_of_before_goes_on_with_shares_of_its_own() -> None:
    """The rule had no share and no first unit once: the one is found within ten steps, the
    other is the present unit."""
    units, declared = GradientUnits(), {"fit": Pointwise()}
    units.measure("fit", 6.0, 2.0, 0.5)
    state = units.state_dict()
    del state["states"]["fit"]["share"], state["states"]["fit"]["first_unit"]
    old = GradientUnits()
    old.load_state_dict(state)
    values = torch.full((20, 1), -0.5)
    values[:4] = 0.5
    for _ in range(40):
        force = old.in_force(declared, ONE, 10.0)
        old.add(measured_of(values, torch.zeros(20, 1)), declared, force, 10.0)
    assert old.in_force(declared, ONE)["fit"].augmentation / 3.0 == pytest.approx(
        10.0, rel=0.02
    )


@pytest.mark.parametrize("formulation", [Pointwise(), Relaxed(price=1.0)], ids=str)
def test_an_update_aims_inside_the_bound_and_falls_as_fast_as_it_rises(
    formulation: Formulation,
) -> None:
    """P = 6, a step of 3 at r = .5, v⁺ = v + .125; a linear cost keeps λ at β."""
    in_force = formulation.scaled(Scale(6.0, 6.0, 0.5, 0.125, 4.0))
    v = torch.tensor([-9.0, -0.375, -0.125, 0.0, 0.125, 9.0], dtype=torch.float64)
    found = in_force.ascend(v, torch.full_like(v, 2.0))
    most = 4.0 if isinstance(formulation, Relaxed) else 5.0
    torch.testing.assert_close(found.tolist(), [0.0, 0.5, 2.0, 2.75, 3.5, most])
    # Less λ/2β = .5.
    quadratic = Relaxed(beta=2.0).scaled(Scale(6.0, 6.0, 0.5, 0.125, 4.0))
    assert quadratic.ascend(v, torch.full_like(v, 2.0)).tolist() == [
        0.0,
        0.0,
        0.0,
        0.0,
        0.5,
        2.0,
    ]
    signed = formulation.for_equality().scaled(Scale(6.0, 6.0, 0.5, 0.0, 4.0))
    # It aims at c.
    assert signed.ascend(torch.zeros(1), torch.ones(1)).tolist() == [1.0]


@pytest.mark.parametrize(
    "formulation", [Pointwise(), Relaxed(price=4.0), Relaxed(beta=4.0)], ids=str
)
@pytest.mark.parametrize("signed", [False, True])
def test_nothing_pulls_harder_the_further_it_is_than_r(
    formulation: Formulation, signed: bool
) -> None:
    formulation = formulation.for_equality() if signed else formulation
    in_force = formulation.scaled(Scale(6.0, 6.0, 0.5, 0.0 if signed else 0.125, 1.0))
    v = torch.tensor([-5.0, -0.5, -0.25, 0.0, 0.25, 0.5, 5.0], dtype=torch.float64)
    v.requires_grad_()
    psi = in_force.lagrangian(v, torch.full_like(v, 0.5))
    (pull,) = torch.autograd.grad(psi.sum(), v)
    below = pull[1] if signed else torch.zeros_like(pull[1])
    torch.testing.assert_close(pull[[0, -1]], torch.stack([below, pull[-2]]))
    assert pull[-2] > pull[3]
    torch.testing.assert_close(psi[-1] - psi[-2], 4.5 * pull[-2])  # One line, no jump.


def test_the_page_and_the_docstring_write_the_constants_of_the_rule() -> None:
    page = (Path(__file__).parents[3] / "docs/formulations.md").read_text("utf-8")
    section = page.partition("## How α and η are set")[2].partition("\n## ")[0]
    r = gradient_units
    written = {
        "MARGIN": f"v⁺ = v + r/{1 / r.MARGIN:g}",
        "LEAD": f"P = min(max({r.LEAD:g}Λ·M/m + λ̄, {r.LEAD:g}Λ₀·min(1/s, L)), {r.TEN**2:g}Λ)",
        "PATIENCE, TEN": f"min({r.PATIENCE:g}P, {r.TEN:g}Λ)·clip(v⁺/r, ±1)",
        "MEMORY": {1.5: "an epoch and a half"}[r.MEMORY],
        "TEN, of steps": {10: "W is ten, in a run of T steps"}[r.TEN],
        "TEN, of epochs": {10: "ten in a run|ten in a run of at most ten epochs"}[
            r.TEN
        ],
        "UPDATES": f"s²·T/{r.UPDATES:g}",
        "COST": f"{100 * r.COST:g} %",
    }
    for where, text in (
        ("docs/formulations.md", section),
        ("gradient_units.py", r.__doc__ or ""),
    ):
        for names, formula in written.items():
            assert any(each in text for each in formula.split("|")), (
                f"{where} does not say {formula}, which is by the present {names}: see "
                "CONTRIBUTING.md, The default rule."
            )
