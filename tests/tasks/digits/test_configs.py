"""The packaged example runs as it ships, and loses fewer samples than what stands beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything

from pl_pointwise.cli import PointwiseCLI
from pl_pointwise.errors import DataError
from pl_pointwise.tasks.digits.digits import DigitsDataModule, digits, old_model
from tests.tasks.conftest import comparison, train

QUIET = [
    "--trainer.enable_progress_bar",
    "false",
    "--trainer.enable_model_summary",
    "false",
]
SHORT = [*QUIET, "--trainer.max_epochs", "1"]


def test_packaged_config_trains(tmp_path: Path) -> None:
    train("digits", "digits", SHORT, tmp_path)


def test_packaged_comparison_makes_a_table(tmp_path: Path) -> None:
    arguments = [*SHORT, "--trainer.logger", "false"]
    lines = comparison("digits/methods", arguments, tmp_path / "out")
    old, plain = lines[0], lines[1]
    assert float(old["train/kept/violated"]) == 0  # It is what must be kept.
    assert float(plain["train/objective"]) < float(old["train/objective"]) - 5
    assert float(plain["train/kept/violated"]) > 0.1


def write_digits(path: Path) -> None:
    """Those of the certification split, as `test_file` takes them."""
    images, labels = digits()["test"]
    np.savetxt(
        path, np.c_[16 * images.numpy(), labels.numpy()], fmt="%g", delimiter=","
    )


def test_digits_of_a_file_are_the_test_data(tmp_path: Path) -> None:
    write_digits(tmp_path / "new.csv")
    given, shipped = DigitsDataModule(str(tmp_path / "new.csv")), DigitsDataModule()
    for data in (given, shipped):
        data.setup("test")
    torch.testing.assert_close(given.datasets["test"], shipped.datasets["test"])


@pytest.mark.parametrize("text", ["1,2,3\n", "a,b\n"])
def test_a_file_without_digits_is_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(
        DataError, match=r"bad\.csv: .*Give lines of 64 pixels and a digit"
    ):
        DigitsDataModule(str(tmp_path / "bad.csv")).setup("test")


def test_the_three_parts_have_no_image_in_common() -> None:
    data = DigitsDataModule()
    data.setup("fit")
    images = {
        split: {row["image"].numpy().tobytes() for row in rows if not row["rotated"]}
        for split, rows in data.datasets.items()
    }
    assert [len(rows) // 100 for rows in data.datasets.values()] == [17, 7, 10]
    assert not images["train"] & (images["val"] | images["test"])
    assert not images["val"] & images["test"]
    # Upright ones are those that the old model got right.
    for rows in data.datasets.values():
        upright = [row for row in rows if not row["rotated"]]
        found = old_model()(torch.stack([row["image"] for row in upright])).argmax(
            dim=1
        )
        assert found.tolist() == [int(row["label"]) for row in upright]


def lost(*overlays: str) -> tuple[int, float]:
    """Lost training samples and the objective there, of the packaged settings."""
    args = [word for name in ("digits", *overlays) for word in ("--config", name)]
    args += [
        *QUIET,
        "--trainer.enable_checkpointing",
        "false",
        "--trainer.logger",
        "false",
    ]
    seed_everything(0, verbose=False)
    cli = PointwiseCLI([*args, "--trainer.limit_val_batches", "0"], run=False)
    cli.trainer.fit(cli.model, cli.datamodule)
    found: Any = cli.trainer.test(cli.model, cli.datamodule, verbose=False)
    measured = {name: value for part in found for name, value in part.items()}
    return int((cli.model.violations["train"]["kept"] > 0).sum()), measured[
        "train/objective"
    ]


def test_pointwise_loses_no_training_sample_where_an_average_loses_many() -> None:
    """The packaged settings, as they ship: what docs/own_task.md shows."""
    kept, objective = lost()
    assert kept <= 1
    assert objective < 0.6
    assert lost("digits/average")[0] > 20
