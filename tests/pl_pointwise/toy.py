"""A small constrained problem that reaches every branch of the base module.

N samples with x in R^4 and y; the model is z = tanh(x·A)·w, smooth and not convex. Two constraints:
"fit" on z, one value per sample, and "pair" on z·x_1..3, three values per sample. With
``partial`` data, samples carry the objective only, a constraint only, some of the three pairs, or
everything; the columns ``has_…`` say which.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from pl_pointwise import (
    Constraint,
    Formulation,
    PointwiseDataModule,
    PointwiseModule,
    Training,
)
from tests.pl_pointwise.table import FORMULATIONS as FORMULATIONS
from tests.pl_pointwise.table import KINDS as KINDS

PAIRS = 3
CONSTRAINTS = {"fit": Constraint(at_most=-0.3), "pair": Constraint(at_least=0.2)}
INTERVALS = {
    "fit": Constraint(at_least=-0.2, at_most=0.3),
    "pair": Constraint(at_least=0.4, at_most=0.4),
}
SHARED = {
    "fit": Constraint(at_least=-0.2, at_most=0.3, share=0.3),
    "pair": Constraint(at_least=0.2, share=0.25),
}


class ToyRows:
    """Rows of the problem; everything is a function of the number of samples and the seed."""

    def __init__(self, count: int, seed: int = 0, partial: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
        self.y = torch.randn(count, generator=generator, dtype=torch.float64)
        drawn = torch.rand(count, 2 + PAIRS, generator=generator) < (
            0.6 if partial else 2.0
        )
        self.has = {"objective": drawn[:, 0], "fit": drawn[:, 1], "pair": drawn[:, 2:]}

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        masks = {f"has_{name}": mask[position] for name, mask in self.has.items()}
        return {"x": self.x[position], "y": self.y[position], **masks}


class ToyData(PointwiseDataModule):
    """Loaders over ToyRows, in any order; with ``pieces`` the collate function cuts the batch."""

    def __init__(
        self,
        rows: Any,
        held_out: Any = None,
        pieces: Any = None,
        order: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.pieces, self.order = pieces, order
        self.datasets = {"train": rows}
        if held_out is not None:
            self.datasets |= {"val": held_out, "test": held_out, "predict": held_out}

    def _loader(self, name: str, training: bool = False) -> Any:
        loader = super()._loader(name, training)
        if self.order is not None:
            loader.sampler.order = lambda: self.order
        return loader

    def collate(self, rows: list[dict[str, Any]]) -> Any:
        if self.pieces is None:
            return stack(rows)
        return [
            stack(rows[i : i + self.pieces]) for i in range(0, len(rows), self.pieces)
        ]


def stack(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {
        key: torch.stack([torch.as_tensor(row[key]) for row in rows]) for key in rows[0]
    }


class Toy(PointwiseModule):
    """The problem as a module; plain SGD, so that the scale of the gradient matters."""

    def __init__(
        self,
        formulation: Formulation | dict[str, Formulation] | None = None,
        constraints: dict[str, Constraint] | None = None,
        *,
        partial: bool = False,
        dropout: float = 0.0,
        learning_rate: float = 0.05,
        micro_batch_size: int | None = None,
        gradient_clip_val: float | None = None,
        primal_steps: int = 1,
        order: Any = "simultaneous",
    ) -> None:
        super().__init__(
            formulation=formulation,
            constraints=CONSTRAINTS if constraints is None else constraints,
            training=Training(
                micro_batch_size=micro_batch_size,
                gradient_clip_val=gradient_clip_val,
                primal_steps=primal_steps,
                order=order,
            ),
        )
        self.partial = partial
        self.learning_rate = learning_rate
        first, last = initial_weights()
        self.first, self.last = torch.nn.Parameter(first), torch.nn.Parameter(last)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, batch: Any) -> Tensor:
        return self.dropout(torch.tanh(batch["x"] @ self.first)) @ self.last

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:
        return (outputs - batch["y"]).square()

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        values = {"fit": outputs, "pair": outputs[:, None] * batch["x"][:, :PAIRS]}
        return {name: values[name] for name in self.constraints}

    def membership(self, batch: Any) -> dict[str, Tensor]:
        names = ["objective", *self.constraints] if self.partial else []
        return {name: batch[f"has_{name}"] for name in names}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


class Judged(Toy):
    """ "fit" is judged by a test that has no gradient; "pair" is its own strict value."""

    def strict_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"fit": passed(outputs)} if "fit" in self.constraints else {}


def passed(outputs: Tensor) -> Tensor:
    """A value on either side of the bounds of "fit", and nothing in between."""
    return torch.where(outputs > -0.1, 0.2, -1.5).to(outputs.dtype)


class Steep(Toy):
    """Values of the size of 10⁴, which no exponential takes as they are."""

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        values = super().constraint_values(outputs, batch)
        return {name: 1e4 * value for name, value in values.items()}


def initial_weights() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return (
        torch.randn(4, 5, generator=generator, dtype=torch.float64) / 2,
        torch.randn(5, generator=generator, dtype=torch.float64),
    )


def weights_of(module: torch.nn.Module) -> Tensor:
    """All weights as one row, a copy in float64."""
    return torch.cat([p.detach().double().flatten() for p in module.parameters()])


def multipliers_of(module: PointwiseModule) -> dict[str, Tensor]:
    return {name: table.clone() for name, table in module.multipliers.items()}


def lost(module: PointwiseModule) -> tuple[int, int]:
    """Samples left out of a step, and steps skipped."""
    return module._stepper.repairs.left_out, module._stepper.repairs.skipped_steps


def thresholds_of(module: PointwiseModule) -> dict[str, Tensor]:
    return {
        f"threshold of {name}": value.clone()
        for name, value in module.thresholds.items()
    }


class Seen(Callback):
    """The epoch and the indices of every batch, in order."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, list[int]]] = []

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        pieces = batch if isinstance(batch, list) else [batch]
        index = torch.cat([piece["index"] for piece in pieces]).tolist()
        self.batches.append((trainer.current_epoch, index))


class At(Callback):
    """Calls a function once, after a given number of batches of the run."""

    def __init__(self, batches: int, act: Callable[[Trainer], None]) -> None:
        self.batches, self.act, self.count = batches, act, 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.count += 1
        if self.count == self.batches:
            self.act(trainer)


def trainer(**options: Any) -> Trainer:
    """A quiet trainer on one CPU process."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(**(defaults | options))


def fit(
    module: Toy, rows: Any, *, batch_size: int = 4, epochs: int = 3, **options: Any
) -> Toy:
    """Trains in one process and gives the module back."""
    data = {
        name: options.pop(name) for name in ("pieces", "held_out") if name in options
    }
    trainer(max_epochs=epochs, **options).fit(
        module, ToyData(rows, batch_size=batch_size, **data)
    )
    return module


def assert_same_run(found: Any, expected: Any, atol: float = 1e-6) -> None:
    """Weights, multipliers and thresholds of two modules agree, to the precision of the store."""
    torch.testing.assert_close(
        weights_of(found), weights_of(expected), rtol=0, atol=atol
    )
    for name in ("thresholds", "multipliers"):
        pair = getattr(found, name), getattr(expected, name)
        torch.testing.assert_close(*pair, rtol=0, atol=atol)


def assert_identical_run(found: Any, expected: Any) -> None:
    """Weights, multipliers and thresholds of two modules are the same to the last bit."""
    assert_same_run(found, expected, atol=0)
