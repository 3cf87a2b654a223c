"""How violations are distributed: mean, max, violation rate, CVaR, quantiles, the empirical CDF.

A violation ``v ≤ 0`` is satisfied. The values of a vector-valued constraint are pooled: each
(sample, element) counts once. NaN in, NaN out, in every statistic: a value that is not a number
neither satisfies nor violates. Without values every statistic is NaN. Half precision is
computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def pool(values: Tensor) -> Tensor:
    """Values of any shape as one flat row in float32 or wider: float64 stays float64.

    >>> pool(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([1., 2., 3., 4.])
    """
    return values.to(torch.promote_types(values.dtype, torch.float32)).reshape(-1)


def cvar(values: Tensor, level: float = 0.95) -> Tensor:
    """CVaR_p(v) = mean of the v_i at or above the p-quantile of v, p = ``level``.

    The quantile lies at position h = p(n − 1) of the sorted values, counted from 0, between order
    statistics (numpy's ``linear``). The values at or above it are those ≥ v_(⌈h⌉). Ties with
    v_(⌈h⌉) all count, so the mean can run over more than (1 − p)n values. Level 0 is the mean,
    level 1 the max. The values may have any shape.

    >>> cvar(torch.arange(1.0, 22.0))  # of 1 … 21 the 95th percentile is 20
    tensor(20.5000)
    """
    _check(level)
    ordered = pool(values).sort().values  # NaN sorts last, so it is in the tail
    if not len(ordered):
        return ordered.new_tensor(math.nan)
    # Rounded, because 0.55 · 100 is 55.000000000000007 in binary, and its ceiling 56.
    position = math.ceil(round(level * (len(ordered) - 1), 6))
    # The first of those that tie with it: all of them count.
    start = torch.searchsorted(ordered, ordered[position].detach())
    return ordered[start:].mean()


def empirical_cdf(values: Tensor, points: Tensor) -> Tensor:
    """F(t) = share of the values ≤ t; F(0) is the share of satisfied constraints.

    values, points (the t): any shape.
    Returns: the shape of ``points``.

    >>> empirical_cdf(torch.tensor([-1.0, 0.0, 0.0, 2.0]), torch.tensor([-2.0, 0.0, 5.0]))
    tensor([0.0000, 0.7500, 1.0000])
    """
    values = pool(values)
    dtype = torch.promote_types(values.dtype, points.dtype)
    values = values.to(dtype).sort().values
    points = points.to(dtype)
    if not len(values) or values[-1].isnan():
        return torch.full_like(points, math.nan)
    at_most = torch.searchsorted(values, points.contiguous(), right=True)
    share = at_most.to(dtype) / len(values)
    return share.masked_fill(points.isnan(), math.nan)


def quantiles(values: Tensor, at: Tensor | Sequence[float] | float) -> Tensor:
    """The p-quantiles of the values: linear between order statistics (numpy's ``linear``).

    values, at (the p, fractions in [0, 1]): any shape.
    Returns: the shape of ``at``.

    >>> quantiles(torch.arange(5.0), [0.0, 0.5, 0.9])
    tensor([0.0000, 2.0000, 3.6000])
    """
    values = pool(values)
    at = torch.as_tensor(at, dtype=torch.float64, device="cpu").detach()
    for fraction in at.flatten().tolist():
        _check(fraction)
    # NaN sorts last. torch.quantile takes 16 million values at most
    ordered = values.sort().values
    if not len(ordered) or ordered[-1].isnan():
        return ordered.new_full(at.shape, math.nan)
    position = at * (len(ordered) - 1)
    share = (position % 1).to(values)
    below = ordered[position.long().to(values.device)]
    above = ordered[position.ceil().long().to(values.device)]
    # Where the position is whole, the value itself: 0 · inf would be NaN.
    return torch.where(share == 0, below, below + share * (above - below))


def share_violated(values: Tensor) -> Tensor:
    """The share of the values > 0, in [0, 1]; v = 0 is satisfied.

    >>> share_violated(torch.tensor([-1.0, 0.0, 0.1, 2.0]))
    tensor(0.5000)
    """
    values = pool(values)
    violated = (values > 0).to(values.dtype)
    return torch.where(values.isnan(), values, violated).mean()  # NaN in, NaN out.


def violation_statistics(values: Tensor) -> dict[str, Tensor]:
    """All the statistics reported for one constraint: scalar tensors.

    >>> statistics = violation_statistics(torch.tensor([-2.0, -1.0, 0.0, 5.0]))
    >>> {name: statistic.item() for name, statistic in statistics.items()}
    {'mean': 0.5, 'max': 5.0, 'violated': 0.25, 'cvar95': 5.0}
    """
    values = pool(values)
    return {
        "mean": values.mean(),
        "max": values.max() if len(values) else values.new_tensor(math.nan),
        "violated": share_violated(values),
        "cvar95": cvar(values),
    }


def _check(level: float) -> None:
    if not 0 <= level <= 1:
        raise ValueError(
            f"level must be a fraction in [0, 1], got {level}; the 95th percentile is 0.95."
        )
