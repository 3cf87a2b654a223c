"""Ranking metrics of the re-ranker: functions of scores first, accumulating twins after.

They are defined for any real scores, negative ones included. Candidate 0 of a query is its one
positive; the rest are negatives; `candidates` is false where a query has fewer than others.

The tie rule, for all of them: among equal scores the positive is ranked last and the negatives
by position, so a model that scores everything alike is given no credit. A NaN ranks below every
number, for the same reason.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torchmetrics import Metric

from .lambda_loss import CandidateSet, length_biased_lambda_loss


def ranked_order(scores: Tensor, candidates: Tensor) -> Tensor:
    """Candidates from the highest score to the lowest, absent ones at the end.

    Ties: the positive (candidate 0) after the negatives, these by position. NaN counts as −∞.

    scores: (B, C); candidates: (B, C) bool. Returns: (B, C) long, the candidate at each rank.
    """
    positions = torch.arange(scores.shape[1], device=scores.device).roll(-1)  # 1, 2, …, 0
    numbers = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = positions[numbers[:, positions].argsort(dim=1, descending=True, stable=True)]
    # A second stable sort, as an absent candidate must stay behind a real score of −∞ too.
    absent = ~candidates.gather(1, order)
    return order.gather(1, absent.long().argsort(dim=1, stable=True))


def positive_rank(scores: Tensor, candidates: Tensor) -> Tensor:
    """Rank of the positive, from 1; ties rank it last. (B, C), (B, C) → (B,) long."""
    return (ranked_order(scores, candidates) == 0).long().argmax(dim=1) + 1


def reciprocal_rank(scores: Tensor, candidates: Tensor, top_k: int = 10) -> Tensor:
    """1/r if the positive's rank r ≤ top_k, else 0; ties rank it last. Mean over queries: MRR.

    scores: (B, C) real; candidates: (B, C) bool. Returns: (B,) float32 in [0, 1].
    """
    rank = positive_rank(scores, candidates)
    return torch.where(rank <= top_k, 1.0 / rank.float(), 0.0)


def hit(scores: Tensor, candidates: Tensor, top_k: int = 3) -> Tensor:
    """1 if the positive is among the top_k, else 0; ties rank it last.

    scores: (B, C) real; candidates: (B, C) bool. Returns: (B,) float32.
    """
    return (positive_rank(scores, candidates) <= top_k).float()


def length_rank(scores: Tensor, lengths: Tensor, candidates: Tensor, top_k: int = 10) -> Tensor:
    """Σ_r L_(r)/r over the negatives in ranked order, r = 1 … min(top_k, number of negatives).

    Lower when shorter negatives rank higher; ties by position. 0 where there is no negative.

    scores, lengths: (B, C); candidates: (B, C) bool. Returns: (B,) float32, in tokens.
    """
    negatives = candidates.clone()
    negatives[:, 0] = False
    ranked = _ranked_lengths(scores, lengths, negatives, top_k)
    return (ranked / torch.arange(1, ranked.shape[1] + 1, device=ranked.device)).sum(dim=1)


def average_length(scores: Tensor, lengths: Tensor, candidates: Tensor, top_k: int = 3) -> Tensor:
    """Mean length of the top_k candidates, positive and negatives together.

    Over all candidates where there are fewer than top_k; ties rank the positive last.

    scores, lengths: (B, C); candidates: (B, C) bool. Returns: (B,) float32, in tokens.
    """
    counted = candidates.sum(dim=1).clamp(min=1, max=top_k)
    return _ranked_lengths(scores, lengths, candidates, top_k).sum(dim=1) / counted


def _ranked_lengths(scores: Tensor, lengths: Tensor, candidates: Tensor, top_k: int) -> Tensor:
    """Lengths at ranks 1 … min(top_k, C), 0 at ranks nobody holds; float32."""
    order = ranked_order(scores, candidates)[:, :top_k]
    ranked = lengths.float().gather(1, order)
    return torch.where(candidates.gather(1, order), ranked, 0.0)


class QueryMean(Metric, ABC):
    """Mean over queries of one value per query; sums as states, so ranks and batches just add up.

    `update` takes every re-ranking metric's inputs alike, so they share a collection. Without any
    query the mean is NaN.
    """

    full_state_update = False
    total: Tensor
    queries: Tensor

    def __init__(self, top_k: int) -> None:
        super().__init__()
        if top_k < 1:
            raise ValueError(f"{type(self).__name__}(top_k={top_k}): top_k counts ranks from 1.")
        self.top_k = top_k
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("queries", torch.tensor(0), dist_reduce_fx="sum")

    def update(
        self, scores: Tensor, lengths: Tensor, candidates: Tensor, real: Tensor | None = None
    ) -> None:
        """Add a batch.

        Args:
            scores: (B, C), any real numbers; candidate 0 is the positive.
            lengths: (B, C) passage lengths in tokens.
            candidates: (B, C) bool, false where there is no candidate.
            real: (B,) bool, false for rows that only fill the batch; None counts every row.
        """
        values = self.values(scores.detach(), lengths, candidates)
        keep = torch.ones_like(values, dtype=torch.bool) if real is None else real
        self.total += torch.where(keep, values, 0.0).sum()
        self.queries += keep.sum()

    def compute(self) -> Tensor:
        """The mean over all queries so far."""
        return self.total / self.queries

    @abstractmethod
    def values(self, scores: Tensor, lengths: Tensor, candidates: Tensor) -> Tensor:
        """One value per query, (B,)."""


class MeanReciprocalRank(QueryMean):
    """MRR@top_k, see :func:`reciprocal_rank`. Ties rank the positive last."""

    higher_is_better = True

    def __init__(self, top_k: int = 10) -> None:
        super().__init__(top_k)

    def values(self, scores: Tensor, lengths: Tensor, candidates: Tensor) -> Tensor:
        return reciprocal_rank(scores, candidates, self.top_k)


class HitRate(QueryMean):
    """Hit@top_k, see :func:`hit`. Ties rank the positive last."""

    higher_is_better = True

    def __init__(self, top_k: int = 3) -> None:
        super().__init__(top_k)

    def values(self, scores: Tensor, lengths: Tensor, candidates: Tensor) -> Tensor:
        return hit(scores, candidates, self.top_k)


class LengthRank(QueryMean):
    """LenRank@top_k over the negatives, see :func:`length_rank`. Ties by position."""

    higher_is_better = False

    def __init__(self, top_k: int = 10) -> None:
        super().__init__(top_k)

    def values(self, scores: Tensor, lengths: Tensor, candidates: Tensor) -> Tensor:
        return length_rank(scores, lengths, candidates, self.top_k)


class AverageLength(QueryMean):
    """AvgLength@top_k over all candidates, see :func:`average_length`. Ties: positive last."""

    higher_is_better = False

    def __init__(self, top_k: int = 3) -> None:
        super().__init__(top_k)

    def values(self, scores: Tensor, lengths: Tensor, candidates: Tensor) -> Tensor:
        return average_length(scores, lengths, candidates, self.top_k)


class LengthObjective(QueryMean):
    """Mean of Λ, the length objective, whatever a model was trained on. Ties by position."""

    higher_is_better = False

    def __init__(self, top_k: int = 3, candidate_set: CandidateSet = "all") -> None:
        super().__init__(top_k)
        self.candidate_set: CandidateSet = candidate_set

    def values(self, scores: Tensor, lengths: Tensor, candidates: Tensor) -> Tensor:
        return length_biased_lambda_loss(
            scores, lengths, candidates, self.top_k, self.candidate_set
        )


def ranking_metrics(
    objective_top_k: int = 3, objective_candidates: CandidateSet = "all"
) -> dict[str, Metric]:
    """Fresh metrics of one evaluated data set: the four of the paper, and the length objective.

    The last lets models trained on something else, or not at all, be compared on the objective.

    A dict on purpose. A MetricCollection merges metrics whose states agree after the first batch,
    for good: a first batch ranked perfectly would turn Hit@3 into MRR@10.
    """
    return {
        "mrr@10": MeanReciprocalRank(10),
        "hit@3": HitRate(3),
        "lenrank@10": LengthRank(10),
        "avglength@3": AverageLength(3),
        "length_objective": LengthObjective(objective_top_k, objective_candidates),
    }
