"""Prices are those of the optimum, where they are known in closed form, and cover a run's end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pl_pointwise import Average, Constraint, Pointwise, PointwiseLoss, Relaxed
from pl_pointwise.errors import DataError
from pl_pointwise.formulations import Formulation, Scale
from pl_pointwise.lagrangian.prices import Prices

from ..table import FORMULATIONS

N = 40
WISHED = torch.linspace(-1, 2, N)
BOUND = 0.5


def trained(
    constraint: Constraint,
    formulation: Formulation | None = None,
    *,
    steps: int = 400,
    samples: int | None = N,
    masks: Any = None,
    columns: int = 1,
    **options: Any,
) -> tuple[Prices, Tensor]:
    """Minimises the mean of (w_i − wished_i)²/2 under a constraint on every w_i.

    The price of w_i ≤ b is (wished_i − b)₊: N times the multiplier of the sum's optimum.
    """
    torch.manual_seed(0)
    weights = torch.zeros(N, requires_grad=True)
    constraints = {"c": constraint}
    loss_of = PointwiseLoss(
        constraints,
        Pointwise() if formulation is None else formulation,
        samples=samples,
        parameters=[weights],
        **options,
    )
    prices = Prices(samples or 0)
    optimizer = torch.optim.SGD([weights], 2.0)
    for step in range(steps):
        index = torch.arange(N)[step % 4 :: 4]
        w = weights[index]
        values = w if columns == 1 else torch.stack([w] * columns, 1)
        mask = None if masks is None else {"c": masks[index]}
        loss = loss_of(
            (w - WISHED[index]).square() / 2, {"c": values}, index, masks=mask
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_of.step()
        assert loss_of.measured is not None
        prices.add(loss_of.measured, loss_of._lagrangian.in_force, loss_of.multipliers)
    return prices, weights.detach()


def test_prices_of_a_bound_are_those_of_the_optimum() -> None:
    prices, _ = trained(Constraint(at_most=BOUND))
    torch.testing.assert_close(
        prices["c"][:, 0], (WISHED - BOUND).clamp(min=0), atol=0.05, rtol=0.05
    )
    torch.testing.assert_close(
        prices.mean("c"),
        (WISHED - BOUND).clamp(min=0).mean()[None],
        atol=0.02,
        rtol=0.02,
    )


def test_prices_of_stated_numbers_and_of_a_margin_do_not_depend_on_them() -> None:
    expected = (WISHED - BOUND).clamp(min=0)
    for formulation in (Pointwise(alpha=0.5), Relaxed(alpha=0.5, beta=1e6)):
        prices, _ = trained(Constraint(at_most=BOUND), formulation)
        torch.testing.assert_close(prices["c"][:, 0], expected, atol=0.03, rtol=0.03)


def test_prices_of_an_equality_have_a_sign() -> None:
    prices, _ = trained(Constraint(equals=BOUND))
    torch.testing.assert_close(prices["c"][:, 0], WISHED - BOUND, atol=0.06, rtol=0.06)


def test_prices_of_an_interval_are_those_of_its_sides() -> None:
    prices, _ = trained(Constraint(at_most=BOUND, at_least=0.0))
    expected = torch.stack([WISHED - BOUND, -WISHED], 1).clamp(min=0)
    torch.testing.assert_close(prices["c"], expected, atol=0.06, rtol=0.06)


def test_prices_of_columns_share_a_sample() -> None:
    """Two equal values halve the force of each in the mean, so that the sum is twice the price."""
    prices, _ = trained(Constraint(at_most=BOUND), columns=2)
    expected = 2 * (WISHED - BOUND).clamp(min=0)
    torch.testing.assert_close(prices["c"].sum(1), expected, atol=0.1, rtol=0.06)


def test_a_masked_sample_has_no_price_and_counts_in_no_mean() -> None:
    masks = torch.arange(N) % 2 == 0
    prices, _ = trained(Constraint(at_most=BOUND), masks=masks)
    found = prices["c"][:, 0]
    assert found[~masks].isnan().all()
    assert not found[masks].isnan().any()
    torch.testing.assert_close(prices.mean("c")[0], found[masks].mean())


def test_a_masked_column_has_the_price_0() -> None:
    masks = torch.ones(N, 2, dtype=torch.bool)
    masks[:, 1] = False
    prices, _ = trained(Constraint(at_most=BOUND), masks=masks, columns=2, steps=200)
    assert (prices["c"][:, 1] == 0).all()
    assert (prices["c"][:, 0] > 0).any()


def test_a_stream_has_the_mean_alone() -> None:
    """Without λ some violation stays: the price is that of the bounds where the weights rest."""
    prices, weights = trained(Constraint(at_most=BOUND), samples=None, steps=100)
    expected = (WISHED - weights).mean()
    assert expected > 0.1
    torch.testing.assert_close(prices.mean("c")[0], expected, atol=0.0, rtol=0.08)
    with pytest.raises(DataError, match="no price of a sample"):
        prices.of_groups("c", torch.zeros(N, dtype=torch.long))


def test_groups_have_the_mean_of_their_samples() -> None:
    prices, _ = trained(Constraint(at_most=BOUND))
    groups = torch.arange(N) // 10
    expected = prices["c"].view(4, 10).mean(1)
    torch.testing.assert_close(prices.of_groups("c", groups), expected[:, None])


def test_a_shared_multiplier_has_the_price_of_its_group() -> None:
    """All samples of a group pull alike; its price is what the force on them is on average."""
    groups = torch.arange(N) // 10
    prices, _ = trained(Constraint(at_most=BOUND), groups=groups)
    found = prices.of_groups("c", groups)[:, 0]
    assert found[0] == 0
    assert 0.8 < found[3] / (WISHED[30:] - BOUND).mean() < 1.4


def test_the_price_of_a_mean_is_its_multiplier() -> None:
    """Mean w ≤ 0: all move alike, so that the price is the mean wished for."""
    for formulation in (Average(alpha="adaptive"), Average(alpha=1.0, dual_lr=0.5)):
        prices, _ = trained(Constraint(at_most=0.0), formulation)
        assert prices["c"].shape == ()
        torch.testing.assert_close(prices["c"], WISHED.mean(), atol=0.05, rtol=0.05)


def test_a_sample_without_a_visit_is_nan_and_one_without_a_late_visit_keeps_its_price() -> (
    None
):
    prices = Prices(3)
    for step in range(500):
        index = torch.tensor([0, 1 if step < 20 else 0])
        prices.add_forces(
            "c", index, torch.tensor([[2.0], [3.0 if step < 20 else 2.0]])
        )
        prices.steps += 1
        if prices.steps >= prices._end:
            prices._turn()
    torch.testing.assert_close(
        prices["c"][:, 0], torch.tensor([2.0, 3.0, float("nan")]), equal_nan=True
    )


def test_a_price_covers_between_a_third_and_56_percent_of_the_steps() -> None:
    """A force that is the step's number tells which steps the mean is of: [s, n) has (s + n)/2."""
    prices, shares = Prices(1), []
    for step in range(3000):
        prices.add_forces("c", torch.tensor([0]), torch.tensor([[float(step)]]))
        prices.steps += 1
        if prices.steps >= prices._end:
            prices._turn()
        if step > 100:
            first = 2 * float(prices["c"][0, 0]) - step
            shares.append((step + 1 - first) / (step + 1))
    assert 0.32 < min(shares) < 0.35
    assert 0.54 < max(shares) < 0.57


def test_resumed_equals_uninterrupted() -> None:
    def feed(prices: Prices, steps: range) -> None:
        for step in steps:
            draw = torch.Generator().manual_seed(step)
            index = torch.randint(0, 7, (4,), generator=draw)
            prices.add_forces("c", index, torch.rand(4, 2, generator=draw))
            prices._scalars.add("mean")
            prices._add_statistic("mean", torch.tensor(float(step)))
            prices.steps += 1
            if prices.steps >= prices._end:
                prices._turn()

    whole, first, second = Prices(7), Prices(7), Prices(7)
    feed(whole, range(90))
    feed(first, range(37))
    second.load_state_dict(first.state_dict())
    feed(first, range(37, 90))  # What was saved is a copy.
    feed(second, range(37, 90))
    for name in ("c", "mean"):
        torch.testing.assert_close(second[name], whole[name], rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="of 7 samples, here 8"):
        Prices(8).load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    "name", [n for n, f in FORMULATIONS.items() if hasattr(f, "slope")]
)
@pytest.mark.parametrize("signed", [False, True])
def test_slope_is_the_derivative(name: str, signed: bool) -> None:
    formulation = FORMULATIONS[name]
    if signed:
        try:
            formulation = formulation.for_equality()
        except ValueError:
            return
    check_slope(formulation)


@pytest.mark.parametrize(
    "formulation", [Pointwise(), Relaxed(price=2.0), Relaxed(beta=3.0)]
)
@pytest.mark.parametrize("scale", [Scale(2.0, 0.1, 0.3, 0.05, 1.0), Scale(unit=1.0)])
@pytest.mark.parametrize("signed", [False, True])
def test_slope_of_an_adaptive_one_is_the_derivative(
    formulation: Any, scale: Scale, signed: bool
) -> None:
    if scale.alpha is None and getattr(formulation, "cost", None) == "linear":
        return
    of = formulation.for_equality() if signed else formulation
    check_slope(of.scaled(scale))


def check_slope(formulation: Any) -> None:
    """By differences, in float64."""
    draw = torch.Generator().manual_seed(0)
    v: Tensor = torch.randn(500, generator=draw, dtype=torch.float64)
    multiplier = torch.rand(500, generator=draw, dtype=torch.float64)
    if formulation.signed:
        multiplier -= 0.5
    h = 1e-6
    above = formulation.lagrangian(v + h, multiplier)
    differences = (above - formulation.lagrangian(v - h, multiplier)) / (2 * h)
    torch.testing.assert_close(
        formulation.slope(v, multiplier), differences, atol=1e-5, rtol=1e-5
    )
