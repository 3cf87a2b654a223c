"""Ranking metrics of the re-ranker.

All take scores of any sign and lengths, (B, C), and `candidates`, (B, C) bool, false where a query
has fewer than others, and return (B,), float32. Candidate 0 of a query is its one positive.

Among equal scores the positive is ranked last and the negatives by position, so a model that scores
everything alike is given no credit. A NaN ranks below every number, for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def ranked_order(scores: Tensor, candidates: Tensor) -> Tensor:
    """Candidates from the highest score to the lowest, absent ones at the end, (B, C) long."""
    positions = torch.arange(scores.shape[1], device=scores.device).roll(-1)  # 1, 2, …, 0
    lowest = torch.finfo(scores.dtype).min  # Of a candidate that is there; an absent one has −∞.
    numbers = scores.nan_to_num(nan=lowest, posinf=torch.inf, neginf=lowest)
    numbers = numbers.masked_fill(~candidates, -torch.inf)
    return positions[numbers[:, positions].argsort(dim=1, descending=True, stable=True)]


def reciprocal_rank(scores: Tensor, lengths: Tensor, candidates: Tensor, top_k: int = 10) -> Tensor:
    """1/r if the positive's rank r ≤ top_k, else 0. Mean over queries: MRR."""
    rank = (ranked_order(scores, candidates) == 0).long().argmax(dim=1) + 1
    return torch.where(rank <= top_k, 1.0 / rank.float(), 0.0)


def hit(scores: Tensor, lengths: Tensor, candidates: Tensor, top_k: int = 3) -> Tensor:
    """1 if the positive is among the top_k, else 0."""
    return (reciprocal_rank(scores, lengths, candidates, top_k) > 0).float()


def length_rank(scores: Tensor, lengths: Tensor, candidates: Tensor, top_k: int = 10) -> Tensor:
    """Σ_r L_(r)/r over the negatives in ranked order, r = 1 … min(top_k, number of negatives).

    Lower when shorter negatives rank higher. 0 where there is no negative.
    """
    negatives = candidates.clone()
    negatives[:, 0] = False
    ranked = _ranked_lengths(scores, lengths, negatives, top_k)
    return (ranked / torch.arange(1, ranked.shape[1] + 1, device=ranked.device)).sum(dim=1)


def average_length(scores: Tensor, lengths: Tensor, candidates: Tensor, top_k: int = 3) -> Tensor:
    """Mean length of the top_k candidates, positive and negatives; of all where there are fewer."""
    counted = candidates.sum(dim=1).clamp(min=1, max=top_k)
    return _ranked_lengths(scores, lengths, candidates, top_k).sum(dim=1) / counted


def score_spread(scores: Tensor, lengths: Tensor, candidates: Tensor) -> Tensor:
    """Standard deviation of a query's scores, the population's; 0 of a single candidate.

    A margin that is met because all scores grew shows here, and so do scores that collapsed.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores - scores[:, :1]  # Equal scores of any size have no spread at all.
    counted = candidates.sum(dim=1, keepdim=True).clamp(min=1)
    means = torch.where(candidates, scores, 0.0).sum(dim=1, keepdim=True) / counted
    squares = torch.where(candidates, scores - means, 0.0).square().sum(dim=1, keepdim=True)
    return (squares / counted).sqrt()[:, 0]


def _ranked_lengths(scores: Tensor, lengths: Tensor, candidates: Tensor, top_k: int) -> Tensor:
    """Lengths at ranks 1 … min(top_k, C), 0 at ranks nobody holds; float32."""
    order = ranked_order(scores, candidates)[:, :top_k]
    ranked = lengths.float().gather(1, order)
    return torch.where(candidates.gather(1, order), ranked, 0.0)


RANKING_METRICS: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mrr@10": reciprocal_rank,
    "hit@3": hit,
    "lenrank@10": length_rank,
    "avglength@3": average_length,
    "score_std": score_spread,
}
"""The paper's four, and the scale of the scores; each is a mean over queries."""
