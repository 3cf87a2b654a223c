"""Between the last batch of an epoch and the next one: a stop there resumes exactly.

The commonest stop, since ``every_n_train_steps`` often divides an epoch. A resumed run is compared
with the rest of the uninterrupted one: hooks, evaluations, order of samples, logged steps, learning
rates (of a plateau too), and at the end weights and multipliers, to the last bit.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from torch.utils.data import DataLoader

from pl_pointwise.data import IndexedDataset
from pl_pointwise.errors import TrainingError
from tests.pl_pointwise.toy import ToyData, assert_identical_run, stack, trainer
from tests.pl_pointwise.training.test_checkpoints import HELD_OUT, ROWS, Hard

EPOCH = 4  # Steps of one.


class Recorded(Hard):
    """Notes what it is called for, with the learning rate and the logger's step."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def _note(self, *what: Any) -> None:
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        logged = self.trainer.fit_loop.epoch_loop._batches_that_stepped
        self.events.append((*what, self.current_epoch, self.global_step, logged, rate))

    def on_train_epoch_start(self) -> None:
        torch.rand(1)  # A hook may draw, before the epoch's order is drawn.
        self._note("start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        self._note("batch", batch_idx, batch["index"].tolist())

    def on_validation_epoch_end(self) -> None:
        self._note("evaluated")

    def on_train_epoch_end(self) -> None:
        self._note("end")


class StoppedError(Exception):
    pass


class StopAt(Callback):
    """Saves in the n-th call of a hook, and may stop there; notes what the module had seen."""

    path: Path
    seen = 0

    def __init__(self, hook: str, call: int, path: Path, error: bool = False) -> None:
        self.path, self.calls, self.call, self.error = path, 0, call, error
        setattr(self, hook, self._act)

    def _act(self, runner: Any, module: Any, *_: Any) -> None:
        self.calls += 1
        if self.calls == self.call:
            self.seen = len(module.events)
            if not self.error:
                runner.save_checkpoint(self.path)
            else:
                raise StoppedError

    def on_exception(self, runner: Any, *_: Any) -> None:
        runner.save_checkpoint(self.path)


class LastStop(StopAt, ModelCheckpoint):
    """The same after the module's own hook, where Lightning calls what compares checkpoints."""

    def __init__(self, *args: Any) -> None:
        ModelCheckpoint.__init__(self, save_top_k=0)
        StopAt.__init__(self, *args)

    state_dict = Callback.state_dict


def own(held_out: Any, workers: int = 0) -> Any:
    return {"datamodule": ToyData(ROWS, held_out, batch_size=4, num_workers=workers)}


def foreign(kind: Any, held_out: Any, **options: Any) -> Any:
    train = kind(
        IndexedDataset(ROWS), 4, collate_fn=stack, **({"shuffle": True} | options)
    )
    val = held_out and DataLoader(IndexedDataset(held_out), 4, collate_fn=stack)
    return {"train_dataloaders": train, "val_dataloaders": val}


def stateful(held_out: Any, **options: Any) -> Any:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    return foreign(loaders.StatefulDataLoader, held_out, **options)


class Skipping(DataLoader[Any]):
    """A loader with a state as one writes it: the position is taken up when the first batch is."""

    at = start = 0

    def __iter__(self) -> Any:
        self.at, self.start = self.start, 0
        for position, batch in enumerate(super().__iter__()):
            if position >= self.at:
                self.at = position + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]


def own_and_plain(held_out: Any) -> Any:
    """A plain loader draws from the random state when an evaluation starts."""
    plain = held_out and DataLoader(IndexedDataset(held_out), 4, collate_fn=stack)
    data = ToyData(ROWS, batch_size=4)
    data.val_dataloader = lambda: plain or []  # type: ignore[method-assign, assignment]
    return {"datamodule": data}


LOADERS: dict[str, Any] = {
    "own": own,
    "own, plain evaluation": own_and_plain,
    "own, workers": lambda held_out: own(held_out, 2),
    "plain": lambda held_out: foreign(DataLoader, held_out),
    "plain, own generator": lambda held_out: foreign(
        DataLoader, held_out, generator=torch.Generator().manual_seed(5)
    ),
    "torchdata": stateful,
    "torchdata, workers": lambda held_out: stateful(held_out, num_workers=2),
    "skipping": lambda held_out: foreign(Skipping, held_out),
}
STOPS: dict[str, Any] = {
    "last batch": (StopAt, "on_train_batch_end", 2 * EPOCH),
    "last batch, error": (StopAt, "on_train_batch_end", 2 * EPOCH, True),
    "evaluation starts": (StopAt, "on_validation_start", 2),
    "evaluation starts, error": (StopAt, "on_validation_start", 2, True),
    "in an evaluation, error": (StopAt, "on_validation_batch_end", 3, True),
    "evaluated, error": (StopAt, "on_validation_epoch_end", 2, True),
    "evaluation ends": (StopAt, "on_validation_end", 2),
    "epoch starts": (StopAt, "on_train_epoch_start", 2),
    "epoch ends": (StopAt, "on_train_epoch_end", 2),
    "epoch ended": (LastStop, "on_train_epoch_end", 2),
}


def train(
    make: Any, held_out: Any, stop: Any = None, path: Any = None, **options: Any
) -> Any:
    torch.manual_seed(0 if path is None else 1234)
    stops = [] if stop is None else [stop]
    runner = trainer(
        **{"max_epochs": 3, "callbacks": stops, "enable_checkpointing": True, **options}
    )
    module = Recorded()
    with suppress(StoppedError):
        runner.fit(module, **make(held_out), ckpt_path=path, weights_only=path and True)
    return module


def assert_resumes(
    loader: str, kind: str, held_out: Any, folder: Path, **options: Any
) -> None:
    make, (of, hook, call, *error) = LOADERS[loader], STOPS[kind]
    options["default_root_dir"] = folder
    whole = train(make, held_out, **options)
    stop = of(hook, call, folder / "a.ckpt", *error)
    train(make, held_out, stop, **options)
    resumed = train(make, held_out, path=stop.path, **options)
    assert resumed.events == whole.events[stop.seen :]
    assert_identical_run(resumed, whole)


def marks_of(loader: str, kind: str, held_out: Any) -> Any:
    """Slow is what another row shows with other words."""
    if loader in ("own", "plain", "torchdata"):
        quick = bool(held_out) or kind in ("last batch", "epoch ended")
    else:
        quick = loader.endswith(("evaluation", "skipping")) and kind in (
            "last batch",
            "epoch ends",
        )
    return [] if quick and (held_out or loader != "skipping") else [pytest.mark.slow]


CASES = [
    pytest.param(loader, kind, held_out, marks=marks_of(loader, kind, held_out))
    for loader in LOADERS
    for kind in STOPS
    for held_out in ([HELD_OUT] if "evaluat" in kind + loader else [HELD_OUT, None])
]


@pytest.mark.parametrize(("loader", "kind", "held_out"), CASES)
def test_a_stop_around_an_epochs_end_resumes_exactly(
    loader: str, kind: str, held_out: Any, tmp_path: Path
) -> None:
    """Dropped were an epoch of a loader with a state, hooks, an evaluation or the first part of it,
    a plateau's judgement; drawn, other orders."""
    assert_resumes(loader, kind, held_out, tmp_path)


@pytest.mark.parametrize("loader", ["own, plain evaluation", "plain", "torchdata"])
@pytest.mark.parametrize("kind", ["last batch", "epoch starts", "epoch ended"])
def test_under_max_steps_too(loader: str, kind: str, tmp_path: Path) -> None:
    """Lightning then takes its loops for interrupted ones."""
    assert_resumes(loader, kind, HELD_OUT, tmp_path, max_epochs=-1, max_steps=3 * EPOCH)


def test_an_evaluation_within_an_epoch_is_made_after_the_resume(tmp_path: Path) -> None:
    """It was left out, and its loader drew from the random state: another dropout."""
    STOPS["within"] = (StopAt, "on_train_batch_end", EPOCH + 2)
    options: Any = {"val_check_interval": 2}
    assert_resumes("own, plain evaluation", "within", HELD_OUT, tmp_path, **options)


@pytest.mark.parametrize(
    "loader", ["own", "plain", "plain, own generator", "torchdata"]
)
def test_a_run_saved_after_its_end_is_prolonged(loader: str, tmp_path: Path) -> None:
    """Asked for its state after the fit, torchdata's loader begins an epoch."""
    path, make = tmp_path / "a.ckpt", LOADERS[loader]
    options: Any = {"default_root_dir": tmp_path}
    whole = train(make, HELD_OUT, **options)
    for epochs in (1, 2, 2):  # The last of them takes no step.
        known = path if path.exists() else None
        module = train(make, HELD_OUT, path=known, max_epochs=epochs, **options)
        module.trainer.save_checkpoint(path)
    resumed = train(make, HELD_OUT, path=path, **options)
    assert resumed.events == whole.events[-len(resumed.events) :]
    assert len(resumed.events) == EPOCH + 3
    assert_identical_run(resumed, whole)


class WithBackbone(Recorded):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, batch: Any) -> Any:
        return super().forward({**batch, "x": self.backbone(batch["x"])})

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.02)


@pytest.mark.parametrize(
    ("batches", "refused"),
    [(EPOCH + 2, False), (2 * EPOCH, False), (2 * EPOCH + 2, True)],
)
def test_what_was_unfrozen_is_unfrozen_or_missed(
    batches: int, refused: bool, tmp_path: Path
) -> None:
    """Stopped at the last batch before it unfreezes, the resume died an epoch later; stopped after
    it, the backbone stayed frozen without a word."""

    def run(*stops: Any, path: Any = None) -> Any:
        torch.manual_seed(0)
        callbacks = [
            BackboneFinetuning(unfreeze_backbone_at_epoch=2, verbose=False),
            *stops,
        ]
        options: Any = {"max_epochs": 4, "default_root_dir": tmp_path}
        runner = trainer(callbacks=callbacks, enable_checkpointing=True, **options)
        module = WithBackbone()
        with suppress(StoppedError):
            runner.fit(module, **own(None), ckpt_path=path, weights_only=path and True)
        return module

    whole = run()
    stop = StopAt("on_train_batch_end", batches, tmp_path / "a.ckpt", True)
    run(stop)
    if refused:
        with pytest.raises(
            TrainingError, match=r"2 weights \(backbone.bias, …\).*on_fit_start"
        ):
            run(path=stop.path)
    else:
        assert_identical_run(run(path=stop.path), whole)
