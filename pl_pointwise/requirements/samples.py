"""What a model's evaluation measured, sample by sample, as a table that requirements are tested on.

A line per sample and quantity, with the columns

    dataset    the name in the log keys: "val" for selection, "test" for certification, or another
    kind       "constraint" or "metric"
    quantity   the constraint's or the metric's name
    index      the sample's position in its data set
    value      its worst violation, or the metric's value
    unit       samples of one unit (a prompt, a query) depend on each other
    category   "" where there is none
    content    of the unit's row, without its id: rows under other names are the same rows

A run's file and a certificate's hold a line for each unit of the training data too, "train", with
nothing measured.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from pandas import DataFrame

from pl_pointwise.data import TEST, TRAIN, VAL
from pl_pointwise.errors import printable

from .p_values import Losses
from .requirement import Requirement, RequirementError
from .source import CONTENT, Source

if TYPE_CHECKING:
    from pl_pointwise.module import PointwiseModule

COLUMNS = ("dataset", "kind", "quantity", "index", "value", "unit", "category")
Units = Mapping[str, Collection[str]]
"""Units, and the content of the rows of each: one of both is known if the unit is."""


def contents_of(module: PointwiseModule) -> dict[str, str]:
    """The content of each data set of the last ``validate`` and ``test``."""
    datasets = module._evaluator.datasets.items()
    return {f"{name} data": Source(name, rows).content for name, rows in datasets}


def samples_of(module: PointwiseModule, training: bool = False) -> DataFrame:
    """The table of what the last ``validate`` and ``test`` measured, with the data sets' units.

    training: whether of the training data too.
    """
    parts = []
    for dataset in module.evaluated:
        if training or dataset != TRAIN.key:
            source = Source(dataset, module._evaluator.datasets.get(dataset))
            for name, violations in module.evaluated[dataset].items():
                # A mean is no value of a sample to certify.
                if violations.by_group is not None:
                    continue
                worst = violations.worst()
                parts.append(source.lines("constraint", name, violations.index, worst))
            for name, metric in module.evaluated_metrics.get(dataset, {}).items():
                parts.append(source.lines("metric", name, metric.index, metric.value))
    whole = pd.concat(parts, ignore_index=True) if parts else DataFrame(columns=COLUMNS)
    return with_content(whole)


def with_content(samples: DataFrame) -> DataFrame:
    """The table with contents, which are the units' names where an earlier version wrote it."""
    return (
        samples if CONTENT in samples else samples.assign(**{CONTENT: samples["unit"]})
    )


def read_samples(path: Path) -> DataFrame:
    """Returns the table of a file, of an earlier version too."""
    return with_content(pd.read_parquet(path))[[*COLUMNS, CONTENT]]


def marks_of(samples: DataFrame) -> set[str]:
    """What units are known by: their names, and the contents of their rows."""
    return {*samples["unit"], *with_content(samples)[CONTENT]}


def records_not_known(
    samples: DataFrame, known: Iterable[str]
) -> tuple[DataFrame, int]:
    """The lines of units that are not known, and how many units were: a verdict is of new ones.

    known: names and contents; a unit is known by its own name or by what one of its rows holds.
    """
    marks = set(known)
    whole = with_content(samples)
    seen = whole["unit"].isin(marks) | whole[CONTENT].isin(marks)
    # A unit goes whole: its samples depend on each other, so none is new beside a known one.
    again = whole["unit"].isin(set(whole[seen]["unit"]))
    return samples[~again], samples[again]["unit"].nunique()


def units_in(samples: DataFrame, dataset: str = TEST.key) -> dict[str, set[str]]:
    """The units of a data set, and the contents of the rows of each."""
    chosen = with_content(samples[samples["dataset"] == dataset])
    contents_by_unit: dict[str, set[str]] = {}
    for unit, content in zip(chosen["unit"], chosen[CONTENT], strict=True):
        contents_by_unit.setdefault(unit, set()).add(content)
    return contents_by_unit


def known_among(units: Units, marks: Collection[str]) -> list[str]:
    """The units that are known by these names and contents."""
    known = []
    for unit, contents in units.items():
        if unit in marks or any(content in marks for content in contents):
            known.append(unit)
    return known


def quantities_in(samples: DataFrame, kind: str) -> list[str]:
    """The constraints, or the metrics, that the splits have values of."""
    held_out = samples["dataset"].isin((VAL.key, TEST.key)) & (samples["kind"] == kind)
    return [str(name) for name in samples[held_out]["quantity"].unique()]


def require_known(samples: DataFrame, requirements: Iterable[Requirement]) -> None:
    """Refuses a requirement on what no sample of the splits has."""
    constraints = quantities_in(samples, "constraint")
    metrics = quantities_in(samples, "metric")
    of_test = samples[samples["dataset"] == TEST.key]
    categories = sorted({*of_test["category"]} - {""})
    for requirement in requirements:
        name = requirement.quantity
        is_constraint = requirement.kind == "constraint"
        kind = "constraint" if is_constraint else "metric of values in [0, 1]"
        names = constraints if is_constraint else metrics
        if name not in names:
            remedy = (
                f"There are: {', '.join(names)}."
                if names
                else "No held-out sample has any."
            )
            # Of means of groups samples_of() takes nothing: see there.
            if is_constraint:
                remedy += " A bound on means of groups has no certificate."
            if name in constraints:
                remedy = f'Of a constraint write "{name}: violated <= {requirement.at_most:g}".'
            elif name in {*samples["dataset"]}:
                remedy = "Of data besides the splits: give them as the test data."
            raise RequirementError(
                f"{requirement.text!r}: there is no {kind} {name!r}. {remedy}"
            )
        category = requirement.category
        if category and category not in categories:
            remedy = f"It has {printable(', '.join(categories)) or 'none'}."
            raise RequirementError(
                f"{requirement.text!r}: there is no category {category!r}. {remedy}"
            )


def losses_by_unit(lines: DataFrame, requirement: Requirement) -> Losses:
    """(units,) losses: of a unit's lines the worst for a constraint, the mean for a metric."""
    # In the order of hashes, which no loss can set.
    by_unit = lines.groupby("unit")["loss"]
    return np.asarray(
        by_unit.mean() if requirement.beyond is None else by_unit.max(), float
    )


def lines_about(
    samples: DataFrame, requirement: Requirement, dataset: str = TEST.key
) -> DataFrame:
    """Returns the lines that a requirement is about, of one data set, with their loss."""
    chosen = _of_quantity(samples, requirement) & (samples["dataset"] == dataset)
    if requirement.category:
        chosen &= samples["category"] == requirement.category
    lines = samples[chosen]
    # There beside a predecessor alone: see beside().
    before = lines["before"].to_numpy() if "before" in lines else None
    return lines.assign(loss=requirement.losses(lines["value"].to_numpy(), before))


def _of_quantity(samples: DataFrame, requirement: Requirement) -> pd.Series:
    of_kind = samples["kind"] == requirement.kind
    return of_kind & (samples["quantity"] == requirement.quantity)


def beside(
    samples: DataFrame, predecessor: DataFrame, requirements: Sequence[Requirement]
) -> DataFrame:
    """The table with the predecessor's values as ``before``; those required have to be there."""
    places = ["dataset", "kind", "quantity", "index", "unit"]
    before = predecessor[[*places, "value"]].rename(columns={"value": "before"})
    # From the left: what the predecessor lacks stays, and is refused below if it is required.
    both = samples.merge(
        before, "left", on=places, indicator=True, validate="one_to_one"
    )
    compared = [requirement for requirement in requirements if requirement.beside]
    require_known(samples, compared)
    for requirement in compared:
        of_quantity = _of_quantity(both, requirement)
        alone = both[of_quantity & (both["_merge"] != "both")]
        if len(alone):
            first = alone.iloc[0]
            raise RequirementError(
                f"{len(alone):,} of {of_quantity.sum():,} values of {requirement.quantity!r} have "
                f"none of the predecessor to compare, first sample {first['index']} of "
                f"{first['dataset']!r}. Measure both models on the same records."
            )
    return both.drop(columns="_merge")


def bounds_of(module: PointwiseModule) -> dict[str, str]:
    """What a module's violations are measured by: the same for all that are compared."""
    return {
        name: bound.description()
        for name, bound in module.evaluation_constraints.items()
    }


def require_same_bounds(bounds: Mapping[str, dict[str, str]]) -> None:
    """bounds: by which each model's violations are measured, by its name."""
    # Each with the next: if all of these agree, all do.
    for (one, first), (other, second) in pairwise(bounds.items()):
        if first != second:
            raise RequirementError(
                f"{one} and {other} are evaluated by different bounds, {first} and {second}. Give "
                "both the same evaluation tolerance."
            )
