"""The When2Call table: functions of a confusion matrix first, accumulating twins after.

Categories are positions in :data:`~.when2call.records.CATEGORIES`; ``direct``, an answer made up
where a tool, a question or a refusal was due, is 0, never the right choice in published data.

The model's choice is the candidate with the largest score, its log-likelihood s, by one of

    sum         s
    characters  s / characters of the candidate   (``acc_norm`` of the usual harness)
    tokens      s / tokens of the candidate       (what training constrains)

Among equal scores the first category is chosen; NaN scores below every number.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torchmetrics import Metric

from .records import CATEGORIES

Normalisation = Literal["sum", "characters", "tokens"]

DIRECT, TOOL_CALL, CANNOT_ANSWER = (
    CATEGORIES.index(name) for name in ("direct", "tool_call", "cannot_answer")
)


def choice_scores(
    log_likelihood: Tensor,
    tokens: Tensor,
    characters: Tensor,
    choices: Tensor,
    normalisation: Normalisation,
) -> Tensor:
    """Scores by category, (B, 4); −∞ where a category has no candidate.

    log_likelihood: (B, R) sums; tokens, characters: (B, R), 0 tokens where there is no candidate;
    choices: (B, R) long, the category of each.
    """
    divisor = {"sum": torch.ones_like(tokens), "tokens": tokens, "characters": characters}
    scores = log_likelihood / divisor[normalisation].clamp(min=1)
    present = (tokens > 0) & (choices >= 0)
    scores = torch.where(present, scores, -math.inf)
    found = scores.new_full((len(scores), len(CATEGORIES)), -math.inf)
    # Absent candidates go to a column of their own, which is cut off again.
    columns = torch.where(present, choices, len(CATEGORIES))
    return torch.cat([found, found[:, :1]], dim=1).scatter(1, columns, scores)[:, :-1]


def chosen_category(scores: Tensor) -> Tensor:
    """(B, 4) scores → (B,) long, the category of the largest; ties take the first."""
    numbers = scores.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    largest = numbers.max(dim=1, keepdim=True).values
    return (numbers == largest).long().argmax(dim=1)


def confusion(gold: Tensor, predicted: Tensor) -> Tensor:
    """(B,), (B,) → (4, 4) long: rows of gold, columns of predictions."""
    size = len(CATEGORIES)
    return torch.bincount(gold * size + predicted, minlength=size**2).view(size, size)


def f1_scores(matrix: Tensor) -> Tensor:
    """2·TP / (2·TP + FP + FN) of each category, (4,) float32; 0 where neither occurs."""
    hits = matrix.diagonal().float()
    return 2 * hits / (matrix.sum(0) + matrix.sum(1)).clamp(min=1)


def macro_f1(matrix: Tensor) -> Tensor:
    """The mean F1 over the categories that occur as gold; NaN of nothing.

    The published data never have ``direct`` as gold, so it is a mean over three, whatever is
    predicted. sklearn's default would count ``direct`` in as soon as it is predicted once.
    """
    return f1_scores(matrix)[matrix.sum(1) > 0].mean()


def accuracy(matrix: Tensor) -> Tensor:
    """The share chosen rightly; NaN of nothing."""
    return matrix.diagonal().sum() / matrix.sum()


def hallucination_rate(matrix: Tensor) -> Tensor:
    """The share for which ``direct`` is chosen; NaN of nothing."""
    return matrix[:, DIRECT].sum() / matrix.sum()


def tool_hallucination_rate(matrix: Tensor) -> Tensor:
    """The share for which a tool is called, of a matrix of questions without any tool.

    Of those whose right choice is ``cannot_answer``; NaN where there is none.
    """
    return matrix[CANNOT_ANSWER, TOOL_CALL] / matrix[CANNOT_ANSWER].sum()


class ConfusionMetric(Metric):
    """A figure of the confusion matrix of everything seen, over all ranks."""

    full_state_update = False
    higher_is_better = True
    matrix: Tensor

    def __init__(self) -> None:
        super().__init__()
        size = len(CATEGORIES)
        empty = torch.zeros(size, size, dtype=torch.long)
        self.add_state("matrix", default=empty, dist_reduce_fx="sum")

    def update(self, gold: Tensor, predicted: Tensor) -> None:
        """Add a batch: categories (B,), (B,)."""
        self.matrix += confusion(gold, predicted)

    @abstractmethod
    def figure(self, matrix: Tensor) -> Tensor:
        """The figure, from counts (4, 4), right by chosen category."""

    def compute(self) -> Tensor:
        return self.figure(self.matrix)


class CategoryF1(ConfusionMetric):
    """:func:`f1_scores` of one category, a position in CATEGORIES."""

    def __init__(self, category: int) -> None:
        super().__init__()
        self.category = category

    def figure(self, matrix: Tensor) -> Tensor:
        return f1_scores(matrix)[self.category]


class MacroF1(ConfusionMetric):
    """:func:`macro_f1`."""

    def figure(self, matrix: Tensor) -> Tensor:
        return macro_f1(matrix)


class Accuracy(ConfusionMetric):
    """:func:`accuracy`."""

    def figure(self, matrix: Tensor) -> Tensor:
        return accuracy(matrix)


class HallucinationRate(ConfusionMetric):
    """:func:`hallucination_rate`."""

    higher_is_better = False

    def figure(self, matrix: Tensor) -> Tensor:
        return hallucination_rate(matrix)


class ToolHallucinationRate(ConfusionMetric):
    """:func:`tool_hallucination_rate`; update it with questions without tools only."""

    higher_is_better = False

    def figure(self, matrix: Tensor) -> Tensor:
        return tool_hallucination_rate(matrix)


NORMALISATIONS: dict[str, Normalisation] = {
    "accuracy_sum": "sum",
    "accuracy_characters": "characters",
    "accuracy_tokens": "tokens",
}
"""By which normalisation each accuracy chooses."""


def choice_metrics() -> dict[str, ConfusionMetric]:
    """Fresh metrics of one multiple-choice data set; see :func:`update_choice_metrics`."""
    metrics: dict[str, ConfusionMetric] = {name: Accuracy() for name in NORMALISATIONS}
    metrics["macro_f1"] = MacroF1()
    for place, name in enumerate(CATEGORIES):
        metrics[f"f1_{name}"] = CategoryF1(place)
    metrics["hallucination"] = HallucinationRate()
    metrics["tool_hallucination"] = ToolHallucinationRate()
    return metrics


def update_choice_metrics(
    metrics: Mapping[str, Metric],
    predicted: Mapping[Normalisation, Tensor],
    choose_by: Normalisation,
    gold: Tensor,
    has_tools: Tensor,
) -> None:
    """Add a batch: predicted (B,) by normalisation, gold (B,), has_tools (B,) bool.

    The accuracies choose by their own normalisation, everything else by ``choose_by``.
    """
    for name, metric in metrics.items():
        if name not in CHOICE_METRICS:
            continue
        chosen = predicted[NORMALISATIONS.get(name, choose_by)]
        if name == "tool_hallucination":
            metric.update(gold[~has_tools], chosen[~has_tools])
        else:
            metric.update(gold, chosen)


CHOICE_METRICS = frozenset(choice_metrics())
