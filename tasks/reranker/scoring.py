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


def scores_of(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], lengths: Tensor, present: Tensor
) -> Tensor:
    """The scores (m,) of the pairs that are present, float32 or wider.

    Args:
        inputs: of n pairs, {name: (n, T)}, padded on the right.
        lengths: theirs, (n,), on the CPU.
        present: positions (m,) of those that are to be scored, on the CPU.
    """
    device = inputs["input_ids"].device
    groups = like_length_groups(lengths[present], FORWARD_COST.get(device.type, 512))
    scores = []
    for group in groups:
        rows = present[group]
        longest = int(lengths[rows].max())
        mask = torch.arange(longest) < lengths[rows, None]
        positions = rows.to(device, non_blocking=True)
        arguments = {key: value[positions, :longest] for key, value in inputs.items()}
        arguments["attention_mask"] = mask.to(device, torch.long, non_blocking=True)
        scores.append(score(model(**arguments).logits))
    positions = torch.cat(groups).argsort().to(device, non_blocking=True)
    return torch.cat(scores)[positions]


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
