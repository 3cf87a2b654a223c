"""Terms, means and multipliers are float32 or wider, whatever the precision plugin.

Under ``bf16-true`` Lightning makes bfloat16 the default dtype of a step: a tensor created without
one there counts 300 samples as 300 but 301 as 300 too, and weights a third as 0.3340.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from pl_pointwise import (
    Average,
    Constraint,
    CVaR,
    Penalty,
    Pointwise,
    PointwiseModule,
    Relaxed,
    Tilted,
    Training,
)
from tests.pl_pointwise.toy import (
    Toy,
    ToyData,
    ToyRows,
    fit,
    lost,
    multipliers_of,
    trainer,
    weights_of,
)

COUNT = 301  # not a bfloat16 number
PRECISIONS = ["32-true", "64-true", "bf16-mixed", "bf16-true"]


class Exact:
    """Values that bfloat16 holds exactly, so that only what is computed from them can round."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.values = torch.randint(-32, 32, (COUNT, 3), generator=generator) / 8
        self.mask = torch.rand(COUNT, 3, generator=generator) < 0.7

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        return {"values": self.values[position], "carried": self.mask[position]}


class Reader(PointwiseModule):
    """Its outputs are the batch's values times a weight of 1; notes its loss."""

    def __init__(self, formulation: Any, **options: Any) -> None:
        super().__init__(
            formulation=formulation,
            constraints={"fit": Constraint(at_most=0.0)},
            training=Training(**options),
        )
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.losses: list[Tensor] = []

    def forward(self, batch: Any) -> Tensor:
        return batch["values"] * self.weight

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs[:, 0]

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"fit": outputs}

    def membership(self, batch: Any) -> dict[str, Tensor]:
        return {"fit": batch["carried"]}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def manual_backward(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        self.losses.append(loss.detach())
        super().manual_backward(loss, *arguments, **options)


def member_mean(rows: Exact, values: Tensor) -> Tensor:
    """Mean over the samples that carry any column of the mean over the columns they carry."""
    carried = rows.mask.double()
    per_row = (values.double() * carried).sum(1) / carried.sum(1).clamp(min=1)
    return per_row[rows.mask.any(1)].mean()


@pytest.mark.parametrize("size", [None, 128])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_loss_is_the_mean_over_the_members_exactly(
    precision: Any, size: int | None
) -> None:
    rows = Exact()
    for formulation in (
        None,
        Penalty(weight=0.5),
        Average(alpha=1.0),
        Pointwise(alpha=1.0),
    ):
        module = Reader(formulation, micro_batch_size=size)
        trainer(precision=precision).fit(module, ToyData(rows, batch_size=COUNT))
        expected = rows.values[:, 0].double().mean()
        if isinstance(formulation, Penalty):
            expected = expected + 0.5 * member_mean(rows, rows.values)
        if isinstance(formulation, Pointwise):  # at λ = 0
            expected = expected + member_mean(
                rows, rows.values.double().clamp(min=0) ** 2
            )
        if isinstance(formulation, Average):
            # its loss is the price of the mean, times it
            mean = member_mean(rows, rows.values)
            expected = expected + 2 * mean.clamp(min=0) * mean
        loss = torch.stack(module.losses).double().sum()
        assert module.losses[0].dtype in (torch.float32, torch.float64)
        assert float(loss) == pytest.approx(float(expected), rel=1e-5, abs=1e-6), (
            formulation
        )
        logged = float(module.trainer.callback_metrics["running/objective"])
        assert logged == pytest.approx(
            float(rows.values[:, 0].double().mean()), rel=1e-6
        )


@pytest.mark.parametrize("size", [None, 128])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_multipliers_step_by_the_exact_violation(
    precision: Any, size: int | None
) -> None:
    rows = Exact()
    module = Reader(Pointwise(alpha=1.0, dual_lr=0.3), micro_batch_size=size)
    trainer(precision=precision).fit(module, ToyData(rows, batch_size=COUNT))
    expected = torch.where(
        rows.mask, 0.3 * rows.values.double().clamp(min=0), 0
    ).float()
    torch.testing.assert_close(module.multipliers["fit"], expected, rtol=1e-6, atol=0)

    for alpha in (None, 1.0):
        # Negated values, so that the mean violates.
        average = Reader(Average(alpha=alpha, dual_lr=0.3), micro_batch_size=size)
        average.constraints = {"fit": Constraint(at_most=-3.0)}
        trainer(precision=precision).fit(average, ToyData(rows, batch_size=COUNT))
        mean = float(member_mean(rows, rows.values + 3.0))
        assert mean > 0
        assert float(average.multipliers["fit"]) == pytest.approx(0.3 * mean, rel=1e-6)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_price_of_the_average_is_the_stored_multiplier(precision: Any) -> None:
    """λ = 256.5 of the standard average must not reach the loss as 256."""
    rows, module = Exact(), Reader(Average(dual_lr=0.0))
    module.multipliers.set("fit", 256.5)
    trainer(precision=precision).fit(module, ToyData(rows, batch_size=COUNT))
    expected = rows.values[:, 0].double().mean() + 256.5 * member_mean(
        rows, rows.values
    )
    assert float(module.losses[0]) == pytest.approx(float(expected), rel=1e-5)


# Five samples, each violating by 0.5, which every precision holds.
HALF = [
    {"values": torch.full((3,), 0.5), "carried": torch.ones(3, dtype=torch.bool)}
] * 5


ASCENDING: dict[str, Any] = {
    "average": Average(dual_lr=1.0),
    "average augmented": Average(alpha=1.0, dual_lr=1.0),
    "tilted": Tilted(tilt=1.0, dual_lr=1.0),
    "cvar": CVaR(level=0.5, threshold_lr=0.0, dual_lr=0.5),  # of 0.5 above 0, it is 1
    "pointwise": Pointwise(alpha=1.0, dual_lr=1.0),
    "pointwise standard": Pointwise(alpha=None, dual_lr=1.0),
    "relaxed linear": Relaxed(alpha=1.0, beta=1e4, cost="linear", dual_lr=1.0),
}


@pytest.mark.parametrize("formulation", ASCENDING.values(), ids=ASCENDING)
@pytest.mark.parametrize("precision", [*PRECISIONS, "16-true", "16-mixed"])
def test_small_dual_steps_are_not_lost(precision: Any, formulation: Any) -> None:
    """256 + 0.5 is 256 in bfloat16 and 2048 + 0.5 is 2048 in float16, however often it is added."""
    module = Reader(formulation)
    module.multipliers.set("fit", 4096.0)
    data: Any = ToyData(HALF, batch_size=5)
    options: Any = (
        {"plugins": [scaled(2.0)]}
        if precision == "16-mixed"
        else {"precision": precision}
    )
    trainer(max_epochs=8, **options).fit(module, data)
    table = module.multipliers["fit"]
    assert table.dtype == torch.float32
    assert lost(module)[1] == 0
    torch.testing.assert_close(table, torch.full_like(table, 4100.0), rtol=0, atol=1e-2)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_evaluation_is_exact_over_many_batches(precision: Any) -> None:
    """A running mean in bfloat16 stops moving after a few hundred samples."""
    rows = Exact()
    module = Reader(Relaxed(beta=1.0))
    runner = trainer(precision=precision)
    runner.test(module, ToyData(rows, rows, batch_size=7), verbose=False)
    logged = {key: float(value) for key, value in runner.callback_metrics.items()}
    violations = rows.values[rows.mask].double()
    for stage in ("test", "train"):
        found = logged[f"{stage}/objective"]
        assert found == pytest.approx(
            float(rows.values[:, 0].double().mean()), rel=1e-5
        )
        assert logged[f"{stage}/fit/mean"] == pytest.approx(
            float(violations.mean()), rel=1e-5
        )
        assert logged[f"{stage}/fit/max"] == float(violations.max())
    assert module.violations["test"]["fit"].dtype in (torch.float32, torch.float64)


# float16 and its scaler ---------------------------------------------------------------------------


class Float(Toy):
    """The toy in float32, so that autocast has something to do."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.float()

    def forward(self, batch: Any) -> Tensor:
        hidden = torch.tanh(
            torch.nn.functional.linear(batch["x"].float(), self.first.T)
        )
        return torch.nn.functional.linear(hidden, self.last[None])[:, 0]


def scaled(scale: float) -> MixedPrecision:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)
    return MixedPrecision("16-mixed", "cpu", scaler)


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("size", [None, 3])
def test_scaled_gradients_are_clipped_and_stepped_unscaled(
    clip: float | None, size: int | None
) -> None:
    """Clipped while scaled, every step would be shorter by the scale."""
    rows, options = (
        ToyRows(13, seed=2),
        {"gradient_clip_val": clip, "micro_batch_size": size},
    )
    plain = fit(Float(Pointwise(alpha=1.0), **options), rows)
    half = fit(Float(Pointwise(alpha=1.0), **options), rows, plugins=[scaled(64.0)])
    assert half.trainer.global_step == 12
    assert lost(half)[1] == 0
    torch.testing.assert_close(weights_of(half), weights_of(plain), rtol=0, atol=0.01)
    moved = (weights_of(plain) - weights_of(Float())).abs().max()
    assert moved > 0.05
    half_norm = half.trainer.callback_metrics["running/gradient_norm"]
    assert half_norm == pytest.approx(
        float(plain.trainer.callback_metrics["running/gradient_norm"]), rel=0.05
    )


def test_a_unit_whose_passes_overflow_is_measured_by_a_lower_scale() -> None:
    """The steps alone did not overflow, so a constraint stayed without any force, in silence."""

    class Quiet(Float):
        def objective(self, outputs: Tensor, batch: Any) -> Tensor:
            return 1e-3 * super().objective(outputs, batch)

    units = []
    for plugins in ([], [scaled(2.0**20)]):
        module = Quiet(
            Pointwise(), {"fit": Constraint(at_most=-0.3)}, learning_rate=0.0
        )
        fit(module, ToyRows(8), batch_size=8, epochs=1, plugins=plugins)
        assert module._lagrangian.units.not_finite == 0
        units.append(module._lagrangian.units.state_dict()["states"]["fit"]["unit"])
    assert units[1] == pytest.approx(units[0], rel=0.05)


def test_overflow_of_scaled_gradients_lowers_the_scale_and_moves_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The scaler starts high; its first steps overflow as a matter of course."""
    module = Float(Pointwise(alpha=1.0, dual_lr=1.0))
    start = weights_of(module)
    plugin = scaled(2.0**20)
    fit(module, ToyRows(4), epochs=1, plugins=[plugin])
    assert (lost(module)[1], module.trainer.global_step) == (1, 0)
    assert torch.equal(weights_of(module), start)
    assert not any(table.any() for table in multipliers_of(module).values())
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == 2.0**19
    assert "(train, epoch 0, step 0): the gradient overflows float16" in caplog.text
    # And a run finds its scale and trains.
    module = fit(
        Float(Pointwise(alpha=1.0, dual_lr=1.0)),
        ToyRows(4),
        epochs=20,
        plugins=[scaled(2.0**20)],
    )
    assert 0 < lost(module)[1] < 15
    assert lost(module)[1] + module.trainer.global_step == 20
    assert torch.isfinite(weights_of(module)).all()
    assert not torch.equal(weights_of(module), start)
