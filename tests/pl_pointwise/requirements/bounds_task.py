"""A task whose constraint values stand in the data: what meets which ε is known by hand."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from lightning.pytorch import Callback
from torch import Tensor

from pl_pointwise import Constraint, Formulation, PointwiseDataModule, PointwiseModule
from pl_pointwise.errors import DataError


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
        {"values": values[i], "carries": torch.tensor(i % 5 != 0), "secret": torch.tensor(secret)}
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
        splits = {"train": rows(40, 0), "val": rows(30, 1), "test": rows(60, 2, secret=True)}
        for split in splits.values():
            if self.categories:
                split.categories = [("even", "odd")[i % 2] for i in range(len(split))]
                split.units = [f"{i % 2}, {i // 4}" for i in range(len(split))]
        if self.poisoned:
            for index in (1, 3):
                splits["train"][index]["values"] = torch.tensor([math.nan, 0.0])
        if stage == "validate" and "val" in self.without:
            raise DataError("there is no selection file")
        self.datasets = {name: splits[name] for name in splits if name not in self.without}


class Forbidden(Callback):
    """One of a fit: an export, for one."""

    def on_test_start(self, trainer: Any, pl_module: Any) -> NoReturn:
        raise AssertionError("callbacks are not wanted")
