"""Violation statistics equal numpy's, scipy's and exact arithmetic's."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from pl_pointwise.metrics import cvar, empirical_cdf, quantiles, violation_statistics

KEYS = ["mean", "max", "violated", "cvar95"]
FRACTIONS = [0.0, 0.05, 0.5, 0.9, 0.95, 1.0]

# few values: many ties
whole_numbers = st.lists(st.integers(-50, 50), min_size=1, max_size=200)
decimals = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=80)
levels = st.sampled_from([0.0, 0.1, 0.29, 0.5, 0.55, 0.57, 0.9, 0.95, 0.99, 1.0])


def exact_cvar(values: list[float], level: float) -> float:
    """The definition, with the interpolated percentile as an exact fraction."""
    ordered = sorted(Fraction(value) for value in values)
    position = Fraction(str(level)) * (len(ordered) - 1)
    below, above = ordered[math.floor(position)], ordered[math.ceil(position)]
    percentile = below + (position - math.floor(position)) * (above - below)
    tail = [value for value in ordered if value >= percentile]
    return float(sum(tail) / len(tail))


@given(whole_numbers)
def test_statistics_equal_numpys_with_the_linear_percentile(numbers: list[int]) -> None:
    values = np.array(numbers, dtype=np.float64)
    ours = violation_statistics(torch.from_numpy(values))
    tail = values[values >= np.percentile(values, 95, method="linear")]
    expected = [values.mean(), values.max(), (values > 0).mean(), tail.mean()]
    assert list(ours) == KEYS
    np.testing.assert_allclose(
        [ours[key].item() for key in KEYS], expected, rtol=1e-12, atol=1e-12
    )


@given(decimals, levels)
def test_cvar_equals_exact_arithmetic_at_every_level(
    numbers: list[float], level: float
) -> None:
    values = torch.tensor(numbers, dtype=torch.float64)
    expected = exact_cvar(numbers, level)
    assert cvar(values, level).item() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert cvar(values.float(), level).item() == pytest.approx(
        expected, rel=1e-4, abs=1e-2
    )


@given(whole_numbers, st.lists(st.floats(-60, 60), min_size=1, max_size=20))
def test_empirical_cdf_equals_scipys(numbers: list[int], points: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float64)
    at = torch.tensor(points + numbers, dtype=torch.float64)  # at the jumps too
    expected = stats.ecdf(values.numpy()).cdf.evaluate(at.numpy())
    np.testing.assert_allclose(empirical_cdf(values, at).numpy(), expected, atol=1e-12)


@given(whole_numbers, st.lists(st.floats(0, 1), max_size=20))
def test_quantiles_equal_numpys(numbers: list[int], at: list[float]) -> None:
    values, at = np.array(numbers, dtype=np.float64), FRACTIONS + at
    expected = np.quantile(values, at, method="linear")
    found = quantiles(torch.from_numpy(values), at)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-12)
    rounded = quantiles(torch.from_numpy(values).float(), at)
    assert rounded.dtype == torch.float32
    np.testing.assert_allclose(rounded.numpy(), expected, rtol=1e-5, atol=1e-4)


def test_quantiles_keep_the_shape_and_reach_infinite_values() -> None:
    at = torch.tensor([[0.0, 0.5], [0.25, 1.0]])
    values = torch.tensor([-math.inf, 0.0, 2.0, 4.0, math.inf])
    assert quantiles(values, at).tolist() == [[-math.inf, 2.0], [0.0, math.inf]]
    assert quantiles(torch.tensor([1.0, math.nan]), at).isnan().all()
    assert quantiles(torch.zeros(0), at).isnan().all()
    assert quantiles(torch.arange(5.0), 0.5).shape == ()


@pytest.mark.parametrize("level", [95, -0.1, 1.01, math.nan])
def test_a_level_outside_the_unit_interval_is_refused(level: float) -> None:
    refusals: list[Callable[[], Any]] = [
        lambda: cvar(torch.ones(3), level),
        lambda: quantiles(torch.ones(3), [0.5, level]),
    ]
    for refusing in refusals:
        with pytest.raises(ValueError, match=r"95th percentile is 0\.95"):
            refusing()


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
def test_half_precision_is_widened_and_float64_kept(dtype: torch.dtype) -> None:
    values = torch.linspace(-1, 1, 300).to(dtype)
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    statistics = violation_statistics(values)
    found = [*statistics.values(), empirical_cdf(values, torch.zeros(2))]
    assert {statistic.dtype for statistic in found} == {expected}
    # 256 + 0.5 stays 256 in bfloat16: a mean accumulated there would be far off.
    assert statistics["mean"] == pytest.approx(values.double().mean().item(), abs=1e-6)


def test_nan_is_neither_satisfied_nor_violated() -> None:
    for others in ([], [-1.0, 2.0], [-math.inf, math.inf]):
        values = torch.tensor([*others, math.nan])
        assert all(
            statistic.isnan() for statistic in violation_statistics(values).values()
        )
        assert empirical_cdf(values, torch.tensor([0.0, 1.0])).isnan().all()
    assert empirical_cdf(
        torch.ones(2), torch.tensor([math.nan, 1.0])
    ).isnan().tolist() == [
        True,
        False,
    ]


@pytest.mark.parametrize("values", [torch.zeros(0), torch.zeros(0, 9)])
def test_no_values_give_nan_without_a_warning(values: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        statistics = violation_statistics(values)
        assert empirical_cdf(values, torch.zeros(2)).isnan().all()
    assert list(statistics) == KEYS
    assert all(statistic.isnan() for statistic in statistics.values())
