"""The When2Call table: which behaviour the model chooses, and how often that is right.

Categories are positions in :data:`~.when2call.data.CATEGORIES`; ``direct``, an answer made up
where a tool, a question or a refusal was due, is 0.

The model's choice is the candidate with the largest score, its log-likelihood s, by one of

    sum         s
    characters  s / characters of the candidate   (``acc_norm`` of the usual harness)
    tokens      s / tokens of the candidate       (what training constrains)

Among equal scores the first category is chosen; NaN scores below every number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import BinaryF1Score, MulticlassF1Score

from pl_pointwise.evaluation import MeanBySample

from .data import CATEGORIES

NORMALISATIONS = ("sum", "characters", "tokens")
DIRECT = CATEGORIES.index("direct")


def chosen_categories(
    log_likelihood: Tensor, tokens: Tensor, characters: Tensor, choices: Tensor
) -> dict[str, Tensor]:
    """By normalisation the category of the largest score, (B,) long.

    All (B, R): log_likelihood sums; tokens, 0 where there is no candidate; choices, categories.
    """
    present = (tokens > 0) & (choices >= 0)
    # Absent candidates go to a column of their own, which is cut off again.
    columns = torch.where(present, choices, len(CATEGORIES))
    chosen, divisors = {}, (torch.ones_like(tokens), characters, tokens)
    for name, divisor in zip(NORMALISATIONS, divisors, strict=True):
        scores = log_likelihood / divisor.clamp(min=1)
        scores = scores.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        table = scores.new_full((len(scores), len(CATEGORIES) + 1), -math.inf)
        chosen[name] = table.scatter(1, columns, scores)[:, :-1].argmax(dim=1)
    return chosen


class MacroF1(MulticlassF1Score):
    """The mean F1 over the categories that occur as gold; NaN of nothing.

    In the published data ``direct`` never does. torchmetrics' and sklearn's macro average would
    count it in as soon as it is predicted once.
    """

    def __init__(self) -> None:
        super().__init__(num_classes=len(CATEGORIES), average="none")

    def compute(self) -> Tensor:
        found, missed = torch.as_tensor(self.tp), torch.as_tensor(self.fn)
        return super().compute()[found + missed > 0].mean()


def choice_metrics() -> dict[str, Metric]:
    """Fresh metrics of one multiple-choice data set; see :func:`update_choice_metrics`."""
    return {
        **{f"accuracy_{name}": MeanBySample() for name in NORMALISATIONS},
        "macro_f1": MacroF1(),
        **{f"f1_{name}": BinaryF1Score() for name in CATEGORIES},
        "hallucination": MeanBySample(),
    }


def update_choice_metrics(
    metrics: Mapping[str, Metric], index: Tensor, predicted: Mapping[str, Tensor], gold: Tensor
) -> None:
    """Adds a batch: index, predicted by normalisation, and gold, all (B,).

    The accuracies choose by their own normalisation, all else by characters, as published:
    ``hallucination`` is the share of ``direct``.
    """
    for normalisation, found in predicted.items():
        metrics[f"accuracy_{normalisation}"].update(index, (found == gold).float())
    chosen = predicted["characters"]
    metrics["macro_f1"].update(chosen, gold)
    for category, name in enumerate(CATEGORIES):
        metrics[f"f1_{name}"].update((chosen == category).long(), (gold == category).long())
    metrics["hallucination"].update(index, (chosen == DIRECT).float())
