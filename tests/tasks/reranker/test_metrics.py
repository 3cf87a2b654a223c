"""The ranking metrics: against loops over sorted lists, for any real scores, with ties and gaps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pl_pointwise.data import PADDING
from pl_pointwise.tasks.reranker.lambda_loss import length_biased_lambda_loss
from pl_pointwise.tasks.reranker.metrics import ranked_order, ranking_metrics
from pl_pointwise.tasks.reranker.module import RerankerModule
from tests.tasks.reranker.conftest import tables


def loops(
    scores: np.ndarray, lengths: np.ndarray, present: np.ndarray
) -> dict[str, float]:
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


Batch = tuple[Tensor, Tensor, Tensor]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Up to 14 candidates, so that the cuts at 10 and 3 matter; the positive is always there."""
    rows, width = draw(st.integers(1, 3)), draw(st.integers(1, 14))
    numbers = st.one_of(
        st.sampled_from([-3.0, -0.5, 0.0]), st.floats(-1e4, 1e4, width=32)
    )
    table = tables(draw, rows, width)
    present = torch.tensor(table(st.booleans()))
    present[:, 0] = True
    lengths = torch.tensor(table(st.integers(0, 300).map(float)))
    return torch.tensor(table(numbers)), lengths, present


@given(batches())
def test_equal_loops_over_sorted_lists(batch: Batch) -> None:
    values = ranking_metrics(*batch)
    for row, (scores, lengths, present) in enumerate(zip(*batch, strict=True)):
        expected = loops(scores.double().numpy(), lengths.numpy(), present.numpy())
        for name, value in expected.items():
            assert values[name][row].item() == pytest.approx(
                value, rel=1e-5, abs=1e-6
            ), name


def test_nan_and_absent_candidates_rank_below_everything() -> None:
    scores = torch.tensor([[math.nan, -math.inf, 5.0, 9.0]])
    present = torch.tensor([[True, True, True, False]])
    assert ranked_order(scores, present)[0].tolist() == [2, 1, 0, 3]


@pytest.fixture
def module(tiny_cross_encoder_dir: Path) -> RerankerModule:
    return RerankerModule(str(tiny_cross_encoder_dir))


def update(module: RerankerModule, metrics: Any, batch: Batch, real: Tensor) -> None:
    scores, lengths, present = batch
    fields = {"index": torch.where(real, torch.arange(len(scores)), PADDING)}
    fields |= {"passage_lengths": lengths, "candidates": present}
    module.update_evaluation_metrics(metrics, scores, fields, real, "val")


def test_each_metric_is_a_mean_over_queries_and_padding_is_none(
    module: RerankerModule,
) -> None:
    scores = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 3.0], [math.nan, 1.0, 2.0]])
    batch = (
        scores,
        torch.tensor([[4.0, 9.0, 6.0]]).repeat(3, 1),
        torch.ones(3, 3).bool(),
    )
    expected = ranking_metrics(*batch) | {
        "length_objective": length_biased_lambda_loss(*batch)
    }
    metrics = module.evaluation_metrics()
    assert metrics.keys() == expected.keys() | {"wrong_order"}
    update(module, metrics, batch, torch.tensor([True, True, False]))
    for name, values in expected.items():
        assert metrics[name].compute().item() == pytest.approx(
            values[:2].mean().item()
        ), name


@given(batches(), st.randoms(use_true_random=False))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_wrong_order_is_a_share_of_all_pairs(
    module: RerankerModule, batch: Batch, random: Any
) -> None:
    """A score that is not a number is out of order."""
    batch[0][0, -1] = math.nan
    metrics, margins = module.evaluation_metrics(), []
    real = torch.tensor([random.random() < 0.7 for _ in batch[0]])
    update(module, metrics, batch, real)
    scores, _, present = batch
    for row in real.nonzero()[:, 0].tolist():
        wanted = present[row].nonzero()[1:, 0].tolist()
        margins += [(scores[row, 0] - scores[row, n]).item() for n in wanted]
    expected = 1 - np.mean(np.array(margins) > 0) if margins else math.nan
    order = metrics["wrong_order"].compute().item()
    assert order == pytest.approx(expected, abs=1e-6, nan_ok=True)
