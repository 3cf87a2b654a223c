"""Attention of our own under transformers' registries, around the one a model was loaded with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask

from pl_pointwise.errors import UnsupportedError

_ORIGINAL_MASKS: dict[str, Callable[..., Any]] = {"sdpa": sdpa_mask, "eager": eager_mask}


class Replacement:
    """Attention and mask functions that stand in for "sdpa" and "eager", under one name.

    transformers looks both up by the name of the implementation.

    Args:
        name: prefix of the registered names.
        attention: an attention function with a keyword ``original``, the implementation's name.
        mask: a mask function with the keywords ``original``, the mask function it stands in for,
            and ``additive``, whether masks are added to the logits (else bool, true for visible).
    """

    def __init__(self, name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
        # transformers checks by substring that the model supports "sdpa".
        self.names = {original: f"{name}_{original}" for original in _ORIGINAL_MASKS}
        for original, own in self.names.items():
            AttentionInterface.register(own, partial(attention, original=original))
            masks = partial(mask, original=_ORIGINAL_MASKS[original], additive=original == "eager")
            AttentionMaskInterface.register(own, masks)

    def install(self, model: PreTrainedModel) -> None:
        """Switch the model over; UnsupportedError: its attention has no counterpart here."""
        current = model.config._attn_implementation
        if current in self.names.values():
            return
        if current not in self.names:
            raise UnsupportedError(f'attention implementation "{current}" takes no such mask')
        model.set_attn_implementation(self.names[current])
        if model.config._attn_implementation != self.names[current]:
            raise UnsupportedError(
                f"{type(model).__name__} does not use the attention interface of transformers"
            )

    def uninstall(self, model: PreTrainedModel) -> None:
        """Give the model back the attention implementation it was loaded with."""
        for original, own in self.names.items():
            if model.config._attn_implementation == own:
                model.set_attn_implementation(original)


def attention_function(original: str, module: nn.Module) -> Callable[..., Any]:
    """The attention function named ``original`` that a layer of a model would call itself."""
    attend = AttentionInterface().get(original)
    if attend is None:  # each modeling file brings its own eager attention
        attend = sys.modules[type(module).__module__].eager_attention_forward
    function: Callable[..., Any] = attend
    return function


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


def added(rule: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as one to add to the logits: 0 where true, the lowest number elsewhere."""
    zero = torch.zeros((), dtype=dtype, device=rule.device)
    return torch.where(rule, zero, torch.finfo(dtype).min)
