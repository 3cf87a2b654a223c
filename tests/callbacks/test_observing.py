"""Callbacks observe: with all of them, on any formulation, training goes the very same way.

And they are there by their short names on the command line, with a progress bar that shows the
tail.
"""

from __future__ import annotations

import csv
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers.logger import DummyLogger

import pl_pointwise.callbacks
from pl_pointwise import Average, Constraint, Pointwise
from pl_pointwise.cli import main
from pl_pointwise.data import IndexedDataset
from pl_pointwise.files import run_root
from tests.pl_pointwise.line_task import LineData, LineModule
from tests.pl_pointwise.toy import (
    FORMULATIONS,
    KINDS,
    Toy,
    ToyData,
    ToyRows,
    assert_identical_run,
    trainer,
    weights_of,
)


class Noisy(ToyRows):
    """Rows that draw from every random state when they are read."""

    def __getitem__(self, position: int) -> dict[str, Any]:
        row = super().__getitem__(position)
        return row | {"x": row["x"] + 0.1 * torch.randn(4) + 0.1 * np.random.randn()}


OF_LANGUAGE = ("AnswerSamples", "ModelExport")  # They ask more of a module.
# All are built without arguments: a callback has defaults for its own.
OBSERVERS = [name for name in pl_pointwise.callbacks.__all__ if name not in OF_LANGUAGE]


@pytest.mark.parametrize("name", pl_pointwise.callbacks.__all__)
def test_every_argument_has_a_default(name: str) -> None:
    given = inspect.signature(getattr(pl_pointwise.callbacks, name)).parameters.values()
    for each in given:
        variadic = each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        assert variadic or each.default is not each.empty or name in OF_LANGUAGE, (
            f"{name}({each.name}): give it a default; the command line builds it by its name."
        )


def callbacks_of(names: list[str]) -> list[Callback]:
    return [getattr(pl_pointwise.callbacks, name)() for name in names]


@pytest.mark.parametrize("kind", ["of the batch", "one without multipliers"])
def test_groups_without_a_multiplier_each_are_observed_too(
    kind: str, tmp_path: Path
) -> None:
    """λ is () of a statistic, and what has no formulation is not in ``multipliers``."""
    stated = Pointwise(alpha=0.8, dual_lr=1.2)
    of_kind: Any = (
        Average() if kind == "of the batch" else {"fit": stated, "pair": None}
    )
    module = Toy(of_kind)
    rows = IndexedDataset(ToyRows(13, seed=2), groups=[i % 4 for i in range(13)])
    runner = trainer(
        max_epochs=2,
        callbacks=callbacks_of(OBSERVERS),
        default_root_dir=tmp_path,
        enable_checkpointing=True,
        enable_progress_bar=True,
    )
    runner.fit(module, ToyData(rows, ToyRows(5), batch_size=4))
    assert runner.logged_metrics


def assert_observed(without: Toy, with_callbacks: Toy) -> None:
    try:
        assert_identical_run(without, with_callbacks)
    except AssertionError as error:
        raise AssertionError(
            "With the callbacks the run is another one: does one draw random numbers, or change a "
            "table or a weight that it was handed? multipliers[name] is λ itself; clone() it."
        ) from error


@pytest.mark.parametrize("name", [*KINDS, "by name"])
def test_training_is_the_same_with_and_without_callbacks(
    name: str, tmp_path: Path
) -> None:
    modules = []
    for callbacks in (
        [],
        [getattr(pl_pointwise.callbacks, each)() for each in OBSERVERS],
    ):
        torch.manual_seed(5)
        np.random.seed(5)
        module = Toy(
            FORMULATIONS[name], partial=True, dropout=0.3, gradient_clip_val=0.5
        )
        start = weights_of(module)
        runner = trainer(
            max_epochs=3,
            callbacks=callbacks,
            default_root_dir=tmp_path,
            enable_checkpointing=bool(callbacks),
            enable_progress_bar=bool(callbacks),
        )
        rows = Noisy(13, seed=2, partial=True), ToyRows(5, partial=True)
        runner.fit(module, ToyData(*rows, batch_size=4))
        assert not torch.equal(weights_of(module), start)
        modules.append(module)
    assert_observed(*modules)


def test_training_on_groups_is_the_same_and_every_key_of_the_log_is_on_the_page(
    tmp_path: Path,
) -> None:
    """What looks at groups alone does nothing in the runs above."""
    modules, logged = [], []
    for names in ([], OBSERVERS):
        torch.manual_seed(5)
        np.random.seed(5)
        bounds = {"fit": Constraint(at_most=-0.3)}
        module = Toy(Pointwise(alpha=0.8, dual_lr=1.2), bounds, dropout=0.3)
        runner = trainer(
            max_epochs=3,
            callbacks=[getattr(pl_pointwise.callbacks, name)() for name in names],
            default_root_dir=tmp_path,
            enable_checkpointing=bool(names),
            enable_progress_bar=bool(names),
        )
        rows = IndexedDataset(Noisy(13, seed=2), groups=[i % 4 for i in range(13)])
        runner.fit(module, ToyData(rows, ToyRows(5), batch_size=4))
        assert module.multipliers["fit"].any()
        modules.append(module)
        logged.append(set(runner.logged_metrics))
    assert_observed(*modules)
    page = (Path(__file__).parents[2] / "docs/callbacks.md").read_text("utf-8")
    of_callbacks = sorted(logged[1] - logged[0])
    assert of_callbacks
    for key in of_callbacks:
        heading = re.sub("/fit/.*", "/{constraint}/…", key)
        assert f"| key `{heading}` |" in page, (
            f"docs/callbacks.md: a section with a table | key `{heading}` | meaning | of what the "
            "callback logs. Keys are WORD/{constraint}/…"
        )
        section = page.partition(f"| key `{heading}` |")[2].partition("\n## ")[0]
        tail = key.rpartition("/")[2]
        short = "_" + tail.rpartition("_")[2]
        assert f"`{tail}`" in section or f"`{short}`" in section, (
            f"docs/callbacks.md: a row of `{tail}` below | key `{heading}` |."
        )


def test_short_names_on_the_command_line(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    main(
        [
            *("fit", "--model", "tests.pl_pointwise.line_task.LineModule"),
            *("--data", "tests.pl_pointwise.line_task.LineData"),
            *("--model.formulation", "Relaxed", "--model.formulation.beta", "2.0"),
            *("--trainer.max_epochs", "3", "--trainer.accelerator", "cpu"),
            *("--trainer.enable_progress_bar", "false"),
            *("--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "logs"),
            *("--trainer.callbacks+", "DualMonitor"),
            *(
                "--trainer.callbacks+",
                "HardestSamples",
                "--trainer.callbacks.count",
                "2",
            ),
            *(
                "--trainer.callbacks+",
                "FeasibleCheckpoint",
                "--trainer.callbacks.at_most",
                "0.5",
            ),
            *("--trainer.callbacks.dirpath", "best"),
        ]
    )
    (samples,) = tmp_path.glob("**/hardest/samples.jsonl")
    assert len(samples.read_text().splitlines()) == 2
    assert list(tmp_path.glob("best/*.ckpt"))
    (path,) = tmp_path.rglob("metrics.csv")
    with path.open() as file:
        keys = csv.DictReader(file).fieldnames or []
    assert {"dual/fit/relaxed", "dual/fit/active", "val/fit/cvar95"} <= set(keys)


def test_the_progress_bar_shows_objective_and_share_violated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen, bar = Steps(), TQDMProgressBar(refresh_rate=1)
    runner = trainer(max_epochs=2, callbacks=[bar, seen], enable_progress_bar=True)
    runner.fit(LineModule(), LineData(batch_size=2))
    captured = capsys.readouterr()
    shown = captured.out + captured.err
    assert len(seen.violations) == 6
    # Of all samples at their last visit: with batches of two, those of the last three steps.
    objectives, violations = (
        np.concatenate(each[-3:]) for each in (seen.objectives, seen.violations)
    )
    wanted = {"objective": objectives.mean(), "violated": (violations > 0).mean()}
    for name, value in wanted.items():
        printed = re.findall(rf"\b{name}[=:] ?([-+.\de]+)", shown)[-1]
        assert float(printed) == pytest.approx(value, rel=5e-3, abs=1e-3), name


class Steps(Callback):
    """What every step measured."""

    def __init__(self) -> None:
        self.violations: list[Any] = []
        self.objectives: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        measured = pl_module.measured
        self.violations.append(measured.judged["fit"][measured.masks["fit"]].numpy())
        self.objectives.append(measured.objective[measured.masks["objective"]].numpy())


@pytest.mark.parametrize(
    ("save_dir", "version", "folder"),
    [("logs", "a1b2", "logs/project/a1b2"), (None, 3, "root/project/version_3")],
)
def test_callbacks_write_beside_the_loggers_version(
    tmp_path: Path, save_dir: str | None, version: Any, folder: str
) -> None:
    """One folder for all runs, as W&B and MLflow have."""
    place = save_dir and str(tmp_path / save_dir)
    of = {"save_dir": place, "name": "project", "version": version}
    logger = type("Remote", (DummyLogger,), of)()
    runner = trainer(default_root_dir=tmp_path / "root", logger=logger)
    assert run_root(runner) == tmp_path / folder
