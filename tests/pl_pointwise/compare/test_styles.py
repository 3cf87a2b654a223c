"""A method looks the same in every plot, and like no other."""

from __future__ import annotations

from pl_pointwise.compare.styles import styles_of


def test_all_are_told_apart() -> None:
    found = styles_of(["a", "a", *map(str, range(83)), "a"])
    assert len({style[:2] for style in found.values()}) == len(found) == 84
