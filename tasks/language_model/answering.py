"""Generated answers in an evaluation: what is counted of them, and whose prompts are asked.

A task's evaluation has ``answer_in``, the data sets of `test` whose prompts are answered, and
``answers_at_most``, so many of each kind by a batch's "rank". Its module has a table of rates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pl_pointwise.data import PADDING
from pl_pointwise.evaluation import MeanBySample
from pl_pointwise.task import Batch


@dataclass(frozen=True)
class Rate:
    """A metric: the mean over the answers of an entry of theirs.

    Args:
        entry: of an answer, such as "refused"; answers without it are not counted.
        value: what counts of it; of a flag 1 or 0.
        kind: of the prompts, as ``prompt_kind`` names it; None for all.
        higher_is_better: None for neither.
    """

    entry: str
    value: Callable[[Any], float] = float
    kind: str | None = None
    higher_is_better: bool | None = True

    def metric(self) -> MeanBySample:
        return MeanBySample(self.higher_is_better)


CUT = Rate("cut", higher_is_better=False)
"""Answers that stop only at the length limit."""


def real_samples(batch: Batch) -> list[tuple[int, int]]:
    """(position in the batch, index) of the samples of a batch that do not only fill it."""
    return [each for each in enumerate(batch["index"].tolist()) if each[1] != PADDING]
