"""Λ is the formula of the paper: against loops written from it; and its gradient is finite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from pl_pointwise.tasks.reranker.lambda_loss import length_biased_lambda_loss
from tests.tasks.reranker.conftest import tables


def reference(scores: list[float], lengths: list[float], top_k: int) -> float:
    """Λ of one candidate set, written from the formula with loops; ties ranked by position."""
    n = len(scores)
    if n == 0:
        return 0.0
    gains = [max(lengths) - length for length in lengths]
    ranks = [
        1
        + sum(
            scores[j] > scores[i] or (scores[j] == scores[i] and j < i)
            for j in range(n)
        )
        for i in range(n)
    ]

    def discount(rank: int) -> float:
        return 1.0 / math.log2(rank + 1) if rank <= top_k else 0.0

    ideal = sum(
        g * discount(r) for r, g in enumerate(sorted(gains, reverse=True), start=1)
    )
    if ideal == 0:
        return 0.0
    numerator = denominator = 0.0
    for i in range(n):
        for j in range(i + 1, n):
            difference = gains[i] - gains[j]
            if difference == 0:
                continue
            y = 1.0 if difference > 0 else -1.0
            weight = abs(difference * (discount(ranks[j]) - discount(ranks[i]))) / ideal
            numerator += weight * math.log1p(math.exp(-y * (scores[i] - scores[j])))
            denominator += weight
    return numerator / denominator if denominator > 0 else 0.0


Case = tuple[list[list[float]], list[list[float]], list[list[bool]], int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Batches with ties among scores and among lengths, and with absent candidates."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    table = tables(draw, rows, width)
    few = st.sampled_from([-2.0, 0.0, 0.5, 3.0])
    scores = table(st.one_of(few, st.floats(-8, 8)))
    lengths = table(st.integers(1, 6).map(float))
    return scores, lengths, table(st.booleans()), draw(st.integers(1, 8))


def tensors(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    scores, lengths, candidates, _ = case
    return (
        torch.tensor(scores, dtype=torch.float64),
        torch.tensor(lengths),
        torch.tensor(candidates),
    )


@given(cases(), st.sampled_from(["all", "negatives"]))
# all scores tied
@example(([[1.0, 1.0, 1.0]], [[3.0, 1.0, 2.0]], [[True] * 3], 3), "all")
@example(([[1.0, 2.0]], [[3.0, 1.0]], [[False] * 2], 3), "all")  # nobody there
def test_equals_the_formula_in_loops(case: Case, candidate_set: str) -> None:
    scores, *others = tensors(case)
    scores.requires_grad_()
    found = length_biased_lambda_loss(scores, *others, case[3], candidate_set)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(found.sum(), scores)
    assert gradient.isfinite().all()
    first = 0 if candidate_set == "all" else 1
    for value, of_scores, lengths, present in zip(found, *case[:3], strict=True):
        kept = [i for i in range(first, len(of_scores)) if present[i]]
        expected = reference(
            [of_scores[i] for i in kept], [lengths[i] for i in kept], case[3]
        )
        assert value.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_absent_candidates_change_nothing_whatever_they_hold() -> None:
    scores = torch.tensor([[0.3, -1.0, 2.0]], requires_grad=True)
    lengths = torch.tensor([[4.0, 9.0, 6.0]])
    alone = length_biased_lambda_loss(
        scores, lengths, torch.ones(1, 3, dtype=torch.bool)
    )
    junk = torch.tensor([[math.nan, -math.inf]])
    padded_scores = torch.cat([scores, junk], dim=1)
    padded = length_biased_lambda_loss(
        padded_scores,
        torch.cat([lengths, torch.tensor([[1e6, math.nan]])], dim=1),
        torch.tensor([[True, True, True, False, False]]),
    )
    assert padded.item() == alone.item()
    (with_junk,) = torch.autograd.grad(padded.sum(), scores, retain_graph=True)
    (without,) = torch.autograd.grad(alone.sum(), scores)
    assert torch.equal(with_junk, without)


def test_a_nan_score_stays_visible_in_its_row_alone() -> None:
    scores = torch.tensor([[1.0, math.nan, 0.0], [1.0, 2.0, 0.0]])
    lengths = torch.tensor([[1.0, 2.0, 3.0]]).repeat(2, 1)
    found = length_biased_lambda_loss(
        scores, lengths, torch.ones(2, 3, dtype=torch.bool)
    )
    assert found.isnan().tolist() == [True, False]


def test_half_precision_scores_are_computed_in_float32() -> None:
    scores, lengths = torch.randn(2, 6), torch.randint(5, 50, (2, 6)).float()
    present = torch.ones(2, 6, dtype=torch.bool)
    rounded = scores.bfloat16()
    found = length_biased_lambda_loss(rounded, lengths, present)
    assert found.dtype == torch.float32
    assert torch.equal(
        found, length_biased_lambda_loss(rounded.float(), lengths, present)
    )
