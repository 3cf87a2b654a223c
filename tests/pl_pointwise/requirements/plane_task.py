"""A task with three splits: weights that stay small, answers that stay near the truth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from pl_pointwise import (
    Constraint,
    Formulation,
    Optimization,
    PointwiseDataModule,
    PointwiseModule,
    Training,
)
from pl_pointwise.evaluation import MeanBySample
from pl_pointwise.model_card import write_card


class PlaneModule(PointwiseModule):
    """The mean |w| is the objective, the distance of every point the constraint.

    Args:
        formulation: how the constraint is enforced.
        tolerance: of the distance in training; 0.5 is what it is judged by.
        judged_by: another one.
    """

    def __init__(
        self,
        formulation: Formulation | dict[str, Formulation] | None = None,
        tolerance: float = 0.5,
        judged_by: float = 0.5,
    ) -> None:
        super().__init__(
            formulation=formulation,
            constraints={"near": Constraint(at_most=tolerance)},
            evaluation_constraints={"near": Constraint(at_most=judged_by)},
            training=Training(Optimization(learning_rate=0.1)),
        )
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def forward(self, batch: Any) -> Tensor:
        return batch["x"] @ self.weight

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:
        return self.weight.abs().mean().expand(len(outputs))

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"near": (outputs - batch["y"]).abs()}

    def evaluation_metrics(self) -> dict[str, Metric]:
        return {"wrong_sign": MeanBySample()}

    def update_evaluation_metrics(
        self,
        metrics: dict[str, Metric],
        outputs: Any,
        batch: Any,
        real: Tensor,
        stage: str,
    ) -> None:
        wrong = (outputs * batch["y"] < 0).float()
        metrics["wrong_sign"].update(batch["index"][real], wrong[real])

    def export(self, path: str | Path) -> Path:
        folder = Path(path)
        folder.mkdir(parents=True)
        torch.save({"weight": self.weight.detach()}, folder / "plane.pt")
        write_card(
            self,
            folder,
            library_name="x",
            pipeline_tag="x",
            base_model="none",
            usage="pass",
        )
        return folder


class Points(list[dict[str, Any]]):
    """Rows with the kind of each, and two samples for every unit."""

    categories: list[str]
    units: list[str]


class PlaneData(PointwiseDataModule):
    """Points near a plane; two follow each other as one unit.

    Args:
        held_out: points for selection, and as many for certification.
        noise: the standard deviation of the points' distance.
        seed: of the points.
        test_file: "drifted" tests on points of another plane.
        shared: certify on the points that choose.
        trained: certify on the points that are trained on, which name no units.
    """

    def __init__(
        self,
        held_out: int = 400,
        noise: float = 0.1,
        seed: int = 0,
        test_file: str | None = None,
        shared: bool = False,
        trained: bool = False,
    ) -> None:
        super().__init__(batch_size=8, eval_batch_size=100)
        self.held_out, self.noise, self.of = held_out, noise, seed
        self.test_file, self.shared, self.trained = test_file, shared, trained

    def setup(self, stage: str) -> None:
        sizes = {"train": 32, "val": self.held_out, "test": self.held_out}
        self.datasets = {
            name: self._points(name, count) for name, count in sizes.items()
        }
        if self.shared:
            self.datasets["test"] = self.datasets["val"]
        if self.trained:
            self.datasets |= {
                name: [*self.datasets["train"]] for name in ("train", "test")
            }

    def _points(self, name: str, count: int) -> Points:
        generator = torch.Generator().manual_seed(100 * self.of + len(name))
        if name == "test":
            generator.manual_seed(100 * self.of + 50 + len(self.test_file or ""))
        x = torch.randn(count, 3, generator=generator)
        plane = torch.tensor([1.0, -1.0, 0.5])
        if name == "test" and self.test_file == "drifted":
            plane = -plane
        y = x @ plane + self.noise * torch.randn(count, generator=generator)
        points = Points(
            {"x": each, "y": value} for each, value in zip(x, y, strict=True)
        )
        points.categories = ["left" if each[0] < 0 else "right" for each in x]
        points.units = [
            f"{self.of} {name} {self.test_file} {k // 2}" for k in range(count)
        ]
        return points
