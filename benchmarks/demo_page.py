"""The end of ``make demo``: one page of what its three parts found, with their pictures.

    python -m benchmarks.demo_page results/demo [--quick]

Reads the folders digits, family and keep that the parts have written, and writes report.html.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Part:
    """A comparison whose table is made of its CSV file."""

    about: str
    columns: Mapping[str, str]  #: by heading the metric


WITH_METRICS = {
    "digits": Part(
        "A network learns digits that are turned around, and must not lose an upright one that the "
        "old network read rightly. The requirement is on training digits; held-out ones show how "
        "far it carries over.",
        {
            "lost, training": "train/kept/violated",
            "lost, held out": "test/kept/violated",
            "turned ones read, held out": "test/accuracy_rotated",
            "objective, held out": "test/objective",
        },
    ),
    "family": Part(
        "A network answers optimisation problems with linear constraints that it has not seen; "
        "before any correction. Gap: how far above the optimum, as a share of it; below 0 only by "
        "violating. Worst: the mean over the problems of their largest violation. Margin: trained "
        "with bounds that are 0.03 stricter.",
        {"gap": "test/gap", "worst": "test/worst", "violated": "test/beyond"},
    ),
}


def page_of(folder: Path, note: str = "") -> Page:
    """What the demo found.

    Args:
        folder: that of the demo, with a folder for each of its parts.
        note: stands above all else.
    """
    answers, rows = demo.results(folder / "keep")
    tables = [_shares(answers, rows), *_answers(demo.asked(answers))]
    for name, part in WITH_METRICS.items():
        tables.append(_table(folder / name, PARTS[name], part))
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


def _shares(of_method: dict[str, demo.Answers], rows: list[dict[str, str]]) -> Table:
    lines = []
    for name, shares in demo.shares_of(rows).items():
        cells = {column: f"{shares[column]:.2f}" for column in demo.SHARES}
        lines.append({"method": name, **cells})
    ours = of_method[demo.OURS]
    learnt, kept, held_out = (len(ours[kind]) for kind in demo.KINDS)
    return Table(
        LANGUAGE,
        f"It learns {learnt} facts about a library, and is to answer everything else as before: of "
        f"{kept} answers to keep each may move by a KL of at most {demo.budget():g} nats per token "
        f"to the model before; {held_out} others are held out. {demo.sentence_of(rows)} Shares; "
        "changed: another text, by a word or altogether; beyond: moved further than the budget.",
        pd.DataFrame(lines),
    )


def _table(folder: Path, title: str, part: Part) -> Table:
    rows = pd.read_csv(folder / "comparison.csv")
    cells = pd.DataFrame({"method": rows["method"]})
    for heading, metric in part.columns.items():
        values = rows[metric] if metric in rows else [math.nan] * len(rows)
        cells[heading] = [f"{value:.3g}" for value in values]
    return Table(title, part.about, cells)


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
