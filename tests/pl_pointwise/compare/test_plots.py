"""A comparison's plots and tables show what its results hold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from pl_pointwise.compare import plots, tables
from pl_pointwise.compare.runs import Outcome, Run
from pl_pointwise.printing import Table


def outcome(method: str, seed: int, metrics: dict[str, float], **more: Any) -> Outcome:
    return Run(method, seed, Path("nowhere"), [], ""), {"metrics": metrics, **more}


def frame(*outcomes: Outcome) -> DataFrame:
    return DataFrame(tables.run_lines(outcomes))


def lines(table: Table) -> list[list[str]]:
    return table.cells.to_numpy().tolist()


def panels(figure: Figure, folder: Path) -> list[Axes]:
    """The panels of a figure, which is also an image that can be read."""
    plots.save(figure, folder / "plot.png")
    image = matplotlib.image.imread(folder / "plot.png")
    assert image.shape[0] > 150
    assert image[..., :3].std() > 0.01
    return [panel for panel in figure.axes if panel.get_visible()]


def test_a_few_extremes_do_not_flatten_the_others(tmp_path) -> None:
    """Seen: one penalty at −40 drew every other method's curve as one vertical line."""
    near = np.linspace(-1, 1, 50)
    for far, scale in ((5.0, "linear"), (400.0, "symlog")):
        violations = {"test/fit": {"a": near, "b": np.append(near, far)}}
        (panel,) = panels(plots.violation_cdfs(violations), tmp_path)
        assert panel.get_xscale() == scale
        assert ("logarithmic beyond ±1" in panel.get_xlabel()) == (scale == "symlog")
        low, high = panel.get_xlim()
        assert low < -1 < far < high


def test_all_methods_are_told_apart() -> None:
    found = [plots.look_of(number) for number in range(84)]
    assert len({(look["color"], look["marker"]) for look in found}) == 84


def test_infinite_violations_count_and_nan_do_not(tmp_path) -> None:
    """A method that diverges must not look as if all its samples were in the plot."""
    values = np.array([-1.0, 0.5, math.inf, math.inf, math.nan])
    curves = {"test/fit": {"diverging": values}}
    (panel,) = panels(plots.violation_cdfs(curves), tmp_path)
    (x, y) = panel.get_lines()[0].get_data()
    assert list(x) == [-1.0, -1.0, 0.5, math.inf, math.inf]
    assert list(y) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert panel.get_xlim()[1] < 1


def test_a_metric_that_is_nan_at_one_seed_is_nan_in_the_table(tmp_path) -> None:
    """It used to end the comparison: no table, after all its runs."""
    done = [outcome("a", 0, {"test/f1": math.nan}), outcome("a", 1, {"test/f1": 1.0})]
    done.append(outcome("b", 0, {}))
    assert lines(tables.metrics_table(frame(*done), ["test/f1"]))[0] == ["a", "nan ± nan"]
    tables.write_csv(done, tmp_path / "runs.csv")
    cells = [line.split(",")[-2] for line in (tmp_path / "runs.csv").read_text().splitlines()]
    assert cells == ["test/f1", "nan", "1.0", ""]


def test_the_plot_of_an_earlier_comparison_goes(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Run, "violations", lambda run: {"test/fit": np.array([0.5])})
    assert plots.draw([outcome("a", 0, {})], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [plots.PLOT]
    assert not plots.draw([], tmp_path)
    assert not [*tmp_path.iterdir()]


def test_the_objective_shown_is_that_which_all_methods_share() -> None:
    """Seen: one method's cross-entropy beside another's Lagrangian on one axis."""
    metrics = {"test/objective": 1.0, "test/kl": 2.0, "test/fit/violated": 0.0}
    done = [outcome("a", 0, metrics, shared_objective="kl"), outcome("b", 0, {}, error="x")]
    assert tables.shared_objective(done) == "test/kl"
    assert tables.shared_objective([outcome("a", 0, metrics)]) == "test/objective"
    gone = [outcome("a", 0, {"test/objective": 1.0}, shared_objective="kl")]
    assert tables.shared_objective(gone) == "test/objective"
    learnt = [outcome("a", 0, {"test/fit/mean": 1.0, "train/nll": 1.0}, shared_objective="nll")]
    assert tables.shared_objective(learnt) == "train/nll"
