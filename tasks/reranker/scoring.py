"""Scores of pairs of different lengths without computing on their padding.

Two scoring methods, which differ in cost and in nothing else:

    grouped  pairs of similar length go through the model together, padded to the longest of their
             group; any model
    packed   all tokens as one row, not padded (packing.py); for models that attend through
             transformers' interface, on a CPU: on a GPU attention batch by batch is many small
             kernels

Both take inputs of n pairs, {name: (n, T)} padded on the right, their lengths (n,) on the CPU, and
the positions (m,) of those that are to be scored, and return (m,) scores, float32 or wider.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pl_pointwise.task import evaluation_mode
from pl_pointwise.tasks.common.agreement import (
    Values,
    clone_problem,
    drawn_ids,
    rounding,
    value_problem,
)
from pl_pointwise.tasks.common.packing import Packing, install, packed, uninstall

log = logging.getLogger(__name__)

ScoringMethod = Literal["packed", "grouped"]
METHODS: tuple[ScoringMethod, ...] = get_args(ScoringMethod)

FORWARD_COST = {"cpu": 64}
"""What one more forward pass costs, in tokens: padding up to that much is cheaper than a pass.

Forward and backward on one CPU core: 55 tokens in float32, 145 to 170 under bf16 autocast.
"""

ROW_TOKENS = 4096
"""About how many tokens a packed row holds: of more, activations do not fit a CPU's caches."""


def score(logits: Tensor) -> Tensor:
    """(n, 1) or (n, 2) logits → (n,) scores: the logit, or logit 1 − logit 0; float32 or wider."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]


def scores_of(
    method: ScoringMethod,
    model: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    lengths: Tensor,
    present: Tensor,
) -> Tensor:
    """The scores of the present pairs by a scoring method; arguments as at the top."""
    device = inputs["input_ids"].device
    chosen = lengths[present]
    if method == "packed":  # Rows of about ROW_TOKENS tokens, pairs of similar length in one row.
        install(model)
        order = chosen.argsort(stable=True)
        rows = chosen[order].cumsum(0).sub(1).div(ROW_TOKENS, rounding_mode="floor")
        groups = list(order.split(rows.unique_consecutive(return_counts=True)[1].tolist()))
    else:
        groups = like_length_groups(chosen, FORWARD_COST.get(device.type, 512))
    scores = []
    for group in groups:
        rows = present[group]
        longest = int(lengths[rows].max())
        mask = torch.arange(longest) < lengths[rows, None]
        positions = rows.to(device, non_blocking=True)
        arguments = {key: value[positions, :longest] for key, value in inputs.items()}
        arguments["attention_mask"] = mask.to(device, torch.long, non_blocking=True)
        pack = method == "packed"
        with packed(model, Packing.of(lengths[rows], longest)) if pack else nullcontext():
            scores.append(score(model(**arguments).logits))
    positions = torch.cat(groups).argsort().to(device, non_blocking=True)
    return torch.cat(scores)[positions]


def choose_scoring_method(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], lengths: Tensor, present: Tensor
) -> ScoringMethod:
    """Whether a packed row gives what padded groups give; if not, the log says why."""
    if inputs["input_ids"].device.type != "cpu":
        return "grouped"
    by_length = present[lengths[present].argsort(stable=True)]
    probe = by_length[[0, len(by_length) // 2, -1]]
    try:
        with evaluation_mode(model), torch.no_grad():
            fast, plain = (_values(method, model, inputs, lengths, probe) for method in METHODS)
        problem = value_problem(fast, plain, rounding(model))
        problem = problem or clone_problem(model, _values_of_clone, METHODS[0], METHODS[1])
    except Exception as error:  # whatever a model may raise that was not built for this
        problem = f"{type(error).__name__}: {error}"
    if problem is None:
        return "packed"
    uninstall(model)
    log.warning("Pairs are padded in groups of similar length, not packed: %s.", problem)
    return "grouped"


def _values(*arguments: Any) -> Values:
    return {"score of a pair": scores_of(*arguments)}


def _values_of_clone(clone: Any, method: ScoringMethod) -> Values:
    inputs = {"input_ids": torch.tensor(drawn_ids([31] * 5))}
    return _values(method, clone, inputs, torch.tensor([31, 4, 17, 4, 1]), torch.arange(5))


def like_length_groups(lengths: Tensor, forward_cost: int) -> list[Tensor]:
    """Cut pairs, lengths (n,) on the CPU, into groups padded to their longest, short pairs first.

    A group costs forward_cost + size · longest tokens; sorted by length, the cheapest groups are
    consecutive, so dynamic programming over the distinct lengths finds them.
    """
    order = np.argsort(lengths.numpy(), kind="stable")
    distinct, counts = np.unique(lengths.numpy(), return_counts=True)
    ends = np.cumsum(counts)  # in `order`, of each distinct length
    starts = ends - counts
    cheapest = np.zeros(len(distinct) + 1)  # [j]: cost of the j shortest lengths
    opened = np.zeros(len(distinct), dtype=int)  # [j]: first length of the group that ends in j
    for j, length in enumerate(distinct):
        costs = cheapest[: j + 1] + forward_cost + (ends[j] - starts[: j + 1]) * length
        opened[j] = costs.argmin()
        cheapest[j + 1] = costs[opened[j]]
    groups = []
    last = len(distinct) - 1
    while last >= 0:
        groups.append(torch.from_numpy(order[starts[opened[last]] : ends[last]]))
        last = opened[last] - 1
    return groups[::-1]
