"""A method looks the same in every plot; packaged ones in every comparison."""

from __future__ import annotations

from pl_pointwise.compare.styles import COLOURS, MARKERS, PACKAGED, styles_of


def test_packaged_methods_look_the_same_anywhere() -> None:
    one = styles_of(["pointwise", "average", "mine"])
    other = styles_of(["yours", "average", "pointwise"])
    for method in ("pointwise", "average"):
        assert one[method] == other[method] == PACKAGED[method]


def test_all_are_told_apart_while_there_are_styles_left() -> None:
    left = len(COLOURS) * len(MARKERS) - len(PACKAGED)
    found = styles_of([*PACKAGED, *(f"method {number}" for number in range(left))])
    assert len(set(found.values())) == len(COLOURS) * len(MARKERS)
    assert len(styles_of(str(number) for number in range(left + 1))) == left + 1
