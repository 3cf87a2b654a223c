"""The page of a run, in a real browser: opened, sorted, filtered, and nothing in the data runs."""

from __future__ import annotations

import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pl_pointwise import Constraint, Pointwise
from pl_pointwise.cli import main
from pl_pointwise.report.closing import Closing, RequirementRow
from pl_pointwise.report.of_run import hardest_samples, page_of_fit
from pl_pointwise.report.page import Page, Plot, Sample, write_page
from pl_pointwise.report.samples import fields_and_image, png_of
from tests.browser import CHROMIUM, Browser
from tests.pl_pointwise.toy import Toy, ToyData, ToyRows, trainer

EVIL = '<script>window.ran = 1</script><img src=x onerror="window.ran = 1"></script>'


def page_with(samples: list[Sample]) -> Page:
    row = RequirementRow(EVIL, "≤ 0.1", 1, 4, 0.5, 0.3, 2, 3, 0.6, 0.4, multipliers=2, price=1.5)
    return Page(
        title=EVIL,
        facts={EVIL: EVIL},
        warning=EVIL,
        closing=Closing(10, 2, (1.0, 0.5, 0.6), [row], 8, [EVIL], [], [EVIL]),
        plots=[Plot(EVIL, [1, 5, 10], {EVIL: [1.0, math.nan, 0.5]}, bound=0.7)],
        samples=samples,
        metrics={EVIL: {EVIL: EVIL}},
        runs=[Page(title=EVIL, link="runs/a/report.html")],
    )


def samples_of(number: int) -> list[Sample]:
    return [
        Sample(
            index=index,
            constraint="keep" if index % 2 else "learn",
            bound="≤ 0.1",
            value=0.1 + index / 100,
            violation=index / 100 - 0.5,
            price=1.0 / (1 + index),
            fields={"prompt": f"question {index} {EVIL}", "answer": "a word " * 60},
            image=png_of(torch.arange(16.0).view(4, 4)) if index == 3 else None,
            before=EVIL,
            wanted=f"wanted {index}",
            after=None if index == 5 else f"now {index}",
            source=f"own.jsonl, line {index + 1}",
        )
        for index in range(number)
    ]


class Tags(HTMLParser):
    """The elements of a page, and what loads something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [v or "" for name, v in attrs if name in ("src", "srcset", "onerror")]
        self.loads += [v or "" for name, v in attrs if name == "href" and tag == "link"]


def test_texts_of_the_data_are_no_markup_and_nothing_is_loaded(tmp_path: Path) -> None:
    text = write_page(tmp_path / "report.html", page_with(samples_of(6))).read_text()
    found = Tags()
    found.feed(text)
    assert found.tags.count("script") == 2  # The samples, and what shows them.
    assert "img" not in found.tags
    assert not found.loads
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert json.loads(data)[0]["before"] == EVIL
    assert "http" not in re.sub(r'http-equiv="', "", text)


def test_numbers_that_are_none_leave_the_page_whole(tmp_path: Path) -> None:
    strange = Sample(0, "fit", "≤ 0", math.inf, math.nan, price=math.nan)
    page = Page(
        title="a run",
        plots=[Plot("no value", [1, 2], {"a": [math.nan, math.inf]}), Plot("none", [], {"a": []})],
        samples=[strange],
    )
    text = write_page(tmp_path / "report.html", page).read_text()
    assert "NaN" not in text
    assert "<svg" not in text
    assert "Where it ended" not in text


# In a browser ------------------------------------------------------------------------------------

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def browser() -> Any:
    with Browser() as opened:
        yield opened


def shown(browser: Any) -> list[str]:
    """The numbers of the samples in the table, in its order."""
    script = "[...document.querySelectorAll('#samples tbody tr')].map(r => r.cells[0].textContent)"
    return browser.run(script)


@in_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_is_opened_sorted_and_filtered(tmp_path: Path, browser: Any, width: int) -> None:
    path = write_page(tmp_path / "report.html", page_with(samples_of(40)))
    browser.open(path, width)
    assert browser.errors() == []
    assert [url for url in browser.requests() if not url.startswith(("file:", "data:"))] == []
    assert browser.run("window.ran") is None
    assert browser.run("document.querySelector('h1').textContent") == EVIL
    assert shown(browser) == [str(n) for n in range(40)]  # In the order given.
    # No wider than the window: tables scroll in themselves.
    assert browser.run("document.documentElement.scrollWidth") <= width

    browser.run("document.getElementById('only').click()")
    assert shown(browser) == []  # Of forty none has a violation above 0.
    browser.run("document.getElementById('only').click()")
    if width > 640:  # Its head is no part of the narrow form.
        browser.click("#samples th:nth-child(5) button")
        assert shown(browser)[:2] == ["39", "38"]
        browser.key("Enter")  # The button has the focus.
        assert shown(browser)[:2] == ["0", "1"]
    browser.run("document.getElementById('which').value = 'keep'")
    browser.run("document.getElementById('which').dispatchEvent(new Event('change'))")
    assert all(int(n) % 2 for n in shown(browser))
    browser.click("#contains")
    browser.type("question 7 ")
    assert shown(browser) == ["7"]
    assert browser.run("document.getElementById('shown').textContent") == "1 of 40"
    assert browser.run("window.ran") is None
    picture = browser.screenshot(tmp_path / "page.png")
    assert picture.stat().st_size > 10_000


@in_browser
def test_ten_thousand_samples_open_at_once(tmp_path: Path, browser: Any) -> None:
    path = write_page(tmp_path / "report.html", page_with(samples_of(10_000)))
    seconds = min(browser.open(path) for _ in range(2))
    assert seconds < 3  # 0.3 on an idle machine; tests run beside others.
    assert 0 < len(shown(browser)) <= 400
    assert browser.run("document.getElementById('shown').textContent") == "10,000 of 10,000"


@in_browser
def test_the_pointer_shows_a_value(tmp_path: Path, browser: Any) -> None:
    browser.open(write_page(tmp_path / "report.html", page_with(samples_of(2))))
    browser.point("svg[data-plot]", 0.97)
    assert browser.run("document.querySelector('figcaption output').textContent") == "step 10: 0.5"


# What a page is made of --------------------------------------------------------------------------


def test_the_hardest_samples_of_each_requirement_come_in_turn() -> None:
    constraints = {"fit": Constraint(at_most=0.1), "pair": Constraint(at_most=-0.5)}
    module = Toy(Pointwise(), constraints)
    runner = trainer(max_epochs=3)
    runner.fit(module, ToyData(ToyRows(9), batch_size=4))
    samples = hardest_samples(module, runner)
    assert [sample.constraint for sample in samples[:4]] == ["fit", "pair", "fit", "pair"]
    for name, constraint in constraints.items():
        own = [sample for sample in samples if sample.constraint == name]
        assert len(own) == 9
        violations = [sample.violation for sample in own]
        assert violations == sorted(violations, reverse=True)
        last = module._lagrangian.history.last[name]
        assert own[0].violation == pytest.approx(float(last.max()))
        assert own[0].value == pytest.approx(constraint.value_at(float(last.max())))
        row = module.prices[name][own[0].index]
        assert own[0].price == pytest.approx(float(row.mean()))
    page = page_of_fit(module, runner)
    assert [plot.title for plot in page.plots][:2] == ["objective", "fit: samples violated"]


@pytest.mark.parametrize(
    "pixels",
    [
        torch.rand(8, 6),
        (torch.rand(1, 5, 7) * 255).to(torch.uint8),
        torch.rand(3, 9, 4),
        np.arange(48).reshape(6, 8),
    ],
    ids=lambda value: str(tuple(value.shape)),
)
def test_an_image_is_written_as_a_png(pixels: Any) -> None:
    image = pytest.importorskip("matplotlib.image")
    written = png_of(pixels)
    assert written is not None
    found = image.imread(io.BytesIO(written), format="png")
    values = torch.as_tensor(pixels).double()
    values = values if values.dim() == 2 else values.squeeze(0) if len(values) == 1 else values
    if values.dim() == 3:
        values = values.permute(1, 2, 0)
    else:
        values = (values - values.min()) / (values.max() - values.min())
    np.testing.assert_allclose(found[..., :3] if found.ndim == 3 else found, values, atol=0.003)


def test_what_is_no_image_is_told_as_a_number_or_not_at_all() -> None:
    row = {
        "text": "a text",
        "number": 0.123456,
        "vector": torch.tensor([1.0, 2.0]),
        "long": torch.zeros(100),
        "table": torch.zeros(2, 2),
        "index": 7,
        "picture": torch.rand(4, 4),
    }
    fields, image = fields_and_image(row)
    assert fields == {"text": "a text", "number": "0.1235", "vector": "1, 2"}
    assert image is not None
    assert fields_and_image({"text": "x" * 9999})[0]["text"].endswith(" …")


def test_fit_and_test_write_a_page_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    line = ["--model", "tests.pl_pointwise.line_task.LineModule", "--trainer.accelerator", "cpu"]
    line += ["--data", "tests.pl_pointwise.line_task.LineData"]
    main(["fit", *line, "--trainer.max_epochs", "2"])
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    main(["test", *line, "--ckpt_path", str(checkpoint)])
    shown_paths = re.findall(r"open (\S+report\S*\.html)", capsys.readouterr().out)
    assert len(shown_paths) == 2
    fitted, tested = (Path(path).read_text() for path in shown_paths)
    assert "Where it ended" in fitted
    assert "fit ≤ 0.1" in fitted
    assert "Measured" in tested
    assert "fit/violated" in tested


class Unreadable(ToyData):
    def describe(self, index: int) -> dict[str, Any]:
        raise OSError("the disk with the texts is away")


def test_a_row_that_cannot_be_read_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "pl_pointwise.report.of_run.hardest_samples",
        lambda *_: Unreadable(ToyRows(2)).describe(0),
    )
    line = ["--model", "tests.pl_pointwise.line_task.LineModule", "--trainer.accelerator", "cpu"]
    main(
        [
            "fit",
            *line,
            "--data",
            "tests.pl_pointwise.line_task.LineData",
            "--trainer.max_epochs",
            "1",
        ]
    )
    assert "report.html is not written: OSError: the disk with the texts is away" in caplog.text
    assert list(tmp_path.rglob("*.ckpt"))
