"""Whether a fast way to compute something agrees with the plain one.

A fast way relies on a model's architecture, not on its weights. So both are compared, values and
gradients, on a narrow clone: the same class and settings with few layers, heads and words, short
windows, and random weights in float32. Rounding to bfloat16 would move a result as far as a shift
by one position. The model itself is looked at besides, values alone, in its own precision.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

Method = TypeVar("Method")
Values = Mapping[str, Tensor]
"""What a way computes, by its name in a message."""

GRADIENT_BOUND = 3e-2
"""In float32. Rounding that turns one ReLU off moved a gradient of OPT by 7e-3 of its norm."""

WORDS = 96
"""The vocabulary of a clone."""
INNER, WINDOW = 64, 8
"""The inner size of its layers, or of each expert, and how far they see where they have windows."""
WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention")


def narrow_clone(model: PreTrainedModel) -> PreTrainedModel:
    """A small model of the same class and settings, on the same device, in evaluation mode."""
    eager = (model.config._attn_implementation or "").endswith("eager")
    options = {"attn_implementation": "eager" if eager else "sdpa", "dtype": torch.float32}
    clone: PreTrainedModel = type(model)._from_config(narrow_config(model.config), **options)
    draw_weights(clone)
    return clone.to(model.device).eval()


def drawn_ids(sizes: Sequence[int]) -> list[list[int]]:
    """Sequences of a clone's words, always the same."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, WORDS, (size,), generator=generator).tolist() for size in sizes]


def narrow_config(config: PretrainedConfig) -> PretrainedConfig:
    """The settings with a layer of each kind, two at least, and two key heads of the same size."""
    narrow = copy.deepcopy(config)
    text = narrow.get_text_config()
    heads, layers = text.num_attention_heads, text.num_hidden_layers
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    kinds = getattr(text, "layer_types", None) or [None] * layers
    kept = sorted({0, min(1, layers - 1), *map(kinds.index, kinds)})
    for name, value in list(vars(text).items()):
        if isinstance(value, (list, tuple)) and len(value) == layers:
            setattr(text, name, [value[layer] for layer in kept])  # What each layer is.
        elif name in WINDOWS and isinstance(value, int):
            setattr(text, name, min(value, WINDOW))
    text.num_hidden_layers = len(kept)
    text.num_attention_heads = min(heads // key_heads, 2) * min(key_heads, 2)
    if getattr(text, "num_key_value_heads", None):
        text.num_key_value_heads = min(key_heads, 2)
    text.hidden_size = head_size * text.num_attention_heads
    for name in ("intermediate_size", "moe_intermediate_size"):
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, INNER)
    text.vocab_size = WORDS
    if (text.pad_token_id or 0) >= WORDS:
        text.pad_token_id = 0
    return narrow


def draw_weights(model: nn.Module) -> None:
    """Draws all matrices from a seed of their own, so large that positions matter."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)


@contextmanager
def exact_comparison() -> Iterator[None]:
    """Gradients, also in an evaluation; float32 without TF32 and autocast; random state kept."""
    before = torch.get_float32_matmul_precision()
    default = torch.get_default_dtype()  # Another under Lightning's "bf16-true".
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        torch.random.fork_rng(devices=[]),
    ):
        torch.set_float32_matmul_precision("highest")
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
            torch.set_default_dtype(default)


def rounding(model: nn.Module) -> float:
    """How far two correct ways may differ, relative to 1 + |value|, in the precision in use."""
    weights = list(model.parameters())
    device = weights[0].device.type
    if torch.is_autocast_enabled(device) or any(each.dtype.itemsize < 4 for each in weights):
        return 0.1
    return 1e-4 if device == "cpu" else 1e-3


def value_problem(fast: Values, plain: Values, bound: float) -> str | None:
    """Which values differ by more than the bound where ``plain`` is finite, or None."""
    for name, expected in plain.items():
        finite = expected.isfinite()
        error = ((fast[name] - expected).abs() / (1 + expected.abs()))[finite]
        if not (error <= bound).all():  # So that NaN does not pass.
            return (
                f"its {name} differs from the plain method's by {error.max():.1e}, relative to "
                f"1 + |value|; rounding explains {bound:.0e}"
            )
    return None


def clone_problem(
    model: PreTrainedModel,
    values_of: Callable[[nn.Module, Method], Values],
    fast: Method,
    plain: Method,
    adapt: Callable[[PreTrainedModel], nn.Module] = lambda clone: clone,
) -> str | None:
    """Which values of the model's clone differ, or which weight's gradient of their sum, or None.

    Norms below a thousandth of the largest count as that: what is left of them is rounding.
    """
    with exact_comparison():
        clone = adapt(narrow_clone(model))
        weights = [weight for weight in clone.parameters() if weight.requires_grad]

        def computed(method: Method) -> tuple[Values, Sequence[Tensor]]:
            values, loss = values_of(clone, method), torch.zeros((), device=weights[0].device)
            for each in values.values():
                scale = torch.linspace(0.5, 1.5, each.numel()).to(each)
                loss = loss + (each.flatten() * scale).sum()
            slopes = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
            return values, slopes

        (values, gradients), (plain_values, slopes) = computed(fast), computed(plain)
        bound = rounding(clone)
    if problem := value_problem(values, plain_values, bound):
        return problem
    largest = max(float(each.norm()) for each in slopes)
    for value, expected in zip(gradients, slopes, strict=True):
        error = float((value - expected).norm()) / max(float(expected.norm()), 1e-3 * largest)
        if not error <= GRADIENT_BOUND:
            return (
                f"its gradient differs from the plain method's by {error:.1e} of its norm, for a "
                f"weight of shape {tuple(value.shape)}; rounding explains {GRADIENT_BOUND:.0e}"
            )
    return None
