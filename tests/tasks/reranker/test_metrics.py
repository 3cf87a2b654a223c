"""The ranking metrics: against loops over sorted lists, for any real scores, with ties and gaps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pl_pointwise.data import PADDING
from pl_pointwise.tasks.reranker.lambda_loss import length_biased_lambda_loss
from pl_pointwise.tasks.reranker.metrics import (
    QueryMean,
    average_length,
    hit,
    length_rank,
    ranked_order,
    ranking_metrics,
    reciprocal_rank,
    score_spread,
)
from tests.tasks.reranker.conftest import tables


def loops(scores: np.ndarray, lengths: np.ndarray, present: np.ndarray) -> dict[str, float]:
    """The four metrics of one query, from a sorted list: the positive after those it ties with."""
    order = [i for i in range(len(scores)) if present[i]]
    order.sort(key=lambda i: (-scores[i], i == 0, i))
    rank = order.index(0) + 1
    negatives = [i for i in order if i != 0][:10]
    return {
        "mrr@10": 1 / rank if rank <= 10 else 0.0,
        "hit@3": 1.0 if rank <= 3 else 0.0,
        "lenrank@10": sum(lengths[i] / r for r, i in enumerate(negatives, start=1)),
        "avglength@3": sum(lengths[i] for i in order[:3]) / len(order[:3]),
        "score_std": float(np.std([scores[i] for i in order])),
    }


def found(scores: Tensor, lengths: Tensor, present: Tensor) -> dict[str, Tensor]:
    return {
        "mrr@10": reciprocal_rank(scores, lengths, present, 10),
        "hit@3": hit(scores, lengths, present, 3),
        "lenrank@10": length_rank(scores, lengths, present, 10),
        "avglength@3": average_length(scores, lengths, present, 3),
        "score_std": score_spread(scores, lengths, present),
    }


Batch = tuple[Tensor, Tensor, Tensor]
NO_LENGTHS = torch.empty(0)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Up to 14 candidates, so that the cuts at 10 and 3 matter; the positive is always there."""
    rows, width = draw(st.integers(1, 3)), draw(st.integers(1, 14))
    numbers = st.one_of(st.sampled_from([-3.0, -0.5, 0.0]), st.floats(-1e4, 1e4, width=32))
    table = tables(draw, rows, width)
    present = torch.tensor(table(st.booleans()))
    present[:, 0] = True
    lengths = torch.tensor(table(st.integers(0, 300).map(float)))
    return torch.tensor(table(numbers)), lengths, present


@given(batches())
def test_equal_loops_over_sorted_lists(batch: Batch) -> None:
    values = found(*batch)
    for row, (scores, lengths, present) in enumerate(zip(*batch, strict=True)):
        expected = loops(scores.double().numpy(), lengths.numpy(), present.numpy())
        for name, value in expected.items():
            assert values[name][row].item() == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_nan_and_absent_candidates_rank_below_everything() -> None:
    scores = torch.tensor([[math.nan, -math.inf, 5.0, 9.0]])
    present = torch.tensor([[True, True, True, False]])
    assert ranked_order(scores, present)[0].tolist() == [2, 1, 0, 3]


def test_each_metric_is_a_mean_over_queries_and_padding_is_none() -> None:
    scores = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 3.0], [math.nan, 1.0, 2.0]])
    lengths, present = torch.tensor([[4.0, 9.0, 6.0]]).repeat(3, 1), torch.ones(3, 3).bool()
    expected = found(scores, lengths, present)
    expected["length_objective"] = length_biased_lambda_loss(scores, lengths, present)
    metrics = {n: m for n, m in ranking_metrics().items() if isinstance(m, QueryMean)}
    assert metrics.keys() == expected.keys()
    for name, metric in metrics.items():
        assert metric.compute().isnan()
        for rows, index in ((slice(0, 1), [0]), (slice(1, 3), [1, PADDING])):
            metric.update(scores[rows], lengths[rows], present[rows], torch.tensor(index))
        assert metric.compute().item() == pytest.approx(expected[name][:2].mean().item()), name


@given(st.lists(batches(), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_the_wrong_order_is_a_share_of_all_pairs_of_all_batches(
    several: list[Batch], random: Any
) -> None:
    metric, margins = ranking_metrics()["wrong_order"], []
    for scores, lengths, present in several:
        real = torch.tensor([random.random() < 0.7 for _ in scores])
        metric.update(scores, lengths, present, torch.where(real, 0, PADDING))
        for row in real.nonzero()[:, 0].tolist():
            wanted = present[row].nonzero()[1:, 0].tolist()
            margins += [(scores[row, 0] - scores[row, n]).item() for n in wanted]
    order = metric.compute().item()
    expected = np.mean(np.array(margins) <= 0) if margins else math.nan
    assert order == pytest.approx(expected, abs=1e-6, nan_ok=True)


def test_equal_scores_and_nan_are_the_wrong_order() -> None:
    metric = ranking_metrics()["wrong_order"]
    scores = torch.tensor([[1.0, 1.0, math.nan, 0.0]])
    metric.update(scores, NO_LENGTHS, torch.ones(1, 4, dtype=torch.bool), torch.tensor([0]))
    assert metric.compute().item() == pytest.approx(2 / 3)
