"""What the rows of a data set tell before training: held-out rows that are trained on, lost fields.

A language task's data module compares prompts itself, and says so by ``tells_of_shared_rows``.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any

from lightning.pytorch.utilities.seed import isolate_rng

from ..data import IndexedDataset, dataset_of, units_of, without_index
from ..data.fingerprints import digests_of_rows
from ..evaluation import loaders_by_name
from ..task import Task, warn

READ = 1024
"""The most rows of a data set that are read, evenly spread over it."""
SECONDS = 3.0
"""So long at most: rows may be images on a slow disk."""


def warn_of_data(task: Task, train: Any) -> None:
    """Says which held-out rows stand in the training set too, and of a field "index" of its own."""
    trainer = task.trainer
    if train is None or not trainer.is_global_zero:
        return
    warn_of_own_index(task, train)
    found = loaders_by_name("val", trainer.val_dataloaders or [])
    held_out = {name: dataset_of(loader) for name, loader in found.items()}
    of_data = getattr(getattr(trainer, "datamodule", None), "datasets", None)
    if isinstance(of_data, Mapping):
        held_out |= {name: of_data[name] for name in ("val", "test") if name in of_data}
    warn_of_shared_rows(task, train, held_out)


def warn_of_shared_rows(task: Task, train: Any, held_out: Mapping[str, Any]) -> None:
    """Says of each held-out data set how many of its rows are rows of the training set."""
    trainer = task.trainer
    told = getattr(getattr(trainer, "datamodule", None), "tells_of_shared_rows", False)
    if told or getattr(trainer, "overfit_batches", 0) or train is None:
        return
    known: set[Any] | None = None
    for name, rows in held_out.items():
        if rows is None or not len(rows):
            continue
        if without_index(rows) is without_index(train):
            warn(task, f"The data set {name} is the training set itself: results on it flatter.")
            continue
        known = set(_contents_of(train) or ()) if known is None else known
        contents = _contents_of(rows) if known else None
        shared = [place for place, each in enumerate(contents or ()) if each in known]
        if contents and shared:
            whole = len(contents) == len(rows) and len(train) <= READ
            least = "" if whole else "At least "
            some = f"{least}{len(shared):,} of {len(contents):,} rows"
            warn(
                task,
                f"{some} of the data set {name} that were read are rows of the training set "
                "too, so results on it flatter. Take them out of one of the two.",
            )


def _contents_of(rows: Any) -> list[Any] | None:
    """What tells rows apart, of some of them: their units, else digests of their content.

    None: rows differ when read again, or hold what is not known here.
    """
    units = units_of(rows)
    if units is not None:
        return list(units)
    rows, started = without_index(rows), monotonic()
    count = len(rows)
    places = range(count) if count <= READ else [n * count // READ for n in range(READ)]
    taken = list[Any]()
    with isolate_rng(include_cuda=False):
        for place in places:
            row = rows[place]
            if isinstance(row, Mapping):
                row = {key: value for key, value in row.items() if key != "index"}
            taken.append(row)
            if monotonic() - started > SECONDS:
                break
    return list(digests_of_rows(taken) or ()) or None


def warn_of_own_index(task: Task, train: Any) -> None:
    """Says of a field "index" of the rows' own, which the position in the data set replaces."""
    rows = train.rows if isinstance(train, IndexedDataset) else None
    if rows is None or isinstance(rows, IndexedDataset):
        return
    with isolate_rng(include_cuda=False):
        for place in range(min(len(rows), 16)):
            row = rows[place]
            if not isinstance(row, Mapping) or "index" not in row:
                return
            try:
                same = bool(int(row["index"]) == place)
            except (TypeError, ValueError):
                same = False
            if not same:
                warn(
                    task,
                    f'Row {place} of the training set has a field "index" of its own '
                    f"({row['index']!r}), which its position, {place}, replaces in every batch. "
                    "Give it another name if the task reads it.",
                )
                return
