"""One colour and marker per method, in every plot of a comparison.

A packaged method has its own, so it looks the same everywhere. Methods that differ in a setting at
the end of their name alone share a colour.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

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
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "--", "||", "oo", "OO", "**", "/.")
OTHERS = "#BBBBBB"

PACKAGED = {
    "pointwise": (BLUE, "o"),
    "relaxed": (GREEN, "s"),
    "relaxed linear": (GREEN, "D"),
    "penalty": (RED, "^"),
    "penalty linear": (RED, "^"),
    "penalty hinge": (RED, "v"),
    "hinge": (RED, "v"),
    "penalty squared hinge": (RED, ">"),
    "squared hinge": (RED, ">"),
    "average": (ORANGE, "P"),
    "tilted": (PURPLE, "X"),
    "CVaR": (PURPLE, "p"),
    "as it is": (BLACK, "*"),
    "base": (BLACK, "*"),
    "objective only": (BLACK, "h"),
    "only stay close": (BLACK, "h"),
    "relevance only (monoBERT)": (CYAN, "o"),
    "monobert": (CYAN, "o"),
    "DPO": (CYAN, "s"),
    "SimPO": (CYAN, "^"),
    "CPO": (CYAN, "v"),
    "Cal-DPO": (CYAN, "D"),
    "Safe-DPO": (CYAN, "P"),
}
"""Colour and marker of the packaged methods. One colour is one kind of method."""


@dataclass(frozen=True)
class Style:
    """How a method is drawn."""

    colour: str
    marker: str

    @property
    def hatch(self) -> str:
        """One for each marker, for those who see no colour."""
        return HATCHES[MARKERS.index(self.marker)]


def family(method: str) -> str:
    """Returns a method's name without the setting at its end: one family gets one colour.

    >>> [family(name) for name in ("penalty 0.1", "mine, alpha=1, beta=3", "pointwise, stricter")]
    ['penalty', 'mine', 'pointwise']
    """
    found = re.fullmatch(r"(.*?)[, ]+((?:\S+=\S+(?:, )?)+|[-+]?[\d.]+(?:e[-+]?\d+)?)", method)
    start = method.rpartition(" ")[0].rstrip(",")
    return found[1] if found else start if start in PACKAGED else method


def styles_of(methods: Iterable[str]) -> dict[str, Style]:
    """Returns the style of every method; no two are the same while there are any left."""
    styles: dict[str, Style] = {}
    colours = {method: colour for method, (colour, _) in PACKAGED.items()}
    for method in dict.fromkeys(methods):
        if method in PACKAGED:
            styles[method] = Style(*PACKAGED[method])
            continue
        here = [style.colour for style in styles.values()]
        # The last ones first, which packaged methods take less often.
        colour = colours.setdefault(family(method), min(reversed(COLOURS), key=here.count))
        used = {marker for reserved, marker in PACKAGED.values() if reserved == colour}
        used |= {style.marker for style in styles.values() if style.colour == colour}
        free = [marker for marker in MARKERS if marker not in used]
        styles[method] = Style(colour, (free or MARKERS)[0])
    return styles
