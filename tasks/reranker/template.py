"""One text of a query and a passage, for models that read no pairs: what stands around the two.

    "Query: {query}\\nSentence: {passage}"
    "<Instruct>: {instruction}\\n<Query>: {query}\\n<Document>: {passage}<|im_end|>\\n…"

A text that is too long loses tokens at the passage's end; what stands behind the passage stays, as
a model that answers yes or no reads its question there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pl_pointwise.errors import DataError


@dataclass(frozen=True)
class Rendered:
    """A text, and where its passage begins and ends."""

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class Template:
    """before · query · between · passage · after; {instruction} may stand in the first three."""

    before: str
    between: str
    after: str

    @classmethod
    def parse(cls, text: str) -> Template:
        """The parts of a template.

        Raises:
            DataError: query or passage is missing or stands twice, the passage before the query, or
                there is another brace.
        """
        before, query, rest = text.partition("{query}")
        between, passage, after = rest.partition("{passage}")
        plain = "".join((before, between, after)).replace("{instruction}", "", 1)
        if not (query and passage) or set("{}").intersection(plain):
            raise DataError(
                f"template {text!r}: needs {{query}} once, then {{passage}} once, {{instruction}} "
                "at most once, and no other brace."
            )
        return cls(before, between, after)

    @property
    def instructed(self) -> bool:
        """Whether it has a place for an instruction."""
        return "{instruction}" in self.before + self.between + self.after

    def filled(self, instruction: str | None) -> Template:
        """The template of an instruction; DataError where it has a place and there is none."""
        # A template without a place for it: the instruction stands in the text already.
        if not self.instructed:
            return self
        if not instruction:
            raise DataError(
                "The template has an {instruction}: set model.instruction, which stands for it "
                "where a record has none, and in the export."
            )
        parts = (self.before, self.between, self.after)
        before, between, after = (
            part.replace("{instruction}", instruction) for part in parts
        )
        return Template(before, between, after)

    def render(self, query: str, passage: str) -> Rendered:
        """The text of a pair; the instruction is filled in by now."""
        start = len(self.before) + len(query) + len(self.between)
        text = f"{self.before}{query}{self.between}{passage}{self.after}"
        return Rendered(text, start, start + len(passage))


def kept_tokens(
    offsets: Sequence[tuple[int, int]], rendered: Rendered, max_length: int
) -> list[int] | None:
    """Which tokens of a text go in, the passage cut at its end; None where no token of it is left.

    offsets: of every token the characters that it stands for; equal ones of a special token.
    """
    passage = [
        place
        for place, (start, end) in enumerate(offsets)
        if start < end and start < rendered.end and end > rendered.start
    ]
    cut = max(0, len(offsets) - max_length)
    # Query and what stands around it fill max_length: the score would be of no passage.
    if cut >= len(passage):
        return None
    dropped = set(passage[len(passage) - cut :])
    return [place for place in range(len(offsets)) if place not in dropped]
