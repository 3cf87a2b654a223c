"""The violations of one evaluated data set, sample by sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed
from torch import Tensor

from .certificates import worst_per_sample


@dataclass(frozen=True)
class Evaluated:
    """Violations of one constraint after a full pass, of all ranks, on the CPU.

    One row per sample that carries the constraint, in data-set order; rows that only filled up a
    rank are gone. An interval has the upper side's K columns, then the lower side's.
    """

    index: Tensor
    """(n,) int64, each sample's position in its data set."""
    violation: Tensor
    """(n, sides·K), positive violates; NaN where the sample does not carry the element."""
    carried: Tensor
    """bool, (n, sides·K)."""

    def pooled(self) -> Tensor:
        """(m,), the elements that are carried, in one row."""
        return self.violation[self.carried]

    def worst(self) -> Tensor:
        """(n,), the largest violation of each sample: what to certify (certificates.py)."""
        return worst_per_sample(self.violation, self.carried)


def gather(batches: Sequence[Evaluated], sides: int) -> Evaluated:
    """The batches of all ranks as one pass; a collective where there are several ranks.

    batches: on any device, padding (index −1), rows that carry nothing and any value where not
        carried included. They may differ in K: missing columns are carried by nobody. None: a rank
        that had no batch.
    """
    parts = [Evaluated(b.index.cpu(), b.violation.cpu(), b.carried.cpu()) for b in batches]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        ranks: list[list[Evaluated]] = [parts] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(ranks, parts)
        parts = [part for rank in ranks for part in rank]
    if not parts:
        nothing = torch.zeros(0, sides)
        return Evaluated(torch.zeros(0, dtype=torch.long), nothing, nothing.bool())
    width = max(part.violation.shape[1] for part in parts) // sides
    index = torch.cat([part.index for part in parts])
    violation = torch.cat([_widened(part.violation, sides, width) for part in parts])
    carried = torch.cat([_widened(part.carried, sides, width) for part in parts])
    order = index.argsort(stable=True)
    order = order[carried[order].any(1)]
    carried = carried[order]
    return Evaluated(index[order], violation[order].masked_fill(~carried, math.nan), carried)


def _widened(rows: Tensor, sides: int, width: int) -> Tensor:
    """(b, sides·width): each side's missing columns are zeros, or False."""
    missing = width - rows.shape[1] // sides
    return torch.nn.functional.pad(rows.unflatten(1, (sides, -1)), (0, missing)).flatten(1)
