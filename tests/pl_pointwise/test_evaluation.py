"""Validation and test measure violations and leave the multipliers alone.

Validation samples have indices of their own: an evaluation that stepped multipliers would move
those of the training samples with the same numbers. Evaluation bounds are the same for every
method compared, so they are apart from the bounds that are trained on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics import MaxMetric, MeanMetric, Metric

from pl_pointwise import Constraint
from pl_pointwise.evaluation import MeanBySample, SampleViolations, ViolationsBySample
from tests.pl_pointwise.toy import (
    FORMULATIONS,
    Toy,
    ToyData,
    ToyRows,
    assert_identical_run,
    fit,
    multipliers_of,
    trainer,
    weights_of,
)


@pytest.mark.parametrize("name", ["pointwise", "cvar augmented", "by name"])
def test_validation_leaves_multipliers_unchanged(name: str) -> None:
    rows, held_out = ToyRows(7), ToyRows(7, seed=3)
    module = fit(Toy(FORMULATIONS[name]), rows)
    before, weights = multipliers_of(module), weights_of(module)
    data = ToyData(rows, held_out, batch_size=4)
    runner = trainer()
    runner.validate(module, data, verbose=False)
    runner.test(module, data, verbose=False)
    torch.testing.assert_close(module.multipliers, before, rtol=0, atol=0)
    assert torch.equal(weights_of(module), weights)


def test_training_with_validation_equals_training_without() -> None:
    options: Any = {"dropout": 0.3, "primal_steps": 2}
    runs = []
    for held_out in (None, ToyRows(9, seed=3)):
        torch.manual_seed(0)
        module = Toy(FORMULATIONS["by name"], **options)
        runs.append(fit(module, ToyRows(7), held_out=held_out, num_sanity_val_steps=2))
    assert_identical_run(*runs)


PARTIAL, PARTIAL_HELD_OUT = (
    ToyRows(11, seed=2, partial=True),
    ToyRows(9, seed=3, partial=True),
)


class Judged(Toy):
    """Trained on one bound and judged by others; a metric of the task."""

    def __init__(self, formulation: Any) -> None:
        super().__init__(formulation, partial=True)
        own = {"fit": Constraint(at_least=-0.4, at_most=0.5)}
        self.evaluation_constraints = {**self.constraints, **own}

    def evaluation_metrics(self) -> dict[str, Metric]:
        return {"largest": MaxMetric()}

    def update_evaluation_metrics(
        self,
        metrics: dict[str, Metric],
        outputs: Tensor,
        batch: Any,
        real: Tensor,
        stage: str,
    ) -> None:
        metrics["largest"].update(outputs[real])


def figures(violation: Tensor) -> dict[str, float]:
    values = violation.double().numpy()
    tail = values[values >= np.percentile(values, 95)]
    return {
        "mean": values.mean(),
        "max": values.max(),
        "violated": (values > 0).mean(),
        "cvar95": tail.mean(),
    }


@pytest.mark.parametrize(
    "formulation", [None, FORMULATIONS["pointwise"]], ids=["none", "pointwise"]
)
def test_figures_of_both_data_sets_by_the_evaluation_bounds(formulation: Any) -> None:
    """Held-out and training data side by side, under their own names; plain training alike."""
    module, runner = Judged(formulation), trainer()
    runner.test(module, ToyData(PARTIAL, PARTIAL_HELD_OUT, batch_size=4), verbose=False)
    expected = {}
    for stage, data in (("train", PARTIAL), ("test", PARTIAL_HELD_OUT)):
        outputs = module({"x": data.x}).detach()
        errors = (outputs - data.y).square()[data.has["objective"]]
        expected[f"{stage}/objective"] = float(errors.mean())
        fit_values = outputs[data.has["fit"]]
        violations = {
            "fit": torch.maximum(fit_values - 0.5, -0.4 - fit_values),
            "pair": 0.2 - (outputs[:, None] * data.x[:, :3])[data.has["pair"]],
        }
        by_sample = torch.where(
            data.has["pair"], 0.2 - outputs[:, None] * data.x[:, :3], -torch.inf
        )[data.has["pair"].any(1)]
        for name, violation in violations.items():
            expected |= {
                f"{stage}/{name}/{k}": v for k, v in figures(violation).items()
            }
            pooled = module.violations[stage][name]
            assert pooled.device.type == "cpu"
            assert torch.equal(module.evaluated[stage][name].pooled(), pooled)
            torch.testing.assert_close(
                pooled.double().sort().values,
                violation.sort().values,
                rtol=0,
                atol=1e-6,
            )
        share = (by_sample > 0).any(1).double().mean()
        expected[f"{stage}/pair/violated_samples"] = float(share)
        expected[f"{stage}/largest"] = float(outputs.max())
    found = {key: float(value) for key, value in runner.callback_metrics.items()}
    assert found == pytest.approx(expected, rel=1e-5)


def test_violations_are_kept_sample_by_sample_in_data_set_order() -> None:
    """A certificate, or a table of the hardest samples, has to know whose they are."""
    module, held_out = Judged(None), PARTIAL_HELD_OUT
    backwards = ToyData(held_out, held_out, order=list(range(8, -1, -1)), batch_size=4)
    trainer().test(module, backwards, verbose=False)
    outputs = module({"x": held_out.x}).detach()
    pairs = 0.2 - outputs[:, None] * held_out.x[:, :3]
    bounds = torch.maximum(outputs - 0.5, -0.4 - outputs)[:, None]
    masks = {"fit": held_out.has["fit"][:, None], "pair": held_out.has["pair"]}
    for name, violation in {"fit": bounds, "pair": pairs}.items():
        found, mask = module.evaluated["test"][name], masks[name]
        carriers = mask.any(1)
        assert not mask.all()
        assert found.index.tolist() == carriers.nonzero()[:, 0].tolist()
        assert torch.equal(found.mask, mask[carriers])
        expected = violation.masked_fill(~mask, torch.nan)[carriers]
        torch.testing.assert_close(
            found.violation.double(), expected, rtol=0, atol=1e-6, equal_nan=True
        )
        worst = violation.masked_fill(~mask, -torch.inf)[carriers].amax(1)
        torch.testing.assert_close(found.worst().double(), worst, rtol=0, atol=1e-6)


def collected(*batches: tuple[Any, Tensor, Tensor]) -> SampleViolations:
    found = ViolationsBySample()
    for index, violation, mask in batches:
        found.add(torch.tensor(index), violation, mask)
    return found.samples()


def test_batches_may_differ_in_their_number_of_columns() -> None:
    narrow, wide = torch.tensor([[10.0], [20.0]]), torch.tensor([[10.0, 20.0]])
    real = torch.tensor([[True], [False]])
    found = collected(([3, -1], narrow, real), ([0], wide, wide > 0))
    assert found.index.tolist() == [0, 3]
    assert found.mask.tolist() == [[True, True], [True, False]]
    assert found.violation.nan_to_num(nan=-1).tolist() == [[10, 20], [10, -1]]
    assert found.pooled().tolist() == [10, 20, 10]
    assert found.worst().tolist() == [20, 10]


def test_an_interval_counts_a_value_once() -> None:
    """Each side had counted: no more than half could be violated, and the mean was −ε always."""
    interval = Constraint(at_least=-1.0, at_most=1.0)
    values, mask = (
        torch.tensor([[3.0, -2.0], [0.5, 9.0]]),
        torch.tensor([[True, True]] * 2),
    )
    mask[1, 1] = False
    violation = interval.violation(values)
    found, counted = interval.outside(violation, mask.repeat(1, 2))
    assert found.tolist() == [[2, 1], [-0.5, 8]]
    assert torch.equal(counted, mask)


def test_a_sample_that_two_batches_bring_counts_once() -> None:
    """A plain sampler over several ranks repeats samples, which certificates counted twice."""
    values, all_of_it = (
        torch.tensor([[1.0], [2.0], [3.0]]),
        torch.ones(3, 1, dtype=torch.bool),
    )
    found = collected(([2, 0, 1], values, all_of_it), ([0, 5, 2], values, all_of_it))
    assert found.index.tolist() == [0, 1, 2, 5]
    assert found.pooled().tolist() == [2, 3, 1, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_violations_keep_float64_and_are_never_below_float32(
    dtype: torch.dtype,
) -> None:
    value = torch.tensor([[0.1]], dtype=dtype)
    found = collected(([0], value, value > 0))
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    assert found.violation.dtype == wanted
    assert torch.equal(found.violation, value.to(wanted))


def test_several_validation_loaders_are_told_apart() -> None:
    class Two(ToyData):
        def val_dataloader(self) -> Any:
            return [self._loader("val"), self._loader("train")]

    class Named(ToyData):
        def val_dataloader(self) -> Any:
            return {"seen": self._loader("train"), "unseen": self._loader("val")}

    keys = []
    for kind in (Two, Named):
        runner = trainer()
        data = kind(ToyRows(7), ToyRows(5, seed=3), batch_size=4)
        runner.validate(Toy(FORMULATIONS["pointwise"]), data, verbose=False)
        keys.append({k: float(v) for k, v in runner.callback_metrics.items()})
    numbered, named = keys
    assert numbered["val0/objective"] == named["unseen/objective"]
    assert numbered["val1/objective"] == named["seen/objective"]
    assert named["seen/objective"] != named["unseen/objective"]


# Means over samples -------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), min_size=1, max_size=60), st.integers(1, 7))
def test_a_mean_over_samples_is_torchmetrics_mean_of_each_sample_once(
    index: list[int], size: int
) -> None:
    value = {each: (each * 37 % 11) / 10 for each in index}
    metric, plain = MeanBySample(), MeanMetric()
    for rows in torch.tensor(index).split(size):
        metric.update(rows, torch.tensor([value[each] for each in rows.tolist()]))
    plain.update(torch.tensor(list(value.values())))
    torch.testing.assert_close(metric.compute(), plain.compute())
    found = metric.samples()
    assert found.index.tolist() == sorted(value)
    assert found.value.tolist() == pytest.approx(
        [value[each] for each in sorted(value)]
    )


def test_a_mean_over_samples_leaves_out_rows_that_fill_a_rank_and_is_nan_of_none() -> (
    None
):
    metric = MeanBySample()
    assert metric.samples().index.tolist() == []
    metric.update(torch.tensor([], dtype=torch.long), torch.tensor([]))
    assert metric.compute().isnan()
    metric.update(torch.tensor([2, -1, 0]), torch.tensor([True, True, False]).float())
    assert metric.compute() == 0.5
    assert metric.compute().dtype == torch.float32
    metric.reset()
    metric.update(torch.tensor([1]), torch.tensor([0.25], dtype=torch.bfloat16))
    assert metric.samples().value.tolist() == [0.25]
    assert metric.compute() == 0.25
    metric(torch.tensor([3]), torch.tensor([0.75]))  # As Lightning calls a metric.
    assert metric.compute() == 0.5


class ByThreshold(Toy):
    """The share of samples whose output is above 0, of those with a label above 0 only."""

    def evaluation_metrics(self) -> dict[str, Metric]:
        return {"above": MeanBySample(), "never": MeanBySample()}

    def update_evaluation_metrics(
        self,
        metrics: dict[str, Metric],
        outputs: Any,
        batch: Any,
        real: Tensor,
        stage: str,
    ) -> None:
        chosen = batch["y"] > 0
        metrics["above"].update(batch["index"][chosen], (outputs > 0)[chosen].float())


def test_values_of_a_users_own_mean_over_samples_are_kept_by_stage() -> None:
    rows, held_out = ToyRows(11, seed=2), ToyRows(9, seed=3)
    module, runner = ByThreshold(), trainer()
    runner.test(module, ToyData(rows, held_out, batch_size=4), verbose=False)
    assert module.evaluated_metrics.keys() == {"test", "train"}
    for stage, data in (("test", held_out), ("train", rows)):
        above = (module({"x": data.x}) > 0).double()
        chosen = data.y > 0
        assert list(module.evaluated_metrics[stage]) == ["above"]
        found = module.evaluated_metrics[stage]["above"]
        assert found.index.tolist() == chosen.nonzero()[:, 0].tolist()
        assert found.value.tolist() == above[chosen].tolist()
        assert runner.callback_metrics[f"{stage}/above"] == pytest.approx(
            float(above[chosen].mean())
        )
    runner = trainer(limit_val_batches=0)
    runner.fit(module, ToyData(rows, held_out, batch_size=4))
    assert module.evaluated_metrics == {}  # They were of other weights.
