"""Its share of the samples meets each ε printed; the certification split stays unseen."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from pl_pointwise import Constraint, Formulation, PointwiseDataModule, PointwiseModule
from pl_pointwise.cli import main
from pl_pointwise.errors import DataError
from pl_pointwise.requirements.tolerances import SHARES


class BoundsModule(PointwiseModule):
    """A constraint of every kind on the two values of a row, times one weight.

    Args:
        formulation: how the constraints are enforced.
        names: the constraints to have.
    """

    def __init__(
        self,
        formulation: Formulation | None = None,
        names: list[str] = ["upper", "lower", "between", "exact"],  # noqa: B006 for jsonargparse.
    ) -> None:
        bounds = {
            "upper": Constraint(at_most=1.0),
            "lower": Constraint(at_least=-0.5),
            "between": Constraint(at_least=-1.0, at_most=0.5),
            "exact": Constraint(equals=0.25),
        }
        super().__init__(
            formulation=formulation, constraints={name: bounds[name] for name in names}
        )
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, batch: Any) -> Tensor:
        if batch["secret"].any():
            raise AssertionError("the model has seen the certification split")
        return self.weight * batch["values"]

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.mean(1)

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return dict.fromkeys(self.constraints, outputs)

    def membership(self, batch: Any) -> dict[str, Tensor]:
        return {name: batch["carries"] for name in self.constraints if name != "upper"}

    def evaluation_metrics(self) -> NoReturn:
        raise AssertionError("the task's metrics take long, and are not wanted")

    def finish_evaluation_metrics(self, metrics: Any) -> NoReturn:
        raise AssertionError("the task's metrics take long, and are not wanted")


class Rows(list[dict[str, Tensor]]):
    """Rows with their categories and units, where they have them."""

    categories: list[str] | None = None
    units: list[str] | None = None


def rows(count: int, seed: int, secret: bool = False) -> Rows:
    """Two normal values each; every fifth row carries the constraint ``upper`` alone."""
    values = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return Rows(
        {
            "values": values[i],
            "carries": torch.tensor(i % 5 != 0),
            "secret": torch.tensor(secret),
        }
        for i in range(count)
    )


class BoundsData(PointwiseDataModule):
    """Splits of 40, 30 and 60 rows.

    Args:
        categories: whether rows are "odd" or "even", in units of two of a kind.
        poisoned: whether the second and fourth training row are NaN.
        without: splits that there are not.
    """

    def __init__(
        self,
        categories: bool = False,
        poisoned: bool = False,
        without: list[str] = [],  # noqa: B006 for jsonargparse.
    ) -> None:
        super().__init__(batch_size=7)
        self.categories, self.poisoned, self.without = categories, poisoned, without

    def setup(self, stage: str) -> None:
        splits = {
            "train": rows(40, 0),
            "val": rows(30, 1),
            "test": rows(60, 2, secret=True),
        }
        for split in splits.values():
            if self.categories:
                split.categories = [("even", "odd")[i % 2] for i in range(len(split))]
                split.units = [f"{i % 2}, {i // 4}" for i in range(len(split))]
        if self.poisoned:
            for index in (1, 3):
                splits["train"][index]["values"] = torch.tensor([math.nan, 0.0])
        if stage == "validate" and "val" in self.without:
            raise DataError("there is no selection file")
        self.datasets = {
            name: splits[name] for name in splits if name not in self.without
        }


class Forbidden(Callback):
    """One of a fit: an export, for one."""

    def on_test_start(self, trainer: Any, pl_module: Any) -> NoReturn:
        raise AssertionError("callbacks are not wanted")


TASK = ["--model", "tests.pl_pointwise.requirements.test_tolerances.BoundsModule"]
TASK += ["--data", "tests.pl_pointwise.requirements.test_tolerances.BoundsData"]
TASK += ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]

ROWS = {"train": rows(40, 0), "val": rows(30, 1), "test": rows(60, 2)}


def run(output: Path, *more: str) -> pandas.DataFrame:
    """The lines of the CSV."""
    main(["tolerances", *TASK, "--output", str(output), *more])
    lines = pandas.read_csv(output / "tolerances.csv", keep_default_na=False)
    return lines.set_index(["data", "constraint", "category"])


def values(split: str, constraint: str, only: slice = slice(None)) -> np.ndarray:
    """The two values of each row that carries the constraint."""
    chosen = [
        row for row in ROWS[split][only] if constraint == "upper" or row["carries"]
    ]
    return torch.stack([row["values"] for row in chosen]).double().numpy()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[pandas.DataFrame, Path]:
    """The CSV's lines, and the folder, of a run with categories and everything else as it comes.

    The model's forward pass raises on a row of the certification split.
    """
    folder = tmp_path_factory.mktemp("measured")
    return run(folder, "--data.categories", "true"), folder


@pytest.mark.parametrize("split", ["train", "val"])
def test_each_share_of_the_samples_meets_its_tolerance_and_no_stricter_one(
    split, measured
) -> None:
    found, _ = measured
    upper, lower, between, exact = (
        values(split, name) for name in ("upper", "lower", "between", "exact")
    )
    meets = {
        "upper": lambda e: (upper <= e).all(1),
        "lower": lambda e: (lower >= e).all(1),
        "between": lambda e: ((between >= -1.0 - e) & (between <= 0.5 + e)).all(1),
        "exact": lambda e: (np.abs(exact - 0.25) <= e).all(1),
    }
    configured = {"upper": 1.0, "lower": -0.5, "between": 0.0, "exact": 0.0}
    for name, met_by in meets.items():
        line = found.loc[split, name, ""]
        assert line["samples"] == len(met_by(0.0))
        assert line["met"] == pytest.approx(met_by(configured[name]).mean())
        stricter = 1e-5 if name == "lower" else -1e-5  # More than what float32 rounds.
        for share in SHARES:
            tolerance = line[f"{100 * share:g}%"]
            assert met_by(tolerance - stricter).mean() >= share
            assert met_by(tolerance + stricter).mean() < share


def test_categories_have_lines_of_their_own(measured) -> None:
    found, folder = measured
    line = found.loc["train", "upper", "odd"]
    worst = values("train", "upper", slice(1, None, 2)).max(1)
    assert (line["samples"], line["units"]) == (20, 10)
    assert line["90%"] == pytest.approx(np.quantile(worst, 0.9, method="inverted_cdf"))
    assert list(found.loc["train", "upper"].index) == ["", "even", "odd"]
    text = (folder / "tolerances.md").read_text()
    assert all(
        f"| selection | upper ≤ 1 | {name} |" in text
        for name in ("all | 30", "even | 15", "odd | 15")
    )


def test_nan_violations_meet_nothing(tmp_path) -> None:
    found = run(tmp_path, "--data.poisoned", "true")
    line = found.loc["train", "upper", ""]
    sound = np.delete(values("train", "upper").max(1), [1, 3])
    assert line["95%"] == pytest.approx(sound.max())  # The 38th of 40.
    assert line["99%"] == math.inf
    assert line["met"] == pytest.approx((sound <= 1).sum() / 40)
    assert "| inf |" in (tmp_path / "tolerances.md").read_text()


def test_without_a_selection_split_the_training_data_are_read(tmp_path) -> None:
    found = run(tmp_path, "--data.without", "[val]")
    assert set(found.index.get_level_values("data")) == {"train"}


def test_nothing_but_a_certification_split_is_an_error(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, "--data.without", "[val, train]")
    said = capsys.readouterr().err
    assert "nothing to read ε off" in said
    assert "Give the data module training data" in said


def test_callbacks_and_the_metrics_of_the_task_are_left_out(tmp_path) -> None:
    """Exports, answers that are generated and judged; the module raises where its metrics are."""
    callback = "tests.pl_pointwise.requirements.test_tolerances.Forbidden"
    run(tmp_path, "--trainer.callbacks+", callback)


def test_a_trained_model_by_its_checkpoint(tmp_path) -> None:
    module, quiet = BoundsModule(), {"logger": False, "enable_progress_bar": False}
    quiet["enable_checkpointing"] = False
    trainer = Trainer(max_steps=1, limit_val_batches=0, accelerator="cpu", **quiet)
    trainer.fit(module, BoundsData())
    module.weight.data.fill_(2.0)
    path = tmp_path / "trained.ckpt"
    trainer.save_checkpoint(path)
    found = run(tmp_path / "out", "--ckpt_path", str(path))
    worst = 2 * values("train", "upper").max(1)
    expected = np.quantile(worst, 0.9, method="inverted_cdf")
    assert found.loc["train", "upper", ""]["90%"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "rerankr"], "No configuration 'rerankr'"),
        ([*TASK, "--data.poissoned", "true"], "poissoned"),
        ([*TASK[:2], *TASK[4:]], "a PointwiseDataModule: give --data one"),
    ],
)
def test_what_is_wrong_with_the_command_line_is_said(
    words, message, tmp_path, capsys
) -> None:
    with pytest.raises(SystemExit):
        main(["tolerances", *words, "--output", str(tmp_path)])
    assert message in capsys.readouterr().err
