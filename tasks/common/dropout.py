"""Dropout whose random numbers cost little on a CPU.

There, torch draws one Bernoulli variable after the other: 5 ns an element, a quarter of a training
step of a small encoder under bf16 autocast. Here one 64-bit number of torch's generator decides
four elements, 16 bits each: 1 ns an element. The probability is therefore a multiple of 1/65536;
the scale belongs to that multiple, so the expectation is exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_LEVELS = 2**16


def kept_and_scaled(like: Tensor, p: float, generator: torch.Generator | None = None) -> Tensor:
    """Dropout's factors of a tensor on the CPU: 0 with probability p, else 1 / (1 − p).

    p counts rounded to a multiple of 2⁻¹⁶, from 2⁻¹⁶ to 1 − 2⁻¹⁶. Same shape and dtype as ``like``.
    """
    dropped = min(max(round(p * _LEVELS), 1), _LEVELS - 1)
    draws = torch.empty(-(-like.numel() // 4), dtype=torch.int64)
    draws.random_(-(2**63), None, generator=generator)
    sixteen = draws.view(torch.int16)[: like.numel()].view(like.shape)
    factors = torch.empty(like.shape, dtype=like.dtype)
    torch.ge(sixteen, dropped - _LEVELS // 2, out=factors)
    return factors.mul_(_LEVELS / (_LEVELS - dropped))


class QuickDropout(nn.Dropout):
    """As ``nn.Dropout``, with :func:`kept_and_scaled` when training on a CPU."""

    def forward(self, input: Tensor) -> Tensor:
        quick = self.training and not self.inplace and input.device.type == "cpu"
        return self.quick(input) if quick and 0.0 < self.p < 1.0 else super().forward(input)

    def quick(self, values: Tensor) -> Tensor:
        """Each value times 0 with probability p, else times 1 / (1 − p)."""
        return values * kept_and_scaled(values, self.p)


class RedrawnDropout(QuickDropout):
    """Likewise, keeping a seed for the backward pass instead of the factors.

    For inputs that nothing else keeps, such as an adapter's: there the factors are a tenth of all
    that a step holds.
    """

    def quick(self, values: Tensor) -> Tensor:
        """As above."""
        result: Tensor = _Redrawn.apply(values, self.p)
        return result


class _Redrawn(torch.autograd.Function):
    """Dropout on the CPU whose factors are drawn again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, p: float) -> Tensor:
        ctx.p, ctx.seed = p, int(torch.randint(2**63 - 1, ()))
        return _Redrawn.backward(ctx, values)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        generator = torch.Generator().manual_seed(ctx.seed)
        return gradient * kept_and_scaled(gradient, ctx.p, generator), None


def use_quick_dropout(model: nn.Module, kind: type[nn.Dropout] = QuickDropout) -> None:
    """Put a :class:`QuickDropout` instead of every ``nn.Dropout`` in the model."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Dropout:
                setattr(parent, name, kind(child.p, child.inplace).train(child.training))
