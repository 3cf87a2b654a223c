"""``pl-pointwise tolerances``: which ε which share of the samples meets, before any training.

A model as it is runs once over the data. Of every data set and constraint, by category where the
data have categories, a table says how many samples meet the configured ε and which ε 50 to 99 % of
them meet. Two more say how many certification samples a requirement takes, and what the
certification split at hand could certify.

The model never sees the certification split here, its samples are only counted: an ε that was
chosen by a model's values on that split could not be certified on it any more.

The output folder then holds

    tolerances.md       the tables
    tolerances.csv      the first of them, a line per data set, constraint and category
    tolerances.png      the share of the samples that meets ε, over ε
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame
from scipy.stats import binom

from pl_pointwise.certificates import violation_bound
from pl_pointwise.cli import PointwiseCLI
from pl_pointwise.cli_errors import CommandParser
from pl_pointwise.compare.runner import quieten
from pl_pointwise.compare.tables import Table
from pl_pointwise.configs import overview
from pl_pointwise.constraint import Constraint
from pl_pointwise.data import PointwiseDataModule, categories_of, units_of
from pl_pointwise.errors import DataError
from pl_pointwise.module import PointwiseModule

from .beforehand import samples_to_come
from .p_values import fewest_samples, samples_needed
from .tolerance_plot import draw

SHARES = (0.5, 0.75, 0.9, 0.95, 0.99)
"""Of the samples, that are to meet an ε."""

RATES = (0.01, 0.02, 0.05, 0.1, 0.2)
"""Of new inputs, that a requirement lets violate."""

DATA_SETS = {"train": "training", "val": "selection", "test": "held-out"}
"""Names of the splits in the tables."""


@dataclass(frozen=True)
class Group:
    """The samples of a data set that carry a constraint: all, or those of one category."""

    dataset: str
    constraint: str
    category: str | None
    """None: all samples."""
    worst: NDArray[np.float64]
    """(n,), the worst violation of each, inf where it is NaN; empty where samples are counted."""
    samples: int
    units: int
    """Independent ones: samples that share a prompt, for one, are a single unit."""

    @property
    def met(self) -> float:
        """The share that meets the bounds as they are configured."""
        return float((self.worst <= 0).mean())

    def shift(self, share: float) -> float:
        """By how much the bounds must be moved outwards so that ``share`` of the samples meets.

        An observed violation, not one between two: at least ``share`` is at or below it.
        """
        return float(np.quantile(self.worst, share, method="inverted_cdf"))


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
    module, data = cli.model, cli.datamodule
    found, notes = measure(cli, known.ckpt_path)
    if not cli.trainer.is_global_zero:
        return
    constraints = module.evaluation_constraints
    tables = [
        *(tolerance_table(name, bounds, found) for name, bounds in constraints.items()),
        sample_table(known.confidence),
        certification_table(certification(module, data, found), known.confidence),
    ]
    tables = [table for table in tables if len(table.cells)]
    text = "\n".join([*(table.markdown() for table in tables), *notes])
    print(f"\n{text}")
    known.output.mkdir(parents=True, exist_ok=True)
    (known.output / "tolerances.md").write_text(text, encoding="utf-8")
    csv_lines(constraints, found).to_csv(known.output / "tolerances.csv", index=False)
    draw(constraints, _curves(constraints, found), known.output / "tolerances.png")
    print(f"Written to {known.output}: tolerances.md, tolerances.csv, tolerances.png")


def _curves(
    constraints: Mapping[str, Constraint], found: Sequence[Group]
) -> dict[str, dict[str, dict[str | None, NDArray[np.float64]]]]:
    """Returns the ε that each sample just meets by constraint, data set and category."""
    datasets = _unique(_title(group.dataset) for group in found)
    curves: dict[str, dict[str, dict[str | None, NDArray[np.float64]]]] = {
        name: {dataset: {} for dataset in datasets} for name in constraints
    }
    for group in found:
        met = [tolerance(constraints[group.constraint], each) for each in group.worst]
        curves[group.constraint][_title(group.dataset)][group.category] = np.array(met)
    return curves


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
    parser.add_argument("--confidence", type=_confidence, default=0.95, help="default: %(default)s")
    return parser


def _confidence(text: str) -> float:
    number = float(text)
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a fraction between 0 and 1")
    return number


# Measuring --------------------------------------------------------------------------------------


def measure(cli: PointwiseCLI, ckpt_path: str | None = None) -> tuple[list[Group], list[str]]:
    """Runs the model over the data, without the task's metrics: no answer is generated or judged.

    Returns: the groups by data set, constraint and category, and notes on what is missing.

    Raises:
        DataError: no sample carries any constraint.
    """
    module, data, trainer = cli.model, cli.datamodule, cli.trainer
    module.evaluation_metrics = dict
    module.update_evaluation_metrics = module.finish_evaluation_metrics = lambda *_: None
    given, notes = data.test_dataloader, list[str]()
    data.test_dataloader = lambda: _without_certification_split(data, given(), notes)
    trainer.test(module, datamodule=data, ckpt_path=ckpt_path, verbose=False, weights_only=True)
    groups: list[Group] = []
    for dataset, by_constraint in module.evaluated.items():
        rows = data.datasets.get(dataset)
        for name in module.evaluation_constraints:
            if name not in by_constraint:
                notes.append(f"{_title(dataset)}: no sample carries the constraint {name}.\n")
                continue
            index = by_constraint[name].index.numpy()
            worst = by_constraint[name].worst().double().numpy()
            notes += _note_of_nan(dataset, name, index[np.isnan(worst)], len(index))
            worst = np.where(np.isnan(worst), np.inf, worst)
            groups += _by_category(dataset, name, rows, index, worst)
    if not groups:
        raise DataError(
            "There is nothing to read ε off: no training or selection sample carries "
            f"{' or '.join(module.evaluation_constraints)}. Give the data module training data; "
            "the certification split is kept for the certificate."
        )
    return groups, notes


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


def certification(
    module: PointwiseModule, data: PointwiseDataModule, found: Sequence[Group]
) -> list[Group]:
    """Returns the groups that a certificate can be about: counted, of the certification split.

    Those of further data sets, beside the splits, too.
    """
    groups = [group for group in found if group.dataset not in ("train", "val")]
    if not data.certification_is_separate:
        return groups
    rows = data.datasets["test"]
    samples = samples_to_come(module, {"test": data._loader("test")}, data.datasets)
    counted = [
        group
        for name, carried in samples[samples["kind"] == "constraint"].groupby(
            "quantity", sort=False
        )
        for group in _by_category("test", str(name), rows, carried["index"].to_numpy(), np.zeros(0))
    ]
    return counted + groups


def _by_category(
    dataset: str, constraint: str, rows: Any, index: NDArray[Any], worst: NDArray[np.float64]
) -> list[Group]:
    """Returns the group of all samples, then one of each category.

    rows: the data set; None where it is unknown. index: (n,) positions in it. worst: (n,) or (0,).
    """
    categories = None if rows is None else categories_of(rows)
    units = None if rows is None else units_of(rows)
    kinds = np.array([categories[i] if categories else "" for i in index], dtype=object)
    unit = np.array([units[i] if units else i for i in index], dtype=object)
    groups = [Group(dataset, constraint, None, worst, len(index), len(set(unit)))]
    for kind in sorted(set(kinds) - {""}):
        chosen = kinds == kind
        violations = worst[chosen] if len(worst) else worst
        sizes = int(chosen.sum()), len(set(unit[chosen]))
        groups.append(Group(dataset, constraint, kind, violations, *sizes))
    return groups


def _note_of_nan(dataset: str, name: str, index: NDArray[Any], n: int) -> list[str]:
    if not len(index):
        return []
    which = ", ".join(map(str, index[:5])) + (", …" if len(index) > 5 else "")
    return [
        f"{_title(dataset)}: {len(index)} of {n} samples have a violation of {name} that is NaN "
        f"(index {which}). They count as meeting no ε; find out why.\n"
    ]


# Tables -----------------------------------------------------------------------------------------


def tolerance_table(name: str, constraint: Constraint, found: Sequence[Group]) -> Table:
    """Returns a line per data set and category: the share that meets ε, the ε that shares meet."""
    bound, meaning = in_words(name, constraint)
    up = not (constraint.at_least is not None and constraint.at_most is None)
    lines = [
        {
            "data": _title(group.dataset),
            "category": group.category or "all",
            "samples": f"{group.samples:,}",
            "meet it": f"{100 * group.met:.3g} %",
            **{
                f"{100 * share:g} %": outwards(tolerance(constraint, group.shift(share)), up)
                for share in SHARES
            },
        }
        for group in found
        if group.constraint == name
    ]
    note = (
        f"Of the model as it is: how many samples meet {bound} with their worst element, and below "
        f"50 % to 99 % {meaning}, rounded so that it does."
    )
    return Table(bound, note, DataFrame(lines))


def outwards(value: float, up: bool) -> str:
    """Returns four significant digits, rounded to the side that more samples meet.

    >>> outwards(1.23401, up=True), outwards(1.23499, up=False), outwards(0.1 + 0.2, up=True)
    ('1.235', '1.234', '0.3')
    """
    # The eighth digit is what float32 made of it.
    exact = Context(prec=7).create_decimal_from_float(value)
    rounding = ROUND_CEILING if up else ROUND_FLOOR
    return f"{float(Context(prec=4, rounding=rounding).create_decimal(exact)):.4g}"


def csv_lines(constraints: Mapping[str, Constraint], found: Sequence[Group]) -> DataFrame:
    """Returns a line per group, its numbers not rounded."""
    return DataFrame(
        {
            "data": group.dataset,
            "constraint": group.constraint,
            "category": group.category or "",
            "samples": group.samples,
            "units": group.units,
            "bounds": in_words(group.constraint, constraints[group.constraint])[0],
            "met": group.met,
            **{
                f"{100 * share:g}%": tolerance(constraints[group.constraint], group.shift(share))
                for share in SHARES
            },
        }
        for group in found
    )


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


def certification_table(groups: Sequence[Group], confidence: float) -> Table:
    """Returns how many may violate so that a rate is still certified, a line per group."""
    lines = [
        {
            "data": "certification" if group.dataset == "test" else group.dataset,
            "constraint": group.constraint,
            "category": group.category or "all",
            "independent samples": f"{group.units:,}",
            "smallest rate": f"{100 * violation_bound(0, group.units, confidence):.3g} %",
            **{f"{100 * rate:g} %": _may_violate(group.units, rate, confidence) for rate in RATES},
        }
        for group in groups
    ]
    note = (
        f"At {100 * confidence:g} %, of one requirement: the smallest rate of violations that "
        "these samples certify, if none of them violates, and by rate how many may. –: too few "
        "samples."
    )
    seen = _unique(_title(g.dataset) for g in groups if len(g.worst))
    if seen:
        note += (
            f" The model has seen {' and '.join(seen)} above: an ε that is chosen by those lines "
            "cannot be certified on the same samples. Choose it by the training lines, or hold out "
            "a certification split of its own."
        )
    return Table("What the certification samples at hand can certify", note, DataFrame(lines))


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


def _title(dataset: str) -> str:
    return DATA_SETS.get(dataset, dataset)


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
