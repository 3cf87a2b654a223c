"""One colour, marker and line per method: in every plot, and in all comparisons of a folder.

A packaged method has its own, so it looks the same everywhere. What another method was given is in
``styles.json`` of the comparison's folder; comparisons beside it read that file and give the same
name the same style. Methods that differ in the last word of their name alone share a colour.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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

FILE = "styles.json"

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
    def place(self) -> int:
        """The marker's number: it also decides the hatch, for those who see no colour."""
        return MARKERS.index(self.marker)

    @property
    def hatch(self) -> str:
        return HATCHES[self.place]


def family(method: str) -> tuple[str, str]:
    """Returns a method's name cut into family and setting: one family gets one colour.

    >>> family("penalty 0.1"), family("pointwise, alpha=1, beta=3"), family("relevance only")
    (('penalty', '0.1'), ('pointwise', 'alpha=1, beta=3'), ('relevance only', ''))
    """
    found = re.fullmatch(r"(.*?)[, ]+((?:\S+=\S+(?:, )?)+|[-+]?[\d.]+(?:e[-+]?\d+)?)", method)
    return (found[1], found[2]) if found else (method, "")


def styles_of(methods: Iterable[str], folder: Path) -> dict[str, Style]:
    """Returns the style of every method, and keeps it in the comparison's folder.

    No two methods of one comparison share colour and marker while there are any left.
    """
    wanted = list(dict.fromkeys(methods))
    own, beside = _read(folder / FILE), _beside(folder)
    known = {**beside, **own}
    styles = {m: Style(*PACKAGED[m]) for m in wanted if m in PACKAGED}
    styles |= {m: known[m] for m in wanted if m in known and m not in PACKAGED}
    for method in wanted:
        if method not in styles:
            # What is taken elsewhere is avoided as long as something else is free.
            styles[method] = _free(method, wanted, styles, known)
    kept = own | styles
    if kept != own and folder.is_dir():
        text = json.dumps({method: asdict(style) for method, style in kept.items()}, indent=1)
        (folder / FILE).write_text(text, encoding="utf-8")
    return {method: styles[method] for method in wanted}


def _free(
    method: str, wanted: Sequence[str], styles: dict[str, Style], known: dict[str, Style]
) -> Style:
    """Returns a style for a method that has none yet."""
    names, taken = [*wanted, *known], {**known, **styles}
    kind = _kind(method, names)
    relatives = [style.colour for name, style in taken.items() if _kind(name, names) == kind]
    if kind in PACKAGED:
        colour = PACKAGED[kind][0]
    elif relatives:
        colour = relatives[0]
    else:
        here = [style.colour for style in styles.values()]
        uses = [style.colour for style in taken.values()]
        # The last ones first, which packaged methods take less often.
        colour = min(reversed(COLOURS), key=lambda c: (here.count(c), uses.count(c)))
    used_here = {style.marker for style in styles.values() if style.colour == colour}
    used = used_here | {style.marker for style in known.values() if style.colour == colour}
    used |= {marker for reserved, marker in PACKAGED.values() if reserved == colour}
    free = [marker for marker in MARKERS if marker not in used]
    return Style(colour, (free or [m for m in MARKERS if m not in used_here] or MARKERS)[0])


def _kind(method: str, methods: Sequence[str]) -> str:
    """Returns what decides the colour: the family, or what is before the last word of a name that
    another method has with another last word.
    """
    name, setting = family(method)
    if setting:
        return name
    start = _start(name)
    others = [other for other in methods if other != method]
    if start in PACKAGED or (start and any(start in (m, _start(m)) for m in others)):
        return start
    return name


def _start(name: str) -> str:
    return name.rpartition(" ")[0].rstrip(",")


def _beside(folder: Path) -> dict[str, Style]:
    """Returns the styles of the comparisons beside this one, the first by name where two differ."""
    found: dict[str, Style] = {}
    for path in sorted(folder.absolute().parent.glob(f"*/{FILE}"), reverse=True):
        found |= _read(path)
    return found


def _read(path: Path) -> dict[str, Style]:
    """Returns what a file holds; nothing if it is none of ours."""
    try:
        entries: Any = json.loads(path.read_text(encoding="utf-8"))
        styles = {method: Style(**entry) for method, entry in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return {m: s for m, s in styles.items() if s.colour in COLOURS and s.marker in MARKERS}
