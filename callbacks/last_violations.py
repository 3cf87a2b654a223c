"""The violation of every training sample at its last visit, and its mean over the visits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pl_pointwise.module import PointwiseModule


class LastViolations:
    """By constraint (N, sides·K) float32 on the CPU; NaN where a sample was not visited, does not
    carry the column, or had a value that is not finite. Updating costs O(batch).

    Each is of the weights at its visit, against the training tolerance; of an equality as its
    formulation acts on it, and ``Constraint.reported`` is what to show.
    """

    def __init__(self) -> None:
        self.tables: dict[str, Tensor] = {}

    def add(self, module: PointwiseModule) -> None:
        """Adds what the module's last training step found."""
        measured, samples = module.measured, module.multipliers.samples
        if measured is None or not samples:  # Rows of a stream belong to no known sample.
            return
        for name, violation in measured.judged.items():
            if name not in self.tables:
                self.tables[name] = torch.full((samples, violation.shape[1]), math.nan)
            mask = measured.masks[name]
            rows = mask.any(1)  # Padding is of no sample, and has no index of its own.
            found = violation[rows].float().masked_fill(~mask[rows], math.nan)
            self._add(module, name, measured.index[rows], found)

    def _add(self, module: PointwiseModule, name: str, index: Tensor, found: Tensor) -> None:
        self.tables[name][index] = found


class MeanViolations(LastViolations):
    """The mean over the visits, as reported, the first left out where there is another.

    The first is of weights that have hardly been trained, and in a run of few epochs it would
    outweigh the others (benchmarks/README.md, "Which ranking finds label errors").
    """

    def __init__(self) -> None:
        super().__init__()
        self.visits: dict[str, Tensor] = {}  # int32, as the tables

    def _add(self, module: PointwiseModule, name: str, index: Tensor, found: Tensor) -> None:
        table = self.tables[name]
        counts = self.visits.setdefault(name, torch.zeros(table.shape, dtype=torch.int32))
        found = module.constraints[name].reported(found)
        counted = found.isfinite()
        visits, before = counts[index] + counted.int(), table[index]
        # Visits 1 and 2 replace what is there; visit n ≥ 3 is the (n − 1)th of the mean.
        after = torch.where(visits <= 2, found, before + (found - before) / (visits - 1))
        table[index] = torch.where(counted, after, before)
        counts[index] = visits
