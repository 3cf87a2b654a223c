"""The order of an epoch over ranks, and what its rows draw in a loader's workers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler


class PointwiseSampler(DistributedSampler[Any]):
    """Every sample once an epoch, over any number of ranks; padding is marked, not disguised.

    With k ranks and batches of B, the ranks' j-th batches together are the j-th batch of kB of a
    single rank. Ranks that run short get positions −1−i instead of a repetition of sample i. A
    DistributedSampler by type, so that Lightning leaves it in place.

    Args:
        dataset: anything with a length.
        num_replicas, rank: world size and global rank.
        shuffle: a new order each epoch, a function of ``seed`` and the epoch alone.
        strata: the kind of each sample, (N,). A shuffled order then spreads every kind evenly.

    >>> from pl_pointwise.data import PointwiseSampler
    >>> list(PointwiseSampler(range(5), num_replicas=2, rank=0, shuffle=False))
    [0, 2, 4]
    >>> list(PointwiseSampler(range(5), num_replicas=2, rank=1, shuffle=False))  # Padded.
    [1, 3, -1]
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        num_replicas: int = 1,
        rank: int = 0,
        shuffle: bool = True,
        seed: int = 0,
        strata: Sequence[int] | None = None,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed)  # type: ignore[arg-type]
        self.strata = None if strata is None else torch.as_tensor(strata)
        self.skip = 0  # Positions of this rank to leave out in the next iteration only.
        # Whether a worker's rows draw by sample; see Drawing.
        self.draws_by_sample = False

    def order(self) -> Tensor:
        """Positions of all ranks in this epoch's order, padding marked; rank r takes [r::k]."""
        count = len(self.dataset)  # type: ignore[arg-type]
        # The same order in half the memory.
        dtype = torch.int32 if count < 2**31 else torch.int64
        if self.shuffle:
            # Not seed + epoch: the next seed would repeat this one's orders, an epoch earlier.
            seed = self.seed if self.epoch == 0 else mixed(self.seed, self.epoch)
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(count, generator=generator, dtype=dtype)
            if self.strata is not None:
                order = _spread(order, self.strata[order], generator)
        else:
            order = torch.arange(count, dtype=dtype)
        missing = -count % self.num_replicas
        return torch.cat([order, -1 - order[torch.arange(missing) % max(1, count)]])

    def __iter__(self) -> Iterator[Any]:
        mine = torch.as_tensor(self.order())  # A subclass may give a list.
        mine = mine[self.rank :: self.num_replicas][self.skip :]
        if self.num_replicas > 1:
            mine = mine.clone()  # A view would keep all ranks'.
        self.skip = 0
        draws = mixed(self.seed, self.epoch) if self.draws_by_sample else None
        numbers = _numbers(mine)
        return (
            numbers if draws is None else (Drawing(number, draws) for number in numbers)
        )


class Drawing(NamedTuple):
    """A position whose row draws by seed, epoch and sample alone, in a loader's worker too."""

    position: int
    draws: int

    def start(self) -> int:
        """Seeds the generators of this process, a loader's worker; returns the position."""
        sample = self.position if self.position >= 0 else -1 - self.position
        seed = mixed(self.draws, sample)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        return self.position


def _numbers(positions: Tensor) -> Iterator[int]:
    """Positions as numbers: all of them at once would take ten times the memory."""
    for part in positions.split(65536):
        yield from part.tolist()


def mixed(*numbers: int) -> int:
    """A number of 64 bits from several, in which near ones are far apart."""
    text = ",".join(str(int(number)) for number in numbers)
    return int.from_bytes(
        hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"
    )


def _spread(order: Tensor, strata: Tensor, generator: torch.Generator) -> Tensor:
    """The positions so reordered that each stratum stands evenly in them, in its own order.

    The j-th of n samples is put at (j + u)/n of the way, u uniform on [0, 1), one a stratum.
    """
    place = torch.empty(len(order), dtype=torch.float64)
    for stratum in strata.unique():
        of_it = strata == stratum
        size = int(of_it.sum())
        phase = torch.rand((), generator=generator, dtype=torch.float64)
        place[of_it] = (torch.arange(size, dtype=torch.float64) + phase) / size
    return order[place.argsort(stable=True)]
