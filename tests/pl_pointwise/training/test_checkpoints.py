"""Interrupted and resumed equals uninterrupted, to the last bit; what cannot be is refused.

The module under test is hard on checkpoints: dropout, windows of three steps that are open at most
checkpoints, a growing α, an average and pointwise multipliers, Adam, a scheduler, a plateau, an
evaluation that draws random numbers, and a last batch that is smaller. A resumed process starts
from another random state than the uninterrupted one had.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from pl_pointwise import (
    Constraint,
    CVaR,
    Formulation,
    Optimization,
    Penalty,
    Pointwise,
    PointwiseModule,
    Relaxed,
    Training,
)
from pl_pointwise.data import IndexedDataset
from pl_pointwise.errors import DataError, TrainingError
from tests.pl_pointwise.toy import (
    Seen,
    Toy,
    ToyData,
    ToyRows,
    assert_identical_run,
    fit,
    lost,
    multipliers_of,
    stack,
    trainer,
)

ROWS = ToyRows(13, partial=True)  # batches of 4, 4, 4 and 1
HELD_OUT = ToyRows(5, seed=1, partial=True)


class Hard(Toy):
    def __init__(self) -> None:
        super().__init__(
            {
                "fit": CVaR(level=0.4, threshold_lr=0.05, alpha=1.0, dual_lr=0.5),
                "pair": Pointwise(alpha=1.0, dual_lr=0.5),
            },
            partial=True,
            dropout=0.3,
            primal_steps=3,
        )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        falling = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, "max", 0.5, patience=0
        )
        # Not strict: some runs have no evaluation.
        judged = {"scheduler": plateau, "monitor": "val/objective", "strict": False}
        return [optimizer], [falling, judged]

    def validation_step(self, *arguments: Any) -> None:
        # As generating answers draws, also in an evaluation that a stop adds.
        torch.rand(3)
        super().validation_step(*arguments)


class Saver(Callback):
    """Saves at every call of one hook."""

    def __init__(self, hook: str, folder: Path) -> None:
        self.folder, self.paths = folder, []
        setattr(self, hook, self.save)

    def save(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.paths.append(self.folder / f"{len(self.paths)}.ckpt")
            trainer.save_checkpoint(self.paths[-1])


def train(
    data: Any,
    *callbacks: Callback,
    module: Any = None,
    checkpoint: Path | None = None,
    **options: Any,
) -> tuple[Any, list[tuple[int, list[int]]]]:
    """The trained module and the batches it saw; resumed from other random states."""
    module, seen = module or Hard(), Seen()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(0 if checkpoint is None else 1234)
    runner = trainer(callbacks=[seen, *callbacks], **options)
    runner.fit(module, data, ckpt_path=checkpoint, weights_only=checkpoint and True)
    return module, seen.batches


def data(held_out: bool = True, **options: Any) -> ToyData:
    return ToyData(ROWS, HELD_OUT if held_out else None, batch_size=4, **options)


def assert_every_resume_is_exact(saver: Saver, **options: Any) -> None:
    uninterrupted, batches = train(data(), saver, **options)
    rates = [group["lr"] for group in uninterrupted.trainer.optimizers[0].param_groups]
    assert len(saver.paths) >= 2
    for path in saver.paths:
        resumed, rest = train(data(), checkpoint=path, **options)
        assert rest == batches[len(batches) - len(rest) :]
        assert_identical_run(resumed, uninterrupted)
        assert resumed.trainer.global_step == uninterrupted.trainer.global_step
        if rest:  # Lightning leaves a run that had ended by max_steps an epoch short.
            assert resumed.trainer.current_epoch == uninterrupted.trainer.current_epoch
        assert rates == [
            group["lr"] for group in resumed.trainer.optimizers[0].param_groups
        ]
    assert len(batches) == uninterrupted.trainer.global_step


LIMITS: dict[str, dict[str, Any]] = {
    "epochs": {"max_epochs": 3},
    "steps": {"max_epochs": -1, "max_steps": 11},
    "epochs and steps": {"max_epochs": 3, "max_steps": 500},
    "part of each epoch": {"max_epochs": 3, "limit_train_batches": 3},
    "validation within epochs": {"max_epochs": 3, "val_check_interval": 3},
}


@pytest.mark.parametrize(
    ("hook", "limits"),
    [
        *(("on_train_batch_end", name) for name in LIMITS),
        *itertools.product(
            ["on_validation_end", "on_train_epoch_end"], ["epochs", "steps"]
        ),
    ],
)
def test_resumed_equals_uninterrupted(hook: str, limits: str, tmp_path: Path) -> None:
    """From every batch, from the end of validation (ModelCheckpoint's place) and of the epoch.

    Seen to go wrong: an epoch's scheduler missed its step when the checkpoint was written in the
    epoch's last batch, and under max_steps Lightning runs and counts the last epoch twice.
    """
    assert_every_resume_is_exact(Saver(hook, tmp_path), **LIMITS[limits])


# Other loaders ------------------------------------------------------------------------------------


def plain(**options: Any) -> DataLoader[Any]:
    return DataLoader(
        IndexedDataset(ROWS), 4, shuffle=True, collate_fn=stack, **options
    )


def stateful(**options: Any) -> Any:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    return loaders.StatefulDataLoader(
        IndexedDataset(ROWS), 4, shuffle=True, collate_fn=stack, **options
    )


@pytest.mark.parametrize(
    ("make", "taken"),
    [(lambda: plain(num_workers=1), 4), (stateful, 2)],
    ids=["plain at the end of an epoch", "with state in mid-epoch"],
)
def test_another_loader_resumes_exactly(make: Any, taken: int, tmp_path: Path) -> None:
    """The order is drawn from the random state, so that has to be restored before."""
    saver = Saver("on_train_batch_end", tmp_path)
    uninterrupted, batches = train(make(), saver, max_epochs=2)
    resumed, rest = train(make(), checkpoint=saver.paths[taken - 1], max_epochs=2)
    assert rest == batches[taken:]
    assert_identical_run(resumed, uninterrupted)


def test_plain_loader_is_refused_in_mid_epoch_with_the_remedy(tmp_path: Path) -> None:
    """It replays the start of the epoch: samples step twice, others never."""
    saver = Saver("on_train_batch_end", tmp_path)
    train(plain(), saver, max_epochs=2)
    with pytest.raises(
        TrainingError, match=r"stopped after 2 batches.*PointwiseDataModule"
    ):
        train(plain(), checkpoint=saver.paths[1], max_epochs=2)


class Estimating(Hard):
    """Reads the number of steps where OneCycleLR and its like are usually given it."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == 8
        return super().configure_optimizers()


@pytest.mark.parametrize("make", [data, stateful], ids=["ours", "torchdata"])
def test_estimated_stepping_batches_is_refused_in_mid_epoch(
    make: Any, tmp_path: Path
) -> None:
    """Reading it sets the loaders up before their state is loaded, and the epoch starts over."""
    saver = Saver("on_train_batch_end", tmp_path)
    uninterrupted, _ = train(make(), saver, module=Estimating(), max_epochs=2)
    with pytest.raises(TrainingError, match="estimated_stepping_batches"):
        train(make(), module=Estimating(), checkpoint=saver.paths[1], max_epochs=2)
    if make is data:  # The end of an epoch needs no loader state.
        resumed, _ = train(
            make(), module=Estimating(), checkpoint=saver.paths[3], max_epochs=2
        )
        assert_identical_run(resumed, uninterrupted)


# What a checkpoint belongs to ---------------------------------------------------------------------


class Reversed:
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        return ROWS[len(ROWS) - 1 - position]


@pytest.fixture(name="two_epochs")
def checkpoints_of_two_epochs(tmp_path: Path) -> list[Path]:
    """One after every batch, of which there are four an epoch."""
    saver = Saver("on_train_batch_end", tmp_path)
    train(data(), saver, max_epochs=2)
    return saver.paths


@pytest.mark.parametrize(
    ("rows", "now"),
    [
        (ToyRows(12, partial=True), "12"),
        (ToyRows(13, seed=9, partial=True), "13"),
        (Reversed(), "13"),
    ],
    ids=["fewer", "other", "reversed"],
)
def test_another_training_set_is_refused(
    rows: Any, now: str, two_epochs: list[Path]
) -> None:
    """Its samples would be trained with the multipliers of others."""
    message = rf"another training set.*checkpoint: 13 rows of λ; now: {now} samples\)"
    with pytest.raises(TrainingError, match=message):
        train(ToyData(rows, batch_size=4), checkpoint=two_epochs[1], max_epochs=2)


def test_another_batch_size_is_refused_in_mid_epoch(
    two_epochs: list[Path], tmp_path: Path
) -> None:
    """The place in the epoch is counted in batches: samples would be repeated or left out."""
    with pytest.raises(
        DataError, match=r"2 batches of an epoch, of 4 samples .* now .* 3"
    ):
        train(ToyData(ROWS, batch_size=3), checkpoint=two_epochs[1], max_epochs=2)
    saver = Saver("on_train_epoch_end", tmp_path / "ends")
    train(data(), saver, max_epochs=2)
    _, rest = train(
        ToyData(ROWS, batch_size=3), checkpoint=saver.paths[0], max_epochs=2
    )
    assert sorted(i for _, batch in rest for i in batch) == list(range(13))


def test_checkpoint_of_another_module_is_refused(tmp_path: Path) -> None:
    class Foreign(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Toy().first, Toy().last

    runner = trainer(max_epochs=0)
    runner.strategy.connect(Foreign())
    runner.save_checkpoint(tmp_path / "foreign.ckpt")
    with pytest.raises(TrainingError, match="not written by a PointwiseModule"):
        train(data(), checkpoint=tmp_path / "foreign.ckpt")


def test_second_fit_on_the_same_data_keeps_the_multipliers() -> None:
    module = fit(Toy(Pointwise(alpha=None)), ToyRows(7))
    before = multipliers_of(module)
    module.learning_rate = 0.0
    fit(module, ToyRows(7), limit_train_batches=0)
    torch.testing.assert_close(module.multipliers, before, rtol=0, atol=0)
    fit(module, ToyRows(7), epochs=1)
    assert (module.multipliers["pair"] >= 0.9 * before["pair"] - 0.5).all()
    assert module.multipliers["pair"].sum() > 0


def test_second_fit_measures_the_unit_anew() -> None:
    """It waited for the step that the first fit would have measured in next, 195 of this one."""
    rows, module = ToyRows(4), Toy(Pointwise(), {"fit": Constraint(at_most=-0.3)})
    module.learning_rate = 0.0
    counts = []
    for epochs in (150, 3, 3):
        fit(module, rows, epochs=epochs)
        counts.append(
            module._lagrangian.units.state_dict()["states"]["fit"]["measurements"]
        )
    assert counts == [9, 12, 15]


def test_fit_on_other_data_starts_its_multipliers_at_zero(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = fit(Toy(Pointwise(alpha=1.0, dual_lr=1.0)), ToyRows(7))
    assert module.multipliers["pair"].any()
    module.learning_rate = 0.0
    fit(module, ToyRows(9), epochs=1, limit_train_batches=1)
    assert module.multipliers["pair"].shape == (9, 3)
    assert (module.multipliers["pair"].any(1)).sum() <= 4  # the one batch it saw
    assert "Another training set than before" in caplog.text


def test_finished_run_that_is_resumed_once_more_leaves_nothing_behind(
    two_epochs: list[Path],
) -> None:
    """It takes no step; the next fit of the module, on other data, is a new one."""
    module, batches = train(data(), checkpoint=two_epochs[-1], max_epochs=2)
    assert batches == []
    train(ToyData(ToyRows(6, partial=True), batch_size=4), module=module)
    assert module.multipliers["pair"].shape == (6, 3)


# What a checkpoint holds --------------------------------------------------------------------------


@dataclass
class Sizes:
    hidden: int = 5
    path: Path = Path("models")


class Mode(str, Enum):
    FAST = "fast"


class Colour(Enum):
    RED = 1


class Own(Pointwise):
    """With an attribute that is derived from an argument."""

    def __init__(self, *, strength: float = 1.0) -> None:
        super().__init__(alpha=strength)
        self.strength = strength
        self.twice = 2 * strength


class Notebook(PointwiseModule):
    """A module as one writes it in a notebook, with arguments of all kinds."""

    def __init__(
        self,
        formulation: Formulation | dict[str, Formulation] | None,
        tolerance: float = 0.1,
        folder: Path | str = "",
        sizes: Any = None,
        optimization: Optimization | None = None,
        extra: Any = None,
        # Called as one of the base module's.
        constraints: dict[str, Constraint] | None = None,
        **others: Any,
    ) -> None:
        super().__init__(
            formulation=formulation,
            constraints=constraints or {"fit": Constraint(at_most=float(tolerance))},
            training=Training(optimization or Optimization(), gradient_clip_val=2.0),
            **others,
        )
        self.first, self.last, self.extra = Toy().first, Toy().last, extra

    forward = Toy.forward
    objective = Toy.objective
    constraint_values = Toy.constraint_values
    dropout = torch.nn.Dropout(0.0)


def assert_plain(value: Any) -> None:
    assert type(value) in (dict, list, str, int, float, bool, type(None)), value
    entries = value.values() if isinstance(value, dict) else value
    for entry in entries if isinstance(value, (dict, list)) else []:
        assert_plain(entry)


@pytest.mark.parametrize(
    "formulation",
    [
        None,
        Penalty(weight=0.5),
        {"fit": Relaxed(beta=2.0, cost="linear")},
        CVaR(level=0.5, threshold_lr=0.02),
        Own(strength=3.0),
    ],
)
def test_checkpoint_of_a_notebook_loads_weights_only(
    formulation: Any, tmp_path: Path
) -> None:
    """Hyperparameters are plain: a pickled object could not be loaded without running code."""
    path = tmp_path / "notebook.ckpt"
    module = Notebook(
        formulation,
        tolerance=np.float32(0.25),  # type: ignore[arg-type]
        folder=tmp_path / "models",
        sizes=Sizes(),
        optimization=Optimization(learning_rate=1e-2, schedule="cosine"),
        extra=[
            np.int64(3),
            (1, 2),
            {"a": np.float64(0.5)},
            torch.tensor(2.5),
            Mode.FAST,
            None,
        ],
    )
    fit(module, ToyRows(7), epochs=1)  # type: ignore[arg-type]
    module.trainer.save_checkpoint(path)

    stored = torch.load(path, weights_only=True)["hyper_parameters"]
    for value in stored.values():
        assert_plain(value)
    assert stored["folder"] == str(tmp_path / "models")
    assert stored["sizes"] == {"hidden": 5, "path": "models"}
    assert stored["extra"] == [3, [1, 2], {"a": 0.5}, 2.5, "fast", None]
    assert stored["tolerance"] == 0.25

    loaded = Notebook.load_from_checkpoint(path, weights_only=True)
    assert loaded.formulations == module.formulations
    assert (
        loaded.training_settings.optimization == module.training_settings.optimization
    )
    assert loaded.constraints == module.constraints
    assert_identical_run(loaded, module)
    assert loaded.multipliers.samples == 7
    other = Notebook.load_from_checkpoint(
        path, weights_only=True, formulation=Pointwise()
    )
    assert other.formulations == {"fit": Pointwise()}


def saved(module: Any, path: Path) -> Path:
    train(data(), module=module)
    module.trainer.save_checkpoint(path)
    return path


def test_a_subclass_loads_from_its_own_arguments_alone(tmp_path: Path) -> None:
    """Failed for a fixed `training=`, and for an argument `constraints`."""
    bounds, own = {"fit": Constraint(at_most=0.25)}, {"fit": Constraint(at_most=0.5)}
    module = Notebook(
        None,
        constraints=bounds,
        evaluation_constraints=own,
        extra=torch.bfloat16,
        sizes=np.ones(2),
    )
    path = saved(module, tmp_path / "a.ckpt")
    loaded = Notebook.load_from_checkpoint(path, weights_only=True)
    assert (loaded.constraints, loaded.evaluation_constraints) == (bounds, own)
    assert loaded.extra is torch.bfloat16
    assert torch.load(path, weights_only=True)["hyper_parameters"]["sizes"] == [
        1.0,
        1.0,
    ]


def test_an_argument_without_a_plain_form_is_asked_for(
    tmp_path: Path, caplog: Any
) -> None:
    """It was None after load_from_checkpoint, without a word."""
    path = saved(Notebook(None, extra=Colour.RED), tmp_path / "c.ckpt")
    assert "will not hold the arguments extra" in caplog.text
    with pytest.raises(TrainingError, match=r"load_from_checkpoint\(path, extra=…\)"):
        Notebook.load_from_checkpoint(path, weights_only=True)
    loaded = Notebook.load_from_checkpoint(path, weights_only=True, extra=Colour.RED)
    assert loaded.extra is Colour.RED
    train(data(), module=loaded, checkpoint=path, max_epochs=2)


def test_fit_after_load_from_checkpoint_goes_on_with_the_multipliers(
    tmp_path: Path,
) -> None:
    path = tmp_path / "last.ckpt"
    module = fit(Toy(Pointwise(alpha=1.0, dual_lr=1.0)), ToyRows(7))
    module.trainer.save_checkpoint(path)
    loaded = Toy.load_from_checkpoint(path, weights_only=True)
    torch.manual_seed(0)
    fit(loaded, ToyRows(7), epochs=1)
    torch.manual_seed(0)
    fit(module, ToyRows(7), epochs=1)
    assert_identical_run(loaded, module)
    # a new run: only weights and multipliers go on
    assert loaded.trainer.global_step == 2


def test_checkpoint_counts_what_was_left_out_so_far(tmp_path: Path) -> None:
    module, saver = Hard(), Saver("on_train_batch_end", tmp_path)
    module._stepper.repairs.left_out, module._stepper.repairs.skipped_steps = 3, 2
    train(data(), saver, module=module)
    resumed, _ = train(data(), checkpoint=saver.paths[0])
    assert lost(resumed) == (3, 2)


class Renamed(Notebook):
    def __init__(self, formulation: Any, bound: float = 0.3) -> None:
        super().__init__(formulation, bound)


def test_what_a_load_would_drop_is_named(tmp_path: Path, caplog: Any) -> None:
    """A renamed argument took its default without a word."""
    path = saved(Notebook(Pointwise(), tolerance=0.2), tmp_path / "a.ckpt")
    Notebook.load_from_checkpoint(path, weights_only=True)
    assert "does not take" not in caplog.text
    Renamed.load_from_checkpoint(path, weights_only=True)
    assert "Renamed does not take" in caplog.text
    assert "tolerance" in caplog.text
