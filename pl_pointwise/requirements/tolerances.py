"""``pl-pointwise tolerances``: which ε which share of the samples meets, before any training.

A model as it is runs once over the data. Of every data set and constraint, by category where the
data have categories, a table says how many samples meet the configured ε and which ε 50 to 99 % of
them meet. Two more say how many certification samples a requirement takes, and what those at hand
could certify.

The model never sees the certification split here, its samples are only counted: an ε that was
chosen by a model's values on that split could not be certified on it any more.

The output folder then holds

    tolerances.md       the tables
    tolerances.csv      the first of them, a line per data set, constraint and category
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas import DataFrame
from scipy.stats import binom

from pl_pointwise.certificates import violation_bound
from pl_pointwise.cli import PointwiseCLI
from pl_pointwise.cli_errors import CommandParser
from pl_pointwise.compare.command import fraction
from pl_pointwise.compare.runner import quieten
from pl_pointwise.compare.tables import Table
from pl_pointwise.configs import overview
from pl_pointwise.data import PointwiseDataModule
from pl_pointwise.errors import DataError
from pl_pointwise.task import Constraint

from .beforehand import samples_to_come
from .p_values import fewest_samples, samples_needed
from .samples import lines

SHARES = (0.5, 0.75, 0.9, 0.95, 0.99)
"""Of the samples, that are to meet an ε."""

RATES = (0.01, 0.02, 0.05, 0.1, 0.2)
"""Of new inputs, that a requirement lets violate."""

DATA_SETS = {"train": "training", "val": "selection", "test": "held-out"}
"""Names of the splits in the tables."""


def groups_of(samples: DataFrame) -> Iterator[tuple[str, str, str, DataFrame]]:
    """Yields data set, constraint, category and samples: "" for all, then one per category."""
    for (dataset, constraint), found in samples.groupby(["dataset", "quantity"], sort=False):
        yield dataset, constraint, "", found
        for category, of_category in found[found["category"] != ""].groupby("category"):
            yield dataset, constraint, str(category), of_category


def worst_of(samples: DataFrame) -> NDArray[np.float64]:
    """Returns (n,), the worst violation of each sample, inf where it is NaN."""
    return samples["value"].fillna(np.inf).to_numpy(float)


def title_of(dataset: str) -> str:
    return DATA_SETS.get(dataset, dataset)


def tolerance(constraint: Constraint, shift: float) -> float:
    """Returns ε of a bound moved outwards by ``shift``.

    Of an interval, ``shift`` itself; of an equality to c, δ of c ± δ, which is ``shift`` too.

    >>> tolerance(Constraint(at_least=3.0), 0.5), tolerance(Constraint(at_most=3.0), 0.5)
    (2.5, 3.5)
    """
    if constraint.at_least is not None and constraint.at_most is None:
        return constraint.at_least - shift
    if constraint.at_most is not None and constraint.at_least is None:
        return constraint.at_most + shift
    return shift


def in_words(name: str, constraint: Constraint) -> tuple[str, str]:
    """Returns the constraint as it is configured, and what the columns of shares show of it."""
    low, high, equals = constraint.at_least, constraint.at_most, constraint.equals
    if equals is not None:
        return f"{name} = {equals:g}", f"the δ of {equals:g} ± δ that this share of them meets"
    if low is not None and high is not None:
        return (
            f"{low:g} ≤ {name} ≤ {high:g}",
            "by how much both bounds must be widened (negative: can be narrowed) so that this "
            "share of them meets",
        )
    bound = f"{name} ≥ {low:g}" if high is None else f"{name} ≤ {high:g}"
    return bound, "the ε that this share of them meets"


def main(args: Sequence[str]) -> None:
    """Runs the command; options it does not know are LightningCLI's."""
    parser = _parser()
    known, options = parser.parse_known_args(list(args))
    quieten()
    words = [word for config in known.config for word in ("--config", config)]
    # What belongs to a fit, an export after the test for one, is left out.
    words += [*options, "--trainer.logger", "false", "--trainer.callbacks", "null"]
    words += ["--trainer.default_root_dir", str(known.output)]
    try:
        cli = PointwiseCLI(words, run=False)
    except (argparse.ArgumentError, FileNotFoundError) as error:
        parser.error(str(error))
    samples, notes = measure(cli, known.ckpt_path)
    if not cli.trainer.is_global_zero:
        return
    constraints = cli.model.evaluation_constraints
    shares = met_shares(samples, constraints)
    tables = [
        *(tolerance_table(name, bounds, shares) for name, bounds in constraints.items()),
        sample_table(known.confidence),
        certification_table(cli, samples, known.confidence),
    ]
    text = "\n".join([*(table.markdown() for table in tables if len(table.cells)), *notes])
    print(f"\n{text}")
    known.output.mkdir(parents=True, exist_ok=True)
    (known.output / "tolerances.md").write_text(text, encoding="utf-8")
    shares.to_csv(known.output / "tolerances.csv", index=False)
    print(f"Written to {known.output}: tolerances.md, tolerances.csv")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "tolerances",
        "Which ε which share of the samples meets, and how many samples certify a "
        "requirement,\nbefore any training. Further options are those of pl-pointwise test.",
        overview(),
    )
    parser.add_argument(
        "-c", "--config", action="append", default=[], help="base, then overlays; name or path"
    )
    parser.add_argument("--ckpt_path", help="of a model that is trained already")
    parser.add_argument(
        "--output", type=Path, default=Path("results/tolerances"), help="default: %(default)s"
    )
    parser.add_argument("--confidence", type=fraction, default=0.95, help="default: %(default)s")
    return parser


# Measuring --------------------------------------------------------------------------------------


def measure(cli: PointwiseCLI, ckpt_path: str | None = None) -> tuple[DataFrame, list[str]]:
    """Runs the model over the data, without the task's metrics: no answer is generated or judged.

    Returns: the table of samples.py, and notes on what is missing.

    Raises:
        DataError: no sample carries any constraint.
    """
    module, data, trainer = cli.model, cli.datamodule, cli.trainer
    module.evaluation_metrics = dict
    module.update_evaluation_metrics = module.finish_evaluation_metrics = lambda *_: None
    given, notes = data.test_dataloader, list[str]()
    data.test_dataloader = lambda: _without_certification_split(data, given(), notes)
    trainer.test(module, datamodule=data, ckpt_path=ckpt_path, verbose=False, weights_only=True)
    parts = []
    for dataset, by_constraint in module.evaluated.items():
        title = title_of(dataset)
        for name in module.evaluation_constraints:
            if name not in by_constraint:
                notes.append(f"{title}: no sample carries the constraint {name}.\n")
                continue
            index, worst = by_constraint[name].index, by_constraint[name].worst()
            parts.append(
                lines(dataset, data.datasets.get(dataset), "constraint", name, index, worst)
            )
            if undefined := index[worst.isnan()].tolist():
                which = ", ".join(map(str, undefined[:5])) + ", …" * (len(undefined) > 5)
                notes.append(
                    f"{title}: {len(undefined)} of {len(index)} samples have a violation of {name} "
                    f"that is NaN (index {which}). They count as meeting no ε; find out why.\n"
                )
    if not parts:
        raise DataError(
            "There is nothing to read ε off: no training or selection sample carries "
            f"{' or '.join(module.evaluation_constraints)}. Give the data module training data; "
            "the certification split is kept for the certificate."
        )
    return pd.concat(parts, ignore_index=True), notes


def _without_certification_split(data: PointwiseDataModule, loaders: Any, notes: list[str]) -> Any:
    """Returns the data sets of a test, the certification split replaced by the selection split.

    notes: why there is no selection split is added.
    """
    if not isinstance(loaders, Mapping) or "test" not in loaders:
        return loaders
    try:
        data.setup("validate")
    except DataError as error:
        notes.append(f"selection: {error}\n")
    if not data.certification_is_separate:
        return loaders
    others = {name: loader for name, loader in loaders.items() if name != "test"}
    return {"val": data._loader("val"), **others} if "val" in data.datasets else others


# Tables -----------------------------------------------------------------------------------------


def met_shares(samples: DataFrame, constraints: Mapping[str, Constraint]) -> DataFrame:
    """Returns a line per group: the share that meets the bounds, and the ε that shares meet.

    An ε is an observed violation, not one between two: at least the share is at or below it.
    """
    lines = []
    for dataset, name, category, found in groups_of(samples):
        worst = worst_of(found)
        shifts = np.quantile(worst, SHARES, method="inverted_cdf")
        met = (tolerance(constraints[name], shift) for shift in shifts.tolist())
        lines.append(
            {
                "data": dataset,
                "constraint": name,
                "category": category,
                "samples": len(found),
                "units": found["unit"].nunique(),
                "bounds": in_words(name, constraints[name])[0],
                "met": float((worst <= 0).mean()),
                **dict(zip((f"{100 * share:g}%" for share in SHARES), met, strict=True)),
            }
        )
    return DataFrame(lines)


def tolerance_table(name: str, constraint: Constraint, shares: DataFrame) -> Table:
    """Returns the lines of one constraint, rounded."""
    bound, meaning = in_words(name, constraint)
    up = not (constraint.at_least is not None and constraint.at_most is None)
    found = shares[shares["constraint"] == name]
    cells = DataFrame(
        {
            "data": found["data"].map(title_of),
            "category": found["category"].replace("", "all"),
            "samples": found["samples"].map("{:,}".format),
            "meet it": found["met"].map(lambda met: f"{100 * met:.3g} %"),
        }
    )
    for share in SHARES:
        values = found[f"{100 * share:g}%"]
        cells[f"{100 * share:g} %"] = [outwards(value, up) for value in values]
    note = (
        f"Of the model as it is: how many samples meet {bound} with their worst element, and below "
        f"50 % to 99 % {meaning}, rounded so that it does."
    )
    return Table(bound, note, cells)


def outwards(value: float, up: bool) -> str:
    """Returns four significant digits, rounded to the side that more samples meet.

    >>> outwards(1.23401, up=True), outwards(1.23499, up=False), outwards(0.1 + 0.2, up=True)
    ('1.235', '1.234', '0.3')
    """
    exact = float(f"{value:.7g}")  # The eighth digit is what float32 made of it.
    if exact == 0 or not math.isfinite(exact):
        return f"{exact:g}"
    unit = 10.0 ** (math.floor(math.log10(abs(exact))) - 3)
    steps = round(exact / unit, 6)
    return f"{(math.ceil(steps) if up else math.floor(steps)) * unit:.4g}"


def sample_table(confidence: float) -> Table:
    """Returns how many certification samples a requirement takes, a line per rate."""

    def needed(rate: float, share: float) -> str:
        number = samples_needed(rate, share * rate, confidence)
        return "over a million" if number is None else f"{number:,}"

    lines = [
        {
            "violated by at most": f"{100 * rate:g} %",
            "none of them violates": f"{fewest_samples(rate, confidence):,}",
            "the model violates half the rate": needed(rate, 0.5),
            "three quarters of it": needed(rate, 0.75),
        }
        for rate in RATES
    ]
    note = (
        f"To certify one requirement at {100 * confidence:g} %. First the fewest, which do if none "
        "violates; then how many certify it with a probability of 80 %, if the model violates half "
        "or three quarters of the rate on new inputs. A requirement of a category takes as many of "
        "that category."
    )
    return Table("Certification samples that a requirement takes", note, DataFrame(lines))


def certification_table(cli: PointwiseCLI, seen: DataFrame, confidence: float) -> Table:
    """Returns how many may violate so that a rate is still certified, a line per group.

    Of the certification split, whose samples are counted, and of the data sets beside the splits.

    seen: the samples that the model has seen.
    """
    data = cli.datamodule
    note = (
        f"At {100 * confidence:g} %, of one requirement: the smallest rate of violations that "
        "these samples certify, if none of them violates, and by rate how many may. –: too few "
        "samples."
    )
    beside = seen[~seen["dataset"].isin(["train", "val"])]
    if len(beside):
        note += (
            f" The model has seen {' and '.join(map(title_of, beside['dataset'].unique()))} "
            "above: an ε that is chosen by those lines cannot be certified on the same samples. "
            "Choose it by the training lines, or hold out a certification split of its own."
        )
    groups = list(groups_of(beside))
    if data.certification_is_separate:
        samples = samples_to_come(cli.model, {"test": data._loader("test")}, data.datasets)
        groups = [*groups_of(samples[samples["kind"] == "constraint"]), *groups]
    cells = []
    for dataset, name, category, found in groups:
        units = found["unit"].nunique()
        cells.append(
            {
                "data": "certification" if dataset == "test" else dataset,
                "constraint": name,
                "category": category or "all",
                "independent samples": f"{units:,}",
                "smallest rate": f"{100 * violation_bound(0, units, confidence):.3g} %",
                **{f"{100 * rate:g} %": _may_violate(units, rate, confidence) for rate in RATES},
            }
        )
    return Table("What the certification samples at hand can certify", note, DataFrame(cells))


def _may_violate(n: int, rate: float, confidence: float) -> str:
    most = most_violated(n, rate, confidence)
    return "–" if most is None else f"up to {most}" if most else "none"


def most_violated(n: int, rate: float, confidence: float) -> int | None:
    """Returns the most of n samples that may violate while ``rate`` is certified; None: too few.

    >>> most_violated(58, 0.05, 0.95), most_violated(59, 0.05, 0.95), most_violated(100, 0.05, 0.95)
    (None, 0, 1)
    """
    probabilities = binom.cdf(np.arange(n + 1), n, rate)
    certified = int((probabilities <= 1 - confidence).sum())
    return certified - 1 if certified else None
