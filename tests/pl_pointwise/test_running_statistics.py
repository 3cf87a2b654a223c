"""A BatchNorm's running statistics: one update a step, none of it from a sample left out.

One NaN in a batch is in every output of a BatchNorm in training mode, and in its running mean for
ever after. Users saw the whole batch left out, innocent samples named in the log, and NaN from
every later evaluation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pl_pointwise import Average, Pointwise
from tests.pl_pointwise.toy import Toy, ToyRows, assert_same_run, fit


class Normed(Toy):
    """The toy behind a BatchNorm."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.norm = torch.nn.BatchNorm1d(4).double()

    def forward(self, batch: Any) -> Tensor:
        return super().forward({**batch, "x": self.norm(batch["x"])})


class Broken(ToyRows):
    """Rows of which some have NaN inputs."""

    def __init__(self, count: int, *broken: int) -> None:
        super().__init__(count, seed=5)
        self.x[list(broken)] = torch.nan


def momentum_of(module: Normed) -> float:
    assert module.norm.momentum is not None
    return module.norm.momentum


@pytest.mark.parametrize(
    "formulation", [Pointwise(alpha=1.0, dual_lr=1.0), Average(alpha=0.8, dual_lr=1.0)]
)
@pytest.mark.parametrize("micro_batch_size", [None, 4])
def test_one_nan_leaves_out_one_sample_and_spoils_no_statistic(
    formulation: Any, micro_batch_size: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    module = Normed(formulation, micro_batch_size=micro_batch_size)
    rows = Broken(8, 3)
    fit(module, rows, held_out=ToyRows(5), batch_size=8)
    assert module.left_out == 3  # Once in each of three epochs.
    assert module.skipped_steps == 0
    named = [r.getMessage() for r in caplog.records if "Left out" in r.getMessage()]
    assert named
    assert all("for sample 3 (" in message for message in named)
    assert torch.isfinite(module.norm.running_mean).all()
    assert torch.isfinite(module.norm.running_var).all()
    assert torch.isfinite(module.violations["val"]["fit"]).all()
    assert module.norm.num_batches_tracked == (3 if micro_batch_size is None else 6)
    table = module.multipliers["fit"]
    if len(table.shape):
        assert table[3] == 0
        assert (table[torch.arange(8) != 3] > 0).any()


def test_statistics_are_those_of_the_samples_that_remain() -> None:
    module = Normed(Pointwise())
    fit(module, Broken(8, 3), batch_size=8, epochs=1)
    kept = Broken(8).x[torch.arange(8) != 3]
    assert module.norm.running_mean is not None
    expected = momentum_of(module) * kept.mean(0)
    torch.testing.assert_close(module.norm.running_mean, expected)


def test_what_the_step_measured_is_of_the_pass_without_the_sample() -> None:
    """The multipliers step by what the weights' step saw; the first pass saw NaN everywhere."""
    module = Normed(Pointwise(alpha=1.0, dual_lr=1.0))
    fit(module, Broken(8, 3), batch_size=8, epochs=1)
    assert module.measured is not None
    assert sorted(module.measured.index.tolist()) == [0, 1, 2, 4, 5, 6, 7]
    assert module.measured.counts["fit"] == 8
    assert not module.measured.non_finite().any()
    stepped = module.dual_steps["fit"].after
    torch.testing.assert_close(
        module.multipliers["fit"][module.dual_steps["fit"].index], stepped.float()
    )


def test_statistics_do_not_count_the_pass_that_finds_the_mean() -> None:
    """An augmented Average with micro-batches forwards each of them twice."""
    plain = fit(Normed(Average(dual_lr=0.5), micro_batch_size=4), ToyRows(8), batch_size=8)
    module = fit(
        Normed(Average(alpha=0.8, dual_lr=0.5), micro_batch_size=4), ToyRows(8), batch_size=8
    )
    assert module.norm.num_batches_tracked == plain.norm.num_batches_tracked == 6


def test_a_skipped_step_updates_no_statistic() -> None:
    class Steep(Normed):
        def objective(self, outputs: Tensor, batch: Any) -> Tensor:
            values = super().objective(outputs, batch)
            at = batch["y"] == batch["y"].max()
            return values + torch.where(at, 0 * outputs, 1.0).sqrt() - 1  # Slope inf · 0.

    module = Steep(Pointwise())
    rows = ToyRows(8)
    with pytest.raises(Exception, match="were skipped"):
        fit(module, rows, batch_size=8, epochs=1)
    assert not module.norm.running_mean.any()
    assert module.norm.num_batches_tracked == 0


def test_buffers_that_are_replaced_are_put_back_too() -> None:
    """``self.seen = self.seen + …`` makes a new tensor at each step."""

    class Counting(Toy):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("constant", torch.arange(3))

        def forward(self, batch: Any) -> Tensor:
            if self.training:
                self.seen = self.seen + batch["x"].mean()
            return super().forward(batch)

    module = fit(Counting(Pointwise()), Broken(8, 3), batch_size=4, epochs=2)
    assert torch.isfinite(module.seen)
    assert module.left_out == 2


def test_a_sample_that_the_batch_has_twice_is_left_out_twice() -> None:
    """A sampler with replacement brings copies; one of them stayed in the step's record."""
    rows = Broken(4, 1)
    found = fit(Toy(Pointwise(), dropout=0.5), _Repeated(rows), batch_size=6, epochs=1)
    assert found.measured is not None
    assert not found.measured.non_finite().any()


class _Repeated(ToyRows):
    """Six rows, of which two are the same broken one."""

    def __init__(self, rows: ToyRows) -> None:
        super().__init__(6)
        self.x[:4], self.x[4] = rows.x, rows.x[1]


def test_several_broken_samples_are_all_left_out() -> None:
    module = fit(Normed(Pointwise()), Broken(12, 1, 2, 7), batch_size=12)
    assert (module.left_out, module.skipped_steps) == (9, 0)


def test_a_module_without_defects_trains_as_before() -> None:
    one = fit(Normed(Pointwise()), ToyRows(8), batch_size=8)
    pair = fit(Normed(Pointwise()), ToyRows(8), batch_size=8)
    assert_same_run(one, pair, atol=0)
    assert one.norm.num_batches_tracked == 3
