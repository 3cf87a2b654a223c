"""One step: micro-batches, what their terms are by the task, and what the step measured.

Shapes: b samples in a micro-batch, R in the whole step over all ranks, K columns of a constraint,
``sides`` 2 for an interval, the upper one's K columns first, and else 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .data import PADDING
from .errors import DataError
from .random_state import replayed_random_state
from .task import Task, judges_strictly

OBJECTIVE = "objective"
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def widest(device: torch.device) -> torch.dtype:
    """What every rank sends, whatever the dtype of its values."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass
class MicroBatch:
    """A piece of the step's batch: b samples, forwarded and differentiated together."""

    batch: Any
    index: Tensor  # (b,) on the CPU, −1 for padding
    masks: dict[str, Tensor]  # bool (b,) or (b, K) per term, padding excluded


@dataclass
class Terms:
    """Objective and violations of a micro-batch: float32 or wider, zero where the mask is False.

    Here and below the violations of an equality are ℓ − c where its formulation is ``signed``.
    """

    objective: Tensor  # (b,)
    followed: dict[str, Tensor]  # violations (b, sides·K) that the weights follow
    judged: dict[str, Tensor]  # those that the multipliers follow; without a gradient
    masks: dict[str, Tensor]  # bool, (b,) for the objective, else as the violations


@dataclass
class Measured:
    """What a step measured, of all ranks, on the CPU."""

    index: Tensor  # (R,)
    objective: Tensor  # (R,)
    followed: dict[str, Tensor]  # violations (R, sides·K) that the weights followed
    judged: dict[str, Tensor]  # those that the multipliers follow
    masks: dict[str, Tensor]  # bool, (R,) for the objective, else as the violations
    multipliers: dict[str, Tensor]  # λ_t of the constraints with one per sample, as the violations
    counts: dict[str, int]  # samples that each term applies to, those left out later included
    lagrangian: float  # of the terms per sample; those of the batch are added when they are known
    gradient_norm: float  # before clipping
    strict: bool = False  # whether the multipliers follow others than the weights
    finite: bool = False  # whether all values are known to be finite in float32

    def keep(self, rows: Tensor) -> Measured:
        """The given samples, bool (R,)."""
        taken: dict[str, Any] = {"index": self.index[rows], "objective": self.objective[rows]}
        for kind in ("followed", "judged", "masks", "multipliers"):
            taken[kind] = {name: table[rows] for name, table in getattr(self, kind).items()}
        return replace(self, **taken)


@dataclass
class DualStep:
    """A dual step of one constraint, the same on every rank, on the CPU.

    All but the index are of one shape: (R, sides·K), of the R samples that stepped, or (1, sides).
    """

    index: Tensor | None  # (R,); None where the multiplier belongs to no sample
    judged: Tensor  # the violations that the step was taken on
    mask: Tensor  # bool
    before: Tensor  # λ
    after: Tensor
    followed: Tensor  # the violations that the weights followed


def micro_batches_of(task: Task, batch: Any, size: int | None = None) -> list[MicroBatch]:
    """The batch, or the pieces that the collate function made of it, cut to ``size`` samples."""
    micro_batches = []
    for piece in batch if isinstance(batch, (list, tuple)) else [batch]:
        whole = micro_batch_of(task, piece)
        if not size or size >= len(whole.index):
            micro_batches.append(whole)
            continue
        for rows in torch.arange(len(whole.index)).split(size):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            masks = {name: mask[part] for name, mask in whole.masks.items()}
            micro = MicroBatch(task.select(piece, rows), whole.index[part], masks)
            micro_batches.append(micro)
    return micro_batches


def micro_batch_of(task: Task, batch: Any) -> MicroBatch:
    """A piece with the masks of its terms; no term applies to a row of padding."""
    index = batch.get("index") if isinstance(batch, Mapping) else None
    if not isinstance(index, Tensor) or index.dim() != 1 or index.dtype not in WHOLE:
        found = index.dtype if isinstance(index, Tensor) else type(index).__name__
        raise DataError(
            f'A batch, here a {type(batch).__name__}, needs "index", the position of each sample, '
            f"a tensor (B,) of whole numbers, got {found}: use PointwiseDataModule, or wrap the "
            'data set in IndexedDataset(rows), of tuples in IndexedDataset(rows, fields=["x", '
            '"y"]).'
        )
    index = index.cpu()
    names, given = [OBJECTIVE, *task.constraints], task.membership(batch)
    if given != {}:
        require_names("membership()", given, names, partial=True)
    real = (index >= 0).to(task.device, non_blocking=True)
    masks = dict.fromkeys(names, real)
    for name, mask in given.items():
        if mask.dtype != torch.bool or mask.dim() not in (1, 2) or len(mask) != len(index):
            raise DataError(
                f'membership()["{name}"] must be bool of shape ({len(index)},) or '
                f"({len(index)}, K), got {mask.dtype} of shape {tuple(mask.shape)}."
            )
        mask = mask.to(task.device, non_blocking=True)
        masks[name] = mask & (real if mask.dim() == 1 else real[:, None])
    return MicroBatch(batch, index, masks)


# The terms of a micro-batch ----------------------------------------------------------------------


def terms_of(
    task: Task, micro: MicroBatch, outputs: Any, strict: bool, evaluating: bool = False
) -> Terms:
    """A micro-batch's terms, ``strict`` ones too; ``evaluating``: by its bounds, with |ℓ − c|."""
    objective = task.objective(outputs, micro.batch)
    given = task.constraint_values(outputs, micro.batch)
    if not isinstance(given, Mapping) or given.keys() != task.constraints.keys():
        require_names("constraint_values()", given, task.constraints)
    values, count = {OBJECTIVE: objective, **given}, len(micro.index)
    for name, value in values.items():
        shape, dims = shape_of(value), (1,) if name == OBJECTIVE else (1, 2)
        if isinstance(shape, str) or len(shape) not in dims or shape[0] != count:
            wanted = f"({count},)" if len(dims) == 1 else f"({count},) or ({count}, K)"
            raise DataError(
                f'"{name}" must have one value per sample, shape {wanted}, got {shape}: '
                "do not reduce over the batch."
            )
        values[name] = value if value.dtype == torch.float64 else value.float()
    objective = values.pop(OBJECTIVE)
    mask = micro.masks[OBJECTIVE]
    followed, masks = violations_of(task, micro, values, evaluating)
    if strict:
        judged = judged_values(task, outputs, micro.batch, values)
        judged, _ = violations_of(task, micro, judged, evaluating)
    else:
        judged = {name: violation.detach() for name, violation in followed.items()}
    objective = torch.where(mask, objective, 0)
    return Terms(objective, followed, judged, {OBJECTIVE: mask, **masks})


def shape_of(value: Any) -> tuple[int, ...] | str:
    """A tensor's; of anything else the name of its type."""
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


def judged_values(
    task: Task, outputs: Any, batch: Any, values: dict[str, Tensor]
) -> dict[str, Tensor]:
    """By constraint the values that multipliers and reports follow: strict, else ``values``."""
    if not judges_strictly(task):
        return values
    with torch.no_grad(), replayed_random_state(task.device):
        given = task.strict_values(outputs, batch)
    require_names("strict_values()", given, values, partial=True)
    strict = {name: value.detach() for name, value in values.items()}
    for name, value in given.items():
        if name in task.formulations and task.formulations[name].learns_threshold:
            raise ValueError(
                f'strict_values()["{name}"]: the threshold of a CVaR is a quantile of what the '
                "weights follow. Take Average, Tilted or Pointwise, or leave it out."
            )
        if shape_of(value) != shape_of(values[name]):
            raise DataError(
                f'strict_values()["{name}"] must have the shape of constraint_values()["{name}"], '
                f"{shape_of(values[name])}, got {shape_of(value)}."
            )
        value = value.detach().to(values[name].device, non_blocking=True)
        strict[name] = value if value.dtype == torch.float64 else value.float()
    return strict


def violations_of(
    task: Task, micro: MicroBatch, values: Mapping[str, Tensor], evaluating: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Violations (b, sides·K) of values (b,) or (b, K), and masks alike; zero where masked."""
    violations, masks = dict[str, Tensor](), dict[str, Tensor]()
    constraints = task.evaluation_constraints if evaluating else task.constraints
    for name, constraint in constraints.items():
        signed = not evaluating and name in task.formulations and task.formulations[name].signed
        residual, mask = constraint.residual(values[name]), micro.masks[name]
        violation = residual if signed else constraint.reported(residual)
        violation = violation[:, None] if violation.dim() == 1 else violation
        width = violation.shape[1] // constraint.sides
        mask = mask[:, None] if mask.dim() == 1 else mask
        if mask.shape[1] not in (1, width):
            raise DataError(
                f'membership()["{name}"] has {mask.shape[1]} columns, '
                f"constraint_values() {width}: they must agree."
            )
        mask = mask.expand(-1, width)
        masks[name] = mask if constraint.sides == 1 else mask.repeat(1, constraint.sides)
        violations[name] = torch.where(masks[name], violation, 0)
    return violations, masks


# What a step measured ----------------------------------------------------------------------------


Layout = dict[tuple[str, str], int]
"""How many columns a table has in packed rows, by its kind and its term."""


def pack(
    index: Tensor, terms: Terms, multipliers: Mapping[str, Tensor], lagrangian: Tensor, strict: bool
) -> tuple[Tensor, Layout]:
    """A micro-batch as one row per sample, for one gather and one copy; see :func:`unpack`.

    In float64, which holds an index up to 2⁵³ (float32 on Apple's GPUs: 2²⁴).
    """
    device = terms.objective.device
    # The first column is in the widest dtype, and torch converts the others to it.
    wide = widest(device)
    tables = {("index", OBJECTIVE): index.to(device, wide, non_blocking=True)}
    tables["objective", OBJECTIVE] = terms.objective
    tables["share", OBJECTIVE] = (lagrangian.detach() / max(1, len(index))).expand(len(index))
    kinds = {"mask": terms.masks, "followed": terms.followed, "multiplier": multipliers}
    kinds |= {"judged": terms.judged} if strict else {}
    for kind, by_name in kinds.items():
        tables |= {(kind, name): table for name, table in by_name.items()}
    layout = {key: table.shape[1] if table.dim() > 1 else 1 for key, table in tables.items()}
    with torch.no_grad():
        return torch.column_stack([*tables.values()]), layout


def unpack(rows: Tensor, layout: Layout, gradient_norm: Tensor) -> Measured:
    """What packed rows (R, columns) say, on the CPU: one copy, for which the host waits."""
    flat = torch.cat([rows.flatten(), gradient_norm.to(rows).reshape(1)]).cpu()
    rows = flat[:-1].view(rows.shape)
    tables: dict[str, dict[str, Tensor]] = {"followed": {}, "multiplier": {}}
    for (kind, name), table in zip(layout, rows.split([*layout.values()], dim=1), strict=True):
        tables.setdefault(kind, {})[name] = table
    masks = {name: mask.bool() for name, mask in tables["mask"].items()}
    masks[OBJECTIVE] = masks[OBJECTIVE][:, 0]
    lowest, highest = map(float, rows.aminmax()) if len(rows) else (0.0, 0.0)
    return Measured(
        index=tables["index"][OBJECTIVE][:, 0].long(),
        objective=tables["objective"][OBJECTIVE][:, 0],
        followed=tables["followed"],
        judged=tables.get("judged", tables["followed"]),
        masks=masks,
        multipliers=tables["multiplier"],
        counts={name: int(carries(mask).sum()) for name, mask in masks.items()},
        lagrangian=float(tables["share"][OBJECTIVE].sum()),
        gradient_norm=float(flat[-1]),
        strict="judged" in tables,
        finite=max(-lowest, highest) <= torch.finfo(torch.float32).max,
    )


def finite_samples(objective: Tensor, *tables: Mapping[str, Tensor]) -> Tensor:
    """(b,) bool: samples all of whose values, 0 where not carried, are finite in float32, as λ is.

    objective: (b,). tables: of violations (b, sides·K) by constraint.
    """
    finite = torch.isfinite(objective)
    for violations in tables:
        for violation in violations.values():
            finite = finite & torch.isfinite(violation.float()).all(1)
    return finite


def carries(mask: Tensor) -> Tensor:
    """(b,) bool: samples that a term applies to at all, from its mask (b,) or (b, K)."""
    if mask.dim() == 2 and mask.shape[1] == 1:
        return mask[:, 0]
    return mask if mask.dim() == 1 else mask.any(1)


def weights(mask: Tensor, sides: int, dtype: torch.dtype) -> Tensor:
    """(b, sides·K): 1 / (the sample's columns in the mask), zero where there are none.

    A sum with them averages within each sample. In the violations' dtype, under ``bf16-true`` too.
    """
    per_side = mask.shape[1] // sides
    if per_side == 1:
        return mask.to(dtype)
    inner = mask.unflatten(1, (sides, per_side)).sum(2).clamp(min=1)
    return mask.to(dtype) / inner.repeat_interleave(per_side, dim=1)


def last_visits(index: Tensor) -> Tensor:
    """Positions of the last occurrence of each distinct entry of ``index``."""
    distinct, inverse = torch.unique(index, return_inverse=True)
    positions = torch.arange(len(index))
    return torch.zeros_like(distinct).scatter_reduce(0, inverse, positions, "amax")


def require_names(what: str, given: Any, names: Iterable[str], partial: bool = False) -> None:
    """Refuses no mapping, an unknown name, and, unless ``partial``, one that is missing."""
    names = list(names)
    if not isinstance(given, Mapping):
        entries = ", ".join(f'"{name}": …' for name in names)
        raise ValueError(
            f"{what} returned a {type(given).__name__}: return a dict by name, {{{entries}}}."
        )
    unknown = [name for name in given if name not in names]
    if unknown:
        raise ValueError(
            f"{what} names {', '.join(map(repr, unknown))}; "
            f"this module has {', '.join(map(repr, names))}."
        )
    missing = [] if partial else [name for name in names if name not in given]
    if missing:
        raise ValueError(f"{what} lacks {', '.join(map(repr, missing))}.")


# A step without some samples ---------------------------------------------------------------------


def non_finite_values(measured: Measured, bad: Tensor, at_most: int = 3) -> Iterator[str]:
    """A value of each sample that is not finite, in words; of so many of the samples ``bad``."""
    for row in bad.nonzero()[:at_most, 0].tolist():
        terms = {"Objective": measured.objective[row].reshape(1)}
        terms |= {f'Constraint "{n}"': v[row] for n, v in measured.followed.items()}
        if measured.strict:
            terms |= {f'Strict value of "{n}"': v[row] for n, v in measured.judged.items()}
        found = [
            f"{term}: {value} for sample {int(measured.index[row])}"
            for term, values in terms.items()
            for value in values[~torch.isfinite(values.float())][:1].tolist()
        ]
        yield from found[:1]


def without_samples(
    task: Task, micro_batches: list[MicroBatch], left_out: Tensor
) -> list[MicroBatch]:
    """The micro-batches with a kept sample, as padding, for each of ``left_out``; [] if none is."""
    keeps = [~torch.isin(micro.index, left_out) for micro in micro_batches]
    spare = next((position for position, keep in enumerate(keeps) if keep.any()), None)
    if spare is None:
        return []
    found = []
    for position, (micro, keep) in enumerate(zip(micro_batches, keeps, strict=True)):
        if keep.all():
            found.append(micro)
            continue
        source = position if keep.any() else spare
        rows = torch.where(keep, torch.arange(len(keep)), int(keeps[source].nonzero()[0]))
        kept = keep.to(micro.masks[OBJECTIVE].device)
        masks = {n: m & (kept if m.dim() == 1 else kept[:, None]) for n, m in micro.masks.items()}
        index = micro.index.masked_fill(~keep, PADDING)
        found.append(MicroBatch(task.select(micro_batches[source].batch, rows), index, masks))
    return found
