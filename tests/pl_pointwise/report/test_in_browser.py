"""The page in a headless Chromium: sorted, filtered, at two widths, and unharmed by texts."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pl_pointwise.report.page import Page, Sample, write_page
from pl_pointwise.report.plots import Plot
from pl_pointwise.report.samples import png_of
from tests.browser import CHROMIUM, Browser
from tests.pl_pointwise.report.test_page import CLOSING, HOSTILE

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

SHOWN = "[...document.querySelectorAll('#samples tbody tr')]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


def sample(index: int) -> Sample:
    """Violations fall with the index; every third is of another requirement."""
    violation = 5.0 - index / 100
    return Sample(
        index=index,
        constraint="other" if index % 3 == 0 else "fit",
        bound="≤ 1",
        value=1 + violation,
        violation=violation,
        price=None if index % 2 else float(index * 37 % 101),
        fields={"prompt": f"Question {index}: {HOSTILE}", "long": "word " * 100},
        image=png_of(torch.rand(8, 8)) if index < 3 else None,
        before="Paris",
        wanted="Lyon",
        after=HOSTILE,
        source=f"own.jsonl, line {index + 1}",
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    steps = list(range(1, 501))
    page = Page(
        title=f"A run of {HOSTILE}",
        facts={"method": HOSTILE},
        closing=CLOSING,
        plots=[
            Plot(
                "fit: worst", steps, {"worst": [1 / step for step in steps]}, bound=0.5
            )
        ],
        samples=[sample(index) for index in range(600)],
        runs=[Page(title=HOSTILE, closing=CLOSING)],
    )
    return write_page(tmp_path_factory.mktemp("page") / "report.html", page)


def indexes(browser: Browser) -> list[int]:
    """The samples that are shown, from the top."""
    heads = "[...document.querySelectorAll('#samples th')]"
    place = f"{heads}.findIndex(head => head.textContent === 'sample')"
    found = browser.run(
        f"(n => {SHOWN}.map(row => +row.cells[n].textContent))({place})"
    )
    return [int(index) for index in found]


def column(browser: Browser, label: str) -> str:
    """A selector of the button that sorts by a column."""
    place = browser.run(
        "[...document.querySelectorAll('#samples th')]"
        f".findIndex(t => t.textContent === {label!r}) + 1"
    )
    assert place > 0
    return f"#samples th:nth-child({place}) button"


def counted(browser: Browser) -> str:
    return str(browser.run("document.getElementById('shown').textContent"))


def test_hostile_texts_are_shown_and_never_run(browser: Browser, path: Path) -> None:
    browser.open(path)
    browser.run("document.querySelector('details').open = true")
    assert HOSTILE in browser.run(
        "document.querySelector('#samples tbody').textContent"
    )
    assert HOSTILE in browser.run("document.querySelector('h1').textContent")
    assert browser.run("typeof window.harmed") == "undefined"
    assert browser.run("document.querySelectorAll('img[src=x]').length") == 0
    assert browser.errors() == []
    asked = [
        address for address in browser.requests() if not address.startswith("data:")
    ]
    assert asked == [path.as_uri()]


def test_the_check_above_sees_a_script_that_runs(
    browser: Browser, tmp_path: Path
) -> None:
    bare = tmp_path / "bare.html"
    bare.write_text(f"<!doctype html><p>{HOSTILE}</p>")
    browser.open(bare)
    assert browser.run("window.harmed") == 1


def test_samples_are_sorted_by_mouse_and_by_key(browser: Browser, path: Path) -> None:
    browser.open(path)
    assert indexes(browser)[:3] == [0, 1, 2]
    browser.click(column(browser, "sample"))
    assert indexes(browser)[:3] == [599, 598, 597]
    assert (
        browser.run("document.querySelectorAll('th[aria-sort=descending]').length") == 1
    )
    browser.key("Enter")  # The button has the focus.
    assert indexes(browser)[:3] == [0, 1, 2]
    browser.click(column(browser, "price"))
    prices = {index: float(index * 37 % 101) for index in range(0, 600, 2)}
    assert indexes(browser)[:5] == sorted(prices, key=lambda i: (-prices[i], i))[:5]
    browser.key("Enter")  # What has no price is last in both orders.
    assert indexes(browser)[:5] == sorted(prices, key=lambda i: (prices[i], i))[:5]


def test_samples_are_filtered(browser: Browser, path: Path) -> None:
    browser.open(path)
    assert counted(browser) == "600 of 600"
    browser.click("#contains")
    browser.type("QUESTION 59")
    assert counted(browser) == "11 of 600"
    assert indexes(browser) == [59, *range(590, 600)]
    browser.run(
        "which.value = 'other'; which.dispatchEvent(new Event('change'))".replace(
            "which", "document.getElementById('which')"
        )
    )
    assert indexes(browser) == [591, 594, 597]
    browser.click("#only")
    assert counted(browser) == "0 of 600"  # Their violations are below 0.


def test_long_texts_unfold_and_a_curve_tells_its_values(
    browser: Browser, path: Path
) -> None:
    browser.open(path)
    assert browser.run("document.querySelectorAll('.long.open').length") == 0
    browser.click(".unfold")
    assert browser.run("document.querySelectorAll('.long.open').length") == 1
    assert (
        browser.run("document.querySelector('.unfold').getAttribute('aria-expanded')")
        == "true"
    )
    browser.point("svg[data-plot]", 0.99)
    assert (
        browser.run("document.querySelector('output').textContent") == "step 500: 0.002"
    )


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, False), (1280, True)])
def test_it_fits_a_desktop_and_a_phone(
    browser: Browser, path: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    browser.open(path, width, 800, dark)
    assert browser.run("document.documentElement.scrollWidth") == width
    sizes = "[...document.querySelectorAll('h1, .stack, #samples, svg')]"
    assert browser.run(
        f"{sizes}.every(e => e.getBoundingClientRect().right <= {width})"
    )
    taken = browser.screenshot(tmp_path / "seen.png").read_bytes()
    assert struct.unpack(">II", taken[16:24]) == (width, 800)
    channels = (
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    )
    assert (sum(browser.run(channels)) < 150) == dark


def test_ten_thousand_samples_open_at_once(browser: Browser, tmp_path: Path) -> None:
    samples = [sample(index) for index in range(10_000)]
    path = write_page(tmp_path / "many.html", Page(title="Many", samples=samples))
    seconds = browser.open(path)
    assert counted(browser) == "10,000 of 10,000"
    assert len(indexes(browser)) < 1000  # As far as one has scrolled.
    print(f"{path.stat().st_size / 1e6:.1f} MB open in {seconds:.2f} s")
    # A quarter of a second on an idle machine; the tests may share theirs.
    assert seconds < 3
