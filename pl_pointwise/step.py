"""One step: micro-batches, what their terms are by the task, and what the step measured.

Shapes: b samples in a micro-batch, R samples in the whole step over all ranks, K columns of a
vector-valued constraint (1 for a scalar one), ``sides`` 2 for an interval and else 1. The columns
of an interval are the upper side's K, then the lower side's K.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .data import PADDING
from .errors import DataError
from .formulations import Constraint
from .random_state import replayed_random_state
from .task import Task, judges_strictly

OBJECTIVE = "objective"


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
    judged: dict[str, Tensor]  # those that the multipliers follow; the same object if no others are
    masks: dict[str, Tensor]  # bool, (R,) for the objective, else as the violations
    multipliers: dict[str, Tensor]  # λ_t of the constraints with one per sample, as the violations
    counts: dict[str, int]  # samples that carry each term, those left out later included
    lagrangian: float  # of the terms per sample; those of the batch are added when they are known
    gradient_norm: float  # before clipping
    finite: bool = False
    """Whether all values are known to be finite in float32, so that none needs looking for."""

    @property
    def strict(self) -> bool:
        """Whether the multipliers follow others than the weights."""
        return self.judged is not self.followed

    def keep(self, rows: Tensor) -> Measured:
        """The given samples, bool (R,)."""

        def taken(tables: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: table[rows] for name, table in tables.items()}

        followed = taken(self.followed)
        return replace(
            self,
            index=self.index[rows],
            objective=self.objective[rows],
            followed=followed,
            judged=taken(self.judged) if self.strict else followed,
            masks=taken(self.masks),
            multipliers=taken(self.multipliers),
        )

    def non_finite(self) -> Tensor:
        """(R,) bool: samples with a value that is not finite in a term they carry.

        A violation beyond float32 counts as infinite: λ, which is float32, would become so.
        """
        bad = ~torch.isfinite(self.objective) & self.masks[OBJECTIVE]
        for violations in (self.followed, self.judged)[: 1 + self.strict]:
            for name, violation in violations.items():
                bad |= (~torch.isfinite(violation.float()) & self.masks[name]).any(1)
        return bad


@dataclass
class DualStep:
    """A dual step of one constraint, the same on every rank, on the CPU.

    Rows are the R samples that stepped, columns the violation's; or one row for a constraint with
    one multiplier, columns its sides.
    """

    index: Tensor | None  # (R,); None where the multiplier belongs to no sample
    judged: Tensor  # (R, sides·K) or (1, sides): the violations that the step was taken on
    mask: Tensor  # bool, of the same shape
    before: Tensor  # λ, of the same shape
    after: Tensor  # λ, of the same shape
    followed: Tensor  # what the weights followed, of the same shape


def pieces_of(batch: Any) -> list[Any]:
    """The micro-batches that the collate function made, or the one batch."""
    return list(batch) if isinstance(batch, (list, tuple)) else [batch]


def index_of(batch: Any) -> Tensor:
    """(B,) on the CPU.

    Raises:
        DataError: the batch has none, or one of other numbers than whole ones.
    """
    index = batch.get("index") if isinstance(batch, Mapping) else None
    if not isinstance(index, Tensor) or index.dim() != 1:
        raise DataError(
            'A batch needs "index", the position of each sample in its data set, as a tensor (B,): '
            "wrap the data set in pl_pointwise.data.IndexedDataset, or use PointwiseDataModule. "
            f"Here it is a {type(batch).__name__}; rows that are tuples get names there, "
            'IndexedDataset(rows, fields=["x", "y"]).'
        )
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise DataError(
            f'"index" of a batch is {index.dtype}: give whole numbers, each sample\'s position.'
        )
    return index.cpu()


def micro_batches_of(task: Task, batch: Any) -> list[MicroBatch]:
    """The batch in pieces of the task's ``micro_batch_size``, each with the masks of its terms."""
    micro_batches = []
    for piece in pieces_of(batch):
        index = index_of(piece)
        size = task.training_settings.micro_batch_size or len(index)
        if size >= len(index):
            micro_batches.append(micro_batch_of(task, piece, index))
            continue
        for rows in torch.arange(len(index)).split(size):
            micro_batches.append(micro_batch_of(task, task.select(piece, rows), index[rows]))
    return micro_batches


def micro_batch_of(task: Task, batch: Any, index: Tensor) -> MicroBatch:
    """A piece with the masks of its terms; nobody carries anything in a row of padding.

    Raises:
        ValueError: a mask of no term.
        DataError: a mask that is not bool, or not of b rows.
    """
    names, given = [OBJECTIVE, *task.constraints], task.membership(batch)
    require_mapping("membership()", given, names, partial=True)
    real = (index >= 0).to(task.device, non_blocking=True)
    masks = {}
    for name in names:
        mask = given.get(name)
        if mask is None:
            masks[name] = real
            continue
        if mask.dtype != torch.bool or mask.dim() not in (1, 2) or len(mask) != len(index):
            raise DataError(
                f'membership()["{name}"] must be bool of shape ({len(index)},) or '
                f"({len(index)}, K), got {mask.dtype} of shape {tuple(mask.shape)}."
            )
        mask = mask.to(task.device, non_blocking=True)
        masks[name] = mask & (real if mask.dim() == 1 else real[:, None])
    return MicroBatch(batch, index, masks)


# The terms of a micro-batch ----------------------------------------------------------------------


def terms_of(task: Task, micro: MicroBatch, columns: dict[str, int], strict: bool) -> Terms:
    """One forward pass of a task in training, and what its terms are by it.

    columns: of each constraint's violations, which stay as many as in its first batch.
    strict: whether strict values are asked for.
    """
    outputs = task(micro.batch)
    objective, values = evaluate_terms(task, outputs, micro)
    masks = {OBJECTIVE: micro.masks[OBJECTIVE]}
    objective = torch.where(masks[OBJECTIVE], objective, 0)
    signed = {name for name, f in task.formulations.items() if f.signed}
    followed, oriented = violations_of(task.constraints, values, micro.masks, signed)
    masks |= oriented
    for name, violation in followed.items():
        found = violation.shape[1]
        if columns.setdefault(name, found) != found:
            raise DataError(
                f'Constraint "{name}": {found} columns in this batch, {columns[name]} before. Give '
                "the same number in every batch and mark missing ones in membership()."
            )
    judged = {name: violation.detach() for name, violation in followed.items()}
    if strict:
        values = judged_values(task, outputs, micro.batch, values)
        judged, _ = violations_of(task.constraints, values, micro.masks, signed)
    return Terms(objective, followed, judged, masks)


def evaluate_terms(task: Task, outputs: Any, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective (b,) and the constraints' values by name, (b,) or (b, K), not yet masked.

    Raises:
        ValueError: a constraint without values, or values of none.
        DataError: values of another shape.
    """
    count = len(micro.index)
    objective = task.objective(outputs, micro.batch)
    objective = validate_values(objective, OBJECTIVE, count, vector=False)
    values = task.constraint_values(outputs, micro.batch)
    require_mapping("constraint_values()", values, task.constraints)
    return objective, {name: validate_values(v, name, count) for name, v in values.items()}


def judged_values(
    task: Task, outputs: Any, batch: Any, values: dict[str, Tensor]
) -> dict[str, Tensor]:
    """By constraint what multipliers and reports go by: strict values, else ``values``.

    Raises:
        ValueError, DataError: strict values of another name or shape; of a CVaR.
    """
    if not judges_strictly(task):
        return values
    with torch.no_grad(), replayed_random_state(task.device):
        given = task.strict_values(outputs, batch)
    require_mapping("strict_values()", given, values, partial=True)
    strict = {}
    for name, value in given.items():
        if name in task.formulations and task.formulations[name].learns_threshold:
            raise ValueError(
                f'strict_values()["{name}"]: the threshold of a CVaR is a quantile of what the '
                "weights follow, and strict values have another. Take Average, Tilted or "
                "Pointwise, or leave it out."
            )
        shape = tuple(values[name].shape)
        if not isinstance(value, Tensor) or tuple(value.shape) != shape:
            other = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise DataError(
                f'strict_values()["{name}"] must have the shape of constraint_values()["{name}"], '
                f"{shape}, got {other}. Leave a constraint out that has no strict value."
            )
        value = value.detach().to(values[name].device, non_blocking=True)
        strict[name] = value if value.dtype == torch.float64 else value.float()
    return {name: strict.get(name, value.detach()) for name, value in values.items()}


# What a step measured ----------------------------------------------------------------------------


Layout = dict[tuple[str, str], int]
"""Of packed rows: how many columns a table has, by its kind and its term."""


def pack(
    index: Tensor,
    terms: Terms,
    multipliers: Mapping[str, Tensor],
    lagrangian: Tensor,
    strict: bool,
) -> tuple[Tensor, Layout]:
    """A micro-batch as one row per sample, for one gather and one copy; see :func:`unpack`.

    In float64, which holds an index up to 2⁵³ (float32 on Apple's GPUs: 2²⁴).

    lagrangian: of the micro-batch, a scalar.
    strict: whether the multipliers follow others than the weights.
    """
    device = terms.objective.device
    # The first column is in the widest dtype, and torch converts the others to it.
    tables = {("index", OBJECTIVE): index.to(device, widest_dtype(device), non_blocking=True)}
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
        tables["index"][OBJECTIVE][:, 0].long(),
        tables["objective"][OBJECTIVE][:, 0],
        tables["followed"],
        tables.get("judged", tables["followed"]),
        masks,
        tables["multiplier"],
        {name: int(carries(mask).sum()) for name, mask in masks.items()},
        float(tables["share"][OBJECTIVE].sum()),
        float(flat[-1]),
        finite=max(-lowest, highest) <= torch.finfo(torch.float32).max,
    )


def widest_dtype(device: torch.device) -> torch.dtype:
    """What every rank sends, whatever the dtype of its values: it may have none left."""
    return torch.float32 if device.type == "mps" else torch.float64


def carries(mask: Tensor) -> Tensor:
    """(b,) bool: samples that carry a term at all, from its mask (b,) or (b, K)."""
    if mask.dim() == 2 and mask.shape[1] == 1:
        return mask[:, 0]
    return mask if mask.dim() == 1 else mask.any(1)


def validate_values(values: Tensor, name: str, count: int, vector: bool = True) -> Tensor:
    """Values of a term in float32 or wider, of shape (b,), or with ``vector`` also (b, K).

    count: b.

    Raises:
        DataError: another shape.
    """
    dims = (1, 2) if vector else (1,)
    if not isinstance(values, Tensor) or values.dim() not in dims or len(values) != count:
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        wanted = f"({count},) or ({count}, K)" if vector else f"({count},)"
        raise DataError(
            f'"{name}" must have one value per sample, shape {wanted}, got {shape}: '
            "do not reduce over the batch."
        )
    return values if values.dtype == torch.float64 else values.float()


def violations_and_mask(
    constraint: Constraint, values: Tensor, mask: Tensor, name: str, signed: bool = False
) -> tuple[Tensor, Tensor]:
    """Violations (b, sides·K) of values (b,) or (b, K), and their mask, bool, alike.

    mask: (b,) or (b, K).
    signed: the residual of an equality instead, of which its multiplier takes the sign.

    Raises:
        DataError: a mask of another number of columns than the values.
    """
    violation = constraint.residual(values) if signed else constraint.violation(values)
    violation = violation[:, None] if violation.dim() == 1 else violation
    width = violation.shape[1] // constraint.sides
    mask = mask[:, None] if mask.dim() == 1 else mask
    if mask.shape[1] not in (1, width):
        raise DataError(
            f'membership()["{name}"] has {mask.shape[1]} columns, '
            f"constraint_values() {width}: they must agree."
        )
    mask = mask if mask.shape[1] == width else mask.expand(-1, width)
    return violation, mask if constraint.sides == 1 else mask.repeat(1, constraint.sides)


def violations_of(
    constraints: Mapping[str, Constraint],
    values: Mapping[str, Tensor],
    masks: Mapping[str, Tensor],
    signed: Container[str],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Violations and masks of all constraints, see above; 0 where the mask is False.

    signed: the constraints whose residual it is instead.
    """
    violations, found = dict[str, Tensor](), dict[str, Tensor]()
    for name, constraint in constraints.items():
        violation, found[name] = violations_and_mask(
            constraint, values[name], masks[name], name, name in signed
        )
        violations[name] = torch.where(found[name], violation, 0)
    return violations, found


def weights(mask: Tensor, sides: int, dtype: torch.dtype) -> Tensor:
    """(b, sides·K): 1 / (columns the sample carries), zero where it carries none.

    In the violations' dtype: the default one is bfloat16 under ``bf16-true``.

    With them a weighted sum over a side averages within each sample; divided by the number of
    samples that carry the constraint, it is the mean of the side.
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


def require_names(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuses a name that is not among the known ones, and lists these."""
    known = list(known)
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(
            f"{what} names {', '.join(map(repr, unknown))}; "
            f"this module has {', '.join(map(repr, known))}."
        )


def require_mapping(what: str, given: Any, names: Iterable[str], partial: bool = False) -> None:
    """Refuses no mapping, an unknown name, and, unless ``partial``, one that is missing."""
    names = list(names)
    if not isinstance(given, Mapping):
        entries = ", ".join(f'"{name}": …' for name in names)
        raise ValueError(
            f"{what} returned a {type(given).__name__}: return a dict by name, {{{entries}}}."
        )
    if not given.keys() <= set(names):
        require_names(what, given, names)
    missing = [] if partial else [name for name in names if name not in given]
    if missing:
        raise ValueError(f"{what} lacks {', '.join(map(repr, missing))}.")


def non_finite_values(measured: Measured, bad: Tensor, at_most: int = 8) -> Iterator[str]:
    """Which value of which sample is not finite, in words; of so many of the samples ``bad``."""
    for row in bad.nonzero()[:at_most, 0].tolist():
        terms = {"Objective": measured.objective[row].reshape(1)}
        terms |= {f'Constraint "{n}"': v[row] for n, v in measured.followed.items()}
        if measured.strict:
            terms |= {f'Strict value of "{n}"': v[row] for n, v in measured.judged.items()}
        for term, values in terms.items():
            for value in values[~torch.isfinite(values.float())][:1].tolist():
                yield f"{term}: {value} for sample {int(measured.index[row])}"


def without_samples(
    task: Task, micro_batches: list[MicroBatch], left_out: Tensor
) -> list[MicroBatch]:
    """The micro-batches with another sample, which counts nowhere, in the place of some.

    So every rank forwards as many rows as before.

    left_out: their index.
    Returns: none where no sample is left.
    """
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
        other = int(keeps[source].nonzero()[0])
        rows = torch.where(keep, torch.arange(len(keep)), other)
        kept = keep.to(micro.masks[OBJECTIVE].device)
        masks = {
            name: mask & (kept if mask.dim() == 1 else kept[:, None])
            for name, mask in micro.masks.items()
        }
        index = micro.index.masked_fill(~keep, PADDING)
        found.append(MicroBatch(task.select(micro_batches[source].batch, rows), index, masks))
    return found
