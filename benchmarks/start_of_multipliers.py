"""Does it help to start λ at the optimum's multipliers instead of at 0? On DC3's families.

    python benchmarks/start_of_multipliers.py --seeds 0 1 2

Tried is the best case of any such start: the multipliers of the solved training instances, their
mean for all ("mean") or each instance's own ("own", what a perfect λ(x) would give). A row of the
CSV is a finished run, which is not repeated. Judged are unseen instances, as they are and after
Newton steps.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from itertools import product
from pathlib import Path

import pandas as pd
import torch
from lightning.pytorch import seed_everything
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.families import append, quiet_trainer
from benchmarks.published import qcqp
from benchmarks.published.runs import Instances, answers, judge, prices
from benchmarks.published.table import geometric_mean
from pl_pointwise import Optimization, Pointwise, Training
from pl_pointwise.tasks.family.family import (
    Family,
    FamilyDataModule,
    FamilyModule,
    optimum,
    problems,
    split_of,
)

OUTPUT = Path(__file__).parent / "evidence/results/start.csv"
PUBLISHED = {"variables": 100, "equations": 50, "inequalities": 50, "instances": 10_000}
FAMILIES = {
    "convex": lambda folder: (Family(**PUBLISHED), 200),
    "sine": lambda folder: (Family(**PUBLISHED, nonconvex=True), 200),
    "QCQP": lambda folder: (qcqp.TABLE.family(folder), 200),
    "small": lambda folder: (Family(), 50),
}
EPOCHS = (15, 60, 150)
STARTS = ("0", "mean", "own")


def start_of(family: Family, start: str) -> Tensor | None:
    """λ of the training instances, (N, K), or None."""
    if start == "0":
        return None
    x = problems(family).x[split_of(family)["train"]]
    # A term is the mean over a sample's K values.
    own = prices(family, x) * family.inequalities
    return own if start == "own" else own.mean(0).expand(len(x), -1)


def run(
    folder: Path, name: str, start: str, epochs: int, seed: int
) -> dict[str, object]:
    family, batch = FAMILIES[name](folder)
    multipliers = start_of(family, start)
    seed_everything(seed, verbose=False)
    schedule = Training(Optimization(learning_rate=1e-3, schedule="linear"))
    module = FamilyModule(Pointwise(), family, training=schedule)
    if multipliers is not None:
        module.multipliers.set("inequalities", multipliers.float())
    trainer = quiet_trainer(epochs)
    trainer.fit(module, FamilyDataModule(family, batch_size=batch, seed=seed))
    part = split_of(family)["test"]
    judged = Instances(problems(family).x[part], optimum(family)[part])
    row: dict[str, object] = {
        "family": name,
        "start": start,
        "epochs": epochs,
        "seed": seed,
    }
    for label, correct in (("", False), (", corrected", True)):
        y = answers(module.proxy.eval(), family, judged.x, correct)
        of = judge(family, judged, y)
        gap = (of.objective - of.best).mean() / of.best.mean().abs()
        row[f"gap, %{label}"] = f"{100 * float(gap):.5g}"
        middle = geometric_mean(of.objective - of.best)
        row[f"gap, geometric mean{label}"] = f"{middle:.5g}"
        row[f"worst{label}"] = f"{float(of.inequality.amax(1).mean()):.5g}"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=[*FAMILIES])
    parser.add_argument("--start", nargs="+", choices=STARTS, default=STARTS)
    parser.add_argument("--epochs", nargs="+", type=int, default=EPOCHS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("pl_pointwise", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    key = ["family", "start", "epochs", "seed"]
    cells = product(given.family, given.start, given.epochs, given.seeds)
    with tempfile.TemporaryDirectory() as folder:
        for cell in cells:
            done = pd.DataFrame(columns=key)
            if given.output.exists():
                done = pd.read_csv(given.output, dtype={"start": str})
            if cell not in set(zip(*(done[k] for k in key), strict=True)):
                append(given.output, [run(Path(folder), *cell)])


if __name__ == "__main__":
    main()
