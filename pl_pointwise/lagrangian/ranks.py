"""What the ranks of torch.distributed add up and gather; where it does not run, one rank."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor


def number_of_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def over_ranks(value: Tensor, operation: Literal["sum", "max"]) -> Tensor:
    """The sum or the largest of every rank's value; all ranks call it."""
    if number_of_ranks() > 1:
        value = value.clone()
        dist.all_reduce(value, dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX)
    return value


def rows_of_all_ranks(rows: Tensor) -> Tensor:
    """(R, columns): the rows (b, columns) of every rank, in their order; b is the same on all."""
    ranks = number_of_ranks()
    if ranks == 1:
        return rows
    found = [torch.empty_like(rows) for _ in range(ranks)]
    dist.all_gather(found, rows.contiguous())
    return torch.cat(found)
