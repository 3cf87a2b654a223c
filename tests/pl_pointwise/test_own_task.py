"""A task of one's own from the command line, in a folder that nobody told Python about."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset as HubDataset
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from pl_pointwise import Pointwise
from pl_pointwise.cli import main
from pl_pointwise.data import IndexedDataset
from pl_pointwise.errors import DataError
from tests.pl_pointwise.line_task import LineModule
from tests.pl_pointwise.toy import stack, trainer

LINE_TASK = Path(__file__).with_name("line_task.py")
SMALL = ["--trainer.max_epochs", "1", "--trainer.accelerator", "cpu"]
SMALL += [
    "--trainer.enable_progress_bar",
    "false",
    "--trainer.enable_model_summary",
    "false",
]
POINTWISE = ["--model.formulation", "Pointwise"]


class PlainData(LightningDataModule):
    """An ordinary data module: three loaders that someone wrote without a thought of ours."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(IndexedDataset(points()), batch_size=5, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(IndexedDataset(points()), batch_size=5)

    test_dataloader = val_dataloader


class LoadersOfItsOwn(LineModule):
    """Lightning lets a module bring its data."""

    train_dataloader = PlainData.train_dataloader
    test_dataloader = PlainData.test_dataloader


def points() -> list[dict[str, Tensor]]:
    x = torch.linspace(-1, 1, 10)
    return [{"x": torch.stack([p, torch.ones(())]), "y": 2 * p + 1} for p in x]


PLAIN = ["--data", f"{__name__}.PlainData"]
LINE = ["--model", "tests.pl_pointwise.line_task.LineModule"]


def folder_of_a_stranger(folder: Path) -> dict[str, str]:
    """``own.py`` in it, and an environment that knows neither it nor this repository."""
    shutil.copy(LINE_TASK, folder / "own.py")
    hidden = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return hidden | {"OMP_NUM_THREADS": "1"}


def console(
    folder: Path, env: dict[str, str], *args: str
) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("pl-pointwise")), *args]
    return subprocess.run(
        command, cwd=folder, env=env, text=True, capture_output=True, timeout=280
    )


@pytest.mark.slow
def test_files_of_the_current_folder_are_found(tmp_path: Path) -> None:
    """By the console script, whose own path is another."""
    env = folder_of_a_stranger(tmp_path)
    library = tmp_path / "jsonargparse.py"
    library.write_text(
        "raise SystemExit('a file stood in for the library of its name')"
    )
    task = ["--model", "own.LineModule", "--data", "own.LineData", *POINTWISE, *SMALL]
    done = console(tmp_path, env, "fit", *task)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "lightning_logs/version_0/metrics.csv").is_file()

    config = tmp_path / "own.yaml"
    config.write_text(
        "model: {class_path: own.LineModule, init_args: {formulation: {class_path: "
        "pl_pointwise.Pointwise}}}\ndata: {class_path: own.LineData}\n"
    )
    options = ["--config", "own.yaml", "--output", "out", *SMALL]
    done = console(tmp_path, env, "compare", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = csv.DictReader((tmp_path / "out/comparison.csv").open())
    assert line["error"] == ""


def test_a_task_inherits_these_public_names_and_no_others() -> None:
    """Beside what it writes and calls, each is one that its author has no other use for."""
    module = LineModule(Pointwise())
    contract = {
        *(
            "objective",
            "constraint_values",
            "membership",
            "strict_values",
            "select",
            "export",
        ),
        *(
            "evaluation_metrics",
            "update_evaluation_metrics",
            "finish_evaluation_metrics",
        ),
        *("host_keys", "shared_objective", "shared_violation", "number_of_steps"),
        *("prepare_fit", "prepare_training", "starting_model", "closing_sentences"),
    }
    own = {"fail", "weight", *contract}
    foreign = {
        n for n in {*dir(module)} - {*dir(LightningModule())} - own if n[0] != "_"
    }
    assert foreign <= {
        *("constraints", "evaluation_constraints", "formulations", "training_settings"),
        *(
            "multipliers",
            "prices",
            "thresholds",
            "measured",
            "dual_steps",
            "forces",
            "in_force",
        ),
        *("violations", "evaluated", "evaluated_metrics", "closing"),
    }
    assert len(foreign) <= 15


# Data modules -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "task",
    [[*LINE, *PLAIN], ["--model", f"{__name__}.LoadersOfItsOwn"]],
    ids=["data", "module"],
)
def test_any_loaders_are_fitted_tested_and_compared(
    task: list[str], tmp_path: Path, capsys: Any
) -> None:
    root = ["--trainer.default_root_dir", str(tmp_path / "run")]
    main(["fit", *task, *POINTWISE, *SMALL, *root])
    (checkpoint,) = (tmp_path / "run").rglob("*.ckpt")
    state = torch.load(checkpoint, weights_only=True)
    assert state["pl_pointwise"]["multipliers"]["fit"].shape == (10, 1)
    main(["test", *task, *POINTWISE, *SMALL, *root, "--ckpt_path", str(checkpoint)])
    assert "fit/cvar95" in capsys.readouterr().out

    kind, *data = [word for word in task if not word.startswith("--")]
    text = f"model: {{class_path: {kind}, init_args: {{formulation: {{class_path: Pointwise}}}}}}\n"
    text += f"data: {{class_path: {data[0]}}}\n" if data else ""
    (tmp_path / "own.yaml").write_text(text)
    output = ["--output", str(tmp_path / "out"), "--trainer.logger", "false"]
    main(["compare", "--config", str(tmp_path / "own.yaml"), *output, *SMALL])
    [line] = csv.DictReader((tmp_path / "out/comparison.csv").open())
    assert line["error"] == ""
    assert float(line["test/fit/max"]) >= float(line["test/fit/cvar95"])
    assert (tmp_path / "out/cdf.png").is_file()


# Rows -------------------------------------------------------------------------------------------


def rows_of(kind: str) -> Any:
    x = torch.tensor([[float(i), 1.0] for i in range(6)])
    y = x.sum(dim=1)
    listed = {"x": x.tolist(), "y": y.tolist()}
    return {
        "mappings": [{"x": a, "y": b} for a, b in zip(x, y, strict=True)],
        "tuples": TensorDataset(x, y),
        "hub, torch": HubDataset.from_dict(listed).with_format("torch"),
        "hub": HubDataset.from_dict(listed),
    }[kind]


def fit(loader: Any) -> LineModule:
    module = LineModule(Pointwise(alpha=1.0))
    trainer().fit(module, loader)
    return module


@pytest.mark.parametrize("kind", ["mappings", "tuples", "hub, torch", "hub"])
def test_rows_of_every_kind_train_once_they_have_an_index(kind: str) -> None:
    fields = ("x", "y") if kind == "tuples" else None
    options: dict[str, Any] = {"collate_fn": stack} if kind == "hub" else {}
    rows = IndexedDataset(rows_of(kind), fields=fields)
    # Of some orders two λ are nearly alike.
    options["generator"] = torch.Generator().manual_seed(0)
    module = fit(DataLoader(rows, batch_size=2, shuffle=True, **options))
    found = module.multipliers["fit"][:, 0]
    assert found.shape == (6,)
    # λ is the sample's own: it grows with (y − 0)² = (x + 1)², the violation at the start.
    assert found.argsort().tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", ["mappings", "tuples", "hub, torch"])
def test_rows_without_an_index_are_refused_with_the_remedy(kind: str) -> None:
    with pytest.raises(DataError, match=r"position of each sample.*IndexedDataset"):
        fit(DataLoader(rows_of(kind), batch_size=2))
