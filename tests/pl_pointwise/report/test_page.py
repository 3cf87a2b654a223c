"""The page of a run as a file: texts escaped, numbers as they are, nothing from elsewhere."""

from __future__ import annotations

import json
import math
import re
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pl_pointwise.printing import Table
from pl_pointwise.report.closing_table import Closing, RequirementRow
from pl_pointwise.report.page import (
    Page,
    Picture,
    Sample,
    write_if_possible,
    write_page,
)
from pl_pointwise.report.plots import Plot, _ticks
from pl_pointwise.report.samples import described, fields_and_image, png_of
from pl_pointwise.report.stored import store, stored

HOSTILE = (
    "</script><script>window.harmed = 1</script><img src=x onerror='window.harmed = 1'>"
)
ROW = RequirementRow(
    HOSTILE, "≤ 0.05", 2, 7, 0.3, 0.1, 1, 3, 0.5, 0.4, multipliers=2, price=0.25
)
CLOSING = Closing(
    steps=40,
    epochs=2,
    objective=(1.5, 0.5, 0.75),
    rows=[ROW],
    sentences=[HOSTILE],
    not_trained=[HOSTILE],
)
PLOT = Plot(
    f"worst {HOSTILE}", [1, 20, 40], {HOSTILE: [0.5, math.nan, 0.125]}, bound=0.05
)


def written(path: Path, **parts: Any) -> str:
    return write_page(path / "report.html", Page(title="A run", **parts)).read_text(
        "utf-8"
    )


def samples_of(text: str) -> Any:
    found = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL
    )
    assert found is not None
    return json.loads(found[1])


def test_texts_of_data_are_never_markup(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    text = written(
        tmp_path,
        facts={HOSTILE: HOSTILE},
        warning=HOSTILE,
        closing=CLOSING,
        plots=[PLOT],
        samples=[
            Sample(
                0, HOSTILE, fields={HOSTILE: HOSTILE}, before=HOSTILE, source=HOSTILE
            )
        ],
        samples_note=HOSTILE,
        metrics={HOSTILE: {HOSTILE: HOSTILE}},
        tables=[Table(HOSTILE, HOSTILE, pandas.DataFrame({HOSTILE: [HOSTILE]}))],
        pictures=[Picture(HOSTILE, b"\x89PNG")],
        runs=[Page(title=HOSTILE, closing=CLOSING, plots=[PLOT], warning=HOSTILE)],
    )
    assert "<img src=x" not in text
    assert "<script>window" not in text
    assert text.count("<script") == 2  # Its data, and its own.
    assert samples_of(text)[0]["fields"] == {HOSTILE: HOSTILE}
    sources = re.findall(r"""(?:src|href)=["']([^"']+)""", text)
    assert [source[:22] for source in sources] == ["data:image/png;base64,"]


def test_what_is_no_number_or_no_utf8_leaves_the_rest_readable(tmp_path: Path) -> None:
    text = written(
        tmp_path,
        closing=CLOSING,
        samples=[
            Sample(0, "fit", value=math.nan, violation=math.inf, price=-math.inf),
            Sample(
                1,
                "fit",
                value=0.0,
                violation=0.0,
                fields={"text": "half \ud83d and whole 😀"},
            ),
        ],
    )
    first, second = samples_of(text)
    assert first == {"index": 0, "constraint": "fit"}
    assert second["value"] == 0.0
    assert second["violation"] == 0.0
    assert second["fields"]["text"] == "half \ud83d and whole 😀"


def test_a_page_shows_the_closing_table(tmp_path: Path) -> None:
    text = written(tmp_path, closing=CLOSING)
    for shown in (
        "2 of 7",
        "1 of 3",
        "0.75",
        "on 2",
        "held out",
        "After 40 steps in 2 epochs",
    ):
        assert shown in text
    assert "held out" not in written(
        tmp_path,
        closing=Closing(
            1, None, (1.0, 0.5, None), [RequirementRow("a", "", 0, 1, 0, 0)]
        ),
    )


def test_a_curve_goes_on_over_a_step_without_a_value(tmp_path: Path) -> None:
    plot = Plot("worst", [1, 2, 3, 4, 5], {"worst": [1.0, 2.0, math.nan, 3.0, 2.0]})
    [path] = re.findall(
        r'<path class="line line0" d="([^"]*)"', written(tmp_path, plots=[plot])
    )
    assert len(re.findall("M", path)) == 1
    assert len(re.findall("L", path)) == 3
    nothing = Plot("none", [1, 2], {"none": [math.nan, math.inf]})
    assert "<svg" not in written(tmp_path, plots=[nothing])


@pytest.mark.parametrize(
    ("low", "high"),
    [(0.0, 1.0), (-3e-7, 2e-7), (5.0, 5.0), (0.0, 0.0), (-1e30, 1e30), (99, 101)],
)
def test_ticks_are_few_and_around_the_values(low: float, high: float) -> None:
    ticks = _ticks(low, high)
    assert 2 <= len(ticks) <= 7
    assert ticks[0] <= low <= high <= ticks[-1]
    assert ticks == sorted(set(ticks))


def test_without_its_package_a_run_ends_without_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert (
        write_if_possible(tmp_path / "report.html", lambda: Page(title="A run")) is None
    )
    assert "needs jinja2" in caplog.text
    assert not [*tmp_path.iterdir()]


def test_a_describe_that_fails_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def page() -> Page:
        raise KeyError("no such column")

    assert write_if_possible(tmp_path / "report.html", page) is None
    assert "no such column" in caplog.text
    assert not [*tmp_path.iterdir()]


def test_the_end_of_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert stored(tmp_path) == (None, [])
    store(tmp_path, CLOSING, [PLOT])
    closing, [plot] = stored(tmp_path)
    assert closing == CLOSING
    assert plot.steps == [1, 20, 40]
    assert (plot.title, plot.bound, plot.percent) == (PLOT.title, 0.05, False)
    first, gap, last = plot.lines[HOSTILE]
    assert (first, last) == (0.5, 0.125)
    assert math.isnan(gap)
    (tmp_path / "closing.json").write_text('{"closing": {"rows": 3}}')
    assert stored(tmp_path) == (None, [])


# What a sample is --------------------------------------------------------------------------------


def pixels_of(png: bytes) -> np.ndarray:
    """Decodes a PNG of 8 bits a channel whose rows have no filter, by its specification."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, place = {}, 8
    while place < len(png):
        [length] = struct.unpack(">I", png[place : place + 4])
        kind, data = png[place + 4 : place + 8], png[place + 8 : place + 8 + length]
        [check] = struct.unpack(">I", png[place + 8 + length : place + 12 + length])
        assert zlib.crc32(kind + data) == check
        chunks[kind], place = data, place + 12 + length
    width, height, depth, colour = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert depth == 8
    channels = {0: 1, 2: 3}[colour]
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, -1)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, channels)


def test_an_image_is_a_png_of_its_pixels() -> None:
    grey = torch.arange(20.0).view(4, 5)
    png = png_of(grey)
    assert png is not None
    shades = pixels_of(png)
    assert shades.shape == (4, 5, 1)
    assert shades[0, 0, 0] == 0
    assert shades[3, 4, 0] == 255
    assert shades[1, 0, 0] == round(5 / 19 * 255)
    colours = torch.randint(0, 256, (3, 6, 4), dtype=torch.uint8)
    png = png_of(colours)
    assert png is not None
    assert (pixels_of(png) == colours.permute(1, 2, 0).numpy()).all()
    assert png_of(torch.full((4, 4), math.nan)) is not None
    for other in (
        torch.zeros(64),
        torch.zeros(2, 2),
        torch.zeros(5, 8, 8),
        "text",
        [[1, 2]],
    ):
        assert png_of(other) is None


def test_a_row_shows_texts_numbers_and_one_image() -> None:
    row = {
        "image": torch.rand(8, 8),
        "label": torch.tensor(3),
        "x": torch.rand(64),
        "index": 5,
    }
    fields, image = fields_and_image(row | {"text": "a" * 5000, "score": 0.123456})
    assert image is not None
    assert fields["label"] == "3"
    assert fields["score"] == "0.1235"
    assert len(fields["text"]) < 5000
    assert set(fields) == {"label", "score", "text"}


def test_a_describe_of_the_index_alone_is_asked_for_training_samples() -> None:
    class Old:
        def describe(self, index: int) -> dict[str, Any]:
            return {"own": index}

    class New:
        def describe(self, index: int, dataset: str = "train") -> dict[str, Any]:
            return {"own": f"{dataset} {index}"}

    rows = [{"row": 7}]
    assert described(Old(), rows, 0, "train")[0] == {"own": "0"}
    assert described(Old(), rows, 0, "test")[0] == {"row": "7"}
    assert described(New(), rows, 0, "test")[0] == {"own": "test 0"}
    assert described(None, rows, 0, "test")[0] == {"row": "7"}
    assert described(None, None, 0, "test") == ({}, None)
