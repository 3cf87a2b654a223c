"""The violation of every training sample at its last visit, and its mean over the visits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pl_pointwise.module import PointwiseModule


class LastViolations:
    """By constraint (N, sides·K) float32 on the CPU; NaN where a sample was not visited, does not
    carry the column, or had a value that is not finite. Updating costs O(batch).

    Values of training: each is of the weights at its visit, and against the training tolerance.
    Of an equality as its formulation acts on it; ``Constraint.reported`` is what to show.
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
            rows = mask.any(1)
            found = violation[rows].float().masked_fill(~mask[rows], math.nan)
            self.tables[name][measured.index[rows]] = found


class MeanViolations:
    """By constraint (N, sides·K) float32 on the CPU: the mean over the visits, the first left out.

    Of a sample with one visit it is that one's. The first is of weights that have hardly been
    trained, and in a run of few epochs it would outweigh the others (benchmarks/README.md, "Which
    ranking finds label errors"). Of an equality the mean distance. NaN as in LastViolations; a
    visit that does not count leaves the mean as it is. Updating costs O(batch).
    """

    def __init__(self) -> None:
        self.tables: dict[str, Tensor] = {}
        self.visits: dict[str, Tensor] = {}  # int32, alike

    def add(self, module: PointwiseModule) -> None:
        """Adds what the module's last training step found."""
        measured, samples = module.measured, module.multipliers.samples
        if measured is None or not samples:
            return
        for name, violation in measured.judged.items():
            if name not in self.tables:
                self.tables[name] = torch.full((samples, violation.shape[1]), math.nan)
                self.visits[name] = torch.zeros(samples, violation.shape[1], dtype=torch.int32)
            found = module.constraints[name].reported(violation).float()
            mask = measured.masks[name] & found.isfinite()
            rows = mask.any(1)  # Padding is of no sample, and has no index of its own.
            index, found, mask = measured.index[rows], found[rows], mask[rows]
            visits, before = self.visits[name][index] + mask.int(), self.tables[name][index]
            # Visits 1 and 2 replace what is there; visit n ≥ 3 is the (n − 1)th of the mean.
            after = torch.where(visits <= 2, found, before + (found - before) / (visits - 1))
            self.tables[name][index] = torch.where(mask, after, before)
            self.visits[name][index] = visits
