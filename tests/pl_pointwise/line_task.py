"""A task for the command line: fit a line, within a tolerance on every point."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from pl_pointwise import (
    Constraint,
    Formulation,
    Optimization,
    PointwiseDataModule,
    PointwiseModule,
    Training,
)


class LineModule(PointwiseModule):
    """|w| is the objective, the squared residual of each point the constraint.

    Args:
        formulation: how the constraint is enforced.
        tolerance: of the squared residual.
        fail: raise in the forward pass.
    """

    def __init__(
        self,
        formulation: Formulation | dict[str, Formulation] | None = None,
        tolerance: float = 0.1,
        fail: bool = False,
    ) -> None:
        super().__init__(
            formulation=formulation,
            constraints={"fit": Constraint(at_most=tolerance)},
            training=Training(Optimization(learning_rate=0.1)),
        )
        self.fail = fail
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def forward(self, batch: Any) -> Tensor:
        if self.fail:
            raise RuntimeError("asked to fail")
        return batch["x"] @ self.weight

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:
        return self.weight.abs().sum().expand(len(outputs))

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"fit": (outputs - batch["y"]).square()}


class LineData(PointwiseDataModule):
    """Ten points near a line, five of them held out."""

    def setup(self, stage: str) -> None:
        x = torch.linspace(-1, 1, 10)
        points = torch.stack([x, torch.ones(10)], dim=1)
        rows = [{"x": p, "y": 2 * p[0] + 1 + 0.3 * torch.sin(9 * p[0])} for p in points]
        self.datasets = {"train": rows[::2], "val": rows[1::2], "test": rows[1::2]}

    def collate(self, rows: list[dict[str, Any]]) -> Any:
        return default_collate(rows)
