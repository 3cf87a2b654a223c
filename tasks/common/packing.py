"""Texts of different lengths through an encoder as one row of tokens, without padding.

All in an encoder but attention works token by token. So a padded batch (n, T) becomes a single row
of N tokens, sequence behind sequence, the short ones first, every token with its own position.
Attention takes the row apart again, into batches of sequences of similar length, padded to whole
blocks. What may see what is decided by the model's own mask functions, given positions, so that a
window reaches as far as in a padded batch.

Inside :func:`packed` the encoder of a classifier has its inputs packed on the way in and its last
hidden states padded on the way out, so the head around it sees what it always sees.

It saves more than the padding: a pass costs an embedding's gradient and a sum of all others, so one
pass for pairs of all lengths is cheaper than one for each group of like length.

Encoders that do not attend through transformers' "sdpa" or mix tokens by other means cannot be
packed, so compare with the padded computation first.
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

from .dropout import drawn, use_quick_dropout

IMPLEMENTATION = "packed_sdpa"
"""The name in transformers' registries, which checks by substring that a model supports "sdpa"."""

BLOCK = 16
"""Lengths that are padded to one multiple of this are one batch of attention; of 16 to 64 it was
the fastest in steps of MiniLM-L6, by 2 % against 32."""


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
    # (count, length) bool: is a token; None where all are
    inside: tuple[Tensor | None, ...]
    # (M,) places in the row; where there is no token, those of some token
    source: Tensor
    places: Tensor  # (N,) of the row's tokens among the M
    # (count, 1, 1 or length, length); None is everything
    masks: tuple[Tensor | None, ...] = ()

    @classmethod
    def of(cls, lengths: Tensor) -> Batches:
        """For sequences of rising lengths (n,)."""
        padded = (lengths + BLOCK - 1) // BLOCK * BLOCK
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


_PACKING: ContextVar[Packing | None] = ContextVar("packing", default=None)


@contextmanager
def packed(model: PreTrainedModel, packing: Packing) -> Iterator[None]:
    """While this holds, an installed model computes its padded inputs in this packing."""
    encoder, token = model.base_model, _PACKING.set(packing)
    hooks = (
        encoder.register_forward_pre_hook(
            partial(_pack_inputs, packing), with_kwargs=True
        ),
        encoder.register_forward_hook(partial(_padded, packing)),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        _PACKING.reset(token)


def install(model: PreTrainedModel) -> None:
    """Make a classifier able to compute under :func:`packed`; :func:`uninstall` undoes it.

    It stays so: gradient checkpointing calls the layers again during the backward pass.

    Raises:
        UnsupportedError: it has no encoder inside, or attends by other means than "sdpa".
    """
    # Only the encoder is packed; its head works on padded rows.
    if model.base_model is model:
        raise UnsupportedError(f"{type(model).__name__} has no encoder inside it")
    current = model.config._attn_implementation
    # Installed by an earlier fit.
    if current == IMPLEMENTATION:
        return
    if current != "sdpa":
        raise UnsupportedError(f'attention implementation "{current}" is not "sdpa"')
    model.set_attn_implementation(IMPLEMENTATION)
    # Older architectures keep attention of their own whatever the setting is.
    if model.config._attn_implementation != IMPLEMENTATION:
        raise UnsupportedError(
            f"{type(model).__name__} does not use the attention interface of transformers"
        )
    use_quick_dropout(model)


def uninstall(model: PreTrainedModel) -> None:
    """Give the model back the attention it was loaded with."""
    if model.config._attn_implementation == IMPLEMENTATION:
        model.set_attn_implementation("sdpa")


def _pack_inputs(
    packing: Packing, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The encoder's inputs (n, T) as one row (1, N)."""
    inputs = (
        dict(zip(inspect.signature(module.forward).parameters, args, strict=False))
        | kwargs
    )
    for name in ("input_ids", "token_type_ids"):
        if inputs.get(name) is not None:
            inputs[name] = packing.pack(inputs[name])
    # With a mask, transformers does not take the row for several packed sequences of its own kind.
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["position_ids"] = packing.positions[None] + first_position(module)
    return (), inputs


def first_position(encoder: nn.Module) -> int:
    """The position of a first token: RoBERTa and its like count from behind the padding's."""
    padding = (
        part.padding_idx
        for name, part in encoder.named_modules()
        if isinstance(part, nn.Embedding)
        and "position" in name
        and part.padding_idx is not None
    )
    return next((place + 1 for place in padding), 0)


def _padded(packing: Packing, module: Any, args: tuple[Any, ...], output: Any) -> Any:
    """The encoder's outputs as the head expects them."""
    output.last_hidden_state = packing.pad(output.last_hidden_state)
    # BERT's pooler read the first token of the packed row: of one text instead of each.
    if output.get("pooler_output") is not None:
        output.pooler_output = module.pooler(output.last_hidden_state)
    return output


def _mask(*args: Any, mask_function: Callable[..., Tensor], **kwargs: Any) -> Any:
    """A mask for transformers' registry: :class:`Batches` in a packing, else sdpa's.

    mask_function(sample, head, query position, key position) → bool is the model's rule.
    """
    packing = _PACKING.get()
    if packing is None:
        return sdpa_mask(*args, mask_function=mask_function, **kwargs)
    batches = Batches.of(packing.lengths)
    longest = torch.arange(batches.shapes[-1][1])
    zero = torch.zeros((1, 1, 1, 1), dtype=torch.long)
    rule = mask_function(
        zero, zero, longest[None, None, :, None], longest[None, None, None, :]
    )
    rule = rule.expand(1, 1, len(longest), len(longest))
    masks: list[Tensor | None] = []
    for (_, length), inside in zip(batches.shapes, batches.inside, strict=True):
        allowed = rule[..., :length, :length]
        mask = None if allowed.all() else allowed
        if inside is not None:
            keys = inside[:, None, None]
            # What is no token sees all tokens, as a softmax over nothing is NaN.
            mask = keys if mask is None else (mask | ~inside[:, None, :, None]) & keys
        masks.append(mask)
    return replace(batches, masks=tuple(masks))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Batches | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention for transformers' registry: given :class:`Batches`, batch by batch.

    query, key, value: (1, heads, N, D)  →  (1, N, heads, D)
    """
    # Not within packed(): an evaluation in padded groups, or another user of the model.
    if not isinstance(attention_mask, Batches):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
    attend: Callable[..., Any] = sdpa_attention_forward
    same = (
        kwargs.get("position_bias") is None and key.shape == query.shape == value.shape
    )
    dropped = kwargs.get("dropout", 0.0) > 0  # which torch's fused kernel has not
    # With a position bias or grouped-query heads the written-out gradient is another.
    if same and (dropped or query.dtype == torch.bfloat16):
        attend = softmax_attention  # the same, and faster
    apart = map(attention_mask.apart, (query, key, value))
    parts = zip(*apart, attention_mask.masks, strict=True)
    return attention_mask.together(attend(module, *p, **kwargs)[0] for p in parts), None


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
    """softmax(q kᵀ · scaling) v, dropout on the probabilities; the softmax sums in float32.

    query, key, value: (n, heads, T, D); mask: bool, (n or 1, 1, T or 1, T)  →  (n, T, heads, D)
    """
    bias = None
    if mask is not None:
        bias = query.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    attended: Tensor = _SoftmaxAttention.apply(
        query, key, value, bias, scaling, dropout
    )
    return attended.transpose(1, 2), None


class _SoftmaxAttention(torch.autograd.Function):
    """Attention with its gradient written out, which passes over (T, T) half as often.

    With S = q kᵀ · scaling + bias, P = softmax(S), W = P ∘ K / (1 − p), K what dropout keeps:

        O = W v        ∂v = Wᵀ ∂O        ∂P = (∂O vᵀ) ∘ K / (1 − p)
        ∂S = P ∘ (∂P − Σ ∂P ∘ P)         ∂q = ∂S k · scaling        ∂k = ∂Sᵀ q · scaling
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        scaling: float,
        dropout: float,
    ) -> Tensor:
        n, heads, length, _ = ctx.shape = query.shape
        q, k, v = (part.reshape(n * heads, length, -1) for part in (query, key, value))
        if bias is None:
            scores = torch.bmm(q, k.transpose(1, 2)).mul_(scaling)
        else:
            wide = bias.expand(n, heads, length, length).reshape(
                n * heads, length, length
            )
            scores = torch.baddbmm(wide, q, k.transpose(1, 2), alpha=scaling)
        # Autocast would widen the public one.
        probabilities = torch._softmax(scores, -1, half_to_float=False)
        kept, weights = None, probabilities
        if dropout > 0:
            kept, scale = drawn(probabilities, dropout)
            weights, v = probabilities * kept, v * scale
            ctx.scale = scale
        ctx.save_for_backward(q, k, v, probabilities, weights, kept)
        ctx.scaling = scaling
        return torch.bmm(weights, v).view(ctx.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, probabilities, weights, kept = ctx.saved_tensors
        gradient = gradient.reshape(q.shape)
        of_v = torch.bmm(weights.transpose(1, 2), gradient)
        of_weights = torch.bmm(gradient, v.transpose(1, 2))
        if kept is not None:
            of_v, of_weights = of_v.mul_(ctx.scale), of_weights.mul_(kept)
        dtype = probabilities.dtype
        of_scores = torch._softmax_backward_data(of_weights, probabilities, -1, dtype)
        of_q = torch.bmm(of_scores, k).mul_(ctx.scaling)
        of_k = torch.bmm(of_scores.transpose(1, 2), q).mul_(ctx.scaling)
        shaped = (part.view(ctx.shape) for part in (of_q, of_k, of_v))
        return (*shaped, None, None, None)


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, _mask)
