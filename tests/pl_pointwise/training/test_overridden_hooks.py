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

from pl_pointwise import Pointwise
from pl_pointwise.own_hooks import part_of, parts_of
from pl_pointwise.tasks import RerankerModule, SafetyModule, When2CallModule
from pl_pointwise.training.run import Run
from tests.pl_pointwise.toy import Toy, ToyData, ToyRows, assert_identical_run, trainer

ROWS, HELD_OUT = ToyRows(9), ToyRows(5, seed=1)
HOOKS = [hook for (hook, _), _ in parts_of(Run)]


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
Polite = type("Polite", (Plateau,), {name: _calling_super(name, Plateau) for name in HOOKS})
PoliteAboveSilent = type(
    "PoliteAboveSilent", (Overridden,), {name: _calling_super(name, Overridden) for name in HOOKS}
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
def test_overrides_of_every_hook_change_nothing(kind: type[Plateau], tmp_path: Path) -> None:
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


def test_each_class_registers_a_part_of_its_own_and_all_run_once_base_first() -> None:
    ran: list[str] = []

    class Task(Toy):
        @part_of("on_train_start")
        def _task(self) -> None:
            assert self.multipliers.samples == 9  # The base module's part came before.
            ran.append("task")

        @part_of("on_fit_start")
        def _fit(self) -> None:
            ran.append("fit")

        @part_of("on_train_start", after=True)
        def _late(self) -> None:
            ran.append("late")

    class Special(Task):
        @part_of("on_train_start")
        def _special(self) -> None:
            ran.append("special")

    class User(Special):
        def on_train_start(self) -> None:
            ran.append("user")

        def on_fit_start(self) -> None:
            super().on_fit_start()
            ran.append("user's fit")

    trainer().fit(User(Pointwise()), ToyData(ROWS, batch_size=3))
    assert ran == ["fit", "user's fit", "task", "special", "user", "late"]


@pytest.mark.parametrize(
    ("task", "hook"),
    [
        (SafetyModule, "on_fit_start"),
        (SafetyModule, "on_train_start"),
        (When2CallModule, "on_fit_start"),
        (RerankerModule, "on_train_start"),
    ],
)
def test_no_task_does_in_a_hook_itself_what_an_override_could_lose(task: type, hook: str) -> None:
    """A subclass's ``on_fit_start`` left a policy in evaluation mode, without its cache."""
    for base in task.__mro__:
        if base.__module__.startswith("pl_pointwise.tasks"):
            own = [name for name in vars(base) if name.startswith("on_") or name == "setup"]
            assert all(hasattr(vars(base)[name], "has_own_part") for name in own), base
    child = type("Child", (task,), {hook: lambda self: None})
    assert hasattr(getattr(child, hook), "has_own_part")
    if hook == "on_fit_start":
        assert parts(child, hook) == ["_prepare_fit"]
    if task is SafetyModule and hook == "on_train_start":
        assert parts(child, hook) == ["_prepare_training"]
        assert parts(Run, hook) == ["start_training"]


def parts(owner: type, hook: str) -> list[str]:
    return [name for of, name in parts_of(owner) if of == (hook, False)]
