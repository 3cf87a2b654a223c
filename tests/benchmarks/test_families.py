"""The study of families in miniature: what is run once, and what is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import families
from pl_pointwise.tasks.family import Family


def test_a_study_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {
        "convex": families.Problem(Family(8, 5, 8, 240)),
        "equalities in the loss": families.Problem(Family(8, 5, 8, 240), "loss"),
    }
    monkeypatch.setattr(families, "PROBLEMS", small)
    monkeypatch.setattr(families, "BATCH", 10)
    output, methods = tmp_path / "runs.csv", ["Pointwise()", "hinge 30", "Average"]
    families.study(output, list(small), methods[:2], [0], 8)
    before = output.read_text()
    families.study(output, list(small), methods, [0], 8)
    assert output.read_text().startswith(before)
    table = families.read(output).set_index(["problem", "method", "correction"])
    assert table.index.is_unique
    assert len(table) == 12
    corrected = table.xs(families.CORRECTION, level="correction")
    assert corrected["largest"].max() <= families.ALLOWED
    assert (table["worst"] > 1e-3).any()
    assert corrected["equality"].max() < 1e-5 < table["equality"].max()
    assert "| convex | DC3, published | | 5 | -13.46 |" in families.summarise(
        families.read(output)
    )
    families.draw(families.read(output), "convex", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
