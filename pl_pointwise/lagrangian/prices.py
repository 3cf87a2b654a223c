"""What each requirement costs: the force on it, averaged over the later part of a run.

λ as a run leaves it is no price: it falls where a sample has slack and rises where it violates, so
that most are 0 at any moment, and the others are where their sample was last violated. At an
optimum the weights rest, and the forces on them are balanced over many steps, not in each one. So
the price of a requirement is the mean of ∂ψ/∂v over the visits of its sample, of which λ is a part:
the other one is what augments it, all there is before λ has moved, and in a stream.

How long a run will be is not known in a loop of one's own. Steps are summed in blocks, each half as
long as all before it, and the block before this one is kept: the two cover between a third and 56 %
of the steps so far, the last ones. A sample that they have not visited keeps what was before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from ..formulations import Formulation, Pointwise, Scale
from .terms import Measured, group_numbers

FIRST = 10
"""Steps of the first block."""
GROWTH = 1.5
"""From the end of one block to the end of the next, in steps of the run."""
UNREAD_STEPS = 64
UNREAD_ROWS = 8192
"""What is summed at once, at most: so many steps, or so many samples."""


@dataclass(frozen=True)
class Step:
    """A step of the weights, as it was taken.

    .. versionadded:: 0.3.0
    """

    measured: Measured  #: what its micro-batches gave
    in_force: Mapping[str, Formulation]  #: by constraint, with α a number
    #: λ, () or (2,), of the constraints on a batch's statistic
    statistics: Mapping[str, Tensor]
    dual_first: bool = False  #: whether the weights followed λ after this step's update
    #: bool (R,), samples without force
    exempt: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass
class _Block:
    """Sums of some steps for one constraint."""

    sums: Tensor  # (rows, sides·K) float32; of a batch's statistic (1, sides)
    visits: Tensor  # (rows, 1) float32

    @classmethod
    def empty(cls, rows: int, columns: int) -> _Block:
        table = torch.zeros(rows, columns, dtype=torch.float32)
        return cls(table, torch.zeros(rows, 1, dtype=torch.float32))

    def add(self, index: Tensor, forces: Tensor, applies: Tensor) -> None:
        """index (n,), forces (n, sides·K), applies bool (n,): which samples are visited."""
        self.sums.index_add_(0, index, forces)
        self.visits.index_add_(0, index, applies.to(self.visits)[:, None])

    def parts(self) -> list[Tensor]:
        """As a checkpoint holds it."""
        return [self.sums, self.visits]

    def or_else(self, other: _Block) -> _Block:
        """The other's rows where this has no visit."""
        seen = self.visits > 0
        return _Block(
            torch.where(seen, self.sums, other.sums),
            torch.where(seen, self.visits, other.visits),
        )


class Prices(Mapping[str, Tensor]):
    """The price of every requirement, by constraint: (N, sides·K) float32, as its multipliers.

    Loosening the bound of a value by δ lowers the mean objective by price · δ / (N·K), with N the
    samples that the constraint applies to and K its values of a sample. At least 0, of an equality
    of either sign, where a larger c lowers the objective if it is below 0. NaN of a sample that was
    never visited, 0 of a value that a mask leaves out. Of a batch's statistic: the mean of its λ,
    () or (2,). Of groups each sample has its own; :meth:`of_groups` averages.

    .. versionadded:: 0.3.0

    >>> prices = Prices(samples=3)
    >>> prices.add_forces("fit", torch.tensor([0, 2]), torch.tensor([[1.0], [0.0]]))
    >>> prices["fit"][:, 0]
    tensor([1., nan, 0.])

    Args:
        samples: N, of the training set; 0 of a stream, of which only :meth:`mean` is known.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.steps = 0
        self._end = FIRST  # Of this block, in steps.
        self._before: dict[str, _Block] = {}  # The block before this one.
        self._now: dict[str, _Block] = {}
        self._unread: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
        # Constraints with one λ, not an interval's two.
        self._scalars: set[str] = set()

    # A step ---------------------------------------------------------------------------------------

    def add(
        self,
        measured: Measured,
        in_force: Mapping[str, Formulation],
        multipliers: Mapping[str, Tensor],
        dual_first: bool = False,
    ) -> None:
        """Adds a step, before its dual step.

        Args:
            measured: of the step.
            in_force: the formulations by constraint, with α a number.
            multipliers: all tables; those of a batch's statistic are read.
            dual_first: whether the weights followed λ after the step's update.
        """
        self.add_steps([Step(measured, in_force, multipliers, dual_first)])

    def add_steps(self, steps: Sequence[Step]) -> None:
        """Adds steps with as many rows and columns each, in their order."""
        begin = 0
        while begin < len(steps):
            part = steps[begin : begin + self._end - self.steps]
            begin += len(part)
            self.steps += len(part)
            for name, formulation in part[0].in_force.items():
                if formulation.scope == "batch":
                    for step in part:
                        self._add_statistic(name, step.statistics.get(name))
                elif formulation.scope == "sample" and len(part[0].measured.index):
                    self._add_samples(name, part)
            if self.steps >= self._end:
                self._turn()

    def _add_samples(self, name: str, steps: Sequence[Step]) -> None:
        index = torch.cat([step.measured.index for step in steps])
        forces = _forces(name, steps).flatten(0, 1)
        if name in steps[0].exempt:
            exempt = torch.cat([step.exempt[name] for step in steps])
            forces = torch.where(exempt[:, None], 0, forces)
        mask = None
        if not all(step.measured.whole for step in steps):
            mask = torch.cat([step.measured.masks[name] for step in steps])
        self.add_forces(name, index, forces, mask)

    def add_forces(
        self, name: str, index: Tensor, forces: Tensor, mask: Tensor | None = None
    ) -> None:
        """Adds ∂ψ/∂v of samples, (n, sides·K), where the mask, alike, is True."""
        applies = torch.ones(len(index), dtype=torch.bool)
        if mask is not None:
            forces, applies = torch.where(mask, forces, 0), mask.any(1)
            index = index.clamp(min=0)  # No mask is True on padding.
        waiting = self._unread.setdefault(name, [])
        waiting.append((index, forces, applies))
        if len(waiting) >= UNREAD_STEPS or len(waiting) * len(index) >= UNREAD_ROWS:
            self._read(name)

    def _add_statistic(self, name: str, multiplier: Tensor | None) -> None:
        if multiplier is None:  # No batch has had a value yet.
            return
        # A block has rows and columns; asked for, such a price is a number again.
        if multiplier.dim() == 0:
            self._scalars.add(name)
        row = multiplier.detach().reshape(1, -1)
        block = self._block(name, 1, row.shape[1])
        block.add(
            torch.zeros(1, dtype=torch.long),
            row.float(),
            torch.ones(1, dtype=torch.bool),
        )

    def _block(self, name: str, rows: int, columns: int) -> _Block:
        if name not in self._now:
            self._now[name] = _Block.empty(rows, columns)
        return self._now[name]

    def _read(self, name: str) -> None:
        """Sums the steps of a constraint that wait."""
        waiting = self._unread.pop(name, [])
        if not waiting:
            return
        index, forces, applies = map(torch.cat, zip(*waiting, strict=True))
        # Of a stream all samples share a row: there is a mean alone.
        if not self.samples:
            index = torch.zeros_like(index)
        block = self._block(name, max(1, self.samples), forces.shape[1])
        block.add(index, forces.float(), applies)

    def _read_all(self) -> None:
        for name in [*self._unread]:
            self._read(name)

    def _turn(self) -> None:
        """The next block begins."""
        self._read_all()
        for name, block in self._now.items():
            before = self._before.get(name)
            self._before[name] = block if before is None else block.or_else(before)
        self._now = {}
        self._end = int(GROWTH * self.steps) + 1

    # What is asked for ----------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Tensor:
        block = self._window(name)
        means = block.sums / block.visits  # 0 / 0 is NaN.
        if name in self._scalars:
            return means[0, 0]
        return means

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._before, *self._now, *self._unread]))

    def __len__(self) -> int:
        return len([*iter(self)])

    def mean(self, name: str) -> Tensor:
        """The mean over the samples that were visited, of each column, (sides·K,)."""
        return self[name].reshape(-1, self._window(name).sums.shape[1]).nanmean(0)

    def of_groups(self, name: str, groups: Sequence[int] | Tensor) -> Tensor:
        """The mean over each group's samples, (G, sides·K); NaN of a group without a visit.

        Args:
            name: the constraint.
            groups: (N,), the number of each sample's group, from 0.

        Raises:
            DataError: groups that are not one number for each sample; a constraint that has no
                price of samples: a batch's statistic, or of a stream.
        """
        of_samples = self[name]
        if of_samples.dim() != 2 or len(of_samples) != self.samples:
            raise DataError(f'"{name}" has no price of a sample, only mean({name!r}).')
        owners = group_numbers(groups, self.samples)
        seen = ~of_samples.isnan()
        shape = (int(owners.max()) + 1, of_samples.shape[1])
        sums = torch.zeros(shape, dtype=of_samples.dtype)
        sums.index_add_(0, owners, of_samples.nan_to_num())
        return sums / torch.zeros_like(sums).index_add_(0, owners, seen.to(sums))

    def _window(self, name: str) -> _Block:
        """This block and the one before."""
        self._read(name)
        now, before = self._now.get(name), self._before.get(name)
        if now is None and before is None:
            raise KeyError(name)
        if before is None:
            assert now is not None  # One of both there is.
            return now
        if now is None:
            return before
        return _Block(now.sums + before.sums, now.visits + before.visits)

    # In a checkpoint ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""
        self._read_all()
        return {
            "samples": self.samples,
            "steps": self.steps,
            "end": self._end,
            "scalars": sorted(self._scalars),
            "before": {name: block.parts() for name, block in self._before.items()},
            "now": {name: block.parts() for name, block in self._now.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from :meth:`state_dict`.

        Raises:
            ValueError: of another number of samples.
        """
        if int(state["samples"]) != self.samples:
            raise ValueError(
                f"prices of {state['samples']} samples, here {self.samples}"
            )
        self.steps, self._end = int(state["steps"]), int(state["end"])
        self._scalars, self._unread = set(state["scalars"]), {}
        self._before = _blocks_from(state["before"])
        self._now = _blocks_from(state["now"])


def _blocks_from(state: Mapping[str, Any]) -> dict[str, _Block]:
    """Copies of what :meth:`_Block.parts` gave, by constraint."""
    return {
        name: _Block(sums.clone(), visits.clone())
        for name, (sums, visits) in state.items()
    }


def forces_of(name: str, step: Step) -> Tensor:
    """∂ψ/∂v of the samples of a step, (R, sides·K); 0 where a mask or a share leaves them out."""
    forces = _forces(name, [step])[0]
    if name in step.exempt:
        forces = torch.where(step.exempt[name][:, None], 0, forces)
    return torch.where(step.measured.masks[name], forces, 0)


def _forces(name: str, steps: Sequence[Step]) -> Tensor:
    """∂ψ/∂v of the samples of steps with as many rows each, (steps, R, sides·K).

    In one go where that gives the same: for a small model a step takes less time than its sums.
    """
    formulations = [step.in_force[name] for step in steps]
    first, several = formulations[0], len(steps) > 1
    constant = all(formulation is first for formulation in formulations)
    in_one_go = several and not any(step.dual_first for step in steps)
    if in_one_go and constant:
        return first.slope(*_stacked(name, steps))
    if in_one_go and type(first) is Pointwise and first.scale is not None:
        scales = [formulation.scale for formulation in formulations]  # type: ignore[attr-defined]
        return first.scaled(_scale_of_each(scales)).slope(*_stacked(name, steps))
    forces = []
    for step, formulation in zip(steps, formulations, strict=True):
        violation, multiplier = (part[0] for part in _stacked(name, [step]))
        # The weights followed the λ of after the update, which is computed again.
        if step.dual_first:
            multiplier = formulation.ascend(step.measured.judged[name], multiplier)
        forces.append(formulation.slope(violation, multiplier))
    return torch.stack(forces)


def _stacked(name: str, steps: Sequence[Step]) -> tuple[Tensor, Tensor]:
    """Violations and λ, (steps, R, sides·K) each; λ is 0 where there is none."""
    violation = torch.stack([step.measured.followed[name] for step in steps])
    tables = [step.measured.multipliers.get(name) for step in steps]
    known = [table for table in tables if table is not None]
    multiplier = (
        torch.stack(known) if len(known) == len(tables) else torch.zeros_like(violation)
    )
    return violation, multiplier


def _scale_of_each(scales: Sequence[Scale]) -> Any:
    """The numbers of each step, (steps, 1, 1); while nothing was violated the force is λ."""
    idle = Scale(alpha=0.0, reach=math.inf)
    known = [scale if scale.alpha is not None else idle for scale in scales]

    def each(attribute: str) -> Any:
        numbers = [getattr(scale, attribute) for scale in known]
        return torch.tensor(numbers, dtype=torch.float64)[:, None, None]

    return Scale(each("alpha"), 0.0, each("reach"), each("margin"))
