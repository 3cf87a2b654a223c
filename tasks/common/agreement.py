"""Whether a fast way to compute something agrees with the plain one.

A fast way relies on what a model does inside, so before one is used it is compared with the plain
one, values and gradients, in evaluation mode and in float32 whatever the weights are: rounding to
bfloat16 moves a result by 3e-2, as much as a sequence that is shifted by one position may.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

LOW = (torch.bfloat16, torch.float16)

GRADIENT_ELEMENTS = 2**26
"""The most weights whose gradients are compared: the smallest ones, so layers of all kinds."""


class InFloat32(TorchFunctionMode):
    """Every operation on tensors of 16 bits takes them as float32, and none makes such tensors.

    Weights are widened one operation at a time, and again in the backward pass: no second copy of
    the model is held. Where weights are wider nothing changes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._widened: dict[int, Tensor] = {}  # storages of this operation's copies → originals
        self._saved = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> InFloat32:
        self._saved.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._saved.__exit__(*error)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "__get__":  # .shape, .device and the like
            found = func(*args, **kwargs)
            return torch.float32 if isinstance(found, torch.dtype) and found in LOW else found
        before, self._widened = self._widened, {}
        try:
            args, kwargs = tree_map(self._wide, (tuple(args), dict(kwargs)))
            return func(*args, **kwargs)
        finally:
            self._widened = before

    def _wide(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return torch.float32 if value in LOW else value
        if not isinstance(value, Tensor):
            return value
        with torch._C.DisableTorchFunction():
            if value.dtype not in LOW:
                return value
            wide = value.to(torch.float32)
            self._widened[wide.untyped_storage().data_ptr()] = value
        return wide

    def _pack(self, saved: Tensor) -> Any:
        with torch._C.DisableTorchFunction():
            original = self._widened.get(saved.untyped_storage().data_ptr())
            if original is None or not original.is_contiguous():
                return saved
            return original.detach(), saved.size(), saved.stride(), saved.storage_offset()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        original, size, stride, offset = packed
        with torch._C.DisableTorchFunction():
            wide: Tensor = original.to(torch.float32).as_strided(size, stride, offset)
        return wide


@contextmanager
def exact_products() -> Iterator[None]:
    """Products of float32 without TF32, autocast off."""
    before = torch.get_float32_matmul_precision()
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


def compared_weights(model: nn.Module) -> list[Tensor]:
    """The trained weights whose gradients are compared; none where weights are in shards."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if any(
        type(weight) is not nn.Parameter or type(weight.data) is not Tensor for weight in trained
    ):
        return []
    found, total = list[Tensor](), 0
    for weight in sorted(trained, key=Tensor.numel):
        total += weight.numel()
        if found and total > GRADIENT_ELEMENTS:
            break
        found.append(weight)
    return found


@contextmanager
def moved(weights: Sequence[Tensor]) -> Iterator[None]:
    """Moves the weights, by a tenth of their size, from zero by 0.02; puts them back as they were.

    The random state is not drawn from.
    """
    generator = torch.Generator().manual_seed(0)
    kept = [weight.detach().clone() for weight in weights]
    try:
        for weight in weights:
            size = float(weight.detach().float().square().mean().sqrt())
            noise = torch.randn(weight.shape, generator=generator)
            step = 0.1 * size if math.isfinite(size) and size > 1e-4 else 0.02
            weight.data += (step * noise).to(weight)
        yield
    finally:
        for weight, before in zip(weights, kept, strict=True):
            weight.data.copy_(before)


def rounding(model: nn.Module, exact: bool) -> float:
    """How far two correct ways may differ, relative to 1 + |value|, a token."""
    kinds = {weight.dtype for weight in model.parameters()}
    low = any(dtype in LOW for dtype in kinds)
    packed = any(not dtype.is_floating_point or dtype.itemsize < 2 for dtype in kinds)
    if (low and not exact) or packed:  # Packed weights may be multiplied in any precision.
        return 3e-2
    on_cpu = all(weight.device.type == "cpu" for weight in model.parameters())
    return 1e-4 if on_cpu else 1e-3


def disagreement(name: str, fast: Tensor, plain: Tensor, bound: float) -> str | None:
    """What to say if ``fast`` differs from ``plain`` by more than the bound, else None.

    Compared where ``plain`` is finite, relative to 1 + |plain|. name: of the values.
    """
    finite = plain.isfinite()
    error = ((fast - plain).abs() / (1 + plain.abs()))[finite]
    if (error <= bound).all():  # So that NaN does not pass.
        return None
    return (
        f"its {name} differs from the plain method's by {error.max():.1e}, relative to "
        f"1 + |value|; {bound:.0e} is what rounding explains"
    )


def gradient_problem(fast: Sequence[Tensor], plain: Sequence[Tensor], bound: float) -> str | None:
    """Which weight's gradient differs by more than the bound, relative to its norm, or None.

    Norms below a thousandth of the largest count as that: what is left of them is rounding.
    """
    largest = max((float(each.norm()) for each in plain), default=0.0)
    if not math.isfinite(largest) or largest == 0:
        return None  # Nothing to compare with.
    for value, expected in zip(fast, plain, strict=True):
        error = float((value - expected).norm()) / max(float(expected.norm()), 1e-3 * largest)
        if not error <= bound:
            return (
                f"its gradient differs from the plain method's by {error:.1e} of its norm, for a "
                f"weight of shape {tuple(value.shape)}; {bound:.0e} is what rounding explains"
            )
    return None


def precision(model: nn.Module, exact: bool) -> Any:
    """The context of the comparison: in float32, or in the model's own precision."""
    low = any(weight.dtype in LOW for weight in chain(model.parameters(), model.buffers()))
    return InFloat32() if exact and low else nullcontext()
