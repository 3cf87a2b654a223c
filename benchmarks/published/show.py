"""The published rows beside ours, and a dot for every instance."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from .integer import IntegerTable
from .table import Table
from .unicycle import LoopTable

AnyTable = Table | IntegerTable | LoopTable


def summarise(table: AnyTable, runs: pd.DataFrame) -> str:
    """Means over the seeds as Markdown, with the published rows and their source."""
    own = runs[runs["table"] == table.name]
    columns = [c for c in dict.fromkeys(own["column"]) if c != "ms an answer"]
    head = ["method", "correction", "seeds", *columns]
    lines = [f"**{table.name}**: {table.source}", "", f"| {' | '.join(head)} |"]
    lines.append("|---" * len(head) + "|")
    for method, values in table.published.items():
        cells = [f"{values[c]:g}" if c in values else "" for c in columns]
        lines.append(f"| {method}, published | | | {' | '.join(cells)} |")
    for (method, correction), rows in own.groupby(["method", "correction"], sort=False):
        of = rows.pivot(index="seed", columns="column", values="value")
        cells = [f"{of[c].mean():.4g}" for c in columns]
        lines.append(f"| {method} | {correction} | {len(of)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


LABELS = {"none": "as it is", "newton": "corrected", "projected": "projected"}


def page(table: AnyTable, runs: pd.DataFrame) -> str:
    """The table as docs/family.md has it: their columns, and the file that a row is from."""
    own = runs[(runs["table"] == table.name) & runs["column"].isin(table.shown)]
    ours = own["method"].str.startswith("Pointwise(")
    own = pd.concat([own[ours], own[~ours]])
    lines = [f"| {table.name} | {' | '.join(table.shown)} | seeds | from |"]
    lines.append("|---" * (len(table.shown) + 3) + "|")
    for (method, correction), rows in own.groupby(["method", "correction"], sort=False):
        if correction == "none" and "projected" not in set(own["correction"]):
            continue
        of = rows.groupby("column")["value"].mean()
        # What is above 1 may differ from a published row in its fifth digit.
        cells = [f"{of[c]:.{5 if abs(of[c]) >= 1 else 3}g}" for c in table.shown]
        name = f"`{method}`" if method.startswith("Pointwise(") else method
        label = f"{name}, {LABELS[correction]}"
        seeds = str(rows["seed"].nunique())
        lines.append(f"| {' | '.join([label, *cells, seeds])} | published.csv |")
    for method, values in table.published.items():
        cells = [f"{values[c]:g}" if c in values else "" for c in table.shown]
        lines.append(f"| {method}, published | {' | '.join(cells)} | | {table.file} |")
    return "\n".join(lines).replace("| -", "| −") + "\n"


def write(tables: Mapping[str, AnyTable], output: Path, path: Path) -> None:
    """The tables of a page anew: each from its head to the next empty line."""
    runs, text = pd.read_csv(output), path.read_text(encoding="utf-8")
    for table in tables.values():
        before, head, rest = text.partition(f"| {table.name} | {table.shown[0]} |")
        if head:
            after = rest.partition("\n\n")[2]
            text = f"{before}{page(table, runs)}\n{after}"
    path.write_text(text, encoding="utf-8")


COLOURS = {
    "a weight a constraint": "#009E73",
    "hinge 10": "#E69F00",
    "hinge 30": "#D55E00",
    "hinge 100": "#CC79A7",
    "Pointwise()": "#0072B2",
}


def draw(tables: Mapping[str, AnyTable], output: Path, path: Path) -> None:
    """Of each unseen instance the gap after the correction against the violation before it."""
    from matplotlib.figure import Figure

    dots = pd.read_csv(output.with_name(f"{output.stem}-instances.csv"))
    names = [name for name in tables if name.startswith("SnareNet")]
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for panel, name in zip(panels, names, strict=True):
        own = dots[dots["table"] == name]
        panel.loglog()
        for method, colour in COLOURS.items():
            of = own[own["method"] == method]
            if of.empty:
                continue
            # An instance without a violation stands at the left edge.
            panel.plot(
                of["worst before"].clip(lower=1e-4),
                of["gap"].clip(lower=1e-5),
                ".",
                color=colour,
                markersize=3,
                alpha=0.5,
                label=method,
            )
        published = tables[name].published["SnareNet"]
        for column, style in (("gap, geometric mean", "-"), ("gap, largest", ":")):
            panel.axhline(published[column], color="black", linestyle=style, lw=1)
            panel.annotate(
                f"SnareNet, {column.removeprefix('gap, ')}",
                (0.02, published[column]),
                xycoords=("axes fraction", "data"),
                xytext=(0, 2),
                textcoords="offset points",
                fontsize="small",
            )
        panel.set_title(name.removeprefix("SnareNet, "))
        panel.set_xlabel("worst violation before the correction")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("distance to the optimum after it, absolute")
    found = dict[str, Any]()
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    figure.legend(
        list(found.values()),
        list(found),
        loc="outside lower center",
        ncols=5,
        frameon=False,
        fontsize="small",
        markerscale=4,
    )
    figure.savefig(path, dpi=150)
