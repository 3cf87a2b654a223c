"""What held-out violations say about inputs not seen: two bounds.

Each holds with a confidence, under ``ASSUMPTIONS``, for any distribution and any number of samples:
that on the probability of a violation, and that on a quantile.

A violation ``v ≤ 0`` is satisfied. Values are one per sample: the elements of one sample's
vector-valued constraint depend on each other, so certify :func:`worst_per_sample`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from .extras import needs
from .metrics import cvar, share_violated

ASSUMPTIONS = (
    "The samples are independent draws from the distribution of the new inputs. None was trained "
    "on, and before this statement nothing that they showed led to a model, to its settings or "
    "checkpoint, or to what is required."
)
"""Of a certified choice too: it is made by the statement's own test, and not before it."""


def violation_bound(violated: int, n: int, confidence: float = 0.95) -> float:
    """Returns an upper bound on P(a new input violates), by Clopper and Pearson, one-sided.

    violated: how many of the ``n`` samples have v > 0.

    >>> round(violation_bound(0, 100), 4), round(violation_bound(5, 100), 4)
    (0.0295, 0.1023)
    """
    _validate(n, confidence)
    if not 0 <= violated <= n:
        raise ValueError(
            f"{violated} violated of {n} samples: it must be between 0 and n."
        )
    with needs("compare", "violation_bound"):
        from scipy.stats import binomtest
    # "less" is the hypothesis whose interval starts at 0: one-sided, the whole error above it.
    test = binomtest(violated, n, alternative="less")
    return float(test.proportion_ci(confidence, method="exact").high)


def quantile_bound(
    values: Tensor | ArrayLike, level: float = 0.95, confidence: float = 0.95
) -> float:
    """Returns an upper bound on the ``level`` quantile of a new input's violation, exact.

    The k-th smallest value, k the smallest with P(Binomial(n, level) ≤ k − 1) ≥ confidence; inf
    where n is too small for any k ≤ n: at level 0.95 and 95 % below 59 samples.

    values: (n,), one violation per sample.

    >>> quantile_bound(torch.arange(1.0, 101.0)), quantile_bound(torch.arange(1.0, 59.0))
    (99.0, inf)
    """
    ordered = _one_per_sample(values).sort().values
    _validate(len(ordered), confidence)
    cvar(ordered, level)  # Checks the level.
    with needs("compare", "quantile_bound"):
        from scipy.stats import binom
    position = int(binom.ppf(confidence, len(ordered), level))  # k − 1
    return float(ordered[position]) if position < len(ordered) else math.inf


def worst_per_sample(violation: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns the largest violation of each sample, (m,); samples without any element are left out.

    violation: (n, C), or (n,), which is returned unchanged.
    mask: bool, the shape of ``violation``: the elements that the constraint applies to.

    >>> worst_per_sample(torch.tensor([[-1.0, 2.0], [-3.0, -2.0]]))
    tensor([ 2., -2.])
    """
    mask = torch.ones_like(violation, dtype=torch.bool) if mask is None else mask
    if violation.dim() == 1 or violation.shape[1] == 1:
        return violation[mask]
    return violation.masked_fill(~mask, -math.inf)[mask.any(1)].amax(1)


@dataclass(frozen=True)
class Certificate:
    """What n held-out violations of one constraint certify; made by :func:`certify`.

    >>> from pl_pointwise.certificates import certify
    >>> certificate = certify(torch.full((100,), -0.5))
    >>> certificate.violated, round(certificate.bound, 4), round(certificate.quantile, 2)
    (0, 0.0295, -0.5)
    """

    n: int  #: Samples.
    violated: int  #: Samples with v > 0.
    share: float  #: violated / n
    bound: float  #: On P(a new input violates), from above; violation_bound.
    cvar: float  #: Of the n values, in the units of the violation.
    #: Upper bound on that at ``level``, inf for few samples; quantile_bound.
    quantile: float
    confidence: float  #: Of each bound.
    level: float  #: Of the CVaR and of the quantile.

    def statement(self) -> str:
        """Returns the certificate in plain sentences, with its confidence and its assumptions."""
        sure = f"{100 * self.confidence:g} %"
        share = f"{100 * self.level:g} %"
        quantile = (
            f"With {sure} confidence, the violation of at least {share} of new inputs is at most "
            f"{self.quantile:.3g} (order statistics)."
        )
        if self.quantile == math.inf:
            quantile = (
                f"No finite bound holds for the violation of {share} of new inputs."
            )
        probability = (
            f"With {sure} confidence, a new input violates it with a probability of at most "
            f"{100 * self.bound:.3g} % (Clopper–Pearson, one-sided). "
        )
        if f"{100 * self.bound:.3g}" == "100":
            probability = (
                "No bound below 100 % holds for the probability that a new input does. "
            )
        return (
            f"{self.violated} of {self.n} held-out samples violate the constraint "
            f"({100 * self.share:.3g} %). {probability}"
            f"{quantile} The CVaR{100 * self.level:g} of these violations is {self.cvar:.3g}. "
            "Each statement holds at its confidence by itself, not all of them together. "
            f"Assumptions: {ASSUMPTIONS}"
        )


def certify(
    values: Tensor | ArrayLike,
    *,
    confidence: float = 0.95,
    level: float = 0.95,
) -> Certificate:
    """Returns the certificate of held-out violations, one per sample.

    values: (n,); of a vector-valued constraint :func:`worst_per_sample`, or
        ``module.evaluated[stage][constraint].worst()``.

    Raises:
        ValueError: values of another shape, none, or NaN among them.

    >>> certificate = certify(torch.linspace(-9, 1, 100))
    >>> certificate.violated, round(certificate.bound, 3)
    (10, 0.164)
    """
    values = _one_per_sample(values)
    violated = int((values > 0).sum())
    return Certificate(
        n=len(values),
        violated=violated,
        share=float(share_violated(values)),
        bound=violation_bound(violated, len(values), confidence),
        cvar=float(cvar(values, level)),
        quantile=quantile_bound(values, level, confidence),
        confidence=confidence,
        level=level,
    )


def _one_per_sample(values: Tensor | ArrayLike) -> Tensor:
    values = torch.as_tensor(values).detach().cpu()
    if values.dim() != 1:
        raise ValueError(
            f"A certificate takes one value per sample, got shape {tuple(values.shape)}: give "
            "worst_per_sample(violation)."
        )
    undefined = int(values.isnan().sum())
    if undefined:
        raise ValueError(
            f"{undefined} of {len(values)} violations are NaN. Find out why, or set them to inf."
        )
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _validate(n: int, confidence: float) -> None:
    if n < 1:
        raise ValueError(f"n={n}: a certificate needs at least one held-out sample.")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be a fraction in (0, 1), got {confidence}.")
