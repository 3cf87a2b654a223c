"""A method looks the same in every plot; packaged ones in every comparison."""

from __future__ import annotations

import doctest

from pl_pointwise.compare import styles
from pl_pointwise.compare.styles import COLOURS, MARKERS, PACKAGED, Style, styles_of


def test_doctests_pass() -> None:
    assert doctest.testmod(styles)[0] == 0


def test_packaged_methods_look_the_same_anywhere() -> None:
    one = styles_of(["pointwise", "average", "mine"])
    other = styles_of(["yours", "average", "pointwise"])
    for method in ("pointwise", "average"):
        assert one[method] == other[method] == Style(*PACKAGED[method])


def test_a_setting_at_the_end_of_a_name_changes_no_colour() -> None:
    names = ["penalty 0.1", "penalty 1", "mine 1", "mine, a=2, b=3", "pointwise, stricter", "else"]
    found = styles_of(names)
    assert found["penalty 0.1"].colour == found["penalty 1"].colour == PACKAGED["penalty"][0]
    assert found["mine 1"].colour == found["mine, a=2, b=3"].colour
    assert found["pointwise, stricter"].colour == PACKAGED["pointwise"][0]
    assert len({style.colour for style in found.values()}) == 4
    assert len(set(found.values())) == len(names)


def test_all_are_told_apart_while_there_are_styles_left() -> None:
    names = [*PACKAGED, *(f"method{number}x" for number in range(40))]
    found = styles_of(names)
    distinct = len(set(PACKAGED.values())) + 40
    assert len(set(found.values())) == distinct <= len(COLOURS) * len(MARKERS)
    assert len({(s.hatch, s.colour) for s in found.values()}) == distinct
