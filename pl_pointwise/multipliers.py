"""λ: where it lives. Whose it is, lagrangian/scopes.py tells.

λ is float32, on the CPU, in training-set order, a row per sample. It is neither a Parameter (DDP
would divide its step by the number of ranks) nor a buffer (DDP would overwrite it from rank 0, and
a bf16 module would cast it). A batch's rows cost O(batch).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from .errors import OF_METHODS, TrainingError, Words


class Multipliers(Mapping[str, Tensor]):
    """λ of every constraint: (N, K) for multipliers per sample, () for one per constraint.

    An interval has its two sides side by side: (N, 2K), or (2,). A table is allocated when its
    number of columns K is first seen; every rank holds the same values. ``samples`` is N. Where the
    samples are of groups ``groups``, (N,) int64, is the row of each sample's group, else None; a
    table is then (G, K).

    >>> multipliers = Multipliers(samples=3)  # module.multipliers, once a module is trained
    >>> multipliers.load_state_dict({"fit": torch.tensor([[0.0], [2.0], [0.5]])})
    >>> multipliers["fit"][:, 0].argsort(descending=True)  # the hardest sample first
    tensor([1, 2, 0])
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        # (N,), of each sample, where a row is a group's.
        self.groups: Tensor | None = None
        self.words: Words = OF_METHODS  # How errors call what its user gives.
        self._tables: dict[str, Tensor] = {}
        self._initial: dict[str, Tensor] = {}  # Of tables that are not allocated yet.

    def __getitem__(self, name: str) -> Tensor:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def of(self, name: str, index: Tensor) -> Tensor:
        """λ of samples, (b, sides·K), a copy: of groups each sample has its group's.

        Args:
            name: the constraint.
            index: (b,), positions in the training set, from 0; −1, of padding, gets 0.

        Raises:
            KeyError: a constraint that has no multipliers, or none yet.
            ValueError: a constraint with one λ for the batch: ``multipliers[name]``.
        """
        table = self._tables[name]
        if table.dim() < 2:
            raise ValueError(
                f'Multipliers of "{name}": one for all samples, multipliers[{name!r}].'
            )
        index = index.cpu()
        real = index >= 0
        # Padding looks up the first row, and is cleared: −1 would be the last sample's.
        rows = index.clamp(min=0)
        if self.groups is not None:
            rows = self.groups[rows]
        return table[rows].masked_fill(~real[:, None], 0.0)

    def reset(self, *names: str) -> None:
        """λ of these constraints, or of all, starts again from 0; KeyError for an unknown name."""
        known = {**self._tables, **self._initial}
        unknown = [name for name in names if name not in known]
        if unknown:
            raise KeyError(
                f"no multipliers of {', '.join(unknown)}; there are {', '.join(known)}"
            )
        for name in names or known:
            self._tables.pop(name, None)
            self._initial.pop(name, None)

    def set(self, name: str, values: Tensor | float) -> None:
        """λ of a constraint from now on, or from the first step of the next fit.

        values: one number, (N, K) for one per sample and column ((N,) for K = 1), or () and (2,)
        for one per side. Either sign for an equality, else ≥ 0.

        Raises:
            ValueError: values that are not finite, or of another shape than there are.
        """
        values = torch.as_tensor(values).detach().to("cpu", torch.float32, copy=True)
        if values.dim() > 2 or not torch.isfinite(values).all():
            raise ValueError(
                f'Multipliers of "{name}": needs finite numbers, one or of shape (N, K), got '
                f"{tuple(values.shape)}."
            )
        table = self._tables.get(name)
        # Its shape is known with the first batch.
        if table is None:
            self._initial[name] = values
            return
        expanded = _as_table(values, tuple(table.shape))
        if expanded is None:
            raise ValueError(
                f'Multipliers of "{name}" have shape {tuple(table.shape)}, the values '
                f"{tuple(values.shape)}. Call reset({name!r}) first to give them another."
            )
        table.copy_(expanded)

    def for_samples(self, samples: int) -> Multipliers:
        """A store for another training set, from 0 or from what :meth:`set` was given before."""
        store = Multipliers(samples)
        store._initial = dict(self._initial)
        store.words = self.words
        return store

    def pending(self) -> dict[str, Tensor]:
        """What :meth:`set` was given for multipliers that no step has needed yet."""
        return self._initial

    def state_dict(self) -> dict[str, Tensor]:
        """The tables themselves, not copies."""
        return dict(self._tables)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes copies of tables; refuses those of other samples, or not finite."""
        for name, table in state.items():
            if table.dim() > 2 or (table.dim() == 2 and len(table) != self.samples):
                raise ValueError(
                    f'"{name}": {tuple(table.shape)} for {self.samples:,} samples'
                )
            if not torch.isfinite(table).all():
                raise ValueError(f'"{name}": multipliers that are not finite')
        self._tables = {
            name: torch.zeros(table.shape, dtype=torch.float32).copy_(table)
            for name, table in state.items()
        }

    def table(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """λ of a constraint, not a copy; of a shape allocated where it is not yet, or refused."""
        if shape is None:
            return self._tables[name]
        if name not in self._tables:
            initial = self._initial.get(name, torch.zeros((), dtype=torch.float32))
            values = _as_table(initial, shape)
            if values is None:
                raise TrainingError(
                    f'Constraint "{name}": initial multipliers of shape {tuple(initial.shape)} for '
                    f"a table of shape {shape}. Give {self.words.owner}.multipliers.set() one "
                    "number, or that."
                )
            self._tables[name] = values.clone()
            self._initial.pop(name, None)
        table = self._tables[name]
        if tuple(table.shape) != shape:
            raise TrainingError(
                f'Constraint "{name}": multipliers of shape {tuple(table.shape)}, values that need '
                f"{shape}. A sample has as many values in every batch: pad to one width, not to "
                f"each batch's longest row, and mark what is missing in {self.words.masks}. Is the "
                "width the batch's size, then (B, 1) was broadcast against (B,): bring both to "
                "(B,), as by prediction[:, 0]. Of another task, call "
                f"{self.words.owner}.multipliers.reset()."
            )
        return table


def _as_table(values: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """One number, or a value per row and column, as a table of ``shape``; None if it is neither."""
    # One column is what most constraints have, and what a user gives as (N,).
    if values.dim() == 1 and len(shape) == 2 and shape[1] == 1:
        values = values[:, None]
    return (
        values.expand(shape)
        if values.dim() == 0 or tuple(values.shape) == shape
        else None
    )
