"""At most a share of the samples may violate: the others are bounded as ever, which ones is learnt.

The reference is Neyman and Pearson's: the score of a linear classifier with a threshold at the
quantile of the positives, its direction by a grid.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pl_pointwise import Average, Constraint, Penalty, Pointwise, PointwiseLoss, Relaxed
from pl_pointwise.data import IndexedDataset
from pl_pointwise.errors import TrainingError
from pl_pointwise.lagrangian.shares import Share
from tests.pl_pointwise.toy import (
    PAIRS,
    SHARED,
    Toy,
    ToyData,
    ToyRows,
    assert_identical_run,
    fit,
    trainer,
)

N = 13


class Recall:
    """At least a share of the positives score above 0, at the least loss of the negatives."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        draw: Any = {"generator": generator, "dtype": torch.float64}
        self.positives = torch.randn(200, 2, **draw) * torch.tensor([1.0, 0.6])
        self.positives += torch.tensor([1.5, 0.5])
        self.negatives = torch.randn(200, 2, **draw) * torch.tensor([0.7, 1.2])

    def objective(self, angle: Tensor, offset: Tensor) -> Tensor:
        direction = torch.stack([angle.cos(), angle.sin()])
        return torch.nn.functional.softplus(self.negatives @ direction + offset)

    def optimum(self, share: float) -> float:
        found = []
        for angle in torch.linspace(-math.pi, math.pi, 721, dtype=torch.float64):
            score = self.positives @ torch.stack([angle.cos(), angle.sin()])
            offset = -score.sort().values[round(share * len(score))]
            found.append(float(self.objective(angle, offset).mean()))
        return min(found)

    def trained(
        self, bound: Constraint, epochs: int
    ) -> tuple[PointwiseLoss, float, int]:
        """The loss, the objective, and the number of positives below 0."""
        weights = torch.tensor([0.3, 0.0], dtype=torch.float64, requires_grad=True)
        optimizer, steps = torch.optim.Adam([weights], lr=0.03), 10 * epochs
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        loss = PointwiseLoss({"recall": bound}, Pointwise(), samples=200)
        generator = torch.Generator().manual_seed(1)
        for _ in range(epochs):
            for batch in torch.randperm(200, generator=generator).chunk(10):
                direction = torch.stack([weights[0].cos(), weights[0].sin()])
                score = self.positives[batch] @ direction + weights[1]
                optimizer.zero_grad()
                objective = self.objective(weights[0], weights[1])[batch]
                loss(objective, {"recall": score}, batch).backward()
                optimizer.step()
                schedule.step()
                loss.step()
        angle, offset = weights.detach()
        score = self.positives @ torch.stack([angle.cos(), angle.sin()]) + offset
        return loss, float(self.objective(angle, offset).mean()), int((score < 0).sum())


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_a_recall_is_met_at_the_optimum_of_neyman_and_pearson(share: float) -> None:
    problem = Recall()
    loss, objective, missed = problem.trained(
        Constraint(at_least=0.0, share=share), 100
    )
    assert 0.8 * share * 200 <= missed <= share * 200
    assert abs(objective / problem.optimum(share) - 1) < 0.03
    (row,) = loss.report().rows
    assert row.allowed == round(share * 200)
    assert row.bound == f"≥ 0 but for {100 * share:g} %"
    assert f"of 200 ({row.allowed} allowed)" in str(loss.report())
    # Who is exempt has no price, and the others pay what there is to pay.
    exempt = loss._lagrangian.shares["recall"].exempt(torch.arange(200))
    assert (
        loss.multipliers["recall"][exempt].max()
        < 0.1 * loss.multipliers["recall"].max()
    )


def test_those_that_may_violate_are_the_worst_at_their_last_visit() -> None:
    share = Share(samples=5, share=0.5)
    violation = torch.tensor([[-1.0, 9.0], [2.0, -1.0], [-3.0, -2.0], [math.nan, 0.0]])
    mask = torch.tensor([[True, False], [True, True], [True, True], [True, True]])
    # Of three, one may, and one does.
    share.put(torch.tensor([4, 2, 0, 3]), violation, mask)
    assert share.exempt(torch.arange(-1, 5)).tolist() == [
        False,
        False,
        False,
        True,
        False,
        False,
    ]
    # Of five, two may; three do, so one fewer is exempt.
    values = torch.tensor([[5.0], [1.0], [8.0]])
    share.put(torch.tensor([1, 3, -1]), values, torch.ones(3, 1, dtype=torch.bool))
    assert share.exempt(torch.arange(5)).tolist() == [False, True, False, False, False]
    share.put(
        torch.tensor([3]), torch.tensor([[-1.0]]), torch.ones(1, 1, dtype=torch.bool)
    )
    assert share.exempt(torch.arange(5)).tolist() == [False, True, True, False, False]


def test_an_exempt_sample_has_no_force_and_its_multiplier_halves() -> None:
    loss = PointwiseLoss(
        {"c": Constraint(at_most=0.0, share=0.5)}, Pointwise(alpha=1.0), samples=2
    )
    values, index = torch.tensor([3.0, -0.1]), torch.arange(2)
    for _ in range(2):
        weight = torch.ones(2, requires_grad=True)
        before = loss.multipliers["c"].clone() if loss.steps else None
        loss(0 * weight, {"c": values * weight}, index).backward()
        loss.step()
    assert before is not None
    # α = 1: the force of the other is λ + 2v, and λ moves by 2αv, to 0 at least.
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0, 0.0]
    assert (
        loss.multipliers["c"].flatten().tolist()
        == [before[0, 0] / 2, 0.0]
        == [3.0, 0.0]
    )
    assert loss.prices["c"][0, 0] == 3.0  # The mean of a force of 6 and of none.


def rows_of(**options: Any) -> ToyRows:
    return ToyRows(N, seed=2, **options)


@pytest.mark.parametrize("formulation", [Pointwise(), Relaxed(price=5.0)])
def test_micro_batches_of_a_module_are_one_batch(formulation: Any) -> None:
    modules = [
        fit(
            Toy(formulation, SHARED, partial=True, micro_batch_size=size),
            rows_of(partial=True),
            batch_size=5,
            epochs=6,
        )
        for size in (None, 2)
    ]
    for found, expected in zip(
        *(module.parameters() for module in modules), strict=True
    ):
        torch.testing.assert_close(found, expected)
    without = {n: Constraint(c.at_most, c.at_least) for n, c in SHARED.items()}
    other = fit(
        Toy(formulation, without, partial=True), rows_of(partial=True), epochs=6
    )
    assert not torch.allclose(other.first, modules[0].first, atol=1e-3)
    assert modules[0].multipliers["pair"].shape == (N, PAIRS)


def step_of(
    loss: PointwiseLoss, weight: Tensor, batch: list[int], keep: bool = True
) -> None:
    x = torch.linspace(-1.0, 1.5, N, dtype=torch.float64)[batch]
    values = {"c": x * weight + 0.2}
    found = loss((weight - 2 * x).square(), values, torch.tensor(batch), keep=keep)
    (gradient,) = torch.autograd.grad(found, weight)
    if keep:
        with torch.no_grad():
            weight -= 0.05 * gradient
        loss.step()


def loop() -> tuple[PointwiseLoss, Tensor]:
    bound = {"c": Constraint(at_most=0.1, share=0.3)}
    loss = PointwiseLoss(bound, Pointwise(), samples=N, primal_steps=2)
    return loss, torch.tensor(0.5, dtype=torch.float64, requires_grad=True)


BATCHES = [list(range(start, min(start + 4, N))) for start in range(0, N, 4)] * 6


def test_a_state_goes_on_to_the_bit_and_one_of_before_loads() -> None:
    loss, weight = loop()
    for batch in BATCHES[:7]:
        step_of(loss, weight, batch)
    file = io.BytesIO()
    torch.save(loss.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    resumed, again = loop()
    resumed.load_state_dict(state)
    again.data.copy_(weight.data)
    for batch in BATCHES[7:]:
        step_of(resumed, again, batch)
        # A closure or a skipped loss leaves nothing.
        step_of(loss, weight, batch, keep=False)
        loss.skip()
        step_of(loss, weight, batch)
    assert torch.equal(weight, again)
    assert torch.equal(loss.multipliers["c"], resumed.multipliers["c"])
    assert loss._lagrangian.shares["c"].exempt(torch.arange(N)).any()
    del state["shares"]
    state["window"] = []
    older, _ = loop()
    older.load_state_dict(state)
    assert not older._lagrangian.shares["c"].exempt(torch.arange(N)).any()
    state["shares"] = {
        "c": {**loss._lagrangian.shares["c"].state_dict(), "values": torch.zeros(3)}
    }
    with pytest.raises(TrainingError, match="3 values"):
        loop()[0].load_state_dict(state)


def test_a_module_resumes_within_an_epoch_to_the_bit(tmp_path: Path) -> None:
    whole, begun, resumed = (Toy(Pointwise(), SHARED) for _ in range(3))
    trainer(max_epochs=6).fit(whole, ToyData(rows_of(), batch_size=5))
    runner = trainer(max_steps=7)
    runner.fit(begun, ToyData(rows_of(), batch_size=5))
    runner.save_checkpoint(tmp_path / "part.ckpt")
    data = ToyData(rows_of(), batch_size=5)
    trainer(max_epochs=6).fit(resumed, data, ckpt_path=tmp_path / "part.ckpt")
    assert_identical_run(resumed, whole)
    assert whole._lagrangian.shares["pair"].exempt(torch.arange(N)).sum() in (2, 3)
    row = next(row for row in whole.closing.rows if row.name == "pair")  # type: ignore[union-attr]
    assert (row.of, row.allowed) == (N, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"at_most": 1.0, "share": 0.0}, "between 0 and 1"),
        ({"at_most": 1.0, "share": 1}, "between 0 and 1"),
        ({"at_most": 1.0, "share": "5 %"}, "as 0.05 for 5 %"),
        ({"equals": 1.0, "share": 0.1}, "not equals"),
        ({"at_most": 1.0, "share": 0.1, "each_sample": True}, "without groups"),
    ],
)
def test_shares_that_are_none_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Constraint(**arguments)


def test_where_no_sample_can_be_exempt_a_share_is_refused() -> None:
    bound = {"c": Constraint(at_most=0.0, share=0.1)}
    without = (
        Average(alpha="adaptive"),
        Penalty(weight=1.0, shape="hinge"),
        Pointwise(memory=False),
    )
    for formulation in without:
        with pytest.raises(TrainingError, match=r'"c".*Take Pointwise\(\) or Relaxed'):
            PointwiseLoss(bound, formulation, samples=4)
    with pytest.raises(TrainingError, match=r'"c".*groups'):
        PointwiseLoss(bound, Pointwise(), samples=4, groups=[0, 0, 1, 1])
    stream = PointwiseLoss(bound, Pointwise(), samples=None)
    weight = torch.ones(2, requires_grad=True)
    with pytest.raises(TrainingError, match=r'"c".*a stream has none'):
        stream(weight, {"c": weight}, torch.arange(2))
    with pytest.raises(TrainingError, match=r'"fit".*groups'):
        fit(Toy(Pointwise(), SHARED), IndexedDataset(rows_of(), groups=[0] * N))
