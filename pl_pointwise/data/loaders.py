"""A loader that resumes in the midst of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..errors import DataError
from .indexed import IndexedDataset
from .sampler import PointwiseSampler


class ResumableDataLoader(DataLoader[Any]):
    """A DataLoader over a :class:`PointwiseSampler` that continues in mid-epoch, with workers too.

    Its state: the sampler's seed and epoch, batches handed out, and samples a batch over all ranks.
    ``dataset``, ``batch_size``, ``collate_fn`` and ``num_workers`` are as DataLoader's.

    >>> from torch.utils.data import default_collate
    >>> from pl_pointwise.data import IndexedDataset, PointwiseSampler, ResumableDataLoader
    >>> rows = IndexedDataset([{"x": float(number)} for number in range(4)])
    >>> sampler = PointwiseSampler(rows, shuffle=False)
    >>> loader = ResumableDataLoader(rows, sampler, batch_size=2, collate_fn=default_collate)
    >>> [batch["index"].tolist() for batch in loader]
    [[0, 1], [2, 3]]
    """

    sampler: PointwiseSampler

    def __init__(
        self,
        dataset: IndexedDataset,
        sampler: PointwiseSampler,
        batch_size: int,
        collate_fn: Callable[[list[dict[str, Any]]], Any],
        num_workers: int = 0,
    ) -> None:
        super().__init__(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            collate_fn=collate_fn,
            num_workers=num_workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=num_workers > 0,
            # Its own generator: starting an epoch must not draw from the global random state.
            generator=torch.Generator().manual_seed(sampler.seed),
        )
        sampler.draws_by_sample = num_workers > 0
        self.position = 0  # Batches handed out in the current epoch.
        self._resume_at: Mapping[str, int] | None = None

    @property
    def _global_batch_size(self) -> int:
        return (self.batch_size or 1) * self.sampler.num_replicas

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator body runs at the first batch, after Lightning has set the sampler's epoch,
        # which is one too far after a stop in mid-epoch by max_steps.
        resumed = self._resume_at
        self._resume_at = None
        self.position = resumed["position"] if resumed else 0
        if resumed and self.position:
            if resumed["global_batch_size"] != self._global_batch_size:
                raise DataError(
                    f"This checkpoint stopped after {self.position} batches of an epoch, of "
                    f"{resumed['global_batch_size']} samples over all ranks; now a batch has "
                    f"{self._global_batch_size}. Set the same."
                )
            self.sampler.set_epoch(resumed["epoch"])
        self.sampler.skip = self.position * (self.batch_size or 1)
        for batch in super().__iter__():
            self.position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands; a finished epoch is the start of the next."""
        finished = self.position >= len(self)
        return {
            "seed": self.sampler.seed,
            "epoch": self.sampler.epoch + finished,
            "position": 0 if finished else self.position,
            "global_batch_size": self._global_batch_size,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at ``state`` in the next iteration; at the start of an epoch, in that epoch."""
        self.sampler.seed = state["seed"]
        self._resume_at = state
