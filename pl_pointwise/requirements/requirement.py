"""What a user requires of a model on new inputs, and what of a data set it is about.

    relevance: violated <= 0.05          at most 5 % of new inputs violate the constraint
    relevance: q90 <= 0.5                at least 90 % of new inputs violate it by at most 0.5
    refuse/malware: violated <= 0.1      of the inputs of a category
    over_refusal <= 0.05                 a metric of the task that is a mean of values in [0, 1]
    mrr@10 >= 0.3
    lost(refuse) <= 0.02                 of all inputs: a predecessor met it, this model does not
    mrr@10 >= predecessor - 0.02         the difference of a metric

All are of the splits, none of data sets besides. Each is a condition on one mean of losses in
[0, 1]: a sample's worst violation above the bound counts 1, else 0; a metric that has to be large
counts 1 − its value. The mean is over units (prompts, queries): of a unit's samples the worst
counts, or of a metric their mean. A difference d of metrics in [0, 1] is the loss (1 + d) / 2.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from pl_pointwise.errors import DataError

from .p_values import Losses, betting, fewest_samples

NUMBER = r"(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?"
LONGEST = 500
FORM = re.compile(  # Of a text with single blanks, and none at its ends.
    r"((?P<change>lost)\s*\((?P<of>[^()]+)\)"
    r"|(?P<name>[^:<>=()]+?)(\s*:\s*(?P<statistic>violated|q\d{1,2}(\.\d+)?))?)"
    rf"\s*(?P<sign><=|>=)\s*((?P<bound>[-+]?{NUMBER})"
    rf"|predecessor\s*(?P<margin>[-+]\s*{NUMBER})?)"
)

EXAMPLES = (
    '"relevance: violated <= 0.05", "relevance: q90 <= 0.5", "refuse/malware: violated <= 0.1" or '
    '"over_refusal <= 0.05"'
)


class RequirementError(DataError):
    """A requirement that cannot be read, is about nothing there is, or cannot be certified.

    >>> from pl_pointwise.requirements import Requirement, RequirementError
    >>> try:
    ...     Requirement.parse("refuse: violated >= 0.9")
    ... except RequirementError as error:
    ...     print(error)
    'refuse: violated >= 0.9': what is violated or lost has to be small. Write <=.
    """


@dataclass(frozen=True)
class Requirement:
    """One condition on new inputs; made by :meth:`parse`.

    >>> from pl_pointwise.requirements import Requirement
    >>> found = Requirement.parse("refuse/malware: violated <= 0.1")
    >>> found.quantity, found.category, found.at_most
    ('refuse', 'malware', 0.1)
    """

    text: str
    """As it was written."""
    quantity: str
    """The name of the constraint, or of the metric."""
    category: str
    """What follows a slash in the name; "" for all inputs."""
    at_most: float
    """The largest mean loss."""
    beyond: float | None
    """A violation above it counts as a loss; None for a metric."""
    complement: bool = False
    """Whether a metric has to be large, so that the loss is 1 − its value."""
    beside: Literal["lost", "difference"] | None = None
    """What is compared with a predecessor; None for a requirement of one model."""

    @classmethod
    def parse(cls, text: str) -> Requirement:
        """Reads a requirement; the module's docstring shows all forms.

        >>> found = Requirement.parse("relevance: q90 <= 0.5")
        >>> round(found.at_most, 3), found.beyond
        (0.1, 0.5)
        """
        if len(text) > LONGEST or not text.isprintable():  # Of strangers' certificates.
            limit = f"at most {LONGEST} characters, all printable"
            raise RequirementError(f"{text[:40]!r} …: a requirement has {limit}.")
        match = FORM.fullmatch(" ".join(text.split()))
        if match is None:
            raise _no_requirement(text)
        parts: dict[str, str | None] = match.groupdict()
        name, slash, category = str(parts["of"] or parts["name"]).partition("/")
        category = category.strip()
        # Behind a slash nothing would be about all inputs.
        if slash and not category:
            raise _no_requirement(text)
        about = cls(text, name.strip(), category, at_most=1.0, beyond=None)
        large = parts["sign"] == ">="
        statistic = parts["statistic"]
        change: Any = parts["change"]
        if parts["bound"] is None:
            if change or statistic:  # Only a metric is compared with the predecessor's.
                raise _no_requirement(text)
            return about._of_difference(_number(parts["margin"] or "0"), large)
        number = _number(parts["bound"])
        if large and (statistic or change):
            raise RequirementError(
                f"{text!r}: what is violated or lost has to be small. Write <=."
            )
        if statistic is not None and statistic != "violated":
            # q90: nine of ten stay within the bound, so at most a tenth goes beyond it.
            share = float(statistic[1:]) / 100
            return about._with_share(share, at_most=1 - share, beyond=number)
        if statistic is not None or change is not None:
            return about._with_share(number, at_most=number, beyond=0.0, beside=change)
        rate = 1 - number if large else number
        return about._with_share(number, at_most=rate, complement=large)

    def _of_difference(self, margin: float, large: bool) -> Requirement:
        """A metric beside the predecessor's: at most ``margin`` worse."""
        if margin and large != (margin < 0):
            raise RequirementError(
                f"{self.text!r}: an improvement of every draw of inputs. Write "
                '">= predecessor - 0.02" or "<= predecessor + 0.02".'
            )
        share = abs(margin)
        return self._with_share(
            share, at_most=(1 + share) / 2, complement=large, beside="difference"
        )

    def _with_share(self, share: float, **fields: Any) -> Requirement:
        """With these fields; ``share`` is what was written, for the error."""
        read = replace(self, **fields)
        if not 0 < read.at_most < 1:
            raise RequirementError(
                f"{self.text!r}: {share:g} is no share between 0 and 1."
            )
        return read

    def from_on(self, loss: float) -> str:
        """Returns "from this mean loss on" in the requirement's own terms."""
        if self.beyond is not None:
            return f"from a rate of {100 * loss:.3g} % on"
        direction = "down" if self.complement else "up"
        return f"from a mean of {self._value(loss):.3g} {direction}, of values that are 0 or 1"

    def in_words(self, loss: float) -> str:
        """Returns what a mean loss says of samples."""
        if self.beyond is not None:
            return f"{100 * loss:.3g} % fail"
        return f"mean {self._value(loss):.3g}"

    def allowed(self) -> str:
        """Returns the bound in the same terms."""
        if self.beyond is not None:
            return f"{100 * self.at_most:.3g} % may"
        sign = "at least" if self.complement else "at most"
        return f"it has to be {sign} {self._value(self.at_most):.3g}"

    def _value(self, loss: float) -> float:
        """The metric of a mean loss."""
        return 1 - loss if self.complement else loss

    @property
    def kind(self) -> Literal["constraint", "metric"]:
        """What the quantity is."""
        return "metric" if self.beyond is None else "constraint"

    def fewest_samples(self, confidence: float, zero_one: bool | None = None) -> int:
        """The fewest that certify a model which never fails; of a difference, an equal model.

        zero_one: whether its losses are 0 or 1, so that the binomial test is made. None: only
            those of a constraint are.
        """
        binomial = self.beyond is not None if zero_one is None else zero_one
        if binomial:
            return fewest_samples(self.at_most, confidence)
        # An equal model has a loss of ½ everywhere, which is below the bound with a margin alone.
        equal = self.beside == "difference" and self.at_most > 0.5
        losses = np.full(1_000_000, 0.5 if equal else 0.0)

        def suffices(n: int) -> bool:
            return betting(losses[:n], self.at_most, confidence) <= 1 - confidence

        return 1 + bisect_left(range(1, len(losses)), True, key=suffices)

    def losses(self, values: np.ndarray, before: np.ndarray | None = None) -> Losses:
        """(n,) in [0, 1] from worst violations or a metric's values, (n,); NaN counts 1."""
        if self.beside is None:
            return self._losses(values)
        if before is None:
            raise RequirementError(
                f"{self.text!r} is about a predecessor: pl-pointwise check MODEL --against OLD."
            )
        now = self._losses(values)
        then = self._losses(before)
        if self.beside == "difference":
            return (1 + now - then) / 2
        return (now > then).astype(float)  # Lost is what was no loss and is one.

    def _losses(self, values: np.ndarray) -> Losses:
        """The losses of one model."""
        if self.beyond is not None:
            # Not `values > beyond`: NaN is neither, and has to count as a loss.
            return (~(values <= self.beyond)).astype(float)
        losses = 1 - values if self.complement else np.asarray(values, float)
        losses = np.where(np.isnan(losses), 1.0, losses)
        if ((losses < 0) | (losses > 1)).any():
            between = f"between {np.nanmin(values):g} and {np.nanmax(values):g}"
            raise RequirementError(
                f"{self.text!r}: its values lie {between}, and not in [0, 1]."
            )
        return losses


def _no_requirement(text: str) -> RequirementError:
    return RequirementError(f"{text!r} is no requirement. Write {EXAMPLES}.")


def _number(text: str) -> float:
    """Of a text that may have blanks behind its sign."""
    return float("".join(text.split()))


def distinct(texts: Iterable[str]) -> list[Requirement]:
    """Reads requirements; what is the same as an earlier one, spelt in another way too, is left
    out, as it would be tested twice.
    """
    requirements = list[Requirement]()
    for text in texts:
        requirement = Requirement.parse(text)
        if all(
            replace(requirement, text=other.text) != other for other in requirements
        ):
            requirements.append(requirement)
    return requirements
