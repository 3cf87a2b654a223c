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
    loaders = loaders_by_name("val", trainer.val_dataloaders or [])
    held_out = {name: dataset_of(loader) for name, loader in loaders.items()}
    datasets = getattr(getattr(trainer, "datamodule", None), "datasets", None)
    if isinstance(datasets, Mapping):  # Those that no loader of this fit reads, too.
        for name in ("val", "test"):
            if name in datasets:
                held_out[name] = datasets[name]
    warn_of_shared_rows(task, train, held_out)


def warn_of_shared_rows(task: Task, train: Any, held_out: Mapping[str, Any]) -> None:
    """Says of each held-out data set how many of its rows are rows of the training set."""
    trainer = task.trainer
    by_data_module = getattr(
        getattr(trainer, "datamodule", None), "tells_of_shared_rows", False
    )
    if by_data_module or train is None:
        return
    # Then they are the training set, as is meant.
    if getattr(trainer, "overfit_batches", 0):
        return
    known: set[Any] | None = None
    for name, rows in held_out.items():
        if rows is None or not len(rows):
            continue
        if without_index(rows) is without_index(train):
            warn(
                task,
                f"The data set {name} is the training set itself: results on it flatter.",
            )
            continue
        if known is None:  # Read once, and only where there is something to compare.
            known = set(_contents_of(train) or ())
        contents = (_contents_of(rows) if known else None) or []
        shared = sum(content in known for content in contents)
        if shared:
            whole = len(contents) == len(rows) and len(train) <= READ
            least = "" if whole else "At least "
            warn(
                task,
                f"{least}{shared:,} of {len(contents):,} rows of the data set {name} that were "
                "read are rows of the training set too, so results on it flatter. Take them out "
                "of one of the two.",
            )


def _contents_of(rows: Any) -> list[Any] | None:
    """What tells rows apart, of some of them: their units, else digests of their content.

    None: rows differ when read again, or hold what is not known here.
    """
    units = units_of(rows)
    if units is not None:
        return list(units)
    rows = without_index(rows)
    started = monotonic()
    count = len(rows)
    number = min(count, READ)
    read = list[Any]()
    with isolate_rng(include_cuda=False):
        for n in range(number):
            row = rows[n * count // number]
            if isinstance(row, Mapping):
                row = {key: value for key, value in row.items() if key != "index"}
            read.append(row)
            if monotonic() - started > SECONDS:
                break
    return list(digests_of_rows(read) or ()) or None


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
