"""Λ, the length-biased LambdaLoss: the re-ranker's objective, as a function of scores and lengths.

A candidate set gains by putting short passages first, a pair of candidates weighs as much as
exchanging the two would change the length-aware DCG@K, and each pair that is ordered by length pays
a logistic loss on the difference of its scores.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

CandidateSet = Literal["all", "negatives"]


def length_biased_lambda_loss(
    scores: Tensor,
    lengths: Tensor,
    candidates: Tensor,
    top_k: int = 3,
    candidate_set: CandidateSet = "all",
) -> Tensor:
    """Λ of each query, differentiable in the scores; ranks and weights are constants.

    With gains g_i = max_k L_k − L_i over the candidate set, ranks r_i by the current scores and the
    discount D(r) = 1{r ≤ K} / log₂(r + 1),

        w_ij = |(g_i − g_j)(D(r_j) − D(r_i))| / IDCG@K
        Λ    = Σ w_ij log(1 + exp(−y_ij (s_i − s_j))) / Σ w_ij,   y_ij = sign(g_i − g_j)

    over the pairs i < j with y_ij ≠ 0. So Λ ≥ 0, and it falls as shorter passages score higher.
    Where nothing is ordered (fewer than two candidates, or all of one length) Λ and its gradient
    are 0. Candidates of equal score are ranked by position. A score that is not finite shows in its
    own row alone.

    Args:
        scores, lengths: (B, C), the latter of passages in tokens.
        candidates: (B, C) bool, false where there is no candidate; what the other two hold there
            is not read.
        top_k: K, the ranks that count.
        candidate_set: "all", as the paper's formula, or the "negatives", all but candidate 0.

    Returns:
        (B,), float32 or wider.
    """
    if candidate_set == "negatives":
        candidates = candidates & (
            torch.arange(scores.shape[1], device=scores.device) > 0
        )
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores.masked_fill(~candidates, 0.0)
    lengths = lengths.to(scores.dtype)
    longest = lengths.masked_fill(~candidates, -torch.inf).amax(dim=1, keepdim=True)
    gains = torch.where(candidates, longest - lengths, 0.0)

    by_score = scores.detach().masked_fill(~candidates, -torch.inf)
    places = by_score.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    ranks = torch.arange(1, scores.shape[1] + 1, device=scores.device)
    discount = torch.where(
        ranks <= top_k, 1.0 / torch.log2(ranks.to(scores.dtype) + 1.0), 0.0
    )
    discounts = discount[places]
    ideal_dcg = (gains.sort(dim=1, descending=True).values * discount).sum(dim=1)

    gain_differences = gains[:, :, None] - gains[:, None, :]
    discount_differences = discounts[:, None, :] - discounts[:, :, None]
    exchange = (gain_differences * discount_differences).abs()
    weights = exchange / torch.where(ideal_dcg > 0, ideal_dcg, 1.0)[:, None, None]
    pairs = candidates[:, :, None] & candidates[:, None, :] & (gain_differences != 0)
    weights = torch.where(pairs.triu(diagonal=1), weights, 0.0)

    score_differences = scores[:, :, None] - scores[:, None, :]
    losses = -logsigmoid(gain_differences.sign() * score_differences)
    total = weights.sum(dim=(1, 2))
    return (weights * losses).sum(dim=(1, 2)) / torch.where(total > 0, total, 1.0)
