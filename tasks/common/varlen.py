"""Attention in segments of a row by one kernel: on a GPU, torch's ``varlen_attn``.

There, attention sequence by sequence is many small kernels. Instead, a row of N tokens is cut into
:class:`Segments`, runs of queries each of which sees keys of its own, and one call computes them
all. A segment's last query stands at its last key, so with more keys than queries the queries are
the end of the sequence ("bottom right", as flash attention has it). That says all there is to say
of packed sequences, and of several responses to one prompt: a response is a segment whose keys are
the prompt's and its own.

:func:`by_definition` is what the kernel computes, and stands in for it in float32, which the kernel
does not take: so a model is compared in float32 through the very segments that the kernel gets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from pl_pointwise.errors import UnsupportedError

from .agreement import LOW

Window = tuple[int, int]
"""How many keys before and after a query's own position it sees; −1 is all of them."""

EVERYTHING: Window = (-1, -1)
CAUSAL: Window = (-1, 0)


@dataclass(frozen=True)
class Segments:
    """S segments of a row of N queries, one behind the other; see the top.

    The M keys stand segment behind segment too: they are the row's own, or gathered from it.
    """

    query_ends: Tensor  # (S + 1,) int32, from 0
    key_ends: Tensor  # (S + 1,) int32, from 0
    longest: tuple[int, int]  # queries, keys of one segment
    source: Tensor | None = None  # (M,) places in the row of the keys; None: the row itself

    @classmethod
    def of(
        cls, queries: Sequence[int], keys: Sequence[int], source: Tensor | None = None
    ) -> Segments:
        """Segments of so many queries and keys, on the CPU."""
        query_ends, key_ends = (
            torch.tensor([0, *accumulate(counts)], dtype=torch.int32) for counts in (queries, keys)
        )
        return cls(query_ends, key_ends, (max(queries), max(keys)), source)

    def to(self, device: torch.device) -> Segments:
        source = self.source
        return replace(
            self,
            query_ends=self.query_ends.to(device, non_blocking=True),
            key_ends=self.key_ends.to(device, non_blocking=True),
            source=None if source is None else source.to(device, non_blocking=True),
        )


def by_definition(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, window: Window, scaling: float
) -> Tensor:
    """softmax(q kᵀ · scaling) v segment by segment, in float32 or wider.

    query: (N, heads, D);  key, value: (M, key heads, D)  →  (N, heads, D)
    """
    given, outputs = value.dtype, []
    wide = torch.promote_types(given, torch.float32)
    query, key, value = (each.to(wide) for each in (query, key, value))
    q_ends, k_ends = segments.query_ends.tolist(), segments.key_ends.tolist()
    for i in range(len(q_ends) - 1):
        q = query[q_ends[i] : q_ends[i + 1]].transpose(0, 1)
        k, v = (each[k_ends[i] : k_ends[i + 1]].transpose(0, 1) for each in (key, value))
        first = k.shape[1] - q.shape[1]
        at, of = (torch.arange(n, device=q.device) for n in (q.shape[1], k.shape[1]))
        seen = _within(window, of - (at + first)[:, None])
        k, v = (each.repeat_interleave(len(q) // len(k), dim=0) for each in (k, v))
        logits = (q * scaling) @ k.transpose(-1, -2)
        outputs.append(logits.masked_fill(~seen, -torch.inf).softmax(-1) @ v)
    return torch.cat(outputs, dim=1).transpose(0, 1).to(given)


def _within(window: Window, ahead: Tensor) -> Tensor:
    """bool: whether a key so many positions ahead of the query is seen."""
    before, after = window
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if before >= 0:
        seen = seen & (ahead >= -before)
    return seen & (ahead <= after) if after >= 0 else seen


def by_kernel(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, window: Window, scaling: float
) -> Tensor:
    """:func:`by_definition` in 16 bits, on a GPU."""
    from torch.nn.attention.varlen import varlen_attn

    result = varlen_attn(
        query,
        key,
        value,
        segments.query_ends,
        segments.key_ends,
        *segments.longest,
        scale=scaling,
        window_size=window,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    assert isinstance(result, Tensor)
    return result


def attend(
    segments: Segments,
    window: Window,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers' registry, in segments.

    query: (1, heads, N, D);  key, value: (1, key heads, N, D)  →  (1, N, heads, D)

    Raises:
        UnsupportedError: what the kernel has not: dropout, a bias, a cap of the logits, sinks.
    """
    more = [name for name in _NOT_HERE if others.get(name) is not None]
    more += ["dropout"] if dropout else []
    if more:
        raise UnsupportedError(f"attention in segments has no {', '.join(more)}")
    dtype = value.dtype if value.dtype in LOW else _computing_dtype(query)
    q, k, v = (each[0].transpose(0, 1).to(dtype) for each in (query, key, value))
    if segments.source is not None:
        k, v = (each.index_select(0, segments.source) for each in (k, v))
    compute = by_kernel if q.is_cuda and dtype in LOW else by_definition
    scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
    return compute(q, k, v, segments, window, scaling)[None], None


_NOT_HERE = ("softcap", "position_bias", "s_aux", "sinks")


def _computing_dtype(like: Tensor) -> torch.dtype:
    """The dtype of attention's products: autocast's, else the tensor's own."""
    device = like.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else like.dtype


def window_of(mask_function: Callable[..., Tensor], longest: int, rows: int = 64) -> Window | None:
    """A model's rule of what is seen as a window; None where it is no window.

    The rule is asked for queries spread over a sequence of the longest length, the first and the
    last among them, and all keys, on the CPU.
    """
    zero = torch.zeros((1, 1, 1, 1), dtype=torch.long)
    at = torch.linspace(0, longest - 1, min(rows, longest)).round().long()
    keys = torch.arange(longest)
    seen = mask_function(zero, zero, at[None, None, :, None], keys[None, None, None, :])
    seen = seen.expand(1, 1, len(at), longest)[0, 0]
    before, after = int(seen[-1].sum()) - 1, int(seen[0].sum()) - 1
    if min(before, after) < 0:
        return None
    whole = longest - 1
    window = -1 if before == whole else before, -1 if after == whole else after
    return window if seen.equal(_within(window, keys - at[:, None])) else None


def kernel_problem(model: nn.Module) -> str | None:
    """Why a model cannot attend in segments by the kernel, in the precision that now holds."""
    weight = next(weight for weight in model.parameters() if weight.is_floating_point())
    if not weight.is_cuda:
        return "there is no GPU"
    try:
        from torch.nn.attention.varlen import varlen_attn

        known = set(inspect.signature(varlen_attn).parameters)
    except ImportError:
        known = set()
    if not known >= {"window_size", "enable_gqa"}:
        return f"torch {torch.__version__} has no varlen_attn with windows and shared key heads"
    dtype, dropout = _computing_dtype(weight), attention_dropout(model)
    if dtype not in LOW:
        return f"it does not compute in {dtype}"
    return f"it has no dropout, and the model's attention one of {dropout}" if dropout else None


def attention_dropout(model: Any) -> float:
    """The probability that a model's attention drops in training, by its configuration."""
    settings = vars(model.config.get_text_config()).items()  # attn_pdrop, attention_dropout, …
    named = [value for name, value in settings if "att" in name and "drop" in name]
    return max((float(value) for value in named if isinstance(value, float)), default=0.0)
