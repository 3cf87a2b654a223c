"""The batch that scoring methods of language models are compared on, and what is compared.

Fresh adapters give the reference itself, so that their KL is 0 however it is computed, and no
gradient of what feeds them; so they are moved while methods are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pl_pointwise.tasks.common.agreement import disagreement

PROMPT_TOKENS, RESPONSE_TOKENS = 256, 64
"""The most tokens of the samples whose gradients are compared, as these need the activations."""


def probe_of(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Two samples with two responses each: the longest of the batch and another.

    What the batch lacks is made up, so that a method which lets samples or responses see each other
    cannot pass: the same prompt cut in half, the first response read backwards.
    """
    prompts, responses = batch["prompt_lengths"].cpu(), batch["response_lengths"].cpu()
    order = (prompts + responses.sum(1)).argsort(descending=True)
    order = order[responses[order].sum(1) > 0]
    rows = order[:2] if len(order) > 1 else order.repeat(2)
    rows = rows.to(batch["prompt_ids"].device)
    names = ("prompt_ids", "prompt_lengths", "response_ids", "response_lengths")
    probe = {name: batch[name].to(rows.device)[rows] for name in names}  # lengths may be elsewhere
    if len(order) == 1:
        half = probe["prompt_lengths"][1] // 2
        probe["prompt_lengths"][1] = half.clamp(min=1)
    if (probe["response_lengths"] > 0).sum(1).max() < 2:
        first = probe["response_lengths"].argmax(1)
        here = torch.arange(2, device=rows.device)
        ids, lengths = probe["response_ids"][here, first], probe["response_lengths"][here, first]
        places = torch.arange(ids.shape[1], device=rows.device)
        backwards = (lengths[:, None] - 1 - places).clamp(min=0)
        probe["response_ids"] = torch.stack([ids, ids.gather(1, backwards)], 1)
        probe["response_lengths"] = torch.stack([lengths, lengths], 1)
    return probe


def shortened(probe: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The probe with the first tokens only of prompts and responses, of as many as there are."""
    return {
        "prompt_ids": probe["prompt_ids"][:, :PROMPT_TOKENS],
        "prompt_lengths": probe["prompt_lengths"].clamp(max=PROMPT_TOKENS),
        "response_ids": probe["response_ids"][:, :, :RESPONSE_TOKENS],
        "response_lengths": probe["response_lengths"].clamp(max=RESPONSE_TOKENS),
    }


def value_problem(
    fast: Sequence[Tensor | None], plain: Sequence[Tensor | None], bound: float
) -> str | None:
    """What differs by more than the bound where the plain value is finite, or None.

    fast, plain: log-likelihood, KL and reference log-likelihood of each token.
    """
    names = ("log-likelihood", "KL", "log-likelihood of the reference")
    for name, value, expected in zip(names, fast, plain, strict=True):
        if expected is None:
            continue
        if value is None or value.shape != expected.shape:
            return f"its {name} differs from the plain method's in shape"
        problem = disagreement(f"{name} of a token", value, expected, bound)
        if problem is not None:
            return problem
    return None
