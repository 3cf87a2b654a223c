"""What can be said before training: which samples there will be, and whether they suffice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from pandas import DataFrame

from pl_pointwise.data import TRAIN, dataset_of
from pl_pointwise.evaluation import MeanBySample, loaders_by_name
from pl_pointwise.lagrangian.terms import carries
from pl_pointwise.training.stepper import micro_batches_of

from .requirement import Requirement, RequirementError
from .samples import (
    CERTIFICATION,
    COLUMNS,
    SELECTION,
    TRAINING,
    Source,
    lines_about,
    records_not_known,
    require_known,
    units_in,
)

if TYPE_CHECKING:
    from pl_pointwise.module import PointwiseModule


def samples_to_come(module: PointwiseModule, data: Any) -> tuple[DataFrame, dict[str, Source]]:
    """The table of samples.py before any forward pass, with the training data, and its data sets.

    Values are NaN, and metrics of every sample.

    data: the data module, or the module itself, after the set-up of ``validate`` and ``test``.
    """
    loaders: dict[str, Any] = {}
    for stage in ("val", "test"):
        loaders |= loaders_by_name(stage, getattr(data, f"{stage}_dataloader")())
    loaders.pop(TRAIN.key, None)
    sources = {name: Source(name, dataset_of(loader)) for name, loader in loaders.items()}
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
    if TRAIN.key in (known := getattr(data, "datasets", {})):
        sources[TRAIN.key] = Source(TRAIN.key, known[TRAIN.key])
        parts.append(sources[TRAIN.key].training_lines())
    samples = pd.concat(parts, ignore_index=True) if parts else DataFrame(columns=COLUMNS)
    return samples, sources


def check_splits(
    samples: DataFrame, requirements: Sequence[Requirement], confidence: float
) -> None:
    """Refuses splits that overlap or are missing, what there is not, and too few samples."""
    for split in (SELECTION, CERTIFICATION):
        if not units_in(samples, split):
            raise RequirementError(
                f"There is no {split} split. Hold out validation data to choose by and test data "
                "to certify with."
            )
    require_separate_splits(samples)
    samples = samples.assign(before=torch.nan)  # Nothing is measured.
    require_known(samples, requirements)
    for each in requirements:
        n = lines_about(samples, each, CERTIFICATION)["unit"].nunique()
        needed = each.fewest_samples(confidence)
        if n < needed:
            of = f" of category {each.category}" if each.category else ""
            raise RequirementError(
                f"{each.text!r}: certifying this at {100 * confidence:g} % takes at "
                f"least {needed:,} independent samples, all of them satisfied (or equal to the "
                f"predecessor's), and the certification split has {n:,}{of}. Hold out more, "
                "require less, or lower --confidence."
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
