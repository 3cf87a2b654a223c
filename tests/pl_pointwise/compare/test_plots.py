"""A comparison's pictures and tables show what its results hold."""

from __future__ import annotations

import doctest
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.cbook import STEP_LOOKUP_MAP
from matplotlib.figure import Figure

from pl_pointwise.certificates import dkw_width
from pl_pointwise.compare import plot_data as pictures
from pl_pointwise.compare import plots as figures
from pl_pointwise.compare import tables
from pl_pointwise.compare.plots import Axis, frontier
from pl_pointwise.compare.runs import Run

FINITE = st.floats(-5, 5, allow_nan=False)


def outcome(row: str, seed: int, metrics: dict[str, float], **more: Any) -> tables.Outcome:
    run = Run(row, seed, Path("nowhere"), [], {}, "")
    return run, {"metrics": metrics, **more}


def panels(draw: Any, *arguments: Any, folder: Path, monkeypatch: Any) -> list[Axes]:
    """The panels of what a function drew, which is also a picture that can be read."""
    drawn: list[Figure] = []
    save = Figure.savefig

    def remember(self: Figure, *args: Any, **options: Any) -> None:
        drawn.append(self)
        save(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", remember)
    draw(*arguments, folder / "picture.png")
    image = matplotlib.image.imread(folder / "picture.png")
    assert image.shape[0] > 150
    assert image[..., :3].std() > 0.01
    return [panel for panel in drawn[0].axes if panel.get_visible()]


def test_a_few_extremes_do_not_flatten_the_others(tmp_path, monkeypatch) -> None:
    """Seen: one penalty at −40 drew every other method's curve as one vertical line."""
    near = np.linspace(-1, 1, 50)
    for far, scale in ((5.0, "linear"), (400.0, "symlog")):
        violations = {"test/fit": {"a": near, "b": np.append(near, far)}}
        (panel,) = panels(
            figures.violation_cdfs, violations, folder=tmp_path, monkeypatch=monkeypatch
        )
        assert panel.get_xscale() == scale
        assert ("logarithmic beyond ±1" in panel.get_xlabel()) == (scale == "symlog")
        low, high = panel.get_xlim()
        assert low < -1 < far < high


@pytest.mark.parametrize("module", [figures, tables], ids=lambda module: module.__name__)
def test_doctests_pass(module) -> None:
    failures, tried = doctest.testmod(module)
    assert tried > 0
    assert failures == 0


@given(st.lists(st.tuples(FINITE, FINITE), min_size=1, max_size=12), st.booleans(), st.booleans())
def test_the_frontier_is_what_nothing_beats(points, up, right) -> None:
    axes = (Axis("x", right), Axis("y", up))

    def beats(a: tuple[float, float], b: tuple[float, float]) -> bool:
        both = zip(a, b, axes, strict=True)
        ends = [(q, p) if axis.higher_is_better else (p, q) for p, q, axis in both]
        better, worse = [low < high for low, high in ends], [low > high for low, high in ends]
        return any(better) and not any(worse)

    expected = [i for i, p in enumerate(points) if not any(beats(q, p) for q in points)]
    assert frontier(points, axes) == expected
    assert expected


def test_a_point_that_is_no_number_is_neither_on_the_frontier_nor_beats_one() -> None:
    points = [(math.nan, 0.0), (1.0, 1.0), (0.0, math.inf)]
    assert frontier(points, (Axis("x"), Axis("y"))) == [1]


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("up", [False, True])
def test_the_line_of_the_frontier_keeps_to_what_was_attained(
    right, up, tmp_path, monkeypatch
) -> None:
    """Each corner of the stairs is no better, in both coordinates, than some point."""
    signs = np.array([-1 if right else 1, -1 if up else 1])
    points = np.array([(0, 3), (1, 1), (2, 2), (3, 0)]) * signs
    rows = {str(i): ([float(x)], [float(y)]) for i, (x, y) in enumerate(points)}
    families = {row: (row, "") for row in rows}
    axes = (Axis("a", right), Axis("b", up))
    (panel,) = panels(
        figures.pareto, rows, families, axes, folder=tmp_path, monkeypatch=monkeypatch
    )
    (line,) = [line for line in panel.get_lines() if line.get_label() == "frontier"]
    assert sorted(zip(*line.get_data(), strict=True)) == sorted(
        (x * signs[0], y * signs[1]) for x, y in [(0, 3), (1, 1), (3, 0)]
    )
    stairs = STEP_LOOKUP_MAP[line.get_drawstyle()](*line.get_data())
    corners = np.stack(stairs, axis=1) * signs
    assert len(corners) > 3
    for corner in corners:
        assert any((corner >= point).all() for point in points * signs)
    assert panel.get_xlabel() == f"a ({'higher' if right else 'lower'} is better)"


def test_rows_of_one_method_share_a_colour_and_carry_their_setting(tmp_path, monkeypatch) -> None:
    rows = {name: ([1.0, 2.0], [3.0, 5.0]) for name in ("penalty 0.1", "penalty 1", "pointwise")}
    families = {row: tables.family(row) for row in rows}
    (panel,) = panels(
        figures.pareto,
        rows,
        families,
        (Axis("a"), Axis("b")),
        folder=tmp_path,
        monkeypatch=monkeypatch,
    )
    assert [text.get_text() for text in panel.texts] == ["0.1", "1", ""]
    (legend,) = panel.figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["frontier", "penalty", "pointwise"]


def test_the_band_of_a_method_is_as_wide_as_its_samples_say(tmp_path, monkeypatch) -> None:
    generator = np.random.default_rng(0)
    worst = {
        "few": generator.normal(size=20),
        "many": generator.normal(size=2000),
        "poisoned": np.array([0.0, math.nan, 1.0]),
    }
    found = panels(figures.cdf_panels, {"fit": worst}, folder=tmp_path, monkeypatch=monkeypatch)
    assert [panel.get_title() for panel in found] == list(worst)
    for panel, values in list(zip(found, worst.values(), strict=True))[:2]:
        (band,) = panel.collections
        edges = band.get_paths()[0].vertices
        middle = edges[np.abs(edges[:, 0] - np.median(values)).argmin(), 0]
        heights = edges[edges[:, 0] == middle, 1]
        # Twice the half width, and a step of the empirical CDF on the same vertical.
        width = 2 * dkw_width(len(values))
        assert width - 1e-6 <= np.ptp(heights) <= width + 1.5 / len(values)
    assert not found[2].collections


def test_infinite_violations_count_and_nan_do_not(tmp_path, monkeypatch) -> None:
    """A method that diverges must not look as if all its samples were in the picture."""
    values = np.array([-1.0, 0.5, math.inf, math.inf, math.nan])
    (panel,) = panels(
        figures.violation_cdfs,
        {"test/fit": {"diverging": values}},
        folder=tmp_path,
        monkeypatch=monkeypatch,
    )
    (x, y) = panel.get_lines()[0].get_data()
    assert list(x) == [-1.0, 0.5]
    assert list(y) == [0.25, 0.5]


def test_groups_of_categories_are_found_by_what_their_names_share() -> None:
    metrics = {
        "mc/f1_tool_call": 0.5,
        "mc/f1_direct": 0.1,
        "mc/f1_cannot_answer": 0.7,
        "train/f1_tool_call": 0.9,
        "mc/accuracy_sum": 0.5,
        "mc/accuracy_tokens": 0.5,
        "mc/macro_f1": 0.4,
        "test/tool_call/violated": 0.3,
    }
    done = [outcome("a", 0, metrics), outcome("a", 1, {**metrics, "mc/f1_direct": 0.3})]
    assert pictures.categories(done) == {
        "mc/f1": {"a": {"tool call": [0.5, 0.5], "direct": [0.1, 0.3], "cannot answer": [0.7, 0.7]}}
    }


def test_bars_stand_at_the_means(tmp_path, monkeypatch) -> None:
    group = {"mc/f1": {"a": {"x": [0.2, 0.4], "y": [0.5]}, "b": {"x": [0.8], "y": [0.1]}}}
    (panel,) = panels(figures.category_bars, group, folder=tmp_path, monkeypatch=monkeypatch)
    heights = [
        bar.get_height() for bars in panel.containers for bar in getattr(bars, "patches", [])
    ]
    assert heights == pytest.approx([0.3, 0.5, 0.8, 0.1])
    assert [tick.get_text() for tick in panel.get_xticklabels()] == ["x", "y"]
    assert panel.get_ylabel() == "mc/f1"


def test_the_gap_is_train_and_held_out_means_over_seeds(tmp_path, monkeypatch) -> None:
    done = [
        outcome("a", seed, {"test/fit/cvar95": 4.0 + seed, "train/fit/cvar95": 1.0 + seed})
        for seed in (0, 1)
    ]
    assert pictures.gaps(done) == {"fit/cvar95": {"a": (1.5, 4.5)}}
    (panel,) = panels(figures.gaps, pictures.gaps(done), folder=tmp_path, monkeypatch=monkeypatch)
    assert panel.get_xlabel() == "fit/cvar95"
    table = tables.gap_table(done)
    assert table.rows == [["a", "3 ± 0"]]


def test_costs_are_drawn_with_their_units(tmp_path, monkeypatch) -> None:
    values = {"seconds per epoch": {"a": [1.0, 3.0]}, "host memory, GiB": {"a": [2.0]}}
    found = panels(figures.costs, values, folder=tmp_path, monkeypatch=monkeypatch)
    assert [panel.get_xlabel() for panel in found] == list(values)
    assert found[0].containers[-1].patches[0].get_width() == 2.0


def test_time_and_memory_of_a_row_are_means_over_its_seeds() -> None:
    def costly(seconds: list[float], gib: float | None) -> Mapping[str, Any]:
        return {"epoch_seconds": seconds, "host_bytes": gib and gib * 2**30, "gpu_bytes": None}

    outcomes = [
        outcome("a", 0, {}, **costly([1.0, 3.0], 2.0)),
        outcome("a", 1, {}, **costly([4.0], 4.0)),
        outcome("b", 0, {}, **costly([], None)),
    ]
    table = tables.cost_table(outcomes)
    assert table.header == ["method", "seconds per epoch", "host memory, GiB"]
    assert table.rows == [["a", "3 ± 1.4", "3 ± 1.4"]]


def test_a_metric_that_is_nan_at_one_seed_is_nan_in_the_table() -> None:
    """It used to end the comparison: no table, after all its runs."""
    outcomes = [outcome("a", 0, {"test/f1": math.nan}), outcome("a", 1, {"test/f1": 1.0})]
    assert tables.results_table(outcomes).rows == [["a", "nan ± nan"]]


def test_an_axis_knows_its_better_end_from_the_metric_or_from_the_option() -> None:
    metrics = {"test/mrr@10": 0.5, "test/objective": 1.0, "test/fit/cvar95": 2.0}
    done = [outcome("a", 0, metrics, higher_is_better={"mrr@10": True})]
    names = ("test/mrr@10", "test/objective", "test/mrr@10:min", "test/objective:max")
    found = [pictures._axis(name, done) for name in names]
    assert [axis.higher_is_better for axis in found] == [True, False, False, True]
    assert pictures._axis(pictures.PARETO[1], done).name == "test/fit/cvar95"
    with pytest.raises(ValueError, match=r"--pareto test/mrr: .*test/mrr@10"):
        pictures._axis("test/mrr", done)
