"""Texts of different lengths through an encoder as one row of tokens, without padding.

All in an encoder but attention works token by token. So a padded batch (n, T) becomes a single row
of N tokens, sequence behind sequence, the short ones first, every token with its own position.
Attention takes the row apart again, into batches of sequences of similar length, padded to whole
blocks. What may see what is decided by the model's own mask functions, given positions.

Inside :func:`packed` the encoder of a classifier has its inputs packed on the way in and its last
hidden states padded on the way out, so the head around it sees what it always sees.

Encoders that do not attend through transformers' "sdpa", mix tokens by other means or count
positions from elsewhere than 0 cannot be packed, so compare with the padded computation first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pl_pointwise.errors import UnsupportedError

from .dropout import dropout as quick_dropout

ATTENTION_BLOCK = 32
"""Lengths that are padded to one multiple of this are one batch of attention, half of it without
gradients: measured on MiniLM-L6, 0.91 of a step's time, 0.93 of scoring's."""


class RowAttention:
    """What stands in for the attention and the mask of "sdpa" while a layout of a row is in use.

    transformers looks both up by the name of the implementation, and checks by substring that the
    model supports "sdpa".

    Args:
        name: of the implementation, in front of "_sdpa".
        attention: as transformers calls it, given what ``mask`` returns.
        mask: from the layout and transformers' keywords, anything but a tensor.
    """

    def __init__(self, name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
        self.name = f"{name}_sdpa"
        self._layout: ContextVar[Any] = ContextVar(name, default=None)
        self._own_attention, self._own_mask = attention, mask
        AttentionInterface.register(self.name, self._attention)
        AttentionMaskInterface.register(self.name, self._mask)

    @contextmanager
    def used(self, layout: Any) -> Iterator[None]:
        """While this holds, an installed model computes a row of this layout."""
        token = self._layout.set(layout)
        try:
            yield
        finally:
            self._layout.reset(token)

    def _mask(self, *args: Any, **kwargs: Any) -> Any:
        layout = self._layout.get()
        return sdpa_mask(*args, **kwargs) if layout is None else self._own_mask(layout, **kwargs)

    def _attention(self, module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
        usual = mask is None or isinstance(mask, Tensor)
        attention = sdpa_attention_forward if usual else self._own_attention
        return attention(module, q, k, v, mask, **kwargs)

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


@dataclass(frozen=True)
class Packing:
    """Where the N tokens of the row come from; on the CPU, where a row is the faster way."""

    shape: tuple[int, int]  # (n, T) of the padded batch
    source: Tensor  # (N,) positions in the flattened padded batch
    positions: Tensor  # (N,) from 0 in each sequence
    lengths: Tensor  # (n,) of the sequences, rising

    @classmethod
    def of(cls, lengths: Tensor, width: int) -> Packing:
        """For sequences of the given lengths (n,), all above 0, padded on the right to T."""
        lengths, order = lengths.sort(stable=True)
        columns = torch.arange(width)
        filled = columns < lengths[:, None]  # (n, T)
        source = (order[:, None] * width + columns)[filled]
        positions = columns.expand(len(lengths), width)[filled]
        return cls((len(lengths), width), source, positions, lengths)

    def pack(self, padded: Tensor) -> Tensor:
        """(n, T, …) → (1, N, …)."""
        return padded.flatten(0, 1).index_select(0, self.source)[None]

    def pad(self, row: Tensor) -> Tensor:
        """(1, N, …) → (n, T, …), 0 where there is no token."""
        count, width = self.shape
        zeros = row.new_zeros(count * width, *row.shape[2:])
        return zeros.index_copy(0, self.source, row[0]).unflatten(0, self.shape)


@dataclass(frozen=True)
class Batches:
    """The sequences of a row of N tokens as padded batches for attention, in a mask's place.

    Sequences of similar length are together. Flattened, one behind the other, they are M places.
    """

    shapes: tuple[tuple[int, int], ...]  # (count, length) of each, by rising length
    inside: tuple[Tensor | None, ...]  # (count, length) bool: is a token; None where all are
    source: Tensor  # (M,) places in the row; where there is no token, those of some token
    places: Tensor  # (N,) of the row's tokens among the M
    masks: tuple[Tensor | None, ...] = ()  # (count, 1, 1 or length, length); None is everything

    @classmethod
    def of(cls, lengths: Tensor) -> Batches:
        """For sequences of rising lengths (n,)."""
        block = ATTENTION_BLOCK if torch.is_grad_enabled() else ATTENTION_BLOCK // 2
        padded = (lengths + block - 1) // block * block
        kinds, counts = padded.unique_consecutive(return_counts=True)
        shapes = tuple(zip(counts.tolist(), kinds.tolist(), strict=True))
        sequence = torch.arange(len(lengths)).repeat_interleave(padded)  # (M,)
        column = torch.arange(len(sequence)) - (padded.cumsum(0) - padded)[sequence]
        filled = column < lengths[sequence]
        source = (lengths.cumsum(0) - lengths)[sequence] + column * filled
        parts = filled.split([count * length for count, length in shapes])
        inside = tuple(
            None if part.all() else part.view(shape)
            for part, shape in zip(parts, shapes, strict=True)
        )
        return cls(shapes, inside, source, filled.nonzero()[:, 0])

    def apart(self, row: Tensor) -> list[Tensor]:
        """(1, heads, N, D) → (count, heads, length, D) of each batch."""
        pieces = row[0].transpose(0, 1).index_select(0, self.source)
        sizes = [count * length for count, length in self.shapes]
        return [
            piece.unflatten(0, shape).transpose(1, 2)
            for piece, shape in zip(pieces.split(sizes), self.shapes, strict=True)
        ]

    def together(self, outputs: Iterable[Tensor]) -> Tensor:
        """(count, length, heads, D) of each batch → (1, N, heads, D)."""
        flat = torch.cat([output.flatten(0, 1) for output in outputs])
        return flat.index_select(0, self.places)[None]


@contextmanager
def packed(model: PreTrainedModel, packing: Packing) -> Iterator[None]:
    """While this holds, an installed model computes its padded inputs in this packing."""
    encoder = model.base_model
    hooks = (
        encoder.register_forward_pre_hook(partial(_pack_inputs, packing), with_kwargs=True),
        encoder.register_forward_hook(partial(_padded, packing)),
    )
    try:
        with _ROW.used(packing):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def install(model: PreTrainedModel) -> None:
    """Make a classifier able to compute under :func:`packed`; ``uninstall`` undoes it.

    It stays so: gradient checkpointing calls the layers again during the backward pass.
    """
    if model.base_model is model:
        raise UnsupportedError(f"{type(model).__name__} has no encoder inside it")
    _ROW.install(model)


def _pack_inputs(
    packing: Packing, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The encoder's inputs (n, T) as one row (1, N)."""
    inputs = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
    for name in ("input_ids", "token_type_ids"):
        if inputs.get(name) is not None:
            inputs[name] = packing.pack(inputs[name])
    # With a mask, transformers does not take the row for several packed sequences of its own kind.
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["position_ids"] = packing.positions[None]
    return (), inputs


def _padded(packing: Packing, module: Any, args: tuple[Any, ...], output: Any) -> Any:
    """The encoder's outputs as the head expects them."""
    output.last_hidden_state = packing.pad(output.last_hidden_state)
    if output.get("pooler_output") is not None:
        output.pooler_output = module.pooler(output.last_hidden_state)
    return output


def _packed_mask(
    packing: Packing, *, mask_function: Callable[..., Tensor], **kwargs: Any
) -> Batches:
    """In a mask's place."""
    batches = Batches.of(packing.lengths)
    longest = torch.arange(batches.shapes[-1][1])
    rule = visible(mask_function, longest, longest)
    masks: list[Tensor | None] = []
    for (_, length), inside in zip(batches.shapes, batches.inside, strict=True):
        mine = rule[..., :length, :length]
        mask = None if mine.all() else mine
        if inside is not None:
            keys = inside[:, None, None]
            # What is no token sees all tokens, as a softmax over nothing is NaN.
            mask = keys if mask is None else (mask | ~inside[:, None, :, None]) & keys
        masks.append(mask)
    return replace(batches, masks=tuple(masks))


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batches: Batches,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention batch by batch.  query, key, value: (1, heads, N, D)  →  (1, N, heads, D)"""
    attend: Callable[..., Any] = sdpa_attention_forward
    same = kwargs.get("position_bias") is None and key.shape == query.shape
    dropped = kwargs.get("dropout", 0.0) > 0  # which torch's fused kernel has not
    if same and (dropped or query.dtype == torch.bfloat16):
        attend = softmax_attention  # the same, and faster
    apart = map(batches.apart, (query, key, value))
    parts = zip(*apart, batches.masks, strict=True)
    return batches.together(attend(module, *p, **kwargs)[0] for p in parts), None


def softmax_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """softmax(q kᵀ · scaling) v, the softmax in float32 or wider, dropout on the probabilities.

    query, key, value: (n, heads, T, D); mask: bool, (n or 1, 1, T or 1, T)  →  (n, T, heads, D)
    """
    logits = (query * scaling) @ key.transpose(-1, -2)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    wide = torch.promote_types(logits.dtype, torch.float32)
    probabilities = logits.softmax(-1, dtype=wide).to(value.dtype)
    return (quick_dropout(probabilities, dropout) @ value).transpose(1, 2), None


_ROW = RowAttention("packed", _packed_attention, _packed_mask)
uninstall = _ROW.uninstall
