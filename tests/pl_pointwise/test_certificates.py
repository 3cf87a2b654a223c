"""Certificates cover what they say they cover: against scipy and by enumeration."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from pl_pointwise.certificates import (
    ASSUMPTIONS,
    certify,
    quantile_bound,
    violation_bound,
    worst_per_sample,
)
from pl_pointwise.metrics import cvar


@given(st.integers(1, 2000), st.floats(0, 1), st.floats(0.5, 0.999))
def test_bound_is_a_quantile_of_the_beta_distribution(
    n: int, share: float, confidence: float
) -> None:
    """Clopper and Pearson's closed form, at none and at all violated too."""
    for violated in {0, min(round(share * n), n - 1), n - 1}:
        expected = stats.beta.ppf(confidence, violated + 1, n - violated)
        assert violation_bound(violated, n, confidence) == pytest.approx(
            expected, rel=1e-6
        )
    assert violation_bound(n, n, confidence) == 1.0


@given(st.integers(1, 400), st.floats(0.01, 0.99), st.floats(0.5, 0.999))
def test_quantile_bound_is_the_first_order_statistic_that_is_sure_enough(
    n: int, level: float, confidence: float
) -> None:
    """By a search for the smallest k with P(Binomial(n, level) < k) ≥ confidence."""
    values = np.random.default_rng(n).permutation(n).astype(float)
    sure = stats.binom.cdf(np.arange(n), n, level) >= confidence
    expected = float(sure.argmax()) if sure.any() else math.inf
    assert quantile_bound(values, level, confidence) == expected


def test_certificate_gathers_the_statements() -> None:
    values = torch.randn(300, generator=torch.Generator().manual_seed(1)) - 1
    certificate = certify(values, confidence=0.9, level=0.8)
    assert certificate.bound == violation_bound(certificate.violated, 300, 0.9)
    assert certificate.cvar == pytest.approx(float(cvar(values, 0.8)))
    assert certificate.quantile == quantile_bound(values, 0.8, 0.9)
    assert certify(values.numpy(), confidence=0.9, level=0.8) == certificate


def test_statement_names_confidence_and_assumptions() -> None:
    values = torch.cat([torch.full((95,), -1.0), torch.full((5,), 2.0)])
    statement = certify(values, confidence=0.9).statement()
    for part in (
        "5 of 100 held-out samples",
        "90 % confidence",
        f"at most {100 * violation_bound(5, 100, 0.9):.3g} %",
        "CVaR95 of these violations is 2",
        "independent draws",
        "before this statement nothing that they showed led to a model",
        "not all of them together",
    ):
        assert part in statement
    assert statement.endswith(ASSUMPTIONS)
    quantile = (
        "the violation of at least 50 % of new inputs is at most -1 (order statistics)"
    )
    assert quantile in certify(values, confidence=0.9, level=0.5).statement()
    few = certify(values[:58]).statement()
    assert "No finite bound holds for the violation of 95 %" in few
    assert "inf" not in certify(values[:59]).statement()


def test_worst_per_sample_is_the_largest_within_the_mask() -> None:
    violation = torch.tensor([[-1.0, 2.0, 9.0], [-3.0, -2.0, 9.0], [7.0, 7.0, 7.0]])
    mask = torch.tensor([[True, True, False], [True, True, False], [False] * 3])
    assert worst_per_sample(violation, mask).tolist() == [2, -2]
    assert worst_per_sample(violation).tolist() == [9, 9, 7]
    assert worst_per_sample(violation[:, 0]).tolist() == [-1, -3, 7]
    violation[0, 1] = math.nan  # within the mask, and neither satisfied nor violated
    violation[1, 2] = math.nan  # outside the mask
    assert worst_per_sample(violation, mask).isnan().tolist() == [True, False]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: violation_bound(0, 0), "at least one held-out sample"),
        (lambda: violation_bound(4, 3), "between 0 and n"),
        (lambda: violation_bound(1, 3, 95), r"fraction in \(0, 1\)"),
        # Pooled, its elements would pass for independent samples and the bound be too low.
        (lambda: certify(torch.zeros(50, 9)), r"worst_per_sample\(violation\)"),
        (lambda: certify(torch.zeros(0)), "at least one held-out sample"),
        (lambda: certify(torch.tensor([1.0, math.nan])), "1 of 2 violations are NaN"),
        (lambda: certify(torch.zeros(3), level=95), r"percentile is 0\.95"),
    ],
)
def test_what_cannot_be_certified_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_infinite_violations_count_as_violated() -> None:
    certificate = certify(torch.tensor([-1.0, 0.0, math.inf]))
    assert certificate.violated == 1
    assert certificate.cvar == math.inf
