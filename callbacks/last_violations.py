"""The violation of every training sample at its last visit."""

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
        for name, violation in measured.violations.items():
            if name not in self.tables:
                self.tables[name] = torch.full((samples, violation.shape[1]), math.nan)
            mask = measured.masks[name]
            rows = mask.any(1)
            found = violation[rows].float().masked_fill(~mask[rows], math.nan)
            self.tables[name][measured.index[rows]] = found
