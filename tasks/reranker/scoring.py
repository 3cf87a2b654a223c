"""Scores of pairs of different lengths, with little computed on their padding.

Pairs of similar length go through the model together, padded to the longest of their group.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

FORWARD_COST = {"cpu": 64}
"""What one more forward pass costs, in tokens: padding up to that much is cheaper than a pass.

Forward and backward on one CPU core: 55 tokens in float32, 145 to 170 under bf16 autocast.
"""


def score(logits: Tensor) -> Tensor:
    """(n, 1) or (n, 2) logits → (n,) scores: the logit, or logit 1 − logit 0; float32 or wider."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]


def scores_of(model: PreTrainedModel, inputs: Mapping[str, Tensor], lengths: Tensor) -> Tensor:
    """The scores (n,) of pairs, float32 or wider; 0, without a gradient, where there is none.

    Args:
        inputs: {name: (n, T)}, padded on the right.
        lengths: tokens of each pair, (n,), on the CPU; 0 where there is none.
    """
    device = inputs["input_ids"].device
    present = lengths.nonzero()[:, 0]
    if len(present) == 0:
        return torch.zeros(len(lengths), device=device)
    found, scores = [], []
    for group in like_length_groups(lengths[present], FORWARD_COST.get(device.type, 512)):
        rows = present[group]
        longest = int(lengths[rows].max())
        mask = torch.arange(longest) < lengths[rows, None]
        positions = rows.to(device, non_blocking=True)
        arguments = {key: value[positions, :longest] for key, value in inputs.items()}
        arguments["attention_mask"] = mask.to(device, torch.long, non_blocking=True)
        scores.append(score(model(**arguments).logits))
        found.append(positions)
    values = torch.cat(scores)
    return values.new_zeros(len(lengths)).index_copy(0, torch.cat(found), values)


def like_length_groups(lengths: Tensor, forward_cost: int) -> list[Tensor]:
    """Cut pairs, lengths (n,) on the CPU, into groups padded to their longest, short pairs first.

    A group takes the next longer pair as long as the padding in it costs less than another pass.
    """
    order = lengths.argsort(stable=True)
    in_order = lengths[order].tolist()
    groups, start, padding = list[Tensor](), 0, 0
    for end in range(1, len(in_order)):
        padding += (in_order[end] - in_order[end - 1]) * (end - start)
        if padding > forward_cost:
            groups.append(order[start:end])
            start, padding = end, 0
    return [*groups, order[start:]]
