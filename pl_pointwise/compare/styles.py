"""One colour and marker per method, in every plot of a comparison."""

from __future__ import annotations

from collections.abc import Iterable
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
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
LINES = ("-", "--", "-.", ":")


class Style(NamedTuple):
    """How a method is drawn."""

    colour: str
    marker: str
    line: str


def styles_of(methods: Iterable[str]) -> dict[str, Style]:
    """Returns the style of every method; no two of 84 are the same."""
    return {
        method: Style(COLOURS[n % 7], MARKERS[n % 12], LINES[n % 4])
        for n, method in enumerate(dict.fromkeys(methods))
    }
