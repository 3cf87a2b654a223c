"""What can be said before training: what there will be to judge, and whether it is enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from pandas import DataFrame

from pl_pointwise.evaluation import MeanBySample, stages_of
from pl_pointwise.step import carries, micro_batches_of

from .requirement import Requirement, RequirementError, check_sample_size
from .samples import CERTIFICATION, NOT_HELD_OUT, SELECTION, known_from, lines, values_of

if TYPE_CHECKING:
    from pl_pointwise.module import PointwiseModule


def samples_to_come(
    module: PointwiseModule, loaders: Mapping[str, Any], datasets: Mapping[str, Any]
) -> DataFrame:
    """Returns the table of samples.py with NaN for the values: no forward pass is made.

    A metric is taken to be of every sample: the task decides later.

    loaders: by data set, without the training data.
    """
    metrics = [n for n, m in module.evaluation_metrics().items() if isinstance(m, MeanBySample)]
    parts = []
    for dataset, loader in loaders.items():
        carried: dict[tuple[str, str], list[torch.Tensor]] = {}
        for batch in loader:
            for micro in micro_batches_of(module, batch):
                for name in module.evaluation_constraints:
                    mask = carries(micro.masks[name]).cpu() & (micro.index >= 0)
                    carried.setdefault(("constraint", name), []).append(micro.index[mask])
                for name in metrics:
                    real = micro.index[micro.index >= 0]
                    carried.setdefault(("metric", name), []).append(real)
        for (kind, name), found in carried.items():
            index = torch.cat(found)
            values = torch.full_like(index, torch.nan, dtype=torch.float64)
            parts.append(lines(dataset, datasets.get(dataset), kind, name, index, values))
    return pd.concat(parts, ignore_index=True) if parts else DataFrame(columns=["split", "unit"])


def held_out_loaders(source: Any) -> dict[str, Any]:
    """Returns the loaders of ``validate`` and ``test`` by data set, without the training data.

    source: the data module, or the module where that has the loaders.
    """
    found: dict[str, Any] = {}
    for stage in ("val", "test"):
        if not is_overridden(f"{stage}_dataloader", source):
            continue
        loaders = getattr(source, f"{stage}_dataloader")()
        names = stages_of(stage, loaders)
        if isinstance(loaders, Mapping):
            found |= loaders
        elif isinstance(loaders, (list, tuple)):
            found |= dict(zip(names, loaders, strict=False))
        else:
            found[names[0]] = loaders
    return {name: loader for name, loader in found.items() if name != NOT_HELD_OUT}


def check_splits(
    samples: DataFrame,
    training_units: Sequence[str],
    requirements: Sequence[Requirement],
    confidence: float,
) -> None:
    """Refuses what cannot come to a certificate, before anything is trained.

    samples: what there will be, as :func:`samples_to_come` returns it.
    training_units: hashes of the units that are trained on.

    Raises:
        RequirementError: splits that overlap, no selection or certification split, something that
            there is not, or too few samples.
    """
    units = {split: set(found["unit"]) for split, found in samples.groupby("split")}
    units["training"] = set(training_units)
    for split in (SELECTION, CERTIFICATION):
        if not units.get(split):
            raise RequirementError(
                f"There is no {split} split. Hold out two parts of the data: "
                "validation data to choose by and test data to certify with."
            )
    for one, other in (
        (SELECTION, CERTIFICATION),
        ("training", SELECTION),
        ("training", CERTIFICATION),
    ):
        both = units[one] & units[other]
        if both:
            raise RequirementError(
                f"The {one} and the {other} split share {len(both):,} of "
                f"{len(units[other]):,} units (prompts or queries), so nothing would be certified."
                " Hold out a third part (test_fraction, or a test file), and take what stands in "
                "both out of one."
            )
    known = known_from(samples)
    for requirement in requirements:
        subject = known.subject(requirement)
        n = values_of(samples, subject, CERTIFICATION)["unit"].nunique()
        check_sample_size(subject, n, confidence)
