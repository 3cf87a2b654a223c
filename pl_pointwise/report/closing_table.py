"""What the end of a run says, as numbers, and as the table and the sentences that are printed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from ..constraint import Constraint
from .columns import aligned, counted, number_text, share_text


@dataclass(frozen=True)
class RequirementRow:
    """One requirement at the end of a run; values are in the unit of its bound.

    Of an interval and of an equality a value is how far it is off.

    .. versionadded:: 0.3.0
    """

    name: str  #: of the constraint
    bound: str  #: in words, "≤ 0.05"
    violated: int | None  #: training samples that violate it at their last visit
    of: int | None  #: training samples that it applies to
    worst: float | None  #: the worst value of a training sample
    #: the 95th percentile: 95 % of the samples are at this value or better
    most: float | None
    held_violated: int | None = None  #: held-out samples, and so below
    held_of: int | None = None  #: as ``of``
    held_worst: float | None = None  #: as ``worst``
    held_most: float | None = None  #: as ``most``
    multipliers: int | None = None  #: samples with λ ≠ 0; None without a λ for each
    multiplier: float | None = None  #: λ of a statistic of the batch
    #: loosening the bound by δ lowers the mean objective by price · δ
    price: float | None = None
    #: whether numbers are of groups, each by its mean, not of samples
    by_group: bool = False
    allowed: int | None = None  #: samples that may violate it, where a share may
    held_allowed: int | None = None  #: as ``allowed``

    @property
    def beyond(self) -> int:
        """Training samples that violate it beyond those that may."""
        return max(0, (self.violated or 0) - (self.allowed or 0))

    @property
    def held_beyond(self) -> int:
        """The same of held-out ones."""
        return max(0, (self.held_violated or 0) - (self.held_allowed or 0))


@dataclass(frozen=True)
class HeldOut:
    """What the last evaluation found on samples that were not trained on.

    .. versionadded:: 0.3.0
    """

    constraints: Mapping[str, Constraint]  #: the bounds it measured by
    #: by constraint (n,), the largest of each sample, or group
    worst: Mapping[str, Tensor]
    objective: float | None = None  #: the mean, over all samples that it applies to
    step: int | None = None  #: of the training; None where that is not known


@dataclass(frozen=True)
class Conditions:
    """How the run was made, as far as it is known: for the likelier cause of what went wrong.

    .. versionadded:: 0.3.0
    """

    rate: float | None = None  #: the peak learning rate
    epochs: int | None = None  #: of the whole run
    #: the norm of the trained weights over that at the start
    growth: float | None = None
    skipped: int = 0  #: steps without an update, as values were not finite
    left_out: int = 0  #: samples whose values were not finite
    longer: str = "train longer"  #: how
    #: what was not trained on, and why: a sentence each
    not_trained: Sequence[str] = ()
    #: sentences of the task's own, such as on answers that changed
    of_task: Sequence[str] = ()


NOTHING_KNOWN = Conditions()


@dataclass(frozen=True)
class Closing:
    """The end of a run; ``print`` shows it.

    .. versionadded:: 0.3.0
    """

    steps: int  #: of the weights
    epochs: int | None  #: None where that is not known
    #: first step, last, held out
    objective: tuple[float | None, float | None, float | None]
    rows: list[RequirementRow]  #: one for each constraint, or side of it
    held_step: int | None = None  #: after which the held-out samples were measured
    sentences: list[str] = field(default_factory=list)  #: the most important first
    #: those of them that call for an answer
    warnings: list[str] = field(default_factory=list)
    not_trained: list[str] = field(default_factory=list)  #: those of ``Conditions``

    def plain(self) -> dict[str, Any]:
        """Numbers and texts, for a file."""
        return asdict(self)

    @classmethod
    def from_plain(cls, content: Mapping[str, Any]) -> Closing:
        """What :meth:`plain` gave, read from JSON."""
        rows = [RequirementRow(**row) for row in content["rows"]]
        first, last, held_out = content["objective"]
        return cls(**{**content, "rows": rows, "objective": (first, last, held_out)})

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        first, last, held_out = self.objective
        held = any(row.held_of for row in self.rows) or held_out is not None
        epochs = "" if self.epochs is None else f" in {counted(self.epochs, 'epoch')}"
        yield (
            f"After {counted(self.steps, 'step')}{epochs}; training samples as they were at their "
            "last visit."
        )
        yield ""
        head = ["", "first step", "last", "held out"]
        numbers = [number_text(first), number_text(last), number_text(held_out)]
        cells = [head, ["objective", *numbers]]
        # Without an evaluation the columns of one are left off.
        yield from aligned([line if held else line[:3] for line in cells])
        if self.rows:
            yield ""
            yield from aligned(
                [line if held else line[:6] for line in self._requirements()]
            )
        if held and self.held_step not in (None, self.steps):
            yield f"Held out: measured at step {self.held_step:,} of {self.steps:,}."
        if self.not_trained:
            yield ""
            for line in self.not_trained:
                yield f"Not trained on: {line}"
        if self.sentences:
            yield ""
            for sentence in self.sentences:
                yield f"- {sentence}"

    def _requirements(self) -> list[list[str]]:
        head = ["requirement", "violated", "worst", "95 % within", "λ > 0", "price"]
        lines = [[*head, "held out", "worst", "95 % within"]]
        # A role of no record is one that nobody asked for.
        for row in [row for row in self.rows if row.of] or self.rows:
            multiplier = "" if row.multipliers is None else f"on {row.multipliers:,}"
            if row.multiplier is not None:
                multiplier = number_text(row.multiplier)
            of_what = ", mean of groups" if row.by_group else ""
            lines.append(
                [
                    f"{row.name} {row.bound}{of_what}",
                    share_text(row.violated, row.of, row.allowed),
                    number_text(row.worst),
                    number_text(row.most),
                    multiplier,
                    number_text(row.price),
                    share_text(row.held_violated, row.held_of, row.held_allowed),
                    number_text(row.held_worst),
                    number_text(row.held_most),
                ]
            )
        return lines
