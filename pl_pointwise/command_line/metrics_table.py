"""The metrics of an evaluation as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule

from ..evaluation import BEFORE
from ..module import PointwiseModule
from ..report.of_test import by_name

NARROWEST = 18
"""Characters of a column."""


def samples_measured(module: LightningModule) -> dict[str, int]:
    """Of how many samples, or values, each metric of the last evaluation is, by name."""
    if not isinstance(module, PointwiseModule):
        return {}
    counts = {}
    for stage, by_constraint in module.evaluated.items():
        for name, violations in by_constraint.items():
            counts[f"{stage}/{name}/violated"] = len(violations.pooled())
            counts[f"{stage}/{name}/violated_samples"] = len(violations.index)
    for stage, by_metric in module.evaluated_metrics.items():
        for name, values in by_metric.items():
            counts[f"{stage}/{name}"] = len(values.index)
    return counts


def metrics_table(metrics: Mapping[str, Any], samples: Mapping[str, int]) -> str:
    """Returns a line per metric, a column per evaluated data set, its starting model's before.

    samples: of a metric, where that is known: a rate of 0 says little of four prompts.
    """
    cells = by_name(metrics, samples)
    measured = dict.fromkeys(name.partition("/")[0] for name in metrics)
    stages = list[str]()
    for stage in measured:
        if stage.startswith(BEFORE):
            continue  # In front of its own stage.
        if f"{BEFORE}{stage}" in measured:
            stages.append(f"{BEFORE}{stage}")
        stages.append(stage)
    width = max(map(len, cells), default=0)
    column = (
        max(NARROWEST, *(len(stage) + 2 for stage in stages)) if stages else NARROWEST
    )
    lines = [" " * width + "".join(f"{stage:>{column}}" for stage in stages)]
    for name, by_stage in cells.items():
        line = f"{name:<{width}}"
        line += "".join(f"{by_stage.get(stage, ''):>{column}}" for stage in stages)
        lines.append(line)
    if samples:
        lines.append("In brackets: of how many.")
    return "\n".join(lines)
