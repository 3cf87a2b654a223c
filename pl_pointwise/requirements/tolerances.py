"""``pl-pointwise tolerances``: which ε which share of the samples meets, before any training.

The starting model runs once over all data but the certification split: an ε that was chosen by a
model's values on that split could not be certified on it any more. The output folder then holds
``tolerances.md``, the table, and ``tolerances.csv``, the same with all digits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pandas import DataFrame

from pl_pointwise.cli import PointwiseCLI
from pl_pointwise.command_line.cli_errors import CommandParser
from pl_pointwise.command_line.configs import overview
from pl_pointwise.constraint import Constraint
from pl_pointwise.data import TRAIN, VAL, PointwiseDataModule, title_of
from pl_pointwise.errors import DataError
from pl_pointwise.printing import Table, csv_cell, quieten

from .samples import samples_of

SHARES = (0.5, 0.75, 0.9, 0.95, 0.99)
"""Shares of the samples that are to meet an ε."""


def main(args: Sequence[str]) -> None:
    """Runs the command; options it does not know are LightningCLI's."""
    parser = CommandParser(
        "tolerances",
        "Which ε which share of the samples meets, before any training.\nFurther options are "
        "those of pl-pointwise test.",
        overview(),
    )
    parser.add_argument(
        "-c",
        "--config",
        action="append",
        default=[],
        help="base, then what changes it; name or path",
    )
    parser.add_argument("--ckpt_path", help="of a model that is trained already")
    parser.add_argument(
        "--output", type=Path, default="results/tolerances", help="default: %(default)s"
    )
    known, options = parser.parse_known_args(list(args))
    quieten()
    options += ["--trainer.default_root_dir", str(known.output)]
    cli = PointwiseCLI.of_data(known.config, options)
    samples = measure(cli, known.ckpt_path)
    if not cli.trainer.is_global_zero:
        return
    constraints = cli.model.evaluation_constraints
    shares = met_shares(samples, constraints)
    text = tolerance_table(shares, constraints).markdown()
    print(f"\n{text}")
    known.output.mkdir(parents=True, exist_ok=True)
    (known.output / "tolerances.md").write_text(text, encoding="utf-8")
    shares.map(csv_cell).to_csv(known.output / "tolerances.csv", index=False)
    print(f"Written to {known.output}: tolerances.md, tolerances.csv")


def measure(cli: PointwiseCLI, ckpt_path: str | None = None) -> DataFrame:
    """Runs the model over the data, not its metrics; returns the table of samples.py."""
    module = cli.model
    data = cli.datamodule
    if not isinstance(data, PointwiseDataModule):
        raise DataError(
            "tolerances reads the splits of a PointwiseDataModule: give --data one."
        )
    # Metrics may generate answers, which takes far longer than a pass and says nothing of ε.
    module.evaluation_metrics = dict
    module.update_evaluation_metrics = lambda *_: None
    module.finish_evaluation_metrics = lambda *_: None
    # `test` reads the open splits in place of its own, and the certification split stays closed.
    vars(data)["test_dataloader"] = lambda: open_loaders(data)
    cli.trainer.test(
        module, datamodule=data, ckpt_path=ckpt_path, verbose=False, weights_only=True
    )
    samples = samples_of(module, training=True)
    if samples.empty:
        raise DataError(
            "There is nothing to read ε off: no training or selection sample has a value of "
            f"{' or '.join(module.evaluation_constraints)}. Give the data module training data; "
            "the certification split is kept for the certificate."
        )
    return samples


def open_loaders(data: PointwiseDataModule) -> dict[str, Any]:
    """The training and the selection split, those that there are."""
    for stage in ("fit", "validate"):
        # A data module may have one of the two alone.
        with suppress(DataError):
            data.setup(stage)
    return {
        key: data._loader(key) for key in (TRAIN.key, VAL.key) if key in data.datasets
    }


def met_shares(samples: DataFrame, constraints: Mapping[str, Constraint]) -> DataFrame:
    """A line per group: the share that meets the bounds, and the ε, observed, that shares meet."""
    groups = pd.concat(
        [samples.assign(category=""), samples[samples["category"] != ""]]
    )
    lines = []
    for (dataset, name, category), group in groups.groupby(
        ["dataset", "quantity", "category"]
    ):
        worst = group["value"].fillna(np.inf).to_numpy(float)  # NaN meets no ε.
        line = {
            "data": dataset,
            "constraint": name,
            "category": category,
            "samples": len(group),
            "units": group["unit"].nunique(),
            "met": float((worst <= 0).mean()),
        }
        shifts = np.quantile(worst, SHARES, method="inverted_cdf").tolist()
        for share, shift in zip(SHARES, shifts, strict=True):
            # ε of a bound that is moved outwards by the shift.
            line[f"{100 * share:g}%"] = constraints[name].value_at(shift)
        lines.append(line)
    return DataFrame(lines)


def tolerance_table(shares: DataFrame, constraints: Mapping[str, Constraint]) -> Table:
    """Returns the lines, rounded, with the constraints as configured."""
    cells = shares.assign(
        data=shares["data"].map(title_of),
        constraint=shares["constraint"].map(
            lambda name: f"{name} {constraints[name].in_words()}"
        ),
        category=shares["category"].replace("", "all"),
    ).map(lambda cell: f"{cell:.4g}" if isinstance(cell, float) else str(cell))
    note = (
        "Under 50% to 99%: the ε that this share of the samples meets; of an interval by how "
        "much both bounds must be widened, of an equality to c the δ of c ± δ. Where all are one "
        "value, as of a model compared with itself, choose by what the quantity means "
        "(docs/tolerance.md)."
    )
    return Table("Tolerances", note, cells)
