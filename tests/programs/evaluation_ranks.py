"""What two ranks evaluate together; ``python -m tests.programs.evaluation_ranks FOLDER``."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanMetric, Metric
from torchmetrics.utilities import dim_zero_cat

from pl_pointwise import Constraint, Pointwise
from pl_pointwise.callbacks import DualMonitor
from pl_pointwise.evaluation import Evaluation, MeanBySample
from tests.pl_pointwise.test_running_statistics import Broken, Normed
from tests.pl_pointwise.toy import Toy, ToyData, ToyRows, multipliers_of, weights_of
from tests.programs.two_ranks import World

UPDATED_BY_ONE = 3
"""The index of the only sample that the task's metrics look at."""


# What each of two ranks sees, batch by batch: uneven, overlapping, one empty, both, and a rank
# that does not know the other's dtype.
MERGED: list[list[list[tuple[list[int], Tensor]]]] = [
    [
        [([4, 0], torch.tensor([[1.0], [2.0]])), ([7], torch.tensor([[3.0]]))],
        [([1, 4], torch.tensor([[5.0], [1.0]]))],
    ],
    [[], [([1, 0], torch.tensor([[1.0, -1.0], [2.0, 0.0]]))]],
    [[([3], torch.tensor([[1.0, -2.0]]))], [([2], torch.tensor([[0.5]]))]],
    [[], []],
    [
        [([0], torch.tensor([[0.5]]))],
        [([1], torch.tensor([[0.1]], dtype=torch.float64))],
    ],
]


def merged(rank: int) -> list[dict[str, Any]]:
    found = []
    for case in MERGED:
        evaluation = Evaluation(
            "test", Toy(constraints={"fit": Constraint(at_most=0.0)}), None
        )
        for index, violation in case[rank]:
            mask = torch.ones(violation.shape, dtype=torch.bool)
            evaluation.violations["fit"].add(torch.tensor(index), violation, mask)
        found.append(dict(vars(evaluation.violations["fit"].samples())))
    return found


class Pairs(Metric):
    """A state that is a list of tensors (n, 2) of whole numbers; the sum of the second column."""

    full_state_update = False
    rows: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", default=[], dist_reduce_fx="cat")

    def update(self, index: Tensor) -> None:
        self.rows.append(torch.stack([index, 2 * index], dim=1))

    def compute(self) -> Tensor:
        return dim_zero_cat(self.rows)[:, 1].sum().float()


class Selective(Toy):
    """Metrics of which a rank may update none."""

    def evaluation_metrics(self) -> dict[str, Metric]:
        metrics: dict[str, Metric] = {
            name: MeanBySample() for name in ("odd", "one odd")
        }
        return metrics | {"mean": MeanMetric(), "pairs": Pairs(), "never": MeanMetric()}

    def update_evaluation_metrics(
        self,
        metrics: dict[str, Metric],
        outputs: Any,
        batch: Any,
        real: Tensor,
        stage: str,
    ) -> None:
        chosen = batch["index"][real.cpu()]
        metrics["odd"].update(batch["index"], batch["index"] % 2)
        # Of every rank, each time.
        metrics["odd"].update(torch.tensor([0]), torch.tensor([0.0]))
        chosen = chosen[chosen == UPDATED_BY_ONE]
        if len(chosen):
            metrics["mean"].update(chosen.double())
            metrics["pairs"].update(chosen)
            metrics["one odd"].update(chosen, chosen % 2)


def results(world: World) -> dict[str, Any]:
    """What this rank found."""
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = Selective(Pointwise(alpha=1.0, dual_lr=1.0))
        trainer = world.trainer(max_epochs=2, callbacks=[DualMonitor()])
        trainer.fit(
            module, ToyData(ToyRows(12), ToyRows(5), batch_size=world.batch_size)
        )
        logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
        found["logged"] = {
            k: v for k, v in logged.items() if not k.startswith("running/")
        }
    found["advice"] = [
        str(each.message) for each in caught if "sync_dist" in str(each.message)
    ]
    found["objective"] = float(module.evaluated["val"]["fit"].violation.mean())

    found["odd"] = {
        name: [values.index.tolist(), values.value.tolist()]
        for name, values in module.evaluated_metrics["val"].items()
    }

    module = Normed(Pointwise(alpha=1.0, dual_lr=1.0))
    data = ToyData(Broken(12, 3), batch_size=world.batch_size)
    world.trainer(max_epochs=2).fit(module, data)
    if world.ranks > 1:
        found["merged"] = merged(trainer.global_rank)
    found["left out"] = [
        module._stepper.repairs.left_out,
        module._stepper.repairs.skipped_steps,
    ]
    found["weights"], found["multipliers"] = weights_of(module), multipliers_of(module)
    found["finite"] = bool(torch.isfinite(module.norm.running_mean).all())
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = results(World(ranks=2, folder=folder))
    torch.save(found, folder / f"rank{os.environ['RANK']}.pt")
