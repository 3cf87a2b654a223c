"""What the base module adds to the step of a small model, beside a plain manual step.

    python benchmarks/small_step.py --rounds 5

A network of two linear layers, batches of 8. The plain module is what one writes by hand under
manual optimisation: zero_grad, forward, mean loss plus mean violations, manual_backward, AdamW's
step, a logged loss. Ours has one, three and six constraints with a multiplier per sample. All take
the same data, the same CSV logger at the trainer's default of every 50 steps, and no progress bar.
They take turns in one process and one thread; a round is one epoch of each, in CPU time from the
first batch to the last. Printed: ms a step, medians over rounds with their range, and the ratio.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import default_collate

from pl_pointwise import Constraint, Pointwise, PointwiseDataModule, PointwiseModule

SAMPLES, BATCH = 4000, 8
CONSTRAINTS = (1, 3, 6)


class Data(PointwiseDataModule):
    """Points with a linear target."""

    def setup(self, stage: str) -> None:
        x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
        self.datasets = {"train": [{"x": row, "y": row.sum()} for row in x]}

    def collate(self, rows: list[dict[str, Any]]) -> Any:
        return default_collate(rows)


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
    )


class Plain(LightningModule):
    """A step under manual optimisation, as one writes it by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.network = network()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        outputs = self.network(batch["x"])[:, 0]
        loss = outputs.square().mean() + (outputs - batch["y"]).abs().mean()
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), fused=True)


class Constrained(PointwiseModule):
    """The same outputs, with ``count`` constraints on them."""

    def __init__(self, count: int) -> None:
        bounds = {f"fit{number}": Constraint(at_most=0.1) for number in range(count)}
        super().__init__(
            formulation=Pointwise(alpha=1.0, dual_lr=0.1), constraints=bounds
        )
        self.network = network()

    def forward(self, batch: Any) -> Tensor:
        return self.network(batch["x"])[:, 0]

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.square()

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {name: (outputs - batch["y"]).abs() for name in self.constraints}


class Clock(Callback):
    """CPU seconds from an epoch's first batch to its last, which neighbours lengthen less."""

    def on_train_epoch_start(self, *_: Any) -> None:
        self.started = time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds = time.process_time() - self.started


def milliseconds(module: LightningModule, folder: str) -> float:
    """Of one step, the mean over an epoch."""
    clock = Clock()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=CSVLogger(folder),
        callbacks=[clock],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, Data(batch_size=BATCH))
    return 1000 * clock.seconds / (SAMPLES / BATCH)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    taken: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        milliseconds(Plain(), folder)  # Imports and caches.
        for _ in range(rounds):
            taken.setdefault("plain manual step", []).append(
                milliseconds(Plain(), folder)
            )
            for count in CONSTRAINTS:
                name = f"{count} constraint{'s' if count > 1 else ''}"
                taken.setdefault(name, []).append(
                    milliseconds(Constrained(count), folder)
                )
    plain = taken["plain manual step"]
    print("| | ms/step (range) | × plain, median of rounds (range) |\n|---|---|---|")
    for name, times in taken.items():
        ratios = [mine / base for mine, base in zip(times, plain, strict=True)]
        print(
            f"| {name} | {statistics.median(times):.2f} ({min(times):.2f}–{max(times):.2f}) "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f}) |"
        )


if __name__ == "__main__":
    main()
