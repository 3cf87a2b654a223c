"""A comparison's plots and tables show what its results hold."""

from __future__ import annotations

import math
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
from pandas import DataFrame

from pl_pointwise.compare import plots, tables
from pl_pointwise.compare.plots import frontier, styles_of
from pl_pointwise.compare.runs import Outcome, Run
from pl_pointwise.printing import Table, escaped

FINITE = st.floats(-5, 5, allow_nan=False)


def outcome(method: str, seed: int, metrics: dict[str, float], **more: Any) -> Outcome:
    return Run(method, seed, Path("nowhere"), [], ""), {"metrics": metrics, **more}


def frame(*outcomes: Outcome) -> DataFrame:
    return DataFrame(tables.run_lines(outcomes))


def lines(table: Table) -> list[list[str]]:
    return table.cells.to_numpy().tolist()


def panels(figure: Figure, folder: Path) -> list[Axes]:
    """The panels of a figure, which is also an image that can be read."""
    figure.savefig(folder / "plot.png")
    image = matplotlib.image.imread(folder / "plot.png")
    assert image.shape[0] > 150
    assert image[..., :3].std() > 0.01
    return [panel for panel in figure.axes if panel.get_visible()]


def test_a_few_extremes_do_not_flatten_the_others(tmp_path) -> None:
    """Seen: one penalty at −40 drew every other method's curve as one vertical line."""
    near = np.linspace(-1, 1, 50)
    for far, scale in ((5.0, "linear"), (400.0, "symlog")):
        violations = {"test/fit": {"a": near, "b": np.append(near, far)}}
        (panel,) = panels(plots.violation_cdfs(violations, styles_of("ab")), tmp_path)
        assert panel.get_xscale() == scale
        assert ("logarithmic beyond ±1" in panel.get_xlabel()) == (scale == "symlog")
        low, high = panel.get_xlim()
        assert low < -1 < far < high


@given(st.lists(st.tuples(FINITE, FINITE), min_size=1, max_size=12))
def test_the_frontier_is_what_nothing_beats(points) -> None:
    def beats(a: tuple[float, float], b: tuple[float, float]) -> bool:
        return a != b and a[0] <= b[0] and a[1] <= b[1]

    expected = [i for i, p in enumerate(points) if not any(beats(q, p) for q in points)]
    assert frontier(points) == expected
    assert expected
    undefined = (math.nan, 9.0)  # Neither on the frontier nor beating anything.
    assert frontier([*points, undefined]) == expected


def test_the_line_of_the_frontier_keeps_to_what_was_attained(tmp_path) -> None:
    """Each corner of the stairs is no better, in both coordinates, than some point."""
    points = np.array([(0, 3), (1, 1), (2, 2), (3, 0)])
    runs = DataFrame(points, columns=["a", "b"]).assign(method=list("wxyz"))
    (panel,) = panels(plots.pareto(runs, ("a", "b"), styles_of("wxyz")), tmp_path)
    (line,) = [line for line in panel.get_lines() if line.get_label() == "frontier"]
    assert [*zip(*line.get_data(), strict=True)] == [(0, 3), (1, 1), (3, 0)]
    corners = np.stack(STEP_LOOKUP_MAP[line.get_drawstyle()](*line.get_data()), axis=1)
    assert len(corners) > 3
    for corner in corners:
        assert any((corner >= point).all() for point in points)


def test_all_methods_are_told_apart() -> None:
    names = [*map(str, range(83))]
    found = styles_of(["a", "a", *names, "a"])
    assert (
        len({(style["color"], style["marker"]) for style in found.values()})
        == len(found)
        == 84
    )


def test_methods_differ_and_bars_are_of_the_seeds(tmp_path) -> None:
    names = ("penalty 0.1", "penalty 1", "pointwise")
    seeds = [
        outcome(n, seed, {"a": 1 + seed, "b": 3 + 2 * seed})
        for n in names
        for seed in (0, 1)
    ]
    seeds.append(outcome("diverged", 0, {"a": math.nan, "b": 0.0}))
    figure = plots.pareto(frame(*seeds), ("a", "b"), styles_of(names))
    (panel,) = panels(figure, tmp_path)
    points = [bars.lines[0] for bars in panel.containers]
    assert len({(point.get_color(), point.get_marker()) for point in points}) == 3
    assert [float(v[0]) for v in points[0].get_data()] == [1.5, 4.0]
    across, up = panel.containers[0].lines[2]
    assert np.ptp(across.get_segments()[0][:, 0]) == pytest.approx(2 * math.sqrt(0.5))
    assert np.ptp(up.get_segments()[0][:, 1]) == pytest.approx(2 * math.sqrt(2))
    (legend,) = panel.figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["frontier", "penalty 0.1", "penalty 1", "pointwise"]
    assert "± standard deviation over the seeds" in legend.get_title().get_text()


def test_infinite_violations_count_and_nan_do_not(tmp_path) -> None:
    """A method that diverges must not look as if all its samples were in the plot."""
    values = np.array([-1.0, 0.5, math.inf, math.inf, math.nan])
    curves = {"test/fit": {"diverging": values}}
    (panel,) = panels(plots.violation_cdfs(curves, styles_of(["diverging"])), tmp_path)
    (x, y) = panel.get_lines()[0].get_data()
    assert list(x) == [-1.0, -1.0, 0.5, math.inf, math.inf]
    assert list(y) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert panel.get_xlim()[1] < 1


def test_a_metric_that_is_nan_at_one_seed_is_nan_in_the_table(tmp_path) -> None:
    """It used to end the comparison: no table, after all its runs."""
    done = [outcome("a", 0, {"test/f1": math.nan}), outcome("a", 1, {"test/f1": 1.0})]
    done.append(outcome("b", 0, {}))
    assert lines(tables.tables(done)[1])[0] == ["a", "nan ± nan"]
    tables.write_csv(done, tmp_path / "runs.csv")
    cells = [
        line.split(",")[-2] for line in (tmp_path / "runs.csv").read_text().splitlines()
    ]
    assert cells == ["test/f1", "nan", "1.0", ""]


def test_plots_of_an_earlier_comparison_go(tmp_path, monkeypatch) -> None:
    done = [outcome("a", 0, {"test/objective": 1.0, "test/fit/violated": 0.5})]
    monkeypatch.setattr(Run, "violations", lambda run: {"test/fit": np.array([0.5])})
    plots.draw(done, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"cdf.png", "pareto.png"}
    plots.draw([outcome("a", 0, {"test/objective": 1.0})], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"cdf.png"}


def test_a_note_stands_above_every_table_and_plot(tmp_path, monkeypatch) -> None:
    """Seen: pictures of five steps, passed on without what said so."""
    done = [outcome("a", 0, {"test/objective": 1.0, "test/fit/violated": 0.5})]
    monkeypatch.setattr(Run, "violations", lambda run: {"test/fit": np.array([0.5])})
    drawn: dict[str, Figure] = {}
    monkeypatch.setattr(
        Figure, "savefig", lambda self, path, **_: drawn.update({path.name: self})
    )
    plots.draw(done, tmp_path, "Five steps.")
    assert set(drawn) == {*plots.PLOTS}
    assert {figure.get_suptitle() for figure in drawn.values()} == {"Five steps."}
    assert "**Five steps.**" in tables.tables(done, "Five steps.")[0].markdown()
    plots.draw(done, tmp_path)
    assert {figure.get_suptitle() for figure in drawn.values()} == {""}


def test_the_default_plot_is_of_the_objective_that_all_methods_share() -> None:
    """Seen: one method's cross-entropy beside another's Lagrangian on one axis."""
    metrics = {"test/objective": 1.0, "test/kl": 2.0, "test/fit/violated": 0.0}
    done = [
        outcome("a", 0, metrics, shared_objective="kl"),
        outcome("b", 0, {}, error="x"),
    ]
    assert tables.shared_objective(done) == "test/kl"
    assert plots.pareto_axes([*metrics], "test/kl") == ["test/kl", "test/fit/violated"]
    several = [*metrics, "test/fit/violated_samples"]  # Of values, and of samples.
    assert plots.pareto_axes(several, "test/kl") == [
        "test/kl",
        "test/fit/violated_samples",
    ]
    assert plots.pareto_axes(["test/kl"], "test/kl") == []
    worst = [*metrics, "test/worst"]
    assert plots.pareto_axes(worst, "test/kl", "worst") == ["test/kl", "test/worst"]
    assert plots.pareto_axes([*metrics], "test/kl", "worst") == [
        "test/kl",
        "test/fit/violated",
    ]
    assert tables.shared_objective([outcome("a", 0, metrics)]) == "test/objective"
    gone = [outcome("a", 0, {"test/objective": 1.0}, shared_objective="kl")]
    assert tables.shared_objective(gone) == "test/objective"
    learnt = [
        outcome(
            "a", 0, {"test/fit/mean": 1.0, "train/nll": 1.0}, shared_objective="nll"
        )
    ]
    assert tables.shared_objective(learnt) == "train/nll"


# Tables -----------------------------------------------------------------------------------------


def test_what_decides_comes_first() -> None:
    metrics = {
        "test/objective": 9.0,
        "test/mrr@10": 0.5,
        "test/fit/mean": 1.0,
        "test/fit/violated": 0.25,
        "test/fit/cvar95": 2.0,
        "test/length": 3.0,
        "train/length": 4.0,
    }
    done = [
        outcome("a", 0, metrics, shared_objective="length"),
        outcome("a", 1, {name: 2 * value for name, value in metrics.items()}),
        outcome("b", 0, {}, error="Error: no"),
    ]
    found = tables.tables(done)
    assert found[0].title == "Results"
    assert list(found[0].cells) == ["method", "length", "violation rate", "CVaR95"]
    assert lines(found[0]) == [["a", "4.5 ± 2.1", "0.375 ± 0.18", "3 ± 1.4"]]
    assert found[0].note.endswith("\n\nFailed: b · seed 0: Error: no")
    assert found[-1].title == "All metrics"
    assert "test/mrr@10" in found[-1].cells


def test_the_share_of_samples_comes_before_that_of_values() -> None:
    metrics = {
        f"test/fit/{key}": 0.5 for key in ("violated_samples", "violated", "cvar95")
    }
    shown = [*tables.tables([outcome("a", 0, metrics)])[0].cells]
    assert shown == [
        "method",
        "violation rate of samples",
        "violation rate of values",
        "CVaR95",
    ]


def test_several_constraints_have_their_names() -> None:
    names = [
        f"val/{name}/{key}"
        for name in ("refuse", "comply")
        for key in ("violated", "cvar95")
    ]
    table = tables.results_table(
        frame(outcome("a", 0, dict.fromkeys(names, 0.5))), names, "test/x"
    )
    assert list(table.cells) == [
        "method",
        "refuse: violation rate",
        "refuse: CVaR95",
        "comply: violation rate",
        "comply: CVaR95",
    ]
    assert table.note.startswith("Selection data")


def test_a_name_makes_no_html_and_no_link() -> None:
    cells = DataFrame({"method": ["<img src=x onerror=alert(1)> [x](http://evil)"]})
    text = Table("Results", "", cells).markdown()
    assert "\\<img" in text
    assert "[x]\\(http" in text
    assert escaped("near: violated <= 0.1 (all) < b") == (
        "near: violated <= 0.1 (all) < b"
    )
