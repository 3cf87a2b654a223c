"""A BatchNorm's running statistics: one update a step, none of it from a sample left out.

One NaN in a batch is in every output of a BatchNorm in training mode, and in its running mean for
ever after. Users saw NaN from every later evaluation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pl_pointwise import Average, Formulation, Pointwise
from tests.pl_pointwise.toy import Toy, ToyRows, fit, lost


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


def test_one_nan_skips_its_step_and_spoils_no_statistic(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is in every output of its batch, so that no sample of it is left."""
    module = Normed(Pointwise(alpha=1.0, dual_lr=1.0))
    fit(module, Broken(8, 3), held_out=ToyRows(5), batch_size=4)
    assert lost(module) == (12, 3)  # One batch in each of three epochs.
    assert "no sample of the batch is left" in caplog.text
    assert torch.isfinite(module.norm.running_mean).all()
    assert torch.isfinite(module.norm.running_var).all()
    assert torch.isfinite(module.violations["val"]["fit"]).all()
    assert module.norm.num_batches_tracked == 3
    assert (module.multipliers["fit"] > 0).any()


@pytest.mark.parametrize(
    "formulation", [Average(alpha=0.8, dual_lr=0.5), Pointwise()], ids=repr
)
def test_statistics_do_not_count_passes_that_only_measure(
    formulation: Formulation,
) -> None:
    """The mean of an augmented Average with micro-batches, and the unit of an adaptive α."""
    module = fit(Normed(formulation, micro_batch_size=4), ToyRows(8), batch_size=8)
    assert module.norm.num_batches_tracked == 6


def test_a_skipped_step_updates_no_statistic() -> None:
    class Steep(Normed):
        def objective(self, outputs: Tensor, batch: Any) -> Tensor:
            values = super().objective(outputs, batch)
            at = batch["y"] == batch["y"].max()
            # Slope inf · 0.
            return values + torch.where(at, 0 * outputs, 1.0).sqrt() - 1

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
    assert lost(module)[0] == 2
