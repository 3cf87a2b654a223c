"""The answer to a requirement: the chosen model with its certificate, or that none meets it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from pandas import DataFrame

from pl_pointwise.certificates import ASSUMPTIONS
from pl_pointwise.data import TEST, VAL
from pl_pointwise.metrics import cvar
from pl_pointwise.printing import Table

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
    certified: bool = False
    """Whether a test that chose the model says that it is met."""

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
        within = f"at most {100 * self.bound:.3g} %"
        if self.certified and self.bound > self.requirement.at_most:
            within = f"at most {100 * self.requirement.at_most:.3g} % by the test, and by a bound "
            within += f"that holds for every model {100 * self.bound:.3g} %"
        seen = f"{what}, p = {self.p:.2g}, {within}"
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
        """The position of the chosen model, else of the one whose largest p-value is smallest."""
        chosen, tested = self.selection.position, self.selection.tested
        nearest = min(range(len(self.models)), key=lambda each: tested[each].p)
        return nearest if chosen is None else chosen

    @cached_property
    def findings(self) -> list[Finding]:
        """By requirement, of the model that is shown, on the certification split.

        The bounds of all models and requirements hold together at the confidence, whatever the test
        says; the test's own word, that the chosen model is within what is required, is another one.
        """
        # Over all models and requirements, of which the split's own values chose what is shown.
        sure = 1 - (1 - self.confidence) / (len(self.models) * len(self.requirements))
        samples, kinds = self.models[self.shown].samples, self.selection.zero_one
        found = [
            Finding.of(samples, requirement, kind, self.confidence, sure)
            for requirement, kind in zip(self.requirements, kinds, strict=True)
        ]
        return [replace(each, certified=self.selection.position is not None) for each in found]

    def statement(self) -> str:
        """Returns the answer in plain sentences."""
        count, name = len(self.models), self.models[self.shown].name
        sure = f"{100 * self.confidence:g} %"
        wrong = f"{100 * (1 - self.confidence):.3g}"
        met = "the requirement" if len(self.requirements) == 1 else "all requirements together"
        reached, position = len(self.selection.reached), self.selection.position
        bounds = (
            "The bounds in percent hold together, whichever model is shown (Bonferroni over "
            f"{count} models and {len(self.requirements)} requirements), with {sure} confidence"
        )
        if position is None:
            first = (
                f"None of the {reached} tested of {count} models is certified to meet {met} with "
                f"{sure} confidence: they are tested one after the other until one fails. {name} "
                "comes nearest, as its largest p is the smallest"
            )
            if not self.selection.tested[self.shown].reached:
                first += "; it was not tested, so that no certificate could follow from that"
            first += ":"
            after = [
                f"{bounds}.",
                "These certification samples are used: take new ones, and another --output.",
            ]
        else:
            first = (
                f"{name} was shown to meet {met} on new inputs, with {sure} confidence: by a test "
                f"that passes a model which does not in at most {wrong} % of cases."
            )
            after = [
                f"The confidence accounts for the choice among {count} models: their order comes "
                f"from the selection split, and {reached} of {len(self.selection.order)} in it "
                "were tested one after the other on the certification split (fixed-sequence "
                "testing), which no other comparison has used by this user's record. "
                f"{bounds}: that is another statement than the test's, with an error of its own.",
                f"Assumptions: {ASSUMPTIONS}",
            ]
        seen = [f"- {each.requirement.text}: {each.text()}" for each in self.findings]
        if self.predecessor is not None:
            seen.append(f"- The predecessor is {self.predecessor}.")
        ties = self._ties()
        return "\n".join([first, "", *seen, "", *repetitions(self.findings), *ties, *after])

    def _ties(self) -> list[str]:
        """Says that the selection split is too small to tell candidates apart, where it is."""
        p_values = [each.selection_p for each in self.selection.tested]
        least = min(p_values)  # Of those behind it hardly anything depends on the order.
        if p_values.count(least) < 2:
            return []
        return [
            f"The selection split cannot tell {p_values.count(least)} models apart: each has p = "
            f"{least:.2g} there. They stand in the order of the size of their violations on it; a "
            "larger one tells more."
        ]

    def table(self) -> Table:
        """What happened to each candidate, in the order of the test; the rest behind it."""
        tested, order = self.selection.tested, self.selection.order
        rest = [position for position in range(len(tested)) if position not in order]
        lines = [self._line(position) for position in [*order, *rest]]
        note = (
            "From the selection split come p against each model, the objective, and the size of "
            "violations: the mean of the worst twentieth, of a metric the mean loss. A model is "
            "dropped where another is no worse in p and objective. The last columns are of the "
            "certification split; of what the test did not come to they certify nothing."
        )
        return Table("Candidates", note, DataFrame(lines))

    def _line(self, position: int) -> dict[str, str]:
        found = self.selection.tested[position]
        what = "not reached"
        if found.beaten_by is not None:
            what = f"dropped: {self.models[found.beaten_by].name} is no worse"
        elif found.reached:
            what = "tested: certified" if found.certified else "tested: not certified"
        if position == self.selection.position:
            what += ", chosen"
        line = {
            "model": found.candidate.name,
            "what happened": what,
            "selection: p": f"{found.selection_p:.2g}",
            "objective": f"{found.candidate.objective:.4g}",
        }
        for requirement, size in zip(self.requirements, found.candidate.sizes, strict=True):
            line[f"size, {requirement.text}"] = f"{size:.3g}"
        for requirement, p in zip(self.requirements, found.p_by_requirement, strict=True):
            line[f"p, {requirement.text}"] = f"{p:.2g}"
        return line

    def as_dict(self) -> dict[str, Any]:
        """Returns the certificate of the chosen model as plain values; for a file."""
        model = self.models[self.shown]
        return {
            "certified": None if self.selection.position is None else model.name,
            "confidence": self.confidence,
            "candidates": len(self.models),
            "tested": [self.models[position].name for position in self.selection.reached],
            "models": [self._line(position) for position in range(len(self.models))],
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


def size_of_violations(samples: DataFrame, requirement: Requirement) -> float:
    """How much a model violates on the selection split, where shares of few samples tie.

    The mean of the worst twentieth of the units' worst violations; of a metric the mean loss.
    """
    lines = lines_about(samples, requirement, VAL.key)
    if lines.empty:
        return 0.0
    if requirement.beyond is None:
        return float(losses_by_unit(lines, requirement).mean())
    worst = lines["value"].fillna(np.inf).groupby(lines["unit"]).max() - requirement.beyond
    return float(cvar(torch.tensor(worst.to_numpy(np.float64)), 0.95))


def choose_model(
    models: Sequence[MeasuredModel],
    requirements: Sequence[Requirement],
    confidence: float = 0.95,
) -> Answer:
    """Which model meets all requirements, with its certificate."""
    candidates = []
    for model in models:
        before, after = (
            [losses_by_unit(lines_about(model.samples, each, key), each) for each in requirements]
            for key in (VAL.key, TEST.key)
        )
        objective = float(np.nan_to_num(model.objective, nan=np.inf))
        sizes = [size_of_violations(model.samples, each) for each in requirements]
        candidates.append(Candidate(model.name, objective, before, after, sizes))
    rates = [requirement.at_most for requirement in requirements]
    selection = select(candidates, rates, confidence)
    return Answer(models, requirements, confidence, selection)
