"""The table's numbers are sklearn's where sklearn has them, whatever the batches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, f1_score

from pl_pointwise.tasks.when2call.data import CATEGORIES
from pl_pointwise.tasks.when2call.metrics import (
    DIRECT,
    choice_metrics,
    chosen_categories,
    update_choice_metrics,
)

LABELS = range(len(CATEGORIES))
labelled = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30)


def measured(gold: list[int], chosen: list[int], size: int = 30) -> dict[str, float]:
    """The table of these categories, updated with so many at a time."""
    metrics = choice_metrics()
    for rows in torch.arange(len(gold)).split(size):
        right, predicted = torch.tensor(gold)[rows], torch.tensor(chosen)[rows]
        by_name = dict.fromkeys(("sum", "characters", "tokens"), predicted)
        update_choice_metrics(metrics, rows, by_name, right)
    return {name: float(metric.compute()) for name, metric in metrics.items()}


@given(labelled, st.integers(1, 7))
def test_the_table_equals_sklearns_whatever_the_batches(pairs, size) -> None:
    gold, chosen = (list(column) for column in zip(*pairs, strict=True))
    found = measured(gold, chosen, size)
    assert found["accuracy_sum"] == pytest.approx(accuracy_score(gold, chosen))
    by_category = f1_score(gold, chosen, labels=LABELS, average=None, zero_division=0)
    for name, value in zip(CATEGORIES, by_category, strict=True):
        assert found[f"f1_{name}"] == pytest.approx(value)
    occurring = sorted(set(gold))
    expected = f1_score(gold, chosen, labels=occurring, average="macro", zero_division=0)
    assert found["macro_f1"] == pytest.approx(expected)
    assert found["hallucination"] == pytest.approx(chosen.count(DIRECT) / len(gold))


def test_each_accuracy_chooses_by_its_own_normalisation() -> None:
    sums = torch.tensor([[-4.0, -9.0, -20.0, -30.0]])
    tokens = torch.tensor([[1, 3, 4, 20]])
    characters = torch.tensor([[2, 3, 20, 20]])
    choices = torch.tensor([[3, 2, 1, 0]])  # the right one first
    predicted = chosen_categories(sums, tokens, characters, choices)
    chosen = {name: CATEGORIES[int(choice)] for name, choice in predicted.items()}
    assert chosen == {"sum": "cannot_answer", "characters": "tool_call", "tokens": "direct"}

    metrics = choice_metrics()
    gold = torch.tensor([3])
    update_choice_metrics(metrics, torch.tensor([0]), predicted, gold)
    found = {name: float(metric.compute()) for name, metric in metrics.items()}
    assert (found["accuracy_sum"], found["accuracy_characters"]) == (1, 0)
    assert found["accuracy_tokens"] == found["hallucination"] == 0


def test_absent_candidates_and_nan_are_never_chosen() -> None:
    sums = torch.tensor([[math.nan, -3.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    tokens = torch.tensor([[1, 2, 0, 0], [0, 0, 0, 0]])
    choices = torch.tensor([[0, 2, -1, -1], [-1, -1, -1, -1]])
    assert chosen_categories(sums, tokens, tokens, choices)["tokens"].tolist() == [2, 0]


def test_ties_take_the_first_category() -> None:
    sums, ones = torch.tensor([[-1.0, -0.5, -0.5, -2.0]]), torch.ones(1, 4, dtype=torch.long)
    for choices, first in ([0, 1, 2, 3], 1), ([3, 2, 1, 0], 1):
        chosen = chosen_categories(sums, ones, ones, torch.tensor([choices]))
        assert [each.tolist() for each in chosen.values()] == [[first]] * 3
