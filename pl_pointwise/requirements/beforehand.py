"""What can be said before training: which samples there will be, and whether they suffice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from pandas import DataFrame

from pl_pointwise.data import dataset_of
from pl_pointwise.evaluation import MeanBySample, loaders_by_name
from pl_pointwise.step import carries, micro_batches_of

from .requirement import Requirement, RequirementError
from .samples import (
    CERTIFICATION,
    NOT_HELD_OUT,
    SELECTION,
    TRAINING,
    Source,
    known_from,
    records_not_known,
    units_in,
    values_of,
)

if TYPE_CHECKING:
    from pl_pointwise.module import PointwiseModule


def samples_to_come(
    module: PointwiseModule, loaders: Mapping[str, Any], sources: Mapping[str, Source]
) -> DataFrame:
    """The table of samples.py before any forward pass: values are NaN, metrics of every sample."""
    metrics = [n for n, m in module.evaluation_metrics().items() if isinstance(m, MeanBySample)]
    parts = []
    for dataset, loader in loaders.items():
        carried: dict[tuple[str, str], list[torch.Tensor]] = {}
        for micro in (micro for batch in loader for micro in micro_batches_of(module, batch)):
            real = micro.index >= 0
            masks = {("metric", name): real for name in metrics}
            for name in module.evaluation_constraints:
                masks["constraint", name] = carries(micro.masks[name]).cpu() & real
            for key, mask in masks.items():
                carried.setdefault(key, []).append(micro.index[mask])
        for (kind, name), found in carried.items():
            index = torch.cat(found)
            values = torch.full_like(index, torch.nan, dtype=torch.float64)
            parts.append(sources[dataset].lines(kind, name, index, values))
    return pd.concat(parts, ignore_index=True) if parts else DataFrame(columns=["split", "unit"])


def held_out_loaders(source: Any) -> dict[str, Any]:
    """Loaders of ``validate`` and ``test`` of data module or module, without the training data."""
    found: dict[str, Any] = {}
    for stage in ("val", "test"):
        found |= loaders_by_name(stage, getattr(source, f"{stage}_dataloader")())
    return {name: loader for name, loader in found.items() if name != NOT_HELD_OUT}


def sources_to_come(source: Any, loaders: Mapping[str, Any]) -> dict[str, Source]:
    """The held-out data sets behind the loaders, and the training data where they are set up."""
    rows = {name: dataset_of(loader) for name, loader in loaders.items()}
    rows |= {n: r for n, r in getattr(source, "datasets", {}).items() if n == NOT_HELD_OUT}
    return {name: Source(name, found) for name, found in rows.items()}


def check_splits(
    samples: DataFrame,
    training: DataFrame,
    requirements: Sequence[Requirement],
    confidence: float,
) -> None:
    """Refuses splits that overlap or are missing, what there is not, and too few samples."""
    for split in (SELECTION, CERTIFICATION):
        if not units_in(samples, split):
            raise RequirementError(
                f"There is no {split} split. Hold out validation data to choose by and test data "
                "to certify with."
            )
    require_separate_splits(pd.concat([samples, training]))
    known, samples = known_from(samples), samples.assign(before=torch.nan)  # Nothing is measured.
    for subject in map(known.subject, requirements):
        n = values_of(samples, subject, CERTIFICATION)["unit"].nunique()
        needed = subject.requirement.fewest_samples(confidence)
        if n < needed:
            of = f" of category {subject.category}" if subject.category is not None else ""
            raise RequirementError(
                f"{subject.requirement.text!r}: certifying this at {100 * confidence:g} % takes at "
                f"least {needed:,} independent samples, all of them satisfied (or equal to the "
                "predecessor's), and the "
                f"certification split has {n:,}{of}. Hold out more, require less, or lower "
                "--confidence."
            )


def require_separate_splits(samples: DataFrame) -> None:
    """Refuses units that stand in two splits of a table; those of the training data among them."""
    for one, other in combinations((TRAINING, SELECTION, CERTIFICATION), 2):
        of_other = samples[samples["split"] == other]
        if both := records_not_known(of_other, units_in(samples, one))[1]:
            raise RequirementError(
                f"The {one} and the {other} split share {both:,} of "
                f"{of_other['unit'].nunique():,} units (prompts, queries or records). Take what "
                "stands in both out of one (test_fraction, or a test file)."
            )
