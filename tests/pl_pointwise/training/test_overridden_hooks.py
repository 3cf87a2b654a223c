"""A hook of Lightning's is overridden without ``super()``, as its users do; nothing is lost by it.

What users saw: a run resumed without λ, checkpoints without it, plateau schedulers that never
stepped, no ``val/…``, "training set of 0 samples"; and tasks that trained in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import LightningModule

from pl_pointwise import Pointwise
from pl_pointwise.module import HOOKS
from pl_pointwise.tasks import RerankerModule, SafetyModule, When2CallModule
from pl_pointwise.training.run import Run
from tests.pl_pointwise.toy import Toy, ToyData, ToyRows, assert_identical_run, trainer

ROWS, HELD_OUT = ToyRows(9), ToyRows(5, seed=1)


class Plateau(Toy):
    """Its rate falls at each epoch without progress."""

    calls: ClassVar[list[str]] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, mode="max", patience=0, factor=0.5
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val/objective"},
        }


def _silent(name: str) -> Callable[..., None]:
    def hook(self: Any, *_: Any, **__: Any) -> None:
        self.calls.append(name)

    return hook


def _calling_super(name: str, owner: type) -> Callable[..., None]:
    def hook(self: Any, *args: Any, **named: Any) -> None:
        getattr(owner, name)(self, *args, **named)
        self.calls.append(name)

    return hook


SILENT = {name: _silent(name) for name in HOOKS}
Overridden = type("Overridden", (Plateau,), dict(SILENT))
WithMixin = type("WithMixin", (type("Mixin", (), dict(SILENT)), Plateau), {})
Polite = type(
    "Polite", (Plateau,), {name: _calling_super(name, Plateau) for name in HOOKS}
)
PoliteAboveSilent = type(
    "PoliteAboveSilent",
    (Overridden,),
    {name: _calling_super(name, Overridden) for name in HOOKS},
)
KINDS = [Overridden, WithMixin, Polite, PoliteAboveSilent]


def run(kind: type[Plateau], path: Path) -> tuple[Plateau, list[str]]:
    """Two epochs with a checkpoint after the first, resumed from it in a module of its own."""
    data = ToyData(ROWS, HELD_OUT, batch_size=3)
    kind.calls.clear()
    first = trainer(max_epochs=1)
    first.fit(kind(Pointwise(alpha=1.0, dual_lr=1.0)), data)
    first.save_checkpoint(path)
    module = kind(Pointwise(alpha=1.0, dual_lr=1.0))
    second = trainer(max_epochs=3)
    second.fit(module, ToyData(ROWS, HELD_OUT, batch_size=3), ckpt_path=path)
    second.test(module, ToyData(ROWS, HELD_OUT, batch_size=3), verbose=False)
    return module, list(kind.calls)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_overrides_of_every_hook_change_nothing(
    kind: type[Plateau], tmp_path: Path
) -> None:
    plain, _ = run(Plateau, tmp_path / "plain.ckpt")
    found, calls = run(kind, tmp_path / "overridden.ckpt")
    assert set(calls) == set(HOOKS)
    assert_identical_run(found, plain)
    assert found.multipliers["fit"].any()
    rates = [m.trainer.optimizers[0].param_groups[0]["lr"] for m in (found, plain)]
    assert rates[0] == rates[1] < 0.05
    for stage in ("val", "test", "train"):
        for name, values in plain.violations[stage].items():
            assert torch.equal(found.violations[stage][name], values)


def test_what_an_override_logs_at_the_end_of_an_epoch_can_be_monitored() -> None:
    """The module's part of that hook comes after it: there a plateau scheduler is stepped."""

    class Own(Plateau):
        def on_train_epoch_end(self) -> None:
            self.log("mine", 1.0 + self.current_epoch)

        def configure_optimizers(self) -> Any:
            declared = super().configure_optimizers()
            scheduler = declared["lr_scheduler"]["scheduler"]
            scheduler.mode, scheduler.monitor = "max", "mine"
            return declared

    module = Own(Pointwise())
    trainer(max_epochs=3).fit(module, ToyData(ROWS, batch_size=3))
    assert module.lr_schedulers().best == 3.0  # type: ignore[union-attr]


def test_a_base_class_prepares_whatever_hooks_are_overridden() -> None:
    ran: list[str] = []

    class Base(Toy):
        def prepare_fit(self) -> None:
            ran.append("fit")

        def prepare_training(self) -> None:
            assert self.multipliers.samples == 9  # The base module's part came before.
            ran.append("training")

    class User(Base):
        def on_train_start(self) -> None:
            ran.append("user")

        def on_fit_start(self) -> None:
            super().on_fit_start()
            ran.append("user's fit")

    trainer().fit(User(Pointwise()), ToyData(ROWS, batch_size=3))
    assert ran == ["fit", "user's fit", "training", "user"]


@pytest.mark.parametrize("task", [SafetyModule, When2CallModule, RerankerModule])
def test_no_task_does_in_a_hook_itself_what_an_override_could_lose(task: type) -> None:
    """A subclass's ``on_fit_start`` left a policy in evaluation mode, without its cache."""
    for base in task.__mro__:
        if base.__module__.startswith("pl_pointwise.tasks"):
            assert not [
                name for name in vars(base) if name.startswith("on_") or name == "setup"
            ]


def test_every_hook_that_a_run_has_is_in_the_list() -> None:
    """One that is not would never be called."""
    public = {name for name in vars(Run) if not name.startswith("_")}
    assert {*HOOKS} == {name for name in public if hasattr(LightningModule, name)}
