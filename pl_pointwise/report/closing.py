"""The closing table: what a run reached, on what, and what is to be done about it.

One place computes it for every way to train: the module, :class:`~pl_pointwise.PointwiseLoss` and
the mix-in for other trainers. At most three sentences follow the table, the most important first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..constraint import Constraint
from ..formulations import Formulation
from ..lagrangian.shares import allowed
from ..metrics import quantiles
from .closing_table import NOTHING_KNOWN, Closing, Conditions, HeldOut, RequirementRow
from .history import History
from .sentences import remarks_of, warnings_of

SENTENCES = 3
"""So many of them are shown."""


def closing_of(
    history: History,
    formulations: Mapping[str, Formulation],
    multipliers: Mapping[str, Tensor],
    groups: Tensor | None = None,
    held_out: HeldOut | None = None,
    conditions: Conditions = NOTHING_KNOWN,
    means: Mapping[str, Tensor] | None = None,
) -> Closing:
    """The closing table of what a history has read.

    Args:
        history: of the run.
        formulations: by constraint; none of one that is only measured.
        multipliers: λ by constraint, of samples or groups (N, K), of statistics () or (2,).
        groups: (N,), the group of each sample, where multipliers are of groups.
        held_out: of the last evaluation.
        conditions: how the run was made.
        means: by constraint that is on means of groups, (G,), the violation of each group.
    """
    rows = []
    of_groups = {} if means is None else means
    for name, constraint in history.constraints.items():
        row = _row(name, constraint, of_groups.get(name, history.last[name]))
        row = replace(row, by_group=name in of_groups)
        row = _with_multipliers(
            row, history, formulations.get(name), multipliers.get(name), groups
        )
        rows.append(_with_held_out(row, held_out))
    # NaN is a sample without a visit, or one that the objective does not apply to.
    known = history.objective[~history.objective.isnan()]
    objective = (
        None if math.isnan(history.start) else history.start,
        float(known.double().mean()) if len(known) else None,
        held_out.objective if held_out else None,
    )
    closing = Closing(
        steps=history.steps,
        epochs=conditions.epochs,
        objective=objective,
        rows=rows,
        held_step=held_out.step if held_out else None,
        not_trained=[
            *conditions.not_trained,
            *_never_seen(history, conditions.left_out),
        ],
    )
    warnings = list(
        warnings_of(closing, history, formulations, multipliers, conditions)
    )
    sentences = [*warnings, *remarks_of(closing, history, conditions)]
    closing.warnings.extend(warnings[:SENTENCES])
    closing.sentences.extend(sentences[:SENTENCES])
    return closing


def _row(name: str, constraint: Constraint, worst: Tensor) -> RequirementRow:
    """Of the largest violation of each sample, (n,); NaN where none applies."""
    worst = worst[~worst.isnan()]
    if not len(worst):
        return RequirementRow(name, constraint.in_words(), None, None, None, None)
    return RequirementRow(
        name=name,
        bound=constraint.in_words(),
        violated=int((worst > 0).sum()),
        of=len(worst),
        allowed=None
        if constraint.share is None
        else allowed(constraint.share, len(worst)),
        worst=constraint.value_at(float(worst.max())),
        most=constraint.value_at(float(quantiles(worst, 0.95))),
    )


def _with_held_out(row: RequirementRow, held_out: HeldOut | None) -> RequirementRow:
    """With what the last evaluation found of it, by the bounds of the evaluation."""
    if held_out is None or row.name not in held_out.worst:
        return row
    evaluated = _row(row.name, held_out.constraints[row.name], held_out.worst[row.name])
    return replace(
        row,
        held_violated=evaluated.violated,
        held_of=evaluated.of,
        held_allowed=evaluated.allowed,
        held_worst=evaluated.worst,
        held_most=evaluated.most,
    )


def _price(name: str, history: History) -> float | None:
    """The mean over samples and columns, of an interval the sum of its sides.

    Not of samples that share λ: it pushes those that pull in opposite directions, whose forces
    cancel.
    """
    if name not in history.prices:
        return None
    mean = history.prices.mean(name)
    return float(mean.abs().mean()) * history.constraints[name].sides


def _with_multipliers(
    row: RequirementRow,
    history: History,
    formulation: Formulation | None,
    table: Tensor | None,
    groups: Tensor | None,
) -> RequirementRow:
    """With its λ, of samples or of a statistic, and its price."""
    count = None
    value = None
    scope = "none" if formulation is None else formulation.scope
    if scope == "batch" and table is not None:
        # Of an interval the larger of the two, and of an equality without its sign.
        value = float(table.abs().max())
    elif scope == "sample" and history.samples:
        of_samples = torch.zeros(0, 1) if table is None else table
        if groups is not None and len(of_samples) and not row.by_group:
            of_samples = of_samples[groups]  # A sample has the λ of its group.
        count = int(of_samples.any(1).sum())
    price = None
    if row.of and (groups is None or row.by_group):
        price = _price(row.name, history)
    return replace(row, multipliers=count, multiplier=value, price=price)


def _never_seen(history: History, left_out: int) -> Iterator[str]:
    """Samples of the training set that were in no step, or left out of every one."""
    missing = int((~history.seen).sum())
    if not missing or not history.steps or history.partial:
        return
    unseen = f"{missing:,} of {history.samples:,} training samples were in no step"
    if left_out:
        yield f"{unseen}: values that were not finite kept some of them out."
    elif history.rows >= 2 * history.samples:
        # Two epochs' rows reach all, by their right index.
        yield (
            f"{unseen}, which had {history.rows:,} rows in all. The index is the position of each "
            "sample in the training set, and samples their number: is one of them another?"
        )
    else:
        yield f"{unseen}: the run ended before, or the loader leaves them out."
