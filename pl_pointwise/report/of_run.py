"""The page of a fit: its closing table, its curves, its hardest samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from ..task import Task, history_of
from .page import Page, Sample, write_if_possible
from .plots import plots_of
from .samples import described, source_of, without_source

SAMPLES = 1000
"""The hardest ones that a page shows."""


def write_fit_page(module: Task, trainer: Trainer, path: Path) -> Path | None:
    """Writes the page of the module's last fit, by one process; None where that is not possible."""
    return write_if_possible(path, lambda: page_of_fit(module, trainer))


def page_of_fit(module: Task, trainer: Trainer) -> Page:
    """What is known of the last fit of a module."""
    history = history_of(module)
    closing = module.closing
    assert closing is not None
    optimizer = trainer.optimizers[0]
    rates = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
    methods = dict.fromkeys(map(repr, module.formulations.values()))
    facts = {
        "method": ", ".join(methods) or "the objective alone",
        "training samples": f"{history.samples:,}" if history.samples else "a stream",
        "learning rate": f"{max(rates):g}, {type(optimizer).__name__}",
        "written": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "pl-pointwise": version("pl-pointwise"),
    }
    with isolate_rng():  # Reading a row may draw.
        samples = hardest_samples(module, trainer)
    several = len([row for row in closing.rows if row.of]) > 1
    note = "By the violation at a sample's last visit"
    note += ", in the unit of each requirement's bound." if several else "."
    return Page(
        title=f"{type(module).__name__.removesuffix('Module')}: a fit",
        facts=facts,
        closing=closing,
        plots=plots_of(history.curves(), closing.rows, history.constraints),
        samples=samples,
        samples_note=note,
    )


def hardest_samples(
    module: Task, trainer: Trainer, count: int = SAMPLES
) -> list[Sample]:
    """The samples with the largest violations, of all requirements; none of a stream.

    Of several requirements each brings its hardest in turn, as their units differ.
    """
    history = history_of(module)
    if not history.samples:
        return []
    ranked = {name: ranked_by(worst) for name, worst in history.last.items()}
    places = in_turn(ranked)
    data: Any = getattr(trainer, "datamodule", None)
    rows: Any = getattr(trainer.train_dataloader, "dataset", None)
    seen: dict[int, Any] = {}  # A sample may be under several requirements.
    samples = []
    prices = dict(history.prices)
    for name, index in places[:count]:
        constraint = history.constraints[name]
        violation = float(history.last[name][index])
        if index not in seen:
            seen[index] = described(data, rows, index, "train")
        fields, image = seen[index]
        samples.append(
            Sample(
                index=index,
                constraint=name,
                bound=constraint.in_words(),
                value=constraint.value_at(violation)
                if math.isfinite(violation)
                else None,
                violation=violation,
                price=price_of(prices.get(name), index, constraint.sides),
                fields=without_source(fields),
                image=image,
                source=source_of(fields),
            )
        )
    return samples


def price_of(table: Tensor | None, index: int, sides: int) -> float | None:
    """A sample's price: the mean over its values, of an interval the sum of both sides."""
    if table is None or table.dim() != 2 or index >= len(table):
        return None
    price = float(table[index].abs().mean()) * sides
    return price if math.isfinite(price) else None


def ranked_by(worst: Tensor) -> list[int]:
    """Rows of (n,), the largest violation first, without those that are NaN."""
    order = worst.nan_to_num(nan=-math.inf).argsort(descending=True, stable=True)
    known = ~worst.isnan()
    return [int(index) for index in order[known[order]]]


def in_turn(ranked: Mapping[str, Sequence[int]]) -> list[tuple[str, int]]:
    """(requirement, row): the first of every requirement, then the second, and so on."""
    places = []
    for name, order in ranked.items():
        for rank, row in enumerate(order):
            places.append((rank, name, row))
    # Stable: of a rank in the order of requirements.
    places.sort(key=lambda place: place[0])
    return [(name, row) for _, name, row in places]
