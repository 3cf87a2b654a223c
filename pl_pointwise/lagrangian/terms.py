"""The terms of a batch, objective and violations, and what a step measured of them.

Shapes: b samples in a micro-batch, R in the whole step over all ranks, K columns of a constraint,
``sides`` 2 for an interval, the upper one's K columns first, and else 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..constraint import Constraint
from ..errors import OF_METHODS, DataError, TrainingError, Words
from ..formulations import Formulation

OBJECTIVE = "objective"
PADDING = -1
"""The index of a row that repeats a sample only to fill a batch."""
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
LARGEST = torch.finfo(torch.float32).max


def widest(device: torch.device) -> torch.dtype:
    """What every rank sends, whatever the dtype of its values."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass
class Terms:
    """Objective and violations of a micro-batch: float32 or wider, zero where the mask is False.

    Here and below the violations of an equality are ℓ − c where its formulation is ``signed``.
    """

    objective: Tensor  #: (b,)
    followed: dict[str, Tensor]  #: violations (b, sides·K) that the weights follow
    judged: dict[str, Tensor]  #: those that the multipliers follow; without a gradient
    masks: dict[str, Tensor]  #: bool, (b,) for the objective, else as the violations
    #: whether all terms are known to apply to all samples, without a look
    whole: bool = False
    #: of each row's group, where bounded
    means: dict[str, Tensor] = field(default_factory=dict)
    #: bool (b,), where a share is exempt
    exempt: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Measured:
    """What a step measured, of all ranks, on the CPU."""

    index: Tensor  #: (R,)
    objective: Tensor  #: (R,)
    followed: dict[str, Tensor]  #: violations (R, sides·K) that the weights followed
    judged: dict[str, Tensor]  #: those that the multipliers follow
    masks: dict[str, Tensor]  #: bool, (R,) for the objective, else as the violations
    multipliers: dict[str, Tensor]  #: λ_t where it is per sample, as the violations
    #: samples that each term applies to, those left out later included
    counts: dict[str, int]
    #: of the terms per sample; those of the batch are added when they are known
    lagrangian: float
    gradient_norm: float  #: before clipping
    strict: bool = False  #: whether the multipliers follow others than the weights
    finite: bool = False  #: whether all values are known to be finite in float32
    whole: bool = False  #: whether all masks are known to be True

    def keep(self, rows: Tensor) -> Measured:
        """The given samples, bool (R,)."""
        taken: dict[str, Any] = {
            "index": self.index[rows],
            "objective": self.objective[rows],
        }
        for kind in ("followed", "judged", "masks", "multipliers"):
            taken[kind] = {
                name: table[rows] for name, table in getattr(self, kind).items()
            }
        return replace(self, **taken)


@dataclass
class DualStep:
    """A dual step of one constraint, the same on every rank, on the CPU.

    All but the index are of one shape: (R, sides·K), of the R samples that stepped, or (1, sides).
    """

    index: Tensor | None  #: (R,); None where the multiplier belongs to no sample
    judged: Tensor  #: the violations that the step was taken on
    mask: Tensor  #: bool
    before: Tensor  #: λ
    after: Tensor  #: λ


@dataclass
class MicroBatch:
    """A piece of the step's batch: b samples, forwarded and differentiated together."""

    batch: Any
    index: Tensor  # (b,) on the CPU, −1 for padding
    masks: dict[str, Tensor]  # bool (b,) or (b, K) per term, padding excluded
    whole: bool  # whether they are known to be True everywhere


# From what a task or a loop gives -----------------------------------------------------------------


def masks_from(
    by_term: Mapping[str, Tensor],
    index: Tensor,
    names: Iterable[str],
    device: torch.device,
    words: Words = OF_METHODS,
) -> tuple[dict[str, Tensor], bool]:
    """The mask of every term, bool (b,) or (b, K); no term applies to a row of padding.

    And whether all terms are known to apply to all samples, of what the host knows: the index.
    """
    names, real = list(names), index >= 0
    all_real = bool(real.all())
    if not all_real and (index < PADDING).any():
        raise DataError(
            f"{words.index} holds {int(index.min())}: a position in the training set is a whole "
            f"number from 0, and {PADDING} is padding."
        )
    masks = dict.fromkeys(names, real := real.to(device, non_blocking=True))
    # Nothing stated: what the host knows of the index is all, and no GPU is waited for.
    if by_term == {}:
        return masks, all_real and len(index) > 0
    require_names(words.masks, by_term, names, partial=True)
    for name, mask in by_term.items():
        kind = getattr(mask, "dtype", "no tensor")
        if kind != torch.bool or mask.dim() not in (1, 2) or len(mask) != len(index):
            raise DataError(
                f'{words.masks}["{name}"] must be bool of shape ({len(index)},) or '
                f"({len(index)}, K), got {kind} of shape {shape_of(mask)}."
            )
        mask = mask.to(device, non_blocking=True)
        masks[name] = mask & (real if mask.dim() == 1 else real[:, None])
    return masks, False


def strict_values_from(
    stated: Any,
    values: Mapping[str, Tensor],
    formulations: Mapping[str, Formulation],
    words: Words = OF_METHODS,
) -> dict[str, Tensor]:
    """The values that multipliers and reports follow: the ``stated`` ones, else ``values``."""
    require_names(words.strict, stated, values, partial=True)
    strict = {name: value.detach() for name, value in values.items()}
    for name, value in stated.items():
        # λ would follow the tail of other values than the threshold belongs to.
        if name in formulations and formulations[name].learns_threshold:
            raise ValueError(
                f'{words.strict}["{name}"]: the threshold of a CVaR is a quantile of what the '
                "weights follow. Take Average, Tilted or Pointwise, or leave it out."
            )
        if shape_of(value) != shape_of(values[name]):
            raise DataError(
                f'{words.strict}["{name}"] must have the shape of {words.values}["{name}"], '
                f"{shape_of(values[name])}, got {shape_of(value)}."
            )
        value = value.detach().to(values[name].device, non_blocking=True)
        strict[name] = value if value.dtype == torch.float64 else value.float()
    return strict


def is_index(value: Any) -> bool:
    """Whether it is a tensor of whole numbers, (B,)."""
    return isinstance(value, Tensor) and value.dim() == 1 and value.dtype in INTEGERS


def group_numbers(groups: Any, samples: int, whose: str = "groups") -> Tensor:
    """The group of each of N samples, (N,) int64; refuses what is no number from 0 for each."""
    numbers = None
    with suppress(ValueError, TypeError):  # Of texts.
        numbers = torch.as_tensor(groups).cpu()
    if (
        numbers is None
        or not is_index(numbers)
        or len(numbers) != samples
        or (numbers < 0).any()
    ):
        raise DataError(
            f"{whose}: a whole number from 0 for each of the {samples:,} samples, got "
            f"{shape_of(groups)}; np.unique(groups, return_inverse=True)[1] numbers them."
        )
    return numbers.long()


def shape_of(value: Any) -> tuple[int, ...] | str:
    """A tensor's; of anything else the name of its type."""
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


def build_terms(
    constraints: Mapping[str, Constraint],
    formulations: Mapping[str, Formulation],
    masks: Mapping[str, Tensor],
    objective: Any,
    values: Any,
    judge: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None,
    whole: bool,
    words: Words = OF_METHODS,
) -> Terms:
    """The terms of what a task or a loop gives for b samples, by the bounds of ``constraints``.

    objective, values: (b,); (b,) or (b, K) of every constraint. judge: gives, of the values in
    float32 or wider, those that multipliers follow; None where they follow the same.
    """
    count = len(masks[OBJECTIVE])
    # In the order of the constraints they need no look, which a small step would feel.
    if not isinstance(values, Mapping) or [*values] != [*constraints]:
        require_names(words.values, values, constraints)
    precise = dict[str, Tensor]()  # Float32 or wider.
    for name, value in {OBJECTIVE: objective, **values}.items():
        _require_per_sample(name, value, count, words)
        precise[name] = value if value.dtype == torch.float64 else value.float()
    objective = precise.pop(OBJECTIVE)
    # What the weights follow, and what multipliers follow where that is something else.
    kinds = [precise] if judge is None else [precise, judge(precise)]
    followed = dict[str, Tensor]()
    judged = dict[str, Tensor]()
    wide = dict[str, Tensor]()
    for name, constraint in constraints.items():
        signed = name in formulations and formulations[name].signed
        oriented = constraint.residual if signed else constraint.violation
        violations = [oriented(of_kind[name]) for of_kind in kinds]
        violations = [v[:, None] if v.dim() == 1 else v for v in violations]
        width = violations[0].shape[1] // constraint.sides
        mask = masks[name]
        mask = mask[:, None] if mask.dim() == 1 else mask
        if mask.shape[1] not in (1, width):
            raise DataError(
                f'{words.masks}["{name}"] has {mask.shape[1]} columns, '
                f"{words.values} {width}: they must agree."
            )
        # A mask of samples is one of all their values, and of both sides.
        mask = mask.expand(-1, width)
        wide[name] = mask if constraint.sides == 1 else mask.repeat(1, constraint.sides)
        violations = [
            v.contiguous() if whole else torch.where(wide[name], v, 0)
            for v in violations
        ]
        followed[name], judged[name] = violations[0], violations[-1].detach()
    applies = masks[OBJECTIVE]
    return Terms(
        objective.contiguous() if whole else torch.where(applies, objective, 0),
        followed=followed,
        judged=judged,
        masks={OBJECTIVE: applies, **wide},
        whole=whole,
    )


def _require_per_sample(name: str, value: Any, count: int, words: Words) -> None:
    """Refuses what is not one real value, or a row of them, for each of ``count`` samples."""
    dims = (1,) if name == OBJECTIVE else (1, 2)
    if not isinstance(value, Tensor) or value.dim() not in dims or len(value) != count:
        wanted = f"({count},)" if len(dims) == 1 else f"({count},) or ({count}, K)"
        if value is None:  # The commonest slip in a method of one's own.
            what = words.objective if name == OBJECTIVE else f'{words.values}["{name}"]'
            raise DataError(
                f"{what} is None: one value per sample, shape {wanted}, is asked for. Is its "
                "return missing?"
            )
        raise DataError(
            f'"{name}" must have one value per sample, shape {wanted}, got '
            f"{shape_of(value)}: {_remedy_of_shape(value, count)}."
        )
    real = not value.is_complex() and value.layout == torch.strided
    if not real or (count > 0 and not value[:1].numel()):
        raise DataError(
            f'"{name}" must be real numbers, a dense tensor with one column at least, got '
            f"{value.dtype}, {value.layout}, shape {shape_of(value)}."
        )


def _remedy_of_shape(value: Any, count: int) -> str:
    """What to do about a value that is not one for each of ``count`` samples."""
    if not isinstance(value, Tensor):
        return "give a tensor; where nothing is minimised, 0 times the values"
    if value.dim() == 0:
        return "do not reduce over the batch"
    if len(value) != count:
        return (
            "give one for every sample of the batch, and say by masks which of them "
            "a term applies to"
        )
    if value.shape[1:].numel() == 1:
        return "leave the other dimensions out, as by value.flatten()"
    if value.shape == (count, count):
        return (
            "was (B,) broadcast with (B, 1), as of targets and predictions? "
            "Bring both to (B,), as by prediction[:, 0]"
        )
    return "reduce each sample's values to one, as by value.flatten(1).mean(1)"


# What a step measured ----------------------------------------------------------------------------


Layout = dict[tuple[str, str], int]
"""How many columns a table has in packed rows, by its kind and its term."""


def pack(
    index: Tensor,
    terms: Terms,
    multipliers: Mapping[str, Tensor],
    lagrangian: Tensor,
    strict: bool,
) -> tuple[Tensor, Layout]:
    """A micro-batch as one row per sample, for one gather and one copy; see :func:`unpack`.

    In float64, which holds an index up to 2⁵³ (float32 on Apple's GPUs: 2²⁴).
    """
    device = terms.objective.device
    # The first column is in the widest dtype, and torch converts the others to it.
    wide = widest(device)
    tables = {("index", OBJECTIVE): index.to(device, wide, non_blocking=True)}
    tables["objective", OBJECTIVE] = terms.objective
    tables["share", OBJECTIVE] = (lagrangian.detach() / max(1, len(index))).expand(
        len(index)
    )
    kinds = {"mask": terms.masks, "followed": terms.followed, "multiplier": multipliers}
    kinds |= {"judged": terms.judged} if strict else {}
    for kind, by_name in kinds.items():
        tables |= {(kind, name): table for name, table in by_name.items()}
    layout = {
        key: table.shape[1] if table.dim() > 1 else 1 for key, table in tables.items()
    }
    with torch.no_grad():
        return torch.column_stack([*tables.values()]), layout


def unpack(tables: Sequence[Tensor], layout: Layout, gradient_norm: Tensor) -> Measured:
    """What the packed rows of the micro-batches of all ranks say, (b, columns) each, on the CPU.

    One copy, for which the host waits.
    """
    rows = tables[0] if len(tables) == 1 else torch.cat(list(tables))
    rows = rows if number_of_ranks() == 1 else rows_of_all_ranks(rows)
    flat = torch.cat([rows.flatten(), gradient_norm.to(rows).reshape(1)]).cpu()
    rows = flat[:-1].view(rows.shape)
    by_kind: dict[str, dict[str, Tensor]] = {"followed": {}, "multiplier": {}}
    tables_of_terms = rows.split([*layout.values()], dim=1)
    for (kind, name), table in zip(layout, tables_of_terms, strict=True):
        by_kind.setdefault(kind, {})[name] = table
    masks = {name: mask.bool() for name, mask in by_kind["mask"].items()}
    masks[OBJECTIVE] = masks[OBJECTIVE][:, 0]
    whole = len(rows) > 0 and all(bool(mask.all()) for mask in masks.values())
    lowest, highest = map(float, rows.aminmax()) if len(rows) else (0.0, 0.0)
    return Measured(
        index=by_kind["index"][OBJECTIVE][:, 0].long(),
        objective=by_kind["objective"][OBJECTIVE][:, 0],
        followed=by_kind["followed"],
        judged=by_kind.get("judged", by_kind["followed"]),
        masks=masks,
        multipliers=by_kind["multiplier"],
        counts={
            n: len(rows) if whole else int(carries(m).sum()) for n, m in masks.items()
        },
        lagrangian=float(by_kind["share"][OBJECTIVE].sum()),
        gradient_norm=float(flat[-1]),
        strict="judged" in by_kind,
        finite=max(-lowest, highest) <= LARGEST,
        whole=whole,
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


def non_finite_values(
    measured: Measured, bad: Tensor, at_most: int = 3
) -> Iterator[str]:
    """A value of each sample that is not finite, in words; of so many of the samples ``bad``."""
    for row in bad.nonzero()[:at_most, 0].tolist():
        terms = {"Objective": measured.objective[row].reshape(1)}
        terms |= {f'Constraint "{n}"': v[row] for n, v in measured.followed.items()}
        if measured.strict:
            terms |= {
                f'Strict value of "{n}"': v[row] for n, v in measured.judged.items()
            }
        for term, values in terms.items():
            bad_values = values[~torch.isfinite(values.float())]
            if len(bad_values):
                sample = int(measured.index[row])
                yield f"{term}: {bad_values[0].tolist()} for sample {sample}"
                break  # One of a sample is enough to inspect it.


def require_finite(terms: Terms, index: Tensor) -> None:
    """Refuses values that are not finite in float32, before anything moves."""
    named = [
        (OBJECTIVE, terms.objective),
        *terms.followed.items(),
        *terms.judged.items(),
    ]
    for name, values in named:
        finite = torch.isfinite(values.detach().float())
        if not finite.all():
            row = int((~finite).nonzero()[0, 0])
            value = float(values.detach()[row][~finite[row]].flatten()[0])
            raise TrainingError(
                f'"{name}" is {value} for sample {int(index[row])}, and nothing has moved. Inspect '
                "that record or lower the learning rate."
            )


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


def require_names(
    what: str, mapping: Any, names: Iterable[str], partial: bool = False
) -> None:
    """Refuses no mapping, an unknown name, and, unless ``partial``, one that is missing."""
    names = list(names)
    entries = "{" + ", ".join(f'"{name}": …' for name in names) + "}"
    # A method returns it; an argument is given.
    returned = what.endswith("()")
    if mapping is None:
        remedy = "is its return missing?" if returned else f"give a dict, {entries}."
        raise ValueError(f"{what} {'returned' if returned else 'is'} None: {remedy}")
    if not isinstance(mapping, Mapping):
        verb, remedy = ("returned", "return") if returned else ("is", "give")
        raise ValueError(
            f"{what} {verb} a {type(mapping).__name__}: {remedy} a dict by name, {entries}."
        )
    unknown = [name for name in mapping if name not in names]
    if unknown:
        raise ValueError(
            f"{what} names {', '.join(map(repr, unknown))}: "
            f"the names are {', '.join(map(repr, names))}."
        )
    missing = [] if partial else [name for name in names if name not in mapping]
    if missing:
        raise ValueError(f"{what} lacks {', '.join(map(repr, missing))}.")


# What ranks add up and gather; where torch.distributed does not run, one rank --------------------


def number_of_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def over_ranks(value: Tensor, operation: Literal["sum", "max"]) -> Tensor:
    """The sum or the largest of every rank's value; all ranks call it."""
    if number_of_ranks() > 1:
        value = value.clone()
        dist.all_reduce(
            value, dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX
        )
    return value


def rows_of_all_ranks(rows: Tensor) -> Tensor:
    """(R, columns): the rows (b, columns) of every rank, in their order; b is the same on all."""
    of_ranks = [torch.empty_like(rows) for _ in range(number_of_ranks())]
    dist.all_gather(of_ranks, rows.contiguous())
    return torch.cat(of_ranks)
