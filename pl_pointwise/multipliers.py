"""Where λ lives: float32, on the CPU, in training-set order, one row per sample.

λ is neither a Parameter (DDP would divide its step by the number of ranks, and an optimizer would
pick it up) nor a buffer (DDP would overwrite it from rank 0, and a bf16 module would cast it:
256 + 0.5 stays 256 there). Reading and writing a batch's rows costs O(batch), whatever N is, and
only those rows ever visit the accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from .errors import TrainingError


class Multipliers(Mapping[str, Tensor]):
    """λ of every constraint: (N, K) for multipliers per sample, () or (2,) for one per constraint.

    The tables of a constraint are allocated, as zeros, when its number of columns K is first seen.
    An interval has its two sides side by side: (N, 2K), or (2,) where the multiplier is one per
    constraint. Every rank holds the same values, because every rank makes the same updates.

    Args:
        samples: N, the number of training samples.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._tables: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {tuple(table.shape)}" for name, table in self.items())
        return f"Multipliers({self.samples} samples; {shapes})"

    def rows(self, name: str, index: Tensor, columns: int) -> Tensor:
        """λ of the samples ``index`` (B,), as a copy (B, columns); zero for index −1 (padding).

        Raises:
            TrainingError: an index outside the training set, or K differs from what it was.
        """
        table = self._table(name, (self.samples, columns))
        if len(index) and (int(index.max()) >= self.samples or int(index.min()) < -1):
            raise TrainingError(
                f"Sample index {int(index.max())} is outside the training set of {self.samples} "
                'samples: batch["index"] must be the sample\'s position in it.'
            )
        rows = table[index.clamp(min=0)] if self.samples else table.new_zeros(len(index), columns)
        return rows.masked_fill((index < 0)[:, None], 0.0)

    def write(self, name: str, index: Tensor, rows: Tensor) -> None:
        """Sets λ of the samples ``index`` (B,), all ≥ 0 and distinct, to ``rows`` (B, K)."""
        self._tables[name][index] = rows.to(torch.float32)

    def scalar(self, name: str, sides: int) -> Tensor:
        """λ of a constraint with one multiplier per side, as a copy (sides,)."""
        return self._table(name, () if sides == 1 else (sides,)).reshape(sides).clone()

    def write_scalar(self, name: str, value: Tensor) -> None:
        """Sets the multiplier of each side, (sides,)."""
        table = self._tables[name]
        table.copy_(value.reshape(table.shape))

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._tables)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        # A checkpoint may have been mapped to another device.
        self._tables = {
            name: table.to("cpu", torch.float32, copy=True) for name, table in state.items()
        }

    def _table(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._tables:
            self._tables[name] = torch.zeros(shape, dtype=torch.float32)
        table = self._tables[name]
        if tuple(table.shape) != shape:
            raise TrainingError(
                f'Constraint "{name}": multipliers of shape {tuple(table.shape)}, values that need '
                f"{shape}. A vector-valued constraint needs the same number of columns in every "
                "batch; mark the missing ones in membership()."
            )
        return table
