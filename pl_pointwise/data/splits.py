"""The splits of the data: what each is for, and what people read for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """A split of the data.

    Attributes:
        key: its name in options and in the log.
        role: what it is for. Settings and methods are chosen by the selection split; the
            certification split is used once, for the model that was chosen.
        title: what people read in tables and plots.
    """

    key: str
    role: str
    title: str


TRAIN = Split("train", "training", "training")
VAL = Split("val", "selection", "selection")
TEST = Split("test", "certification", "held-out")

SPLITS = {split.key: split for split in (TRAIN, VAL, TEST)}
"""Any other data set stands besides the splits."""


def title_of(dataset: str) -> str:
    """Returns what people read for a data set: a split's title, else its own name."""
    return SPLITS[dataset].title if dataset in SPLITS else dataset
