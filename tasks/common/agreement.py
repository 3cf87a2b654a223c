"""Whether a fast way to compute something agrees with the plain one.

A fast path relies on what a model does inside, so before one is used it is compared with the plain
way: in evaluation mode, without gradients, in float32 where the weights are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode (no dropout). Left as it was found."""
    in_training = [module for module in model.modules() if module.training]
    for module in in_training:
        module.training = False
    try:
        yield
    finally:
        for module in in_training:
            module.training = True


def rounding_bound(weights: Iterable[Tensor]) -> float:
    """How far two correct results of a model may differ, relative to ``1 + |x|``."""
    weights = list(weights)
    if any(not weight.is_floating_point() or weight.dtype.itemsize < 4 for weight in weights):
        return 3e-2
    on_cpu = all(weight.device.type == "cpu" for weight in weights)
    return 1e-4 if on_cpu else 2e-3  # an accelerator may round to TF32


def disagreement(name: str, fast: Tensor, plain: Tensor, bound: float) -> str | None:
    """What to say if ``fast`` differs from ``plain`` by more than the bound, else None.

    Compared where ``plain`` is finite. name: of the values, in the plural.
    """
    finite = plain.isfinite()
    error = ((fast - plain).abs() / (1 + plain.abs()))[finite]
    if (error <= bound).all():  # so that NaN does not pass
        return None
    return (
        f"{name} differ by {error.max():.1e}, relative to 1 + |x|; {bound:.0e} is what rounding "
        "explains"
    )
