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
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pl_pointwise.tasks.common.lengths import forward_cost, like_length_groups
from pl_pointwise.tasks.common.packing import Packing, install, packed, uninstall

log = logging.getLogger(__name__)

ScoringMethod = Literal["packed", "grouped"]

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
    # Packed rows have no padding to save, but should not be too long for a CPU's caches.
    if method == "packed":
        groups = rows_of_tokens(lengths[present], ROW_TOKENS)
    else:
        groups = like_length_groups(lengths[present], forward_cost(device))
    scores = []
    for group in groups:
        rows = present[group]
        longest = int(lengths[rows].max())
        mask = torch.arange(longest) < lengths[rows, None]
        positions = rows.to(device, non_blocking=True)
        arguments: dict[str, Any] = {
            name: value[positions, :longest] for name, value in inputs.items()
        }
        arguments["attention_mask"] = mask.to(device, torch.long, non_blocking=True)
        row = method == "packed"
        with (
            packed(model, Packing.of(lengths[rows], longest)) if row else nullcontext()
        ):
            scores.append(score(model(**arguments).logits))
    order = torch.cat(groups).argsort().to(device, non_blocking=True)
    return torch.cat(scores)[order]


def choose_scoring_method(
    model: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    lengths: Tensor,
    present: Tensor,
) -> ScoringMethod:
    """Whether a packed row gives what padded groups give; if not, the log says why.

    Of the shortest, a middle and the longest pair, in evaluation mode, and in float32 where the
    weights are: half precision would hide a shift by one position.
    """
    # There attention batch by batch is many small kernels, slower than padding.
    if inputs["input_ids"].device.type != "cpu":
        return "grouped"
    by_length = present[lengths[present].argsort(stable=True)]
    probe = by_length[[0, len(by_length) // 2, -1]].unique()
    # A shift by one position moves scores by less than bfloat16 rounds.
    exact = all(weight.dtype.itemsize >= 4 for weight in model.parameters())
    bound = 1e-4 if exact else 0.1
    mixed = torch.autocast(
        "cpu", enabled=torch.is_autocast_enabled("cpu") and not exact
    )
    training = [part for part in model.modules() if part.training]
    try:
        for part in training:
            part.training = False
        with torch.no_grad(), mixed:
            expected = scores_of("grouped", model, inputs, lengths, probe)
            install(model)
            scores = scores_of("packed", model, inputs, lengths, probe)
        problem = None
        # NaN is not close.
        if not scores.isclose(expected, rtol=bound, atol=bound).all():
            problem = (
                f"its scores are {scores.tolist()}, and {expected.tolist()} in groups"
            )
    except Exception as error:  # whatever a model may raise that was not built for this
        problem = f"{type(error).__name__}: {error}"
    finally:
        for part in training:
            part.training = True
    if problem is None:
        return "packed"
    uninstall(model)
    log.warning(
        "Pairs are padded in groups of similar length, not packed: %s.", problem
    )
    return "grouped"


def rows_of_tokens(lengths: Tensor, most: int) -> list[Tensor]:
    """Pairs, lengths (n,), by rising length as rows of about ``most`` tokens."""
    order = lengths.argsort(stable=True)
    rows = lengths[order].cumsum(0).sub(1).div(most, rounding_mode="floor")
    return list(order.split(rows.unique_consecutive(return_counts=True)[1].tolist()))
