"""What a user requires of a model on new inputs, and what of a data set it is about.

    relevance: violated <= 0.05          at most 5 % of new inputs violate the constraint
    relevance: q90 <= 0.5                at least 90 % of new inputs violate it by at most 0.5
    refuse/malware: violated <= 0.1      of the inputs of a category
    mcq/tool_call: violated <= 0.1       of a data set beside the splits; its only constraint
    over_refusal <= 0.05                 a metric of the task that is a mean of values in [0, 1]
    mrr@10 >= 0.3
    lost(refuse) <= 0.02                 of all inputs: a predecessor met it, this model does not
    gained(refuse/malware) >= 0.3        the other way round
    mrr@10 >= predecessor - 0.02         the difference of a metric

A name has up to three parts, DATASET/CONSTRAINT/CATEGORY. Each is a condition on one mean of losses
in [0, 1]: a sample's worst violation above the bound counts 1, else 0; a metric that has to be
large counts 1 − its value. The mean is over units (prompts, queries): of a unit's samples the worst
counts, or of a metric their mean. A difference d of metrics in [0, 1] is the loss (1 + d) / 2.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from pl_pointwise.configs import nearest
from pl_pointwise.errors import DataError

from .p_values import Losses

FORM = re.compile(
    r"\s*(?P<name>[^:<>=]+?)((?P<colon>\s*:\s*|\s+)(?P<statistic>violated|q\d{1,2}(\.\d+)?))?"
    r"\s*(?P<sign><=|>=)\s*(?P<bound>[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?)\s*"
)
PAIRED = re.compile(
    r"\s*(?P<kind>lost|gained)\s*\((?P<name>[^()]+)\)\s*(?P<sign><=|>=)\s*(?P<bound>[\d.]+)\s*"
)
RELATIVE = re.compile(
    r"\s*(?P<name>[^:<>=]+?)\s*(?P<sign><=|>=)\s*predecessor\s*"
    r"((?P<direction>[-+])\s*(?P<margin>[\d.]+))?\s*"
)

EXAMPLES = (
    '"relevance: violated <= 0.05", "relevance: q90 <= 0.5", "mcq/tool_call: violated <= 0.1" or '
    '"over_refusal <= 0.05"'
)


class RequirementError(DataError):
    """A requirement that cannot be read, is about nothing there is, or cannot be certified."""


@dataclass(frozen=True)
class Requirement:
    """One condition on new inputs; made by :meth:`parse`."""

    text: str
    """As it was written."""
    parts: tuple[str, ...]
    """Of the name, between slashes."""
    at_most: float
    """The largest mean loss."""
    beyond: float | None
    """A violation above it counts as a loss; None for a metric."""
    complement: bool = False
    """Whether a metric has to be large, so that the loss is 1 − its value."""
    beside: Literal["lost", "gained", "difference"] | None = None
    """What is counted beside a predecessor; None for a requirement of one model."""

    @classmethod
    def parse(cls, text: str) -> Requirement:
        """Reads a requirement; the module's docstring shows all forms.

        >>> found = Requirement.parse("relevance: q90 <= 0.5")
        >>> round(found.at_most, 3), found.beyond
        (0.1, 0.5)
        """
        match = PAIRED.fullmatch(text) or RELATIVE.fullmatch(text) or FORM.fullmatch(text)
        found = match.groupdict() if match else {}
        if not match or ":" not in (found.get("colon") or ":"):
            raise RequirementError(f"{text!r} is no requirement. Write {EXAMPLES}.")
        parts = tuple(part.strip() for part in match["name"].split("/"))
        large, statistic = match["sign"] == ">=", found.get("statistic")
        share = float(found.get("margin") or found.get("bound") or 0)
        if "kind" in found:
            if large != (found["kind"] == "gained"):
                raise RequirementError(f'{text!r}: write "lost(…) <= …" or "gained(…) >= …".')
            rate = 1 - share if large else share
            read = cls(text, parts, rate, 0.0, beside="gained" if large else "lost")
        elif "margin" in found:
            if share and large != (found["direction"] == "-"):
                raise RequirementError(
                    f"{text!r}: this asks for an improvement of every draw of inputs. Write "
                    '">= predecessor - 0.02" or "<= predecessor + 0.02".'
                )
            read = cls(text, parts, (1 + share) / 2, None, large, "difference")
        elif statistic is None:
            read = cls(text, parts, 1 - share if large else share, None, large)
        elif large:
            raise RequirementError(f"{text!r}: a violation has to be small. Write <=.")
        elif statistic == "violated":
            read = cls(text, parts, share, 0.0)
        else:
            bound, share = share, float(statistic[1:]) / 100
            read = cls(text, parts, 1 - share, bound)
        if not 0 < read.at_most < 1:
            raise RequirementError(
                f"{text!r}: {share:g} is no share that a finite sample can certify. Give one "
                "between 0 and 1."
            )
        return read

    def losses(self, values: np.ndarray, before: np.ndarray | None = None) -> Losses:
        """Returns (n,) in [0, 1] from worst violations or a metric's values, (n,).

        NaN counts 1, of either. before: the same of the predecessor.
        """
        if self.beside is None:
            return self._losses(values)
        if before is None:
            raise RequirementError(
                f"{self.text!r} is about a predecessor: pl-pointwise check MODEL --against OLD."
            )
        now, then = self._losses(values), self._losses(before)
        if self.beside == "difference":
            return (1 + now - then) / 2
        counts = now > then if self.beside == "lost" else now >= then  # Of 0 and 1.
        return counts.astype(float)

    def _losses(self, values: np.ndarray) -> Losses:
        """Of one model."""
        if self.beyond is not None:
            return (~(values <= self.beyond)).astype(float)
        losses = 1 - values if self.complement else np.asarray(values, float)
        losses = np.where(np.isnan(losses), 1.0, losses)
        if ((losses < 0) | (losses > 1)).any():
            raise RequirementError(
                f"{self.text!r}: its values lie between {np.nanmin(values):g} and "
                f"{np.nanmax(values):g}. Only a mean of values in [0, 1] can be certified."
            )
        return losses


@dataclass(frozen=True)
class Subject:
    """What a requirement is about, once its name has been looked up."""

    requirement: Requirement
    dataset: str | None
    """A data set beside the splits; None for the splits."""
    quantity: str
    """The constraint, or the metric."""
    category: str | None


@dataclass(frozen=True)
class Known:
    """What there is to require something of.

    constraints: names. metrics: of values in [0, 1], sample by sample. datasets: beside the splits,
    name → constraints that they carry. categories: data set, "test" for the split → names.
    """

    constraints: Sequence[str]
    metrics: Sequence[str] = ()
    datasets: Mapping[str, Sequence[str]] = field(default_factory=dict)
    categories: Mapping[str, Collection[str]] = field(default_factory=dict)

    def subject(self, requirement: Requirement) -> Subject:
        """Returns what the requirement is about, if there is that."""
        parts, text = list(requirement.parts), repr(requirement.text)
        dataset = parts.pop(0) if parts[0] in self.datasets else None
        names = self.datasets[dataset] if dataset is not None else self.constraints
        kind, only = "constraint", dataset is not None and len(names) == 1
        if requirement.beyond is None:
            kind, only, names = "metric of values in [0, 1]", False, self.metrics
        if parts and parts[0] in names:
            quantity = parts.pop(0)
        elif only:
            quantity = names[0]
        elif parts:
            there = ", ".join([*names, *(f"{name}/…" for name in self.datasets)]) or "none"
            near = nearest(parts[0], [*names, *self.datasets])
            raise RequirementError(
                f"{text}: there is no {kind} {parts[0]!r}.{near} There are: {there}."
            )
        else:
            there = ", ".join(f"{dataset}/{name}" for name in names) or "none"
            raise RequirementError(
                f"{text} names a data set and no {kind} of it. There are: {there}."
            )
        category = "/".join(parts) if parts else None
        known = self.categories.get(dataset or "test", ())
        if category is not None and category not in known:
            which = f"It has {', '.join(known)}." if known else "Its samples have no categories."
            raise RequirementError(
                f"{text}: there is no category {category!r}.{nearest(category, known)} {which}"
            )
        return Subject(requirement, dataset, quantity, category)
