"""The terms of one step as tensors: who carries them, how they are averaged, what they came to.

Shapes: b rows in a micro-batch, R rows in the whole step over all ranks, K columns of a
vector-valued constraint (1 for a scalar one), ``sides`` 2 for an interval and else 1. The columns
of an interval are the upper side's K, then the lower side's K.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import DataError
from .formulations import Constraint

OBJECTIVE = "objective"


@dataclass
class MicroBatch:
    """A piece of the step's batch: b rows, forwarded and differentiated together."""

    batch: Any
    index: Tensor  # (b,) on the CPU, −1 for padding
    members: dict[str, Tensor]  # bool (b,) or (b, K) per term, padding excluded


@dataclass
class Found:
    """The violations of one constraint that stand for the batch: a step's, or one rank's part."""

    parts: list[tuple[Tensor, Tensor]]  # violations and who carries them, (b, sides·K) both
    count: Tensor | int  # samples that carry it, over all ranks, those left out included
    left_out: Tensor  # share of the count that was left out; such a sample counts as one at v = 0
    over_ranks: bool  # whether the other ranks have parts too


@dataclass
class Price:
    """What one violation costs where ψ acts on one figure of the batch: slope · inner(v − anchor).

    Its gradient is that of ψ: the figure is not linear in v, but its derivative in each v is this.
    """

    anchor: Tensor  # (sides,)
    slope: Tensor  # (sides,), ∂ψ/∂(mean of inner)


@dataclass
class Record:
    """What a step found, for all ranks, on the CPU."""

    index: Tensor  # (R,)
    objective: Tensor  # (R,)
    violations: dict[str, Tensor]  # (R, sides·K), zero where not a member
    members: dict[str, Tensor]  # bool, (R,) for the objective, else as the violations
    counts: dict[str, int]  # rows that carry each term, those left out later included
    gradient_norm: float

    def rows(self, keep: Tensor, gradient_norm: float) -> Record:
        """The rows to keep, bool (R,), with the norm of the gradient that they alone gave."""
        return Record(
            index=self.index[keep],
            objective=self.objective[keep],
            violations={name: violation[keep] for name, violation in self.violations.items()},
            members={name: carried[keep] for name, carried in self.members.items()},
            counts=self.counts,
            gradient_norm=gradient_norm,
        )

    def poisoned(self) -> Tensor:
        """(R,) bool: rows in which a value they carry is not finite.

        A violation beyond float32 counts as infinite: λ, which is float32, would become so.
        """
        bad = ~torch.isfinite(self.objective) & self.members[OBJECTIVE]
        for name, violation in self.violations.items():
            bad |= (~torch.isfinite(violation.float()) & self.members[name]).any(1)
        return bad


@dataclass
class DualStep:
    """A dual step of one constraint, the same on every rank, on the CPU.

    Rows are the R samples that stepped, columns the violation's; or one row for a constraint with
    one multiplier, columns its sides.
    """

    index: Tensor | None  # (R,); None where the multiplier belongs to no sample
    violation: Tensor  # (R, sides·K) or (1, sides): what the step was taken on
    carried: Tensor  # bool, alike
    before: Tensor  # λ, alike
    after: Tensor  # λ, alike


def pack(
    index: Tensor, objective: Tensor, violations: dict[str, Tensor], members: dict[str, Tensor]
) -> Tensor:
    """One row per sample, (b, 3 + 2·columns), for one gather and one copy; see :func:`unpack`.

    In float64, which holds an index up to 2⁵³ (float32 on Apple's GPUs: 2²⁴).
    """
    dtype = widest(objective.device)
    columns = [index.to(objective.device)[:, None], objective[:, None], members[OBJECTIVE][:, None]]
    for name, violation in violations.items():
        columns += [violation, members[name]]
    return torch.cat([column.detach().to(dtype) for column in columns], dim=1)


def unpack(rows: Tensor, columns: Mapping[str, int], gradient_norm: float) -> Record:
    """The record behind packed rows, (R, 3 + 2·columns), on the CPU."""
    members = {OBJECTIVE: rows[:, 2].bool()}
    violations = {}
    start = 3
    for name, width in columns.items():
        violations[name] = rows[:, start : start + width]
        members[name] = rows[:, start + width : start + 2 * width].bool()
        start += 2 * width
    counts = {name: int(carriers(carried).sum()) for name, carried in members.items()}
    return Record(rows[:, 0].long(), rows[:, 1], violations, members, counts, gradient_norm)


def widest(device: torch.device) -> torch.dtype:
    """What every rank sends, whatever the dtype of its values: it may have none left."""
    return torch.float32 if device.type == "mps" else torch.float64


def complete_members(
    members: Mapping[str, Tensor], names: Iterable[str], index: Tensor, device: torch.device
) -> dict[str, Tensor]:
    """Members of every term, bool (b,) or (b, K): all rows where none are given, never padding.

    Raises:
        DataError: a mask that is not bool, or not of b rows.
    """
    everyone = (index >= 0).to(device)
    complete = {}
    for name in names:
        carried = members.get(name)
        if carried is None:
            complete[name] = everyone
            continue
        if carried.dtype != torch.bool or carried.dim() not in (1, 2) or len(carried) != len(index):
            raise DataError(
                f'membership()["{name}"] must be bool of shape ({len(index)},) or '
                f"({len(index)}, K), got {carried.dtype} of shape {tuple(carried.shape)}."
            )
        complete[name] = carried.to(device) & (
            everyone if carried.dim() == 1 else everyone[:, None]
        )
    return complete


def carriers(members: Tensor) -> Tensor:
    """(b,) bool: rows that carry a term at all, from its members (b,) or (b, K)."""
    return members if members.dim() == 1 else members.any(1)


def checked(values: Tensor, name: str, rows: int, vector: bool = True) -> Tensor:
    """Values of a term in float32 or wider, their shape checked: (b,), or with vector (b, K).

    Raises:
        DataError: another shape.
    """
    dims = (1, 2) if vector else (1,)
    if not isinstance(values, Tensor) or values.dim() not in dims or len(values) != rows:
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        wanted = f"({rows},) or ({rows}, K)" if vector else f"({rows},)"
        raise DataError(
            f'"{name}" must have one value per sample, shape {wanted}, got {shape}: '
            "do not reduce over the batch."
        )
    return values if values.dtype == torch.float64 else values.float()


def oriented(
    constraint: Constraint, values: Tensor, carried: Tensor, name: str
) -> tuple[Tensor, Tensor]:
    """Violations (b, sides·K) of values (b,) or (b, K), and who carries them, bool, alike.

    Raises:
        DataError: members of another number of columns than the values.
    """
    violation = constraint.violation(values)
    violation = violation[:, None] if violation.dim() == 1 else violation
    width = violation.shape[1] // constraint.sides
    carried = carried[:, None] if carried.dim() == 1 else carried
    if carried.shape[1] not in (1, width):
        raise DataError(
            f'membership()["{name}"] has {carried.shape[1]} columns, '
            f"constraint_values() {width}: they must agree."
        )
    return violation, carried.expand(-1, width).repeat(1, constraint.sides)


def weights(carried: Tensor, sides: int, dtype: torch.dtype) -> Tensor:
    """(b, sides·K): 1 / (columns the row carries), zero where it carries none.

    In the violations' dtype: the default one is bfloat16 under ``bf16-true``.

    With them a weighted sum over a side averages within each sample; divided by the number of
    samples that carry the constraint, it is the mean of the side.
    """
    per_side = carried.shape[1] // sides
    inner = carried.unflatten(1, (sides, per_side)).sum(2).clamp(min=1)
    return carried.to(dtype) / inner.repeat_interleave(per_side, dim=1)


def side_means(violation: Tensor, normalised: Tensor, sides: int) -> Tensor:
    """(sides,): v̄ of each side, from violations and normalised weights, (b, sides·K) both."""
    return (violation * normalised).unflatten(1, (sides, -1)).sum((0, 2))


def largest(violation: Tensor, carried: Tensor, sides: int) -> Tensor:
    """(sides,): the largest violation of each side that is carried, −inf where none is."""
    alone = violation.masked_fill(~carried, -math.inf).unflatten(1, (sides, -1))
    return alone.transpose(0, 1).flatten(1).amax(1)


def anchored(violation: Tensor, carried: Tensor, anchor: Tensor) -> Tensor:
    """v − a of each side's a, (sides,), in the dtype of v, (b, sides·K); zero where not carried."""
    columns = anchor.to(violation).repeat_interleave(violation.shape[1] // len(anchor))
    return torch.where(carried, violation - columns, 0)


def last_visits(index: Tensor) -> Tensor:
    """Positions of the last occurrence of each distinct entry of ``index``."""
    distinct, inverse = torch.unique(index, return_inverse=True)
    positions = torch.arange(len(index))
    return torch.zeros_like(distinct).scatter_reduce(0, inverse, positions, "amax")


def require_names(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """
    Raises:
        ValueError: a name in ``given`` that is not in ``known``; lists the known ones.
    """
    known = list(known)
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(
            f"{what} names {', '.join(map(repr, unknown))}; "
            f"this module has {', '.join(map(repr, known))}."
        )
