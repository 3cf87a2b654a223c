"""Attention of our own under transformers' registries, around its "sdpa"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from pl_pointwise.errors import UnsupportedError


class Replacement:
    """Functions that stand in for the attention and the mask of "sdpa".

    transformers looks both up by the name of the implementation, and checks by substring that the
    model supports "sdpa".
    """

    def __init__(self, name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
        self.name = f"{name}_sdpa"
        AttentionInterface.register(self.name, attention)
        AttentionMaskInterface.register(self.name, mask)

    def install(self, model: PreTrainedModel) -> None:
        """Switch the model over; UnsupportedError: it attends by other means than "sdpa"."""
        current = model.config._attn_implementation
        if current == self.name:
            return
        if current != "sdpa":
            raise UnsupportedError(f'attention implementation "{current}" is not "sdpa"')
        model.set_attn_implementation(self.name)
        if model.config._attn_implementation != self.name:
            raise UnsupportedError(
                f"{type(model).__name__} does not use the attention interface of transformers"
            )

    def uninstall(self, model: PreTrainedModel) -> None:
        """Give the model back the attention it was loaded with."""
        if model.config._attn_implementation == self.name:
            model.set_attn_implementation("sdpa")


def visible(
    mask_function: Callable[..., Tensor],
    queries: Tensor,
    keys: Tensor,
    device: torch.device | str | None = None,
) -> Tensor:
    """What a model's rule lets queries at positions (Q,) see of keys at (K,): bool (1, 1, Q, K).

    mask_function(sample, head, query position, key position) → bool is the rule.
    """
    zero = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=device)
    rule = mask_function(zero, zero, queries[None, None, :, None], keys[None, None, None, :])
    return rule.expand(1, 1, len(queries), len(keys))
