"""A linear task over JSON lines: rows without units, whose files a test replaces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_model
from torch import Tensor

from pl_pointwise import Constraint, Formulation, PointwiseDataModule, PointwiseModule, Training
from pl_pointwise.optimizers import Optimization

FAILING: list[str] = []
"""What export() fails by."""


class LinearModule(PointwiseModule):
    """|f(x) − y| ≤ 1, at evaluation too."""

    def __init__(self, formulation: Formulation | None = None) -> None:
        training = Training(Optimization(learning_rate=0.1))
        constraints = {"fit": Constraint(at_most=1.0)}
        super().__init__(formulation=formulation, constraints=constraints, training=training)
        self.w = torch.nn.Parameter(torch.zeros(3))

    def forward(self, batch: Any) -> Tensor:
        return batch["x"] @ self.w

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:
        return (outputs - batch["y"]).square()

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"fit": (outputs - batch["y"]).abs()}

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
                    {"x": torch.tensor(line["x"]), "y": torch.tensor(line["y"])} for line in lines
                ]


def write(path: Path, count: int, seed: int, sigma: float = 0.3) -> Path:
    """Writes records of one plane, ``sigma`` off it."""
    random = np.random.default_rng(seed)
    with path.open("w") as file:
        for x in random.normal(size=(count, 3)):
            y = float(x @ np.array([1, -2, 0.5]) + random.normal() * sigma)
            file.write(json.dumps({"x": x.tolist(), "y": y}) + "\n")
    return path
