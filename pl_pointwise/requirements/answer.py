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
        # Where every prompt stands once, the plain word; else a reader would take n for samples.
        units = "samples" if len(self.lines) == self.n else "units (prompts, queries)"
        # Its loss is (1 + d) / 2, of which nobody reads how much worse the metric is.
        if self.requirement.beside == "difference":
            better = (
                f"{_better(self.share)} than the predecessor over {self.n:,} {units}"
            )
            return f"{better}, p = {self.p:.2g}, at worst {_better(self.bound)}"
        # A metric has a mean. What violates or was lost counts 1, so it can be said how many fail.
        if self.requirement.beyond is None:
            loss = f"mean loss {self.share:.3g} over {self.n:,} {units}"
        else:
            loss = f"{round(self.share * self.n):,} of {self.n:,} {units} fail"
        seen = f"{loss}, p = {self.p:.2g}, {self._within()}"
        if self.requirement.beside == "lost":
            # Nothing can be lost that the predecessor did not have: if it failed everywhere, 0 %
            # lost would say nothing.
            share = (self.lines.groupby("unit")["before"].max() <= 0).mean()
            seen += f"; the predecessor meets it on {100 * share:.3g} % of them"
        # Losses of 0 and 1 alone have a distribution that their share tells in full.
        if not self.met and self.zero_one:
            needed = samples_needed(
                self.requirement.at_most, self.share, self.confidence
            )
            if needed is not None:
                seen += f"; if that share holds, {needed:,} samples show it four times in five"
        return seen

    def _within(self) -> str:
        """The bound; where the test says more than it, both."""
        bound = f"{100 * self.bound:.3g} %"
        if not self.certified or self.bound <= self.requirement.at_most:
            return f"at most {bound}"
        return (
            f"at most {100 * self.requirement.at_most:.3g} % by the test, and by a bound that "
            f"holds for every model {bound}"
        )


def _better(loss: float) -> str:
    """A difference of metrics from its loss (1 + d) / 2, where d is how much worse it is."""
    worse = round(2 * loss - 1, 9)
    return f"{abs(worse):.3g} {'worse' if worse >= 0 else 'better'}"


def repetitions(findings: Sequence[Finding]) -> list[str]:
    """Returns what is to be said where units have several samples, which count as one."""
    # Requirements of a category are about other samples: the one that repeats most is told of.
    most = max(findings, key=lambda finding: len(finding.lines) / finding.n)
    samples = len(most.lines)
    if samples == most.n:
        return []
    largest = most.lines["unit"].value_counts(normalize=True).max()
    sentence = (
        f"Each distinct prompt or query counts once: {samples:,} samples are of {most.n:,}, the "
        f"largest has {100 * largest:.3g} % of them"
    )
    # A few prompts that stand twice change no share that a reader would notice.
    if samples > 1.1 * most.n:
        sentence += (
            ". Warning: of inputs that come as often as these, another share may fail"
        )
    return [f"{sentence}."]


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
        # Methods may start from other weights; preconditions.py measures the first run's.
        if not any(requirement.beside for requirement in self.requirements):
            return None
        return f"the model of {self.models[0].name} before training"

    @cached_property
    def shown(self) -> int:
        """The position of the chosen model, else of the one whose largest p-value is smallest."""
        chosen = self.selection.position
        if chosen is not None:
            return chosen
        p_values = [tested.p for tested in self.selection.tested]
        return p_values.index(min(p_values))

    @cached_property
    def findings(self) -> list[Finding]:
        """By requirement, of the model that is shown, on the certification split.

        The bounds of all models and requirements hold together at the confidence, whatever the test
        says; the test's own word, that the chosen model is within what is required, is another one.
        """
        # Over all models and requirements, of which the split's own values chose what is shown.
        sure = 1 - (1 - self.confidence) / (len(self.models) * len(self.requirements))
        samples = self.models[self.shown].samples
        certified = self.selection.position is not None
        findings = []
        kinds = zip(self.requirements, self.selection.zero_one, strict=True)
        for requirement, zero_one in kinds:
            finding = Finding.of(samples, requirement, zero_one, self.confidence, sure)
            findings.append(replace(finding, certified=certified))
        return findings

    def statement(self) -> str:
        """Returns the answer in plain sentences."""
        met = (
            "the requirement"
            if len(self.requirements) == 1
            else "all requirements together"
        )
        certified = self.selection.position is not None
        first = (
            self._that_one_is_certified(met) if certified else self._that_none_is(met)
        )
        lines = [first, ""]
        lines += [
            f"- {finding.requirement.text}: {finding.text()}"
            for finding in self.findings
        ]
        if self.predecessor is not None:
            lines.append(f"- The predecessor is {self.predecessor}.")
        lines.append("")
        lines += repetitions(self.findings)
        lines += self._ties()
        lines += self._what_holds() if certified else self._what_is_left()
        return "\n".join(lines)

    @property
    def _sure(self) -> str:
        return f"{100 * self.confidence:g} %"

    def _that_none_is(self, met: str) -> str:
        count = len(self.models)
        name = self.models[self.shown].name
        sentence = (
            f"None of the {len(self.selection.reached)} tested of {count} models is certified to "
            f"meet {met} with {self._sure} confidence: they are tested one after the other until "
            f"one fails. {name} comes nearest, as its largest p is the smallest"
        )
        # Its p-value may be the smallest though an earlier one failed, and p alone is no
        # certificate.
        if not self.selection.tested[self.shown].reached:
            sentence += (
                "; it was not tested, so that no certificate could follow from that"
            )
        return f"{sentence}:"

    def _that_one_is_certified(self, met: str) -> str:
        name = self.models[self.shown].name
        wrong = f"{100 * (1 - self.confidence):.3g}"
        return (
            f"{name} was shown to meet {met} on new inputs, with {self._sure} confidence: by a "
            f"test that passes a model which does not in at most {wrong} % of cases."
        )

    def _bounds(self) -> str:
        return (
            "The bounds in percent hold together, whichever model is shown (Bonferroni over "
            f"{len(self.models)} models and {len(self.requirements)} requirements), with "
            f"{self._sure} confidence"
        )

    def _what_is_left(self) -> list[str]:
        return [
            f"{self._bounds()}.",
            "These certification samples are used: take new ones, and another --output.",
        ]

    def _what_holds(self) -> list[str]:
        reached = len(self.selection.reached)
        return [
            f"The confidence accounts for the choice among {len(self.models)} models: their order "
            f"comes from the selection split, and {reached} of {len(self.selection.order)} in it "
            "were tested one after the other on the certification split (fixed-sequence testing), "
            f"which no other comparison has used by this user's record. {self._bounds()}: that is "
            "another statement than the test's, with an error of its own.",
            f"Assumptions: {ASSUMPTIONS}",
        ]

    def _ties(self) -> list[str]:
        """Says that the selection split is too small to tell candidates apart, where it is."""
        p_values = [tested.selection_p for tested in self.selection.tested]
        # Of those behind it hardly anything depends on the order.
        least = min(p_values)
        if p_values.count(least) < 2:
            return []
        return [
            f"The selection split cannot tell {p_values.count(least)} models apart: each has p = "
            f"{least:.2g} there. They stand in the order of the size of their violations on it; a "
            "larger one tells more."
        ]

    def table(self) -> Table:
        """What happened to each candidate, in the order of the test; the rest behind it."""
        order = self.selection.order
        rest = [
            position for position in range(len(self.models)) if position not in order
        ]
        lines = [self._line(position) for position in [*order, *rest]]
        note = (
            "From the selection split come p against each model, the objective, and the size of "
            "violations: the mean of the worst twentieth, of a metric the mean loss. A model is "
            "dropped where another is no worse in p and objective. The last columns are of the "
            "certification split; of what the test did not come to they certify nothing."
        )
        return Table("Candidates", note, DataFrame(lines))

    def _line(self, position: int) -> dict[str, str]:
        tested = self.selection.tested[position]
        happened = "not reached"
        if tested.beaten_by is not None:
            happened = f"dropped: {self.models[tested.beaten_by].name} is no worse"
        # Reached and not certified: the test ends there, and all behind it are not reached.
        elif tested.reached:
            happened = (
                "tested: certified" if tested.certified else "tested: not certified"
            )
        if position == self.selection.position:
            happened += ", chosen"
        line = {
            "model": tested.candidate.name,
            "what happened": happened,
            "selection: p": f"{tested.selection_p:.2g}",
            "objective": f"{tested.candidate.objective:.4g}",
        }
        for requirement, size in zip(
            self.requirements, tested.candidate.sizes, strict=True
        ):
            line[f"size, {requirement.text}"] = f"{size:.3g}"
        for requirement, p in zip(
            self.requirements, tested.p_by_requirement, strict=True
        ):
            line[f"p, {requirement.text}"] = f"{p:.2g}"
        return line

    def as_dict(self) -> dict[str, Any]:
        """Returns the certificate of the chosen model as plain values; for a file."""
        model = self.models[self.shown]
        return {
            "certified": None if self.selection.position is None else model.name,
            "confidence": self.confidence,
            "candidates": len(self.models),
            "tested": [
                self.models[position].name for position in self.selection.reached
            ],
            "models": [self._line(position) for position in range(len(self.models))],
            "predecessor": self.predecessor,
            "nearest": model.name,
            "requirements": [_as_dict(finding) for finding in self.findings],
            "objective": model.objective,
            "statement": self.statement(),
        }


def _as_dict(finding: Finding) -> dict[str, Any]:
    requirement = finding.requirement
    return {
        "text": requirement.text,
        "seen": finding.text(),
        "quantity": requirement.quantity,
        "category": requirement.category or None,
        "at_most": requirement.at_most,
        "n": finding.n,
        "share": finding.share,
        "p": finding.p,
        "bound": finding.bound,
    }


def size_of_violations(samples: DataFrame, requirement: Requirement) -> float:
    """How much a model violates on the selection split, where shares of few samples tie.

    The mean of the worst twentieth of the units' worst violations; of a metric the mean loss.
    """
    lines = lines_about(samples, requirement, VAL.key)
    # A category may have samples of certification alone; it then has no part in the order.
    if lines.empty:
        return 0.0
    if requirement.beyond is None:
        return float(losses_by_unit(lines, requirement).mean())
    # NaN violates by no known size: it counts as the largest.
    worst = (
        lines["value"].fillna(np.inf).groupby(lines["unit"]).max() - requirement.beyond
    )
    return float(cvar(torch.tensor(worst.to_numpy(np.float64)), 0.95))


def choose_model(
    models: Sequence[MeasuredModel],
    requirements: Sequence[Requirement],
    confidence: float = 0.95,
) -> Answer:
    """Which model meets all requirements, with its certificate."""
    candidates = [_candidate(model, requirements) for model in models]
    rates = [requirement.at_most for requirement in requirements]
    selection = select(candidates, rates, confidence)
    return Answer(models, requirements, confidence, selection)


def _candidate(model: MeasuredModel, requirements: Sequence[Requirement]) -> Candidate:
    """The losses of a model by requirement, on both splits."""
    selection = []
    certification = []
    sizes = []
    for requirement in requirements:
        on_selection = lines_about(model.samples, requirement, VAL.key)
        on_certification = lines_about(model.samples, requirement, TEST.key)
        selection.append(losses_by_unit(on_selection, requirement))
        certification.append(losses_by_unit(on_certification, requirement))
        sizes.append(size_of_violations(model.samples, requirement))
    return Candidate(
        name=model.name,
        # A model whose objective is not a number is behind all others.
        objective=float(np.nan_to_num(model.objective, nan=np.inf)),
        selection=selection,
        certification=certification,
        sizes=sizes,
    )
