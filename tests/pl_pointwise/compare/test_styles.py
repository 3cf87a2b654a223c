"""A method looks the same in every plot and in every comparison of a folder."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import pytest

from pl_pointwise.compare import styles
from pl_pointwise.compare.styles import COLOURS, FILE, MARKERS, PACKAGED, Style, styles_of


def folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir(parents=True)
    return parent / name


def test_doctests_pass() -> None:
    assert doctest.testmod(styles)[0] == 0


def test_packaged_methods_look_the_same_anywhere(tmp_path: Path) -> None:
    one = styles_of(["pointwise", "average", "mine"], folder(tmp_path / "here", "a"))
    other = styles_of(["yours", "average", "pointwise"], folder(tmp_path / "there", "b"))
    for method in ("pointwise", "average"):
        assert one[method] == other[method] == Style(*PACKAGED[method])


def test_a_comparison_beside_gives_the_same_name_the_same_style(tmp_path: Path) -> None:
    first = styles_of(["mine", "pointwise", "other 1"], folder(tmp_path, "a"))
    second = styles_of(["new", "other 2", "other 1", "mine"], folder(tmp_path, "b"))
    assert second["mine"] == first["mine"]
    assert second["other 1"] == first["other 1"]
    assert second["new"] not in first.values()  # There is enough to choose from.
    elsewhere = styles_of(["mine"], folder(tmp_path / "c", "d"))
    assert (tmp_path / "c/d" / FILE).is_file()
    assert elsewhere["mine"].colour in COLOURS


def test_a_method_that_is_added_changes_no_other(tmp_path: Path) -> None:
    place = folder(tmp_path, "a")
    first = styles_of(["x", "y"], place)
    second = styles_of(["w", "y", "z", "x"], place)
    assert {name: second[name] for name in first} == first


def test_the_last_word_alone_changes_no_colour(tmp_path: Path) -> None:
    names = ["penalty 0.1", "penalty 1", "mine weak", "mine strong", "pointwise, stricter", "else"]
    found = styles_of(names, folder(tmp_path, "a"))
    assert found["penalty 0.1"].colour == found["penalty 1"].colour == PACKAGED["penalty"][0]
    assert found["mine weak"].colour == found["mine strong"].colour
    assert found["pointwise, stricter"].colour == PACKAGED["pointwise"][0]
    assert len({style.colour for style in found.values()}) == 4
    assert len(set(found.values())) == len(names)


def test_all_are_told_apart_while_there_are_styles_left(tmp_path: Path) -> None:
    names = [*dict.fromkeys(PACKAGED), *(f"method{number}x" for number in range(40))]
    found = styles_of(names, folder(tmp_path, "a"))
    distinct = len(set(PACKAGED.values())) + 40
    assert len(set(found.values())) == distinct <= len(COLOURS) * len(MARKERS)
    assert len({(s.hatch, s.colour) for s in found.values()}) == distinct


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "nonsense",
        json.dumps({"x": {"colour": "javascript:", "marker": "o"}}),
        json.dumps({"x": {"colour": COLOURS[0], "marker": "$a$"}}),
        json.dumps({"x": {"colour": COLOURS[0]}}),
    ],
)
def test_a_file_that_is_none_of_ours_is_left_out(tmp_path: Path, text: str) -> None:
    (folder(tmp_path, "a") / FILE).write_text(text)
    found = styles_of(["x"], folder(tmp_path, "b"))["x"]
    assert found.colour in COLOURS
    assert found.marker in MARKERS
