"""What manual optimisation leaves to the module: counting, scheduling and clipping.

Lightning steps no learning-rate scheduler here, counts ``global_step`` once per optimizer, and
refuses its own clipping; max_steps, ModelCheckpoint(every_n_train_steps) and logged steps are
wrong by a factor wherever the count is.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from pl_pointwise import Average, Optimization, Pointwise, PointwiseModule
from pl_pointwise.errors import TrainingError
from tests.pl_pointwise.toy import Toy, ToyRows, fit, weights_of


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 1}, {"primal_steps": 3}])
def test_global_step_counts_batches(options: Any) -> None:
    module = fit(Toy(Average(alpha=1.0), **options), ToyRows(11), epochs=3)
    assert module.trainer.global_step == 9


# Schedulers ---------------------------------------------------------------------------------------


class Rates(Callback):
    """The learning rate with which each step was taken."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


class Small(Toy):
    """The toy with any schedulers and their configurations; of a bare one it is None.

    Of its steps, which move no weight, only the rates matter.
    """

    def __init__(self, *schedulers: Any) -> None:
        super().__init__(Pointwise())
        self.schedulers = schedulers

    def configure_optimizers(self) -> Any:
        moved, fixed = (
            torch.nn.Parameter(torch.zeros(())),
            {"params": self.parameters(), "lr": 0.0},
        )
        optimizer = torch.optim.SGD([{"params": moved}, fixed], lr=1.0)
        return [optimizer], [
            make(optimizer)
            if config is None
            else {"scheduler": make(optimizer), **config}
            for make, config in self.schedulers
        ]


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def rates(module: PointwiseModule, epochs: int = 3, **options: Any) -> list[float]:
    seen = Rates()
    module.learning_rate = 0.0
    fit(module, ToyRows(11), epochs=epochs, callbacks=[seen], **options)  # type: ignore[arg-type]
    return seen.rates


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # By epoch is Lightning's default.
        ({}, [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]),
        (None, [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]),
        ({"interval": "step", "frequency": 2}, [0.5 ** (i // 2) for i in range(9)]),
        ({"interval": "epoch", "frequency": 2}, [1] * 6 + [0.5] * 3),
    ],
)
def test_scheduler_is_stepped_as_declared(config: Any, expected: list[float]) -> None:
    assert rates(Small((halving, config))) == expected


def test_epochs_that_stop_short_do_not_step_the_epochs_scheduler() -> None:
    assert rates(Small((halving, {})), epochs=-1, max_steps=5) == [1, 1, 1, 0.5, 0.5]


def plateau(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, mode="max"
    )


class Rising(Small):
    """Logs a metric in validation that rises in the first two epochs and then falls."""

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.log("score", [0.0, 1.0, 0.5, 0.25][self.current_epoch])


FORMS = ["lists", "list and dict", "dict", "monitor beside", "list of dicts"]


@pytest.mark.parametrize("form", FORMS)
def test_plateau_is_stepped_after_validation_by_what_it_monitors(form: str) -> None:
    """However it is declared: under manual optimisation Lightning forgets the monitor."""

    class Declared(Rising):
        def configure_optimizers(self) -> Any:
            (optimizer,), (config,) = super().configure_optimizers()
            scheduler = config["scheduler"]
            monitored = {"scheduler": scheduler, "monitor": "score"}
            beside = {
                "optimizer": optimizer,
                "lr_scheduler": scheduler,
                "monitor": "score",
            }
            inside = {"optimizer": optimizer, "lr_scheduler": monitored}
            forms = [
                ([optimizer], [monitored]),
                ([optimizer], monitored),
                inside,
                beside,
                [beside],
            ]
            return dict(zip(FORMS, forms, strict=True))[form]

    found = rates(Declared((plateau, {})), epochs=4, held_out=ToyRows(5, seed=1))
    assert found == [1.0] * 9 + [0.5] * 3


def test_plateau_may_monitor_a_metric_of_the_step() -> None:
    """From the first step on: what is logged in a step is known at its end."""
    config = {"monitor": "running/objective", "interval": "step"}
    found = rates(Small((plateau, config)), epochs=1)
    assert found[0] == found[1] == 1.0  # the first value is the best so far


def test_plateau_without_its_metric_names_what_is_logged() -> None:
    with pytest.raises(TrainingError, match=r"'score'.*not logged.*running/objective"):
        rates(Small((plateau, {"monitor": "score"})))
    with pytest.raises(
        TrainingError, match=r"ReduceLROnPlateau is None, which is not logged"
    ):
        rates(Small((plateau, {})))


@pytest.mark.parametrize(
    "declared", [{"interval": "batch"}, {"frequency": 0}, "other weights"]
)
def test_what_would_never_step_is_refused(declared: Any) -> None:
    """Each trained on in silence, but the frequency, which ended in a division by zero."""
    module = Small((halving, {} if isinstance(declared, str) else declared))
    if isinstance(declared, str):
        elsewhere = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        module.configure_optimizers = lambda: elsewhere  # type: ignore
    said = r"A scheduler .*every \"step\"|no weight of this module"
    with pytest.raises(TrainingError, match=said):
        rates(module)


def test_plateau_that_is_not_strict_waits_for_its_metric(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = {"monitor": "score", "strict": False}
    assert rates(Small((plateau, config))) == [1.0] * 9
    assert "'score'" in caplog.text


# The default optimizer ----------------------------------------------------------------------------


class Default(Toy):
    """The base class's own optimizer."""

    def __init__(self, optimization: Optimization | None = None) -> None:
        super().__init__(Pointwise())
        self.training_settings.optimization = optimization or Optimization()

    configure_optimizers = PointwiseModule.configure_optimizers


def share(schedule: str, progress: float) -> float:
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - progress if schedule == "linear" else 1.0


@pytest.mark.parametrize("warmup", [0.0, 0.3])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_default_schedule_warms_up_and_ends_with_the_run(
    schedule: Any, warmup: float
) -> None:
    optimization = Optimization(
        learning_rate=1e-3, schedule=schedule, warmup_ratio=warmup
    )
    found = rates(Default(optimization), epochs=4)
    steps = math.ceil(12 * warmup)
    expected = [
        1e-3
        * (
            step / steps
            if step < steps
            else share(schedule, (step - steps) / (12 - steps))
        )
        for step in range(12)
    ]
    assert found == pytest.approx(expected)


def test_schedule_without_an_end_is_refused() -> None:
    linear = Optimization(schedule="linear")
    with pytest.raises(TrainingError, match="has no end"):
        fit(Default(linear), ToyRows(4), epochs=-1, max_time="00:00:01:00")  # type: ignore[arg-type]


def test_weight_decay_reaches_the_optimizer() -> None:
    module = Default(Optimization(learning_rate=1e-3, weight_decay=0.25))
    fit(module, ToyRows(4), epochs=1)  # type: ignore[arg-type]
    (group,) = module.trainer.optimizers[0].param_groups
    assert (group["weight_decay"], group["lr"]) == (0.25, 1e-3)
    assert isinstance(module.trainer.optimizers[0], torch.optim.AdamW)


# Clipping -----------------------------------------------------------------------------------------


def test_gradient_of_the_whole_step_is_clipped_once() -> None:
    """Clipped piece by piece it would be another gradient (test_micro_batches compares those)."""
    rows, bound, start = ToyRows(7), 0.25, weights_of(Toy())
    module = Toy(
        Pointwise(), learning_rate=1.0, micro_batch_size=2, gradient_clip_val=bound
    )
    fit(module, rows, batch_size=7, epochs=1)
    assert float((weights_of(module) - start).norm()) == pytest.approx(bound, rel=1e-5)
    assert module.trainer.callback_metrics["running/gradient_norm"] > 2 * bound
