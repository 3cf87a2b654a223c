"""The answer to a requirement: the chosen model with its certificate, or that none meets it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from pandas import DataFrame

from pl_pointwise.certificates import ASSUMPTIONS
from pl_pointwise.data import TEST, VAL

from .p_values import Losses, p_value, samples_needed, upper_bound
from .requirement import Requirement
from .samples import lines_about, losses_by_unit
from .selection import Candidate, Selection, select


@dataclass(frozen=True)
class MeasuredModel:
    """A trained model: its table of samples.py, and its objective, smaller is better."""

    name: str
    samples: DataFrame
    objective: float
    """On the selection split."""


@dataclass(frozen=True)
class Finding:
    """One requirement on one model's certification samples, or new records."""

    requirement: Requirement
    lines: DataFrame
    """Of the samples that it is about, with the loss of each."""
    losses: Losses
    """(units,): units are independent, and each counts once, whatever its samples."""
    zero_one: bool
    confidence: float
    p: float
    bound: float
    """Upper bound on the mean loss of inputs like these."""
    note: str = ""
    """What is known of the records."""

    @classmethod
    def of(
        cls,
        samples: DataFrame,
        requirement: Requirement,
        zero_one: bool,
        sure: float,
        sure_of_bound: float,
    ) -> Finding:
        """sure, sure_of_bound: the confidence of the p-value, and of the bound."""
        lines = lines_about(samples, requirement)
        losses = losses_by_unit(lines, requirement)
        p = p_value(losses, requirement.at_most, sure, zero_one)
        bound = upper_bound(losses, sure_of_bound, zero_one)
        return cls(requirement, lines, losses, zero_one, sure, p, bound)

    @property
    def n(self) -> int:
        return len(self.losses)

    @property
    def share(self) -> float:
        """Mean loss over units: of those that violate, or of the metric."""
        return float(self.losses.mean())

    @property
    def met(self) -> bool:
        return self.p <= 1 - self.confidence

    def text(self) -> str:
        """Returns what was seen, and how many units like these would show what was not."""
        units = "samples" if len(self.lines) == self.n else "units (prompts, queries)"
        if self.requirement.beside == "difference":
            better = f"{_better(self.share)} than the predecessor over {self.n:,} {units}"
            return f"{better}, p = {self.p:.2g}, at worst {_better(self.bound)}"
        if self.requirement.beyond is None:
            what = f"mean loss {self.share:.3g} over {self.n:,} {units}"
        else:
            what = f"{round(self.share * self.n):,} of {self.n:,} {units} fail"
        seen = f"{what}, p = {self.p:.2g}, at most {100 * self.bound:.3g} %"
        if self.requirement.beside == "lost":
            share = (self.lines.groupby("unit")["before"].max() <= 0).mean()
            seen += f"; the predecessor meets it on {100 * share:.3g} % of them"
        if not self.met and self.zero_one:
            needed = samples_needed(self.requirement.at_most, self.share, self.confidence)
            if needed is not None:
                seen += f"; if that share holds, {needed:,} samples show it four times in five"
        return seen


def _better(loss: float) -> str:
    """A difference of metrics from its loss (1 + d) / 2, where d is how much worse it is."""
    worse = round(2 * loss - 1, 9)
    return f"{abs(worse):.3g} {'worse' if worse >= 0 else 'better'}"


def repetitions(found: Sequence[Finding]) -> list[str]:
    """Returns what is to be said where units have several samples, which count as one."""
    most = max(found, key=lambda each: len(each.lines) / each.n)
    samples = len(most.lines)
    if samples == most.n:
        return []
    largest = most.lines["unit"].value_counts(normalize=True).max()
    told = f"Each distinct prompt or query counts once: {samples:,} samples are of {most.n:,}"
    told += f", the largest has {100 * largest:.3g} % of them"
    if samples > 1.1 * most.n:
        told += ". Warning: of inputs that come as often as these, another share may fail"
    return [f"{told}."]


@dataclass
class Answer:
    """What came of the test; made by :func:`choose_model`."""

    models: Sequence[MeasuredModel]
    requirements: Sequence[Requirement]
    confidence: float
    selection: Selection

    @property
    def predecessor(self) -> str | None:
        """The model that requirements compare with, if any does."""
        if not any(each.beside for each in self.requirements):
            return None
        return f"the model of {self.models[0].name} before training"

    @cached_property
    def shown(self) -> int:
        """The position of the chosen model, else of that which loses least of what it may lose."""

        def excess(position: int) -> float:
            losses = self.selection.tested[position].candidate.certification
            pairs = zip(losses, self.requirements, strict=True)
            return max(float(each.mean()) / of.at_most for each, of in pairs)

        chosen = self.selection.position
        return min(range(len(self.models)), key=excess) if chosen is None else chosen

    @cached_property
    def findings(self) -> list[Finding]:
        """By requirement, of the model that is shown, on the certification split."""
        # Over all models and requirements, of which the split's own values chose what is shown.
        sure = 1 - (1 - self.confidence) / (len(self.models) * len(self.requirements))
        samples, kinds = self.models[self.shown].samples, self.selection.zero_one
        found = [
            Finding.of(samples, requirement, kind, self.confidence, sure)
            for requirement, kind in zip(self.requirements, kinds, strict=True)
        ]
        if self.selection.position is None:
            return found
        # Of the chosen one the test says that it is within what is required.
        return [replace(f, bound=min(f.bound, f.requirement.at_most)) for f in found]

    def statement(self) -> str:
        """Returns the answer in plain sentences."""
        count, name = len(self.models), self.models[self.shown].name
        sure = f"{100 * self.confidence:g} %"
        wrong = f"{100 * (1 - self.confidence):.3g}"
        met = "the requirement" if len(self.requirements) == 1 else "all requirements together"
        if self.selection.position is None:
            first = f"None of the {count} models is certified to meet {met} with {sure} confidence."
            first += f" {name} comes nearest:"
            after = ["These certification samples are used: take new ones, and another --output."]
        else:
            first = (
                f"{name} was shown to meet {met} on new inputs, with {sure} confidence: by a test "
                f"that passes a model which does not in at most {wrong} % of cases."
            )
            after = [
                f"The confidence accounts for the choice among {count} models: their order comes "
                f"from the selection split, and at most {len(self.selection.order)} were tested "
                "one after the other on the certification split (fixed-sequence testing), which no "
                "other comparison has used by this user's record. "
                "The bounds in percent hold together, whichever is chosen (Bonferroni).",
                f"Assumptions: {ASSUMPTIONS}",
            ]
        seen = [f"- {each.requirement.text}: {each.text()}" for each in self.findings]
        if self.predecessor is not None:
            seen.append(f"- The predecessor is {self.predecessor}.")
        return "\n".join([first, "", *seen, "", *repetitions(self.findings), *after])

    def as_dict(self) -> dict[str, Any]:
        """Returns the certificate of the chosen model as plain values; for a file."""
        model = self.models[self.shown]
        return {
            "certified": None if self.selection.position is None else model.name,
            "confidence": self.confidence,
            "candidates": len(self.models),
            "predecessor": self.predecessor,
            "nearest": model.name,
            "requirements": [
                {
                    "text": each.requirement.text,
                    "seen": each.text(),
                    "quantity": each.requirement.quantity,
                    "category": each.requirement.category or None,
                    "at_most": each.requirement.at_most,
                    **{name: getattr(each, name) for name in ("n", "share", "p", "bound")},
                }
                for each in self.findings
            ],
            "objective": model.objective,
            "statement": self.statement(),
        }


def choose_model(
    models: Sequence[MeasuredModel],
    requirements: Sequence[Requirement],
    confidence: float = 0.95,
) -> Answer:
    """Which model meets all requirements, with its certificate."""
    candidates = []
    for model in models:
        losses = [
            [losses_by_unit(lines_about(model.samples, each, key), each) for each in requirements]
            for key in (VAL.key, TEST.key)
        ]
        objective = float(np.nan_to_num(model.objective, nan=np.inf))
        candidates.append(Candidate(model.name, objective, *losses))
    rates = [requirement.at_most for requirement in requirements]
    selection = select(candidates, rates, confidence)
    return Answer(models, requirements, confidence, selection)
