"""Ranking metrics of the re-ranker.

Among equal scores the positive is ranked last and the negatives by position, so a model that scores
everything alike is given no credit. A NaN ranks below every number, for the same reason.
"""

from __future__ import annotations

import torch
from torch import Tensor

NAMES = ("mrr@10", "hit@3", "lenrank@10", "avglength@3", "score_std")
"""The paper's four, and the scale of the scores; each is a mean over queries."""


def ranking_metrics(
    scores: Tensor, lengths: Tensor, candidates: Tensor
) -> dict[str, Tensor]:
    """By name the values of the queries, (B,) float32.

        mrr@10       1/r if the positive's rank r ≤ 10, else 0
        hit@3        1 if r ≤ 3, else 0
        lenrank@10   Σ_r L_(r)/r over the first 10 negatives in ranked order; 0 of none
        avglength@3  mean length of the first 3 candidates, or of all where there are fewer
        score_std    standard deviation of the query's scores, the population's

    A margin that is met because all scores grew shows in the last, and so do scores that collapsed.

    Args:
        scores, lengths: (B, C), of any sign. Candidate 0 of a query is its one positive.
        candidates: (B, C) bool, false where a query has fewer than others.
    """
    rank = (ranked_order(scores, candidates) == 0).long().argmax(dim=1) + 1
    negatives = candidates.clone()
    negatives[:, 0] = False
    of_negatives = _ranked_lengths(scores, lengths, negatives, 10)
    places = torch.arange(1, of_negatives.shape[1] + 1, device=scores.device)
    first, counted = (
        _ranked_lengths(scores, lengths, candidates, 3),
        candidates.sum(dim=1),
    )
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores - scores[:, :1]  # Equal scores of any size have no spread at all.
    means = torch.where(candidates, scores, 0.0).sum(dim=1) / counted.clamp(min=1)
    squares = torch.where(candidates, scores - means[:, None], 0.0).square().sum(dim=1)
    values = (
        torch.where(rank <= 10, 1.0 / rank.float(), 0.0),
        (rank <= 3).float(),
        (of_negatives / places).sum(dim=1),
        first.sum(dim=1) / counted.clamp(min=1, max=3),
        (squares / counted.clamp(min=1)).sqrt(),
    )
    return dict(zip(NAMES, values, strict=True))


def ranked_order(scores: Tensor, candidates: Tensor) -> Tensor:
    """Candidates from the highest score to the lowest, absent ones at the end, (B, C) long."""
    # 1, 2, …, 0
    positions = torch.arange(scores.shape[1], device=scores.device).roll(-1)
    # Of a candidate that is there; an absent one has −∞.
    lowest = torch.finfo(scores.dtype).min
    numbers = scores.nan_to_num(nan=lowest, posinf=torch.inf, neginf=lowest)
    numbers = numbers.masked_fill(~candidates, -torch.inf)
    return positions[numbers[:, positions].argsort(dim=1, descending=True, stable=True)]


def _ranked_lengths(
    scores: Tensor, lengths: Tensor, candidates: Tensor, top_k: int
) -> Tensor:
    """Lengths at ranks 1 … min(top_k, C), 0 at ranks nobody holds; float32."""
    order = ranked_order(scores, candidates)[:, :top_k]
    ranked = lengths.float().gather(1, order)
    return torch.where(candidates.gather(1, order), ranked, 0.0)
