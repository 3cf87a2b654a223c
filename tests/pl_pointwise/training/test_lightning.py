"""Lightning's own switches, callbacks and habits: each works as documented there, or is refused.

docs/lightning.md lists what differs and what is refused. A run with a switch that should change
nothing is compared, to the last bit, with the run without it.
"""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
)
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from pl_pointwise import Average, Constraint, Pointwise, PointwiseModule, Relaxed
from pl_pointwise.data import IndexedDataset
from pl_pointwise.errors import TrainingError
from tests.pl_pointwise.toy import (
    Toy,
    ToyData,
    ToyRows,
    assert_identical_run,
    stack,
    trainer,
    weights_of,
)

ROWS, HELD_OUT = ToyRows(9), ToyRows(5, seed=1)
EPOCHS = 2


def data(**options: Any) -> ToyData:
    return ToyData(ROWS, HELD_OUT, batch_size=3, **options)


def toy(**options: Any) -> Toy:
    return Toy(Pointwise(alpha=1.0, dual_lr=1.0), **options)


def run(module: Toy | None = None, loaders: Any = None, **options: Any) -> Toy:
    module = toy() if module is None else module
    runner = trainer(**{"max_epochs": EPOCHS, **options})
    runner.fit(module, data() if loaders is None else loaders)
    return module


@pytest.fixture(scope="module")
def plain() -> Toy:
    """The run without any switch."""
    return run()


class ByDefault(Toy):
    """With the default optimizer and its schedule."""

    configure_optimizers = PointwiseModule.configure_optimizers


# What changes nothing -----------------------------------------------------------------------------

UNCHANGED: dict[str, dict[str, Any]] = {
    "detect anomaly": {"detect_anomaly": True},
    "no inference mode": {"inference_mode": False},
    "sanity check": {"num_sanity_val_steps": -1},
    "no validation": {"limit_val_batches": 0},
    "validation within epochs": {"val_check_interval": 2},
    "validation across epochs": {
        "val_check_interval": 4,
        "check_val_every_n_epoch": None,
    },
    "progress bar": {"callbacks": [RichProgressBar()], "enable_progress_bar": True},
    "never logged": {"logger": True, "log_every_n_steps": 0},
}


@pytest.mark.parametrize("options", UNCHANGED.values(), ids=UNCHANGED)
def test_a_switch_of_the_trainer_changes_nothing(
    options: dict[str, Any], plain: Toy, tmp_path: Path
) -> None:
    assert_identical_run(run(**options, default_root_dir=tmp_path), plain)


def test_loggers_and_their_monitors_change_nothing(plain: Toy, tmp_path: Path) -> None:
    loggers = [
        CSVLogger(tmp_path / "csv"),
        TensorBoardLogger(tmp_path / "board", log_graph=True),
    ]
    monitors = [
        LearningRateMonitor("step", log_momentum=True),
        DeviceStatsMonitor(cpu_stats=True),
    ]
    module = run(logger=loggers, callbacks=monitors, log_every_n_steps=1)
    assert_identical_run(module, plain)
    (table,) = (tmp_path / "csv").rglob("metrics.csv")
    assert "running/lagrangian" in table.read_text().splitlines()[0]


def test_callbacks_that_read_the_loss_get_the_lagrangian(
    plain: Toy, tmp_path: Path
) -> None:
    """``training_step`` returned None: SpikeDetection raised a KeyError in the first step."""
    seen: list[Any] = []

    def note(
        trainer: Any, module: Any, outputs: Any, batch: Any, position: int
    ) -> None:
        seen.append((outputs, trainer.callback_metrics["running/lagrangian"]))

    spikes = SpikeDetection(exclude_batches_path=str(tmp_path / "skipped.json"))
    module = run(
        callbacks=[spikes, LambdaCallback(on_train_batch_end=note)],
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
    )
    assert_identical_run(module, plain)
    assert len(seen) == 6
    for outputs, logged in seen:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        assert not loss.requires_grad
        assert float(loss) == pytest.approx(float(logged), rel=1e-6)


def test_hooks_around_a_step_are_called_in_lightnings_order(plain: Toy) -> None:
    called: list[str] = []
    names = ("before_backward", "after_backward", "before_optimizer_step")
    hooks: Any = {
        f"on_{name}": lambda *_, name=name: called.append(name)  # type: ignore[misc]
        for name in names
    }
    module = run(callbacks=[LambdaCallback(**hooks)])
    assert called == list(names) * 6
    assert_identical_run(module, plain)
    average = LambdaCallback(on_before_zero_grad=lambda *_: None)
    with pytest.raises(TrainingError, match="use on_train_batch_end"):
        run(callbacks=[average])


# Tuner --------------------------------------------------------------------------------------------


def find_rate(module: Toy, folder: Path, **options: Any) -> Any:
    """The trainer, and what the search found."""
    runner, rates = (
        trainer(max_epochs=20, default_root_dir=folder),
        {"min_lr": 1e-4, "max_lr": 1.0},
    )
    found = Tuner(runner).lr_find(module, data(), num_training=30, **rates, **options)
    assert found is not None
    return runner, found


def test_lr_find_suggests_and_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    """It saw NaN only."""
    module = toy()
    before, chosen = weights_of(module), module.learning_rate
    runner, found = find_rate(module, tmp_path)
    assert all(torch.isfinite(torch.tensor(found.results["loss"])))
    assert found.suggestion() == module.learning_rate != chosen
    assert torch.equal(weights_of(module), before)
    assert not any(table.any() for table in module.multipliers.values())
    runner.fit(module, data())
    rates = [group["lr"] for group in runner.optimizers[0].param_groups]
    assert rates == [module.learning_rate]


def test_batch_size_finder_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    module, loaders = toy(), ToyData(ROWS, batch_size=2)
    before = weights_of(module)
    runner = trainer(default_root_dir=tmp_path)
    size = Tuner(runner).scale_batch_size(
        module, loaders, steps_per_trial=1, max_trials=2
    )
    assert loaders.batch_size == size > 2
    assert torch.equal(weights_of(module), before)
    assert not any(table.any() for table in module.multipliers.values())


# Weights that callbacks change --------------------------------------------------------------------


def test_weight_averaging_keeps_the_multipliers_of_the_run(plain: Toy) -> None:
    module = run(callbacks=[EMAWeightAveraging(decay=0.5)])
    # The averages, at the end.
    assert not torch.equal(weights_of(module), weights_of(plain))
    torch.testing.assert_close(module.multipliers, plain.multipliers, rtol=0, atol=0)


def test_a_compiled_module_trains_and_tests(plain: Toy) -> None:
    """The compiler took the whole step, backward pass and all, and failed inside itself."""
    module = toy()
    compiled = torch.compile(module, backend="eager")
    runner = trainer(max_epochs=EPOCHS)
    runner.fit(compiled, data())
    assert_identical_run(module, plain)
    runner.test(compiled, data(), verbose=False)
    assert "test" in module.violations


# How much of the data, and how it comes -----------------------------------------------------------


def test_fast_dev_run_takes_one_step_whatever_the_schedule() -> None:
    module = ByDefault(Pointwise())
    optimization = module.training_settings.optimization
    optimization.schedule, optimization.warmup_ratio = "cosine", 0.1
    run(module, fast_dev_run=True)
    assert module.trainer.global_step == 1
    assert "val" in module.violations


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([{**ROWS[i], "index": i} for i in range(9)])


class StreamWithLength(Stream):
    def __len__(self) -> int:
        return 9


@pytest.mark.parametrize(
    "stream", [Stream(), StreamWithLength()], ids=["without", "with length"]
)
def test_a_stream_trains_statistics_and_refuses_a_stated_alpha(stream: Any) -> None:
    """With a length it ended in an error of torch's own."""
    batches = DataLoader(stream, batch_size=3, collate_fn=stack)
    assert run(Toy(Average()), batches).multipliers["fit"].shape == ()
    with pytest.raises(TrainingError, match="map-style data set"):
        run(loaders=batches)


@pytest.mark.parametrize(
    "formulation", [Pointwise(), Relaxed(price=2.0)], ids=["hard", "relaxed"]
)
def test_a_stream_is_trained_as_a_first_epoch_is(formulation: Any) -> None:
    """Nearly: what its violations were is forgotten later. λ is 0 in both when a sample comes.

    And after a fit whose samples had multipliers.
    """
    rows = DataLoader(IndexedDataset(ROWS), batch_size=3, collate_fn=stack)
    first, module = (run(Toy(formulation), rows, max_epochs=1) for _ in range(2))
    assert first.multipliers["fit"].max() > 0
    module.load_state_dict(Toy(formulation).state_dict())
    for streamed in (Toy(formulation), module):
        run(
            streamed, DataLoader(Stream(), batch_size=3, collate_fn=stack), max_epochs=1
        )
        assert not streamed.multipliers
        torch.testing.assert_close(
            weights_of(streamed), weights_of(first), rtol=0, atol=0.01
        )
    plain = run(Toy(None), rows, max_epochs=1)
    assert (weights_of(plain) - weights_of(first)).abs().max() > 0.05


# Where a run begins and ends ----------------------------------------------------------------------


def test_a_test_or_validation_before_the_fit_changes_nothing(plain: Toy) -> None:
    module, runner = toy(), trainer(max_epochs=EPOCHS)
    runner.validate(module, data(), verbose=False)
    runner.test(module, data(), verbose=False)
    runner.fit(module, data())
    assert_identical_run(module, plain)


def test_a_longer_run_continues_the_shorter(plain: Toy) -> None:
    module, runner = toy(), trainer(max_epochs=1)
    runner.fit(module, data())
    runner.fit_loop.max_epochs = EPOCHS
    runner.fit(module, data())
    assert_identical_run(module, plain)


def test_a_longer_run_measures_units_as_one_run_does() -> None:
    """The unit of an adaptive α was measured anew, although the steps went on."""
    runs = []
    for parts in ([3, 6], [6]):
        module, runner = Toy(Pointwise()), trainer()
        for epochs in parts:
            runner.fit_loop.max_epochs = epochs
            runner.fit(module, ToyData(ToyRows(11), batch_size=4))
        runs.append(module)
    assert_identical_run(*runs)


class LeavesEarly(Toy):
    """Its schedulers never stepped: an epoch's last batch did not reach training_step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 2 else None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def test_an_epoch_that_a_hook_ends_steps_its_schedulers(tmp_path: Path) -> None:
    path, runs = tmp_path / "a.ckpt", []
    for epochs, start in ((2, None), (4, None), (4, path)):
        runner = trainer(max_epochs=epochs)
        data = ToyData(ToyRows(13), ToyRows(5), batch_size=4)
        runner.fit(
            LeavesEarly(Pointwise()), data, ckpt_path=start, weights_only=start and True
        )
        rate = runner.optimizers[0].param_groups[0]["lr"]
        assert (runner.global_step, rate) == (
            2 * epochs,
            pytest.approx(0.02 / 2**epochs),
        )
        if epochs == 2:
            runner.save_checkpoint(path)
        else:
            runs.append(runner.lightning_module)
    assert_identical_run(*runs)


def test_a_trainer_that_is_used_up_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """The second module came back untrained, without a word but Lightning's "stopped"."""
    runner = trainer()
    with caplog.at_level(logging.WARNING, logger="pl_pointwise"):
        runner.fit(toy(), data())
        assert "No step was taken" not in caplog.text
        runner.fit(toy(), data())
    assert "No step was taken: this Trainer has fitted before" in caplog.text


def test_copies_train_as_the_original(plain: Toy) -> None:
    module = toy()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_identical_run(run(twin), plain)
    for twin in (copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        assert torch.equal(twin.multipliers["fit"], plain.multipliers["fit"])


def test_checkpoints_by_what_is_logged(plain: Toy, tmp_path: Path) -> None:
    callbacks = [
        ModelCheckpoint(
            tmp_path / "a", monitor="running/objective", every_n_train_steps=3
        ),
        ModelCheckpoint(tmp_path / "b", monitor="val/fit/violated"),
        EarlyStopping("running/fit/violated", patience=9),
        EarlyStopping("val/objective", patience=9),
    ]
    module = run(callbacks=callbacks, enable_checkpointing=True)
    assert_identical_run(module, plain)
    assert all(any((tmp_path / name).iterdir()) for name in "ab")
    twin = Toy.load_from_checkpoint(next((tmp_path / "b").iterdir()), learning_rate=0.9)
    assert twin.learning_rate == 0.9
    assert twin.multipliers["fit"].any()


class Slopes(Toy):
    """A constraint on the gradient of the output by the inputs."""

    gradients: Any = torch.enable_grad

    def forward(self, batch: Any) -> Tensor:
        with self.gradients():
            x = batch["x"].requires_grad_()
            outputs = super().forward({**batch, "x": x})
            (self.slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        return outputs

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"fit": self.slope.norm(dim=1)}


class SlopesInTrainingOnly(Slopes):
    gradients = nullcontext


@pytest.mark.parametrize("stage", ["test", "validate", "predict"])
def test_constraints_on_gradients_of_inputs_are_evaluated(stage: str) -> None:
    """It took Trainer(inference_mode=False), which nobody said before the fit was over."""
    options: dict[str, Any] = {} if stage == "predict" else {"verbose": False}
    bound = {"fit": Constraint(at_most=0.1)}
    getattr(trainer(), stage)(Slopes(Pointwise(alpha=1.0), bound), data(), **options)
    if stage != "predict":
        module = SlopesInTrainingOnly(Pointwise(alpha=1.0), bound)
        with pytest.raises(TrainingError, match="gradient is asked for"):
            getattr(trainer(), stage)(module, data(), **options)


# What is refused before the first step ------------------------------------------------------------


def overriding(method: str, by: Any = lambda *_, **__: None) -> Any:
    return type("Overriding", (Toy,), {method: by})


class Frozen(Toy):
    def configure_optimizers(self) -> Any:
        declared = super().configure_optimizers()
        self.requires_grad_(False)
        return declared


def changed(change: Any, base: type[Toy] = Toy) -> Any:
    """The class with this done after its constructor."""

    def init(self: Any, formulation: Any) -> None:
        base.__init__(self, formulation)
        change(self)

    return type("Changed", (base,), {"__init__": init})


class TrainsByItself(Toy):
    """The natural first step of an existing LightningModule; one warning came after the run."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self(batch)
        self.log("train_loss", loss := self.objective(outputs, batch).mean())
        return loss


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (overriding("optimizer_step"), "optimizer_step, which is never called"),
        (overriding("configure_gradient_clipping"), "gradient_clip_val"),
        (
            overriding("optimizer_zero_grad"),
            "optimizer_zero_grad, which is never called",
        ),
        (overriding("configure_optimizers"), "configure_optimizers returned None"),
        (
            overriding(
                "configure_optimizers", lambda s: [torch.optim.SGD([s.first], 0.1)] * 2
            ),
            "returned 2 optimizers",
        ),
        (Frozen, "No weight requires a gradient"),
        # It ended in torch's "empty parameter list".
        (
            changed(lambda s: s.requires_grad_(False), ByDefault),
            "No weight requires a gradient",
        ),
        (TrainsByItself, r"training_step of TrainsByItself does not call super\(\)"),
        (
            changed(lambda s: setattr(s, "automatic_optimization", True)),
            "optimization = True",
        ),
        (
            overriding(
                "configure_optimizers", lambda s: torch.optim.LBFGS(s.parameters())
            ),
            "LBFGS needs a closure",
        ),
        (
            overriding("objective", PointwiseModule.objective),
            r"has no objective\(.*: define it",
        ),
    ],
)
def test_what_would_be_ignored_is_refused(kind: type[Toy], message: str) -> None:
    """Each trained on without a word: a hook that Lightning never calls, weights that stay."""
    module = kind(Pointwise())
    before = weights_of(module)
    with pytest.raises(TrainingError, match=message):
        run(module)
    assert torch.equal(weights_of(module), before)
    assert not any(table.any() for table in module.multipliers.values())


class EvaluatesByItself(Toy):
    def validation_step(self, batch: Any, *_: Any) -> None:
        self.log("mine", self.objective(self(batch), batch).mean())

    test_step = validation_step


@pytest.mark.parametrize("stage", ["fit", "validate", "test"])
def test_an_evaluation_without_the_modules_own_is_refused(stage: str) -> None:
    """``val/…`` was missing, without a word."""
    module = EvaluatesByItself(Pointwise())
    before, step = weights_of(module), "test" if stage == "test" else "validation"
    with pytest.raises(
        TrainingError, match=rf"{step}_step of .* does not call super\(\)"
    ):
        getattr(trainer(num_sanity_val_steps=1), stage)(module, data())
    assert torch.equal(weights_of(module), before)


def test_a_loader_without_a_batch_is_refused() -> None:
    """The fit ended with success, and a warning."""
    few = DataLoader(IndexedDataset([ROWS[0]]), batch_size=3, drop_last=True)
    with pytest.raises(
        TrainingError, match="no batch: its data set is empty, or with drop_last"
    ):
        run(loaders=few)


def test_a_training_step_around_the_modules_own_is_welcome(plain: Toy) -> None:
    class Around(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("mine", loss, on_epoch=True)
            return loss

    module = run(Around(Pointwise(alpha=1.0, dual_lr=1.0)))
    assert_identical_run(module, plain)
    assert "mine" in module.trainer.callback_metrics


@pytest.mark.parametrize("schedule", [{0: 2}, {1: 2}])
def test_accumulation_by_callback_is_refused_with_ours(
    schedule: dict[int, int],
) -> None:
    callback: Callback = GradientAccumulationScheduler(schedule)
    with pytest.raises(TrainingError, match="micro_batch_size"):
        run(callbacks=[callback])


def test_checkpoints_by_the_clock_are_refused(tmp_path: Path) -> None:
    """Under manual optimization Lightning takes the option and writes no file."""
    clock = ModelCheckpoint(tmp_path, train_time_interval=timedelta(minutes=1))
    with pytest.raises(TrainingError, match="every_n_train_steps"):
        run(callbacks=[clock], enable_checkpointing=True)


def test_a_rate_that_nobody_would_use_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was found, set as hparams.lr, and training went on with the old one."""
    module = ByDefault(Pointwise())
    module.training_settings.optimization.learning_rate = 0.01
    with pytest.raises(TrainingError, match="sets an attribute that nothing reads"):
        find_rate(module, tmp_path)
    assert find_rate(module, tmp_path, update_attr=False)[1].results["lr"]
    assert "learning rate is 0" not in caplog.text
    module.training_settings.optimization.learning_rate = 0.0
    run(module)
    assert "learning rate is 0" in caplog.text
