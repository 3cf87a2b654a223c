"""Attention in segments of a row by one kernel: flash-attn's, torch's, or FlexAttention.

On a GPU, attention sequence by sequence is many small kernels. Instead, a row of N tokens is cut
into :class:`Segments`, runs of queries each of which sees keys of its own, and one call computes
them all. A segment's last query stands at its last key, so with more keys than queries the queries
are the end of the sequence ("bottom right", as flash attention has it). That says all there is to
say of packed sequences, and of several responses to one prompt: a response is a segment whose keys
are the prompt's and its own.

``KERNELS`` in their order of preference, :func:`choose_kernel` takes the first that is
installed, takes the precision and the dropout, and computes on the device at hand what
:func:`by_definition` computes, values and gradients. That function also stands in for a kernel in
a precision that it does not take, so that a model is compared in float32 through the very segments
that the kernel will get.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from pl_pointwise.errors import UnsupportedError

from .agreement import LOW, disagreement, gradient_problem

log = logging.getLogger(__name__)

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
    block_masks: dict[Window, Any] = field(default_factory=dict, compare=False)

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
        query_ends, key_ends, source = (
            None if each is None else each.to(device, non_blocking=True)
            for each in (self.query_ends, self.key_ends, self.source)
        )
        assert query_ends is not None
        assert key_ends is not None
        return replace(
            self, query_ends=query_ends, key_ends=key_ends, source=source, block_masks={}
        )


@dataclass(frozen=True)
class Call:
    """What a layer asks for besides query, key and value."""

    segments: Segments
    window: Window
    scaling: float
    dropout: float = 0.0  # the probability


@dataclass(frozen=True)
class Kernel:
    """A way to compute attention in segments.

    ``attend`` takes query (N, heads, D), key and value (M, key heads, D), and gives (N, heads, D).
    """

    name: str
    attend: Callable[[Tensor, Tensor, Tensor, Call], Tensor]
    package: str  # the module it needs
    low_only: bool = True  # whether it takes 16 bits alone
    drops: bool = False  # whether it has dropout

    @property
    def installed(self) -> bool:
        try:
            return find_spec(self.package) is not None
        except ImportError:  # of the package it is in
            return False


# The kernels -------------------------------------------------------------------------------------


def by_definition(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
    """What a kernel is to compute, segment by segment, in float32 or wider; without dropout."""
    given, outputs, segments = value.dtype, [], call.segments
    wide = torch.promote_types(given, torch.float32)
    query, key, value = (each.to(wide) for each in (query, key, value))
    q_ends, k_ends = segments.query_ends.tolist(), segments.key_ends.tolist()
    for i in range(len(q_ends) - 1):
        q = query[q_ends[i] : q_ends[i + 1]].transpose(0, 1)
        k, v = (each[k_ends[i] : k_ends[i + 1]].transpose(0, 1) for each in (key, value))
        first = k.shape[1] - q.shape[1]
        at, of = (torch.arange(n, device=q.device) for n in (q.shape[1], k.shape[1]))
        seen = _within(call.window, of - (at + first)[:, None])
        k, v = (each.repeat_interleave(len(q) // len(k), dim=0) for each in (k, v))
        logits = (q * call.scaling) @ k.transpose(-1, -2)
        outputs.append(logits.masked_fill(~seen, -torch.inf).softmax(-1) @ v)
    return torch.cat(outputs, dim=1).transpose(0, 1).to(given)


def _within(window: Window, ahead: Tensor) -> Tensor:
    """bool: whether a key so many positions ahead of the query is seen."""
    before, after = window
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if before >= 0:
        seen = seen & (ahead >= -before)
    return seen & (ahead <= after) if after >= 0 else seen


def _flash_attn(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    result: Tensor = flash_attn_varlen_func(
        query,
        key,
        value,
        call.segments.query_ends,
        call.segments.key_ends,
        *call.segments.longest,
        dropout_p=call.dropout,
        softmax_scale=call.scaling,
        causal=call.window[1] == 0,
        window_size=call.window,
    )
    return result


def _torch_varlen(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    result = varlen_attn(
        query,
        key,
        value,
        call.segments.query_ends,
        call.segments.key_ends,
        *call.segments.longest,
        scale=call.scaling,
        window_size=call.window,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    assert isinstance(result, Tensor)
    return result


def _flex(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
    attend, create = _flex_functions(query.device.type == "cuda")
    segments, window = call.segments, call.window
    mask = segments.block_masks.get(window)
    if mask is None:  # Once for all layers with this window.
        sizes = len(query), len(key)
        mask = create(segment_mask(segments, window, *sizes), None, None, *sizes, query.device)
        segments.block_masks[window] = mask
    q, k, v = (each.transpose(0, 1)[None] for each in (query, key, value))
    grouped = key.shape[1] != query.shape[1]
    result: Tensor = attend(q, k, v, block_mask=mask, scale=call.scaling, enable_gqa=grouped)
    return result[0].transpose(0, 1)


@cache
def _flex_functions(compiled: bool) -> tuple[Any, Any]:
    """FlexAttention and the making of its masks; compiled for whatever length, once."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not compiled:
        return flex_attention, create_block_mask
    return torch.compile(flex_attention, dynamic=True), torch.compile(
        create_block_mask, dynamic=True
    )


def segment_mask(
    segments: Segments, window: Window, queries: int, keys: int
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The segments as FlexAttention takes them: (sample, head, query, key) → bool."""
    at, of = (
        torch.arange(count, device=segments.query_ends.device, dtype=torch.int32)
        for count in (queries, keys)
    )
    # The segment of each, and how far it is from the segment's end, where queries and keys meet.
    query_of, key_of = (
        torch.bucketize(place, ends[1:], right=True)
        for place, ends in ((at, segments.query_ends), (of, segments.key_ends))
    )
    query_left = segments.query_ends[1:][query_of] - at
    key_left = segments.key_ends[1:][key_of] - of
    # Tensors, so that FlexAttention is compiled once for all windows.
    before, after = (
        torch.full((), reach if reach >= 0 else queries + keys, device=at.device, dtype=at.dtype)
        for reach in window
    )

    def seen(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        ahead = query_left[query] - key_left[key]
        return (query_of[query] == key_of[key]) & (ahead + before >= 0) & (ahead <= after)

    return seen


BY_DEFINITION = Kernel("by definition", by_definition, "torch", low_only=False)

KERNELS = (
    Kernel("flash-attn", _flash_attn, "flash_attn", drops=True),
    Kernel("torch's varlen_attn", _torch_varlen, "torch.nn.attention.varlen"),
    Kernel("FlexAttention", _flex, "torch.nn.attention.flex_attention", low_only=False),
)


# Attention of a model's layer ---------------------------------------------------------------------


def attend(
    kernel: Kernel,
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
        UnsupportedError: what no kernel here has: a bias, a cap of the logits, sinks; or dropout
            where this one has none.
    """
    more = [name for name in _NOT_HERE if others.get(name) is not None]
    if dropout and not kernel.drops:
        more.append("dropout")
    if more:
        raise UnsupportedError(f"{kernel.name} has no {', '.join(more)}")
    dtype = _computing_dtype(query)
    given = value.dtype if value.dtype in LOW else dtype
    q, k, v = (each[0].transpose(0, 1).to(given) for each in (query, key, value))
    if segments.source is not None:
        k, v = (each.index_select(0, segments.source) for each in (k, v))
    compute = kernel.attend
    if kernel.low_only and q.dtype not in LOW:  # A comparison in float32, see the top.
        compute = by_definition
    scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
    return compute(q, k, v, Call(segments, window, scaling, dropout))[None], None


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


# The choice ---------------------------------------------------------------------------------------


def choose_kernel(model: nn.Module, device: torch.device) -> Kernel | None:
    """The first kernel that can be used for a model on this device and is right there, or None.

    In the precision that now holds. What is taken, and why no other before it, is logged.
    """
    weight = next(weight for weight in model.parameters() if weight.is_floating_point())
    dtype = _computing_dtype(weight)
    dropout, sizes = attention_dropout(model), head_sizes(model)
    refused: list[str] = []
    for kernel in KERNELS:
        problem = None if kernel.installed else f"{kernel.package} is not installed"
        if problem is None and kernel.low_only and dtype not in LOW:
            problem = f"it does not compute in {dtype}"
        if problem is None and dropout and not kernel.drops:
            problem = f"it has no dropout, and the model's attention one of {dropout}"
        if problem is None and sizes is None:
            problem = "the model's configuration does not say how many heads it has"
        if problem is None and sizes is not None:
            problem = kernel_problem(kernel, *sizes, dtype, device)
        if problem is None:
            log.info("Attention in segments: %s%s.", kernel.name, _after(refused))
            return kernel
        refused.append(f"{kernel.name}: {problem}")
    log.info("Attention in segments has no kernel here%s.", _after(refused))
    return None


def _after(refused: Sequence[str]) -> str:
    return f" ({'; '.join(refused)})" if refused else ""


def attention_dropout(model: Any) -> float:
    """The probability that a model's attention drops in training, by its configuration."""
    settings = vars(model.config.get_text_config()).items()  # attn_pdrop, attention_dropout, …
    named = [value for name, value in settings if "att" in name and "drop" in name]
    return max((float(value) for value in named if isinstance(value, float)), default=0.0)


def head_sizes(model: Any) -> tuple[int, int, int] | None:
    """Heads, key heads and the size of a head, by a model's configuration; None if it says not."""
    config = model.config.get_text_config()
    heads, hidden = (getattr(config, n, None) for n in ("num_attention_heads", "hidden_size"))
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return None
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, int(key_heads), int(getattr(config, "head_dim", None) or hidden // heads)


def kernel_problem(
    kernel: Kernel,
    heads: int,
    key_heads: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """Why a kernel is not to be used, or None if it computes what the definition says.

    On random rows of segments with more keys than queries and equally many, everything seen, causal
    and in windows: values, and gradients. In an evaluation too, which has none of its own.
    """
    queries, keys = (37, 130, 1, 64, 200), (37, 161, 60, 64, 333)
    shapes = [(sum(queries), heads), (sum(keys), key_heads), (sum(keys), key_heads)]
    scaling = 3 * size**-0.5  # Sharper than models', so that a key too many is seen.
    bound = 3e-2 if dtype in LOW else 1e-3

    def computed(
        attend: Callable[..., Tensor], inputs: Sequence[Tensor], window: Window
    ) -> tuple[Tensor, list[Tensor]]:
        inputs = [each.detach().requires_grad_() for each in inputs]
        found = attend(*inputs, Call(segments, window, scaling)).float()
        gradients = torch.autograd.grad((found * weights).sum(), inputs)
        return found.detach(), [each.float() for each in gradients]

    off = torch.autocast(device.type, enabled=False)
    with torch.inference_mode(False), torch.enable_grad(), off:
        segments = Segments.of(queries, keys).to(device)
        generator = torch.Generator().manual_seed(0)
        inputs = [
            torch.randn(*shape, size, generator=generator).to(device, dtype) for shape in shapes
        ]
        weights = torch.randn(*shapes[0], size, generator=generator).to(device)
        for window in (EVERYTHING, CAUSAL, (9, 0), (7, 7)):
            expected, wanted = computed(by_definition, [each.float() for each in inputs], window)
            try:
                found, gradients = computed(kernel.attend, inputs, window)
            except Exception as error:  # whatever one may raise on a device it was not made for
                return (str(error) or type(error).__name__).splitlines()[0]
            problem = disagreement("attention", found, expected, bound)
            problem = problem or gradient_problem(gradients, wanted, bound)
            if problem is not None:
                return f"with the window {window}, {problem}"
    return None
