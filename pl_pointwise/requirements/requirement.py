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
    """A requirement that cannot be read, is about nothing there is, or cannot be certified."""


@dataclass(frozen=True)
class Requirement:
    """One condition on new inputs; made by :meth:`parse`."""

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
        found: dict[str, Any] = match.groupdict() if match else {}
        change, statistic, bound = (found.get(key) for key in ("change", "statistic", "bound"))
        quantity, slash, category = (found.get("of") or found.get("name") or "/").partition("/")
        about = text, quantity.strip(), category.strip()
        # Behind a slash nothing would be about all inputs.
        if (slash and not about[-1]) or (bound is None and (change or statistic)):
            raise RequirementError(f"{text!r} is no requirement. Write {EXAMPLES}.")
        large = found["sign"] == ">="
        number = float("".join((bound or found["margin"] or "0").split()))
        if large and (statistic or change):
            raise RequirementError(f"{text!r}: what is violated or lost has to be small. Write <=.")
        if bound is None:
            if number and large != (number < 0):
                raise RequirementError(
                    f"{text!r}: an improvement of every draw of inputs. Write "
                    '">= predecessor - 0.02" or "<= predecessor + 0.02".'
                )
            share = abs(number)
            read = cls(*about, (1 + share) / 2, None, large, "difference")
        elif statistic and statistic != "violated":
            share = float(statistic[1:]) / 100
            read = cls(*about, 1 - share, number)
        else:
            share, of_metric = number, not statistic and not change
            rate, beyond = 1 - share if large else share, None if of_metric else 0.0
            read = cls(*about, rate, beyond, of_metric and large, change)
        if not 0 < read.at_most < 1:
            raise RequirementError(f"{text!r}: {share:g} is no share between 0 and 1.")
        return read

    def from_on(self, loss: float) -> str:
        """Returns "from this mean loss on" in the requirement's own terms."""
        if self.beyond is not None:
            return f"from a rate of {100 * loss:.3g} % on"
        value, way = (1 - loss, "down") if self.complement else (loss, "up")
        return f"from a mean of {value:.3g} {way}, of values that are 0 or 1"

    def in_words(self, loss: float) -> str:
        """Returns what a mean loss says of samples."""
        if self.beyond is not None:
            return f"{100 * loss:.3g} % fail"
        return f"mean {1 - loss if self.complement else loss:.3g}"

    def allowed(self) -> str:
        """Returns the bound in the same terms."""
        if self.beyond is not None:
            return f"{100 * self.at_most:.3g} % may"
        sign = "at least" if self.complement else "at most"
        return f"it has to be {sign} {1 - self.at_most if self.complement else self.at_most:.3g}"

    @property
    def kind(self) -> Literal["constraint", "metric"]:
        """What the quantity is."""
        return "metric" if self.beyond is None else "constraint"

    def fewest_samples(self, confidence: float, zero_one: bool | None = None) -> int:
        """The fewest that certify a model which never fails; of a difference, an equal model.

        zero_one: whether its losses are 0 or 1, so that the binomial test is made. None: only
            those of a constraint are.
        """
        if self.beyond is not None if zero_one is None else zero_one:
            return fewest_samples(self.at_most, confidence)
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
        now, then = self._losses(values), self._losses(before)
        return (1 + now - then) / 2 if self.beside == "difference" else (now > then).astype(float)

    def _losses(self, values: np.ndarray) -> Losses:
        """The losses of one model."""
        if self.beyond is not None:
            return (~(values <= self.beyond)).astype(float)
        losses = 1 - values if self.complement else np.asarray(values, float)
        losses = np.where(np.isnan(losses), 1.0, losses)
        if ((losses < 0) | (losses > 1)).any():
            between = f"between {np.nanmin(values):g} and {np.nanmax(values):g}"
            raise RequirementError(f"{self.text!r}: its values lie {between}, and not in [0, 1].")
        return losses


def distinct(texts: Iterable[str]) -> list[Requirement]:
    """Reads requirements; what is the same as an earlier one, spelt in another way too, is left
    out, as it would be tested twice.
    """
    found = list[Requirement]()
    for text in texts:
        read = Requirement.parse(text)
        if all(replace(read, text=each.text) != each for each in found):
            found.append(read)
    return found
