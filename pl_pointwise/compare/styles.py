"""One colour and marker per method, in every plot of a comparison."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

BLUE, RED, GREEN, PURPLE, ORANGE, CYAN, BLACK = COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)
"""Okabe and Ito's palette, told apart by most colour-blind readers."""
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")


class Style(NamedTuple):
    """How a method is drawn."""

    colour: str
    marker: str

    @property
    def line(self) -> str:
        """One for methods of a colour that differ in their marker."""
        return LINES[MARKERS.index(self.marker) % len(LINES)]


PACKAGED = {
    "pointwise": Style(BLUE, "o"),
    "relaxed": Style(GREEN, "s"),
    "relaxed linear": Style(GREEN, "D"),
    "penalty": Style(RED, "^"),
    "penalty hinge": Style(RED, "v"),
    "average": Style(ORANGE, "P"),
    "tilted": Style(PURPLE, "X"),
    "CVaR": Style(PURPLE, "p"),
    "as it is": Style(BLACK, "*"),
    "objective only": Style(BLACK, "h"),
}
"""Of the methods that several tasks have: the same in every comparison."""


def styles_of(methods: Iterable[str]) -> dict[str, Style]:
    """Returns the style of every method; no two are the same while there are any left."""
    # Another colour each time; the last ones first, which packaged methods take less often.
    every = [Style(colour, marker) for marker, colour in product(MARKERS, reversed(COLOURS))]
    free = iter([style for style in every if style not in PACKAGED.values()])
    return {m: PACKAGED.get(m) or next(free, every[0]) for m in dict.fromkeys(methods)}
