"""Whether a program printed what a page shows: other processors round in another way."""

from __future__ import annotations

import re

NUMBER = r"-?\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?"


def masked(text: str) -> list[str]:
    """The words, each number as one sign: how a line looks whatever was measured."""
    return re.sub(NUMBER, "#", text).split()


def numbers(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(NUMBER, text)]


def alike(found: str, expected: str) -> bool:
    """The same words, and numbers that are near."""
    if masked(found) != masked(expected):
        return False
    pairs = zip(numbers(found), numbers(expected), strict=True)
    return all(abs(a - b) <= 0.02 + 0.5 * abs(b) for a, b in pairs)
