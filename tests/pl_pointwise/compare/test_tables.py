"""Tables for people and papers: few columns first, and the digits that the spread supports."""

from __future__ import annotations

from pandas import DataFrame

from pl_pointwise.compare import tables
from pl_pointwise.printing import Table, escaped
from tests.pl_pointwise.compare.test_plots import frame, lines, outcome


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
    metrics = {f"test/fit/{key}": 0.5 for key in ("violated_samples", "violated", "cvar95")}
    shown = [*tables.tables([outcome("a", 0, metrics)])[0].cells]
    assert shown == ["method", "violation rate of samples", "violation rate of values", "CVaR95"]


def test_several_constraints_have_their_names() -> None:
    names = [f"val/{name}/{key}" for name in ("refuse", "comply") for key in ("violated", "cvar95")]
    table = tables.results_table(frame(outcome("a", 0, dict.fromkeys(names, 0.5))), names, "test/x")
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
    assert escaped("near: violated <= 0.1 (all) < b") == ("near: violated <= 0.1 (all) < b")
