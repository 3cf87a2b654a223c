"""A linear task over JSON lines: rows without units, whose files a test replaces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_model
from torch import Tensor

from pl_pointwise import Formulation, PointwiseDataModule
from tests.pl_pointwise.requirements.plane_task import PlaneModule

FAILING: list[str] = []
"""What export() fails by."""


class LinearModule(PlaneModule):
    """|f(x) − y| ≤ 1, at evaluation too, trained by the squared error."""

    def __init__(self, formulation: Formulation | None = None) -> None:
        super().__init__(formulation, tolerance=1.0, judged_by=1.0)

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:
        return (outputs - batch["y"]).square()

    def export(self, path: str | Path) -> Path:
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self, str(folder / "model.safetensors"))
        (folder / "README.md").write_text("A model.")
        if FAILING:
            raise OSError(28, FAILING[0])
        return folder


class LinearData(PointwiseDataModule):
    """Rows of JSON lines, from files that options name or from a folder.

    Args:
        train_file: one of three files.
        val_file: another.
        test_file: another.
        folder: of train.jsonl, val.jsonl and test.jsonl instead.
    """

    def __init__(
        self,
        train_file: str | None = None,
        val_file: str | None = None,
        test_file: str | None = None,
        folder: str | None = None,
    ) -> None:
        super().__init__(batch_size=64)
        self.files = {"train": train_file, "val": val_file, "test": test_file}
        if folder is not None:
            self.files = {name: f"{folder}/{name}.jsonl" for name in self.files}

    def setup(self, stage: str) -> None:
        for name, path in self.files.items():
            if path is not None:
                lines = map(json.loads, Path(path).read_text().splitlines())
                self.datasets[name] = [
                    {"x": torch.tensor(line["x"]), "y": torch.tensor(line["y"])}
                    for line in lines
                ]


def write(path: Path, count: int, seed: int, sigma: float = 0.3) -> Path:
    """Writes records of one plane, ``sigma`` off it."""
    random = np.random.default_rng(seed)
    with path.open("w") as file:
        for x in random.normal(size=(count, 3)):
            y = float(x @ np.array([1, -2, 0.5]) + random.normal() * sigma)
            file.write(json.dumps({"x": x.tolist(), "y": y}) + "\n")
    return path
