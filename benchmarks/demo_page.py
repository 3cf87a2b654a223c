"""The end of ``make demo``: one page of what its three parts found, with their pictures.

    python -m benchmarks.demo_page results/demo [--quick]

Reads the folders digits, family and keep that the parts have written, and writes report.html.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from pl_pointwise.compare.page import CAPTIONS
from pl_pointwise.printing import Table
from pl_pointwise.report.page import FILE, Page, Picture, write_page

from . import demo

LANGUAGE = "A language model"
PARTS = {
    "keep": LANGUAGE,
    "digits": "Digits",
    "family": "Optimisation problems",
}
"""The folders, in the order of the page."""
ABOUT = {
    "digits": "A network learns digits that are turned around, and must not lose a prediction that "
    "the old model had right. Violated: lost, of the held-out digits.",
    "family": "A network solves problems with linear constraints that it has not seen. Gap: to the "
    "optimum, as a share. A sample is violated where any inequality is.",
}


def page_of(folder: Path, note: str = "") -> Page:
    """What the demo found.

    Args:
        folder: that of the demo, with a folder for each of its parts.
        note: stands above all else.
    """
    answers, rows = demo.results(folder / "keep")
    tables = [_shares(rows), *_answers(demo.asked(answers))]
    for part in ABOUT:
        tables.append(_first_table(folder / part, PARTS[part], ABOUT[part]))
    pictures = []
    for part, name in PARTS.items():
        for file, caption in CAPTIONS.items():
            drawn = folder / part / file
            if drawn.is_file():
                pictures.append(Picture(f"{name}. {caption}", drawn.read_bytes()))
    return Page(
        title="What the demo found",
        tables=tables,
        pictures=pictures,
        warning=note,
        runs=[
            Page(title=f"{name}: all its runs", link=f"{part}/{FILE}")
            for part, name in PARTS.items()
        ],
    )


def _answers(prompts: list[demo.Asked]) -> list[Table]:
    """A table for each kind of prompt."""
    tables = []
    for kind in demo.KINDS:
        lines = []
        for each in prompts:
            if each.kind == kind:
                line = {"prompt": each.prompt, "wanted": each.wanted}
                line[demo.BEFORE] = each.before
                for name, said in each.after.items():
                    line[name] = demo.marked(each, *said)
                lines.append(line)
        cells = pd.DataFrame(lines)
        if not cells["wanted"].any():
            cells = cells.drop(columns="wanted")
        note = f"The first {len(lines)} of the file."
        tables.append(Table(f"{LANGUAGE}: {kind}", note, cells))
    return tables


def _shares(rows: list[dict[str, str]]) -> Table:
    lines = []
    for name, found in demo.shares_of(rows).items():
        shares = {column: f"{found[column]:.2f}" for column in demo.SHARES}
        lines.append({"method": name, **shares})
    return Table(
        LANGUAGE,
        "It learns 24 facts about a library, and is to answer everything else as before. "
        f"{demo.sentence_of(rows)} Shares of all records:",
        pd.DataFrame(lines),
    )


def _first_table(folder: Path, name: str, about: str) -> Table:
    """The results of a comparison, which comparison.md begins with."""
    lines = list[list[str]]()
    for line in (folder / "comparison.md").read_text("utf-8").splitlines():
        if line.startswith("| "):
            lines.append([cell.strip() for cell in line.strip("|").split("|")])
        elif lines:
            break
    # Below the head is a line of dashes.
    cells = pd.DataFrame(lines[2:], columns=lines[0])
    return Table(name, about, cells)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--quick", action="store_true", help="says that it was too short"
    )
    given = parser.parse_args(words)
    note = demo.QUICK if given.quick else ""
    path = write_page(given.folder / FILE, page_of(given.folder, note))
    print(f"\nAll of the demo on one page: open {path}")


if __name__ == "__main__":
    main()
