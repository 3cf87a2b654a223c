"""Several responses to one prompt in one forward pass, the prompt encoded once and nothing padded.

A batch becomes a single row of N tokens. Sample after sample it holds

    prompt · first response · second response · …

with every response at the positions it would have directly behind the prompt. Only attention has to
know the layout:

    trunk     prompt and first response, an ordinary causal sequence
    branches  the other responses; each sees the prompt and itself

Both go to the attention function the model was loaded with, one call each per sample. What may see
what is decided by the model's own mask functions, given *positions* instead of places in the row,
so a window reaches as far back from the second response as from the first.

:func:`install` switches a model to this attention for good, as gradient checkpointing calls the
layers again in the backward pass. While :data:`LAYOUT` is not set, everything passes through.

What this cannot do: models whose layers mix tokens by other means (recurrence, convolution), ALiBi,
attention other than "sdpa". scoring.py compares with the plain computation.
"""

from __future__ import annotations

from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pl_pointwise.errors import UnsupportedError

from .batch import Layout

IMPLEMENTATION = "shared_prompt_sdpa"
"""The name in transformers' registries, which checks by substring that a model supports "sdpa"."""

ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}
"""The kinds of layers, in a model's settings, that mix tokens by attention alone."""

LAYOUT: ContextVar[Layout | None] = ContextVar("layout of a row", default=None)
"""While one is set, an installed model computes a row of it."""


def install(model: PreTrainedModel) -> None:
    """Switch the model over; UnsupportedError: it attends by other means than "sdpa"."""
    current = model.config._attn_implementation
    config = model.config.get_text_config()
    kinds = {*(getattr(config, "layer_types", None) or ())} - ATTENDING
    if kinds:
        raise UnsupportedError(
            f"its layers {sorted(kinds)} pass on more than attention does"
        )
    if current not in ("sdpa", IMPLEMENTATION):
        raise UnsupportedError(f'attention implementation "{current}" is not "sdpa"')
    model.set_attn_implementation(IMPLEMENTATION)
    # A model that does not look its attention up by name may keep its own, without an error.
    if model.config._attn_implementation != IMPLEMENTATION:
        raise UnsupportedError(
            f"{type(model).__name__} does not use the attention interface of transformers"
        )


def uninstall(model: PreTrainedModel) -> None:
    """Give the model back the attention it was loaded with."""
    if model.config._attn_implementation == IMPLEMENTATION:
        model.set_attn_implementation("sdpa")


RowMask = list[tuple[int, int, Tensor | None, Tensor | None]]
"""Of each sample the lengths of its trunk and of all of it; what the trunk may see, (1, 1, trunk,
trunk), None for causal and nothing else; and the branches, (1, 1, branches, all), None of none."""


def _mask(*args: Any, **kwargs: Any) -> Any:
    """The usual mask, or a row's in its place.

    The model's rule, mask_function(sample, head, query position, key position) → bool, is plainly
    causal if nothing was put on top (allow_is_causal_skip) and no window or chunk (local_size) is
    reached.
    """
    layout = LAYOUT.get()
    if layout is None:
        return sdpa_mask(*args, **kwargs)
    device = layout.positions.device
    local_size = kwargs.get("local_size")
    zero = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=device)

    def allowed(queries: Tensor, keys: Tensor) -> Tensor:
        """What queries at positions (Q,) see of keys at (K,): bool (1, 1, Q, K)."""
        q = queries[None, None, :, None]
        k = keys[None, None, None, :]
        seen: Tensor = kwargs["mask_function"](zero, zero, q, k)
        return seen.expand(1, 1, len(queries), len(keys))

    row: RowMask = []
    start = 0
    for lengths in layout.samples:
        trunk = sum(lengths[:2])
        size = sum(lengths)
        positions = layout.positions[start : start + size]
        start += size
        # Plainly causal attention takes no mask, and torch has its fast kernels for it.
        causal = kwargs.get("allow_is_causal_skip", True)
        causal = causal and (local_size is None or trunk < local_size)
        front = positions[:trunk]
        branches = None
        if size > trunk:
            # 0 the prompt, 1, 2, … the responses, by place in the sample
            parts = torch.repeat_interleave(torch.tensor(lengths)).to(
                device, non_blocking=True
            )
            seen = (parts == 0) | (parts == parts[trunk:, None])
            branches = allowed(positions[trunk:], positions) & seen
        row.append((trunk, size, None if causal else allowed(front, front), branches))
    return row


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: RowMask | Tensor | None,
    **kwargs: Any,
) -> Any:
    """Attention sample by sample; of a usual mask or none, the model's own.

    query: (1, heads, N, D);  key, value: (1, key heads, N, D)  →  (1, N, heads, D)
    """
    attend = partial(sdpa_attention_forward, module, **kwargs)
    if row is None or isinstance(row, Tensor):
        return attend(query, key, value, row)
    sizes = [size for _, size, _, _ in row]
    queries = query.split(sizes, dim=2)
    keys = key.split(sizes, dim=2)
    values = value.split(sizes, dim=2)
    outputs = []
    for (n, _, trunk, branches), q, k, v in zip(
        row, queries, keys, values, strict=True
    ):
        # Each sample by itself, so that none sees another.
        outputs.append(attend(q[:, :, :n], k[:, :, :n], v[:, :, :n], trunk)[0])
        if branches is not None:
            outputs.append(attend(q[:, :, n:], k, v, branches)[0])
    return torch.cat(outputs, dim=1), None


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, _mask)
