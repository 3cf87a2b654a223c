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

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from pandas import DataFrame
from torch import Tensor

from pl_pointwise.data import TEST, TRAIN, VAL, categories_of, fingerprint, units_of, without_index
from pl_pointwise.data.fingerprints import RANDOM_ROWS, digests_of_rows, normalised
from pl_pointwise.errors import printable

from .p_values import Losses
from .requirement import Requirement, RequirementError

if TYPE_CHECKING:
    from pl_pointwise.module import PointwiseModule

COLUMNS = ("dataset", "kind", "quantity", "index", "value", "unit", "category")
CONTENT = "content"
"""The column that files of earlier versions have not."""

Units = Mapping[str, Collection[str]]
"""Units, and the content of the rows of each: one of both is known if the unit is."""


class Source:
    """A data set by its name in the log keys, with what is known of its samples before a pass.

    rows: None of a stream.
    """

    def __init__(self, name: str, rows: Any) -> None:
        self.name, self.rows = name, rows

    @cached_property
    def _named_units(self) -> list[str] | None:
        """Of each row, what the data set names, else its content; None: the row has but a place."""
        units = None if self.rows is None else units_of(self.rows)
        if self.rows is None or (units is not None and all(units)):
            return units
        if (digests := digests_of_rows(without_index(self.rows))) is None:
            return units
        named = units or [""] * len(digests)
        return [unit or row.hex() for unit, row in zip(named, digests, strict=True)]

    @cached_property
    def _contents(self) -> list[str] | None:
        """Of each row a digest of what it holds besides its id; None: not known."""
        rows = None if self.rows is None else without_index(self.rows)
        if rows is None or getattr(rows, "units_are_content", False):
            return None
        digests = digests_of_rows(rows, units_of(self.rows) or [""] * len(rows))
        if digests is None:
            return None
        units, of_content = self.units_at(range(len(rows))), dict[bytes, set[str]]()
        for content, unit in zip(digests, units, strict=True):
            of_content.setdefault(content, set()).add(unit)
        # What several units hold, an answer of a word or a category, is none of them.
        return [
            content.hex() if len(of_content[content]) == 1 else unit
            for content, unit in zip(digests, units, strict=True)
        ]

    def contents_at(self, positions: Sequence[int]) -> list[str]:
        """The content of each sample's row; where it is not known, its unit."""
        contents = self._contents
        if contents is None:
            return self.units_at(positions)
        return [contents[position] for position in positions]

    @property
    def content(self) -> str:
        """A digest of the data set, whatever the order: its ``fingerprint``, else of all rows; and
        of their categories, which requirements are about.
        """
        kinds: list[str] = [] if self.rows is None else categories_of(self.rows) or []
        own = None if self.rows is None else getattr(without_index(self.rows), "fingerprint", None)
        if isinstance(own, str):
            return f"{own} {hash_of(repr(kinds))}" if kinds else own
        digests = None if self.rows is None else digests_of_rows(without_index(self.rows))
        if digests is None:
            return RANDOM_ROWS if self.rows is None else f"{RANDOM_ROWS}: {len(self.rows)}"
        kinds = kinds or [""] * len(digests)
        whole = (row + kind.encode() for row, kind in zip(digests, kinds, strict=True))
        return hashlib.sha256(b"".join(sorted(whole))).hexdigest()

    def units_at(self, positions: Iterable[int]) -> list[str]:
        """The unit of each sample: rows of the same content are one."""
        units = self._named_units
        if units is not None:
            return [normalised(units[position]) for position in positions]
        # Of one data set by its name alone.
        of = self.name if self.rows is None else f"{self.name}, {fingerprint(self.rows)}"
        return [f"{of} {position}" for position in positions]

    def lines(self, kind: str, quantity: str, index: Tensor, values: Tensor) -> DataFrame:
        """Returns the lines of one quantity; index, values: (n,)."""
        positions = index.tolist()
        categories = None if self.rows is None else categories_of(self.rows)
        return DataFrame(
            {
                "dataset": self.name,
                "kind": kind,
                "quantity": quantity,
                "index": positions,
                "value": values.double().numpy(),
                "unit": [hash_of(unit) for unit in self.units_at(positions)],
                "category": ["" if categories is None else categories[p] for p in positions],
                CONTENT: [hash_of(content) for content in self.contents_at(positions)],
            }
        )

    def training_lines(self) -> DataFrame:
        """Returns a line for each unit of the training data."""
        index = torch.arange(0 if self.rows is None else len(self.rows))
        found = self.lines("", "", index, torch.full(index.shape, torch.nan))
        return found.drop_duplicates(["unit", CONTENT]).assign(index=-1, category="")


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
            for name, found in module.evaluated[dataset].items():
                parts.append(source.lines("constraint", name, found.index, found.worst()))
            for name, metric in module.evaluated_metrics.get(dataset, {}).items():
                parts.append(source.lines("metric", name, metric.index, metric.value))
    whole = pd.concat(parts, ignore_index=True) if parts else DataFrame(columns=COLUMNS)
    return with_content(whole)


def with_content(samples: DataFrame) -> DataFrame:
    """The table with contents, which are the units' names where an earlier version wrote it."""
    return samples if CONTENT in samples else samples.assign(**{CONTENT: samples["unit"]})


def read_samples(path: Path) -> DataFrame:
    """Returns the table of a file, of an earlier version too."""
    return with_content(pd.read_parquet(path))[[*COLUMNS, CONTENT]]


def marks_of(samples: DataFrame) -> set[str]:
    """What units are known by: their names, and the contents of their rows."""
    return {*samples["unit"], *with_content(samples)[CONTENT]}


def records_not_known(samples: DataFrame, known: Iterable[str]) -> tuple[DataFrame, int]:
    """The lines of units that are not known, and how many units were: a verdict is of new ones.

    known: names and contents; a unit is known by its own name or by what one of its rows holds.
    """
    marks, whole = set(known), with_content(samples)
    seen = whole["unit"].isin(marks) | whole[CONTENT].isin(marks)
    again = whole["unit"].isin(set(whole[seen]["unit"]))
    return samples[~again], samples[again]["unit"].nunique()


def hash_of(text: str) -> str:
    """Returns a unit's hash: prompts are long, and need not leave the machine with an export."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def units_in(samples: DataFrame, dataset: str = TEST.key) -> dict[str, set[str]]:
    """The units of a data set, and the contents of the rows of each."""
    chosen = with_content(samples[samples["dataset"] == dataset])
    found: dict[str, set[str]] = {}
    for unit, content in zip(chosen["unit"], chosen[CONTENT], strict=True):
        found.setdefault(unit, set()).add(content)
    return found


def known_among(units: Units, marks: Collection[str]) -> list[str]:
    """The units that are known by these names and contents."""
    return [
        unit
        for unit, contents in units.items()
        if unit in marks or any(content in marks for content in contents)
    ]


def quantities_in(samples: DataFrame, kind: str) -> list[str]:
    """The constraints, or the metrics, that the splits have values of."""
    held_out = samples["dataset"].isin((VAL.key, TEST.key)) & (samples["kind"] == kind)
    return [str(name) for name in samples[held_out]["quantity"].unique()]


def require_known(samples: DataFrame, requirements: Iterable[Requirement]) -> None:
    """Refuses a requirement on what no sample of the splits has."""
    constraints, metrics = (quantities_in(samples, kind) for kind in ("constraint", "metric"))
    of_test = samples[samples["dataset"] == TEST.key]
    categories = sorted({*of_test["category"]} - {""})
    for each in requirements:
        name, category = each.quantity, each.category
        kind, names = "metric of values in [0, 1]", metrics
        if each.kind == "constraint":
            kind, names = "constraint", constraints
        if name not in names:
            there = f"There are: {', '.join(names)}." if names else "No held-out sample has any."
            if name in constraints:
                there = f'Of a constraint write "{name}: violated <= {each.at_most:g}".'
            elif name in {*samples["dataset"]}:
                there = "Of data besides the splits: give them as the test data."
            raise RequirementError(f"{each.text!r}: there is no {kind} {name!r}. {there}")
        if category and category not in categories:
            which = f"It has {printable(', '.join(categories)) or 'none'}."
            raise RequirementError(f"{each.text!r}: there is no category {category!r}. {which}")


def losses_by_unit(lines: DataFrame, requirement: Requirement) -> Losses:
    """(units,) losses: of a unit's lines the worst for a constraint, the mean for a metric."""
    by_unit = lines.groupby("unit")["loss"]  # In the order of hashes, which no loss can set.
    return np.asarray(by_unit.mean() if requirement.beyond is None else by_unit.max(), float)


def lines_about(samples: DataFrame, requirement: Requirement, dataset: str = TEST.key) -> DataFrame:
    """Returns the lines that a requirement is about, of one data set, with their loss."""
    chosen = _of_quantity(samples, requirement) & (samples["dataset"] == dataset)
    if requirement.category:
        chosen &= samples["category"] == requirement.category
    found = samples[chosen]
    before = found["before"].to_numpy() if "before" in found else None
    return found.assign(loss=requirement.losses(found["value"].to_numpy(), before))


def _of_quantity(samples: DataFrame, requirement: Requirement) -> pd.Series:
    of_kind = samples["kind"] == requirement.kind
    return of_kind & (samples["quantity"] == requirement.quantity)


def beside(
    samples: DataFrame, predecessor: DataFrame, requirements: Sequence[Requirement]
) -> DataFrame:
    """The table with the predecessor's values as ``before``; those required have to be there."""
    places = ["dataset", "kind", "quantity", "index", "unit"]
    before = predecessor[[*places, "value"]].rename(columns={"value": "before"})
    found = samples.merge(before, "left", on=places, indicator=True, validate="one_to_one")
    compared = [each for each in requirements if each.beside]
    require_known(samples, compared)
    for each in compared:
        of = _of_quantity(found, each)
        alone = found[of & (found["_merge"] != "both")]
        if len(alone):
            first = alone.iloc[0]
            raise RequirementError(
                f"{len(alone):,} of {of.sum():,} values of {each.quantity!r} have none of the "
                f"predecessor to compare, first sample {first['index']} of {first['dataset']!r}. "
                "Measure both models on the same records."
            )
    return found.drop(columns="_merge")


def bounds_of(module: PointwiseModule) -> dict[str, str]:
    """What a module's violations are measured by: the same for all that are compared."""
    return {name: repr(bound) for name, bound in module.evaluation_constraints.items()}


def require_same_bounds(bounds: Mapping[str, dict[str, str]]) -> None:
    """bounds: by which each model's violations are measured, by its name."""
    for (one, first), (other, second) in pairwise(bounds.items()):
        if first != second:
            raise RequirementError(
                f"{one} and {other} are evaluated by different bounds, {first} and {second}. Give "
                "both the same evaluation tolerance."
            )
