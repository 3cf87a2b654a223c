"""Samples with ``index``, their position in the data set, and loading that resumes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from .errors import DataError
from .fingerprints import fingerprint_of_content
from .lagrangian.terms import PADDING, group_numbers
from .training.sampler import Drawing
from .training.sampler import PointwiseSampler as PointwiseSampler  # Where users look for it.


@dataclass(frozen=True)
class Split:
    """A split of the data.

    Attributes:
        key: its name in options and in the log.
        role: what it is for. Settings and methods are chosen by the selection split; the
            certification split is used once, for the model that was chosen.
        title: what people read in tables and plots.
    """

    key: str
    role: str
    title: str


TRAIN = Split("train", "training", "training")
VAL = Split("val", "selection", "selection")
TEST = Split("test", "certification", "held-out")

SPLITS = {split.key: split for split in (TRAIN, VAL, TEST)}
"""Any other data set stands besides the splits."""


def title_of(dataset: str) -> str:
    """Returns what people read for a data set: a split's title, else its own name."""
    return SPLITS[dataset].title if dataset in SPLITS else dataset


class Rows(Protocol):
    """A map-style data set of dict rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> Any: ...


class IndexedDataset(Dataset[dict[str, Any]]):
    """Adds ``index`` to the rows of a map-style data set.

    Position i ≥ 0 gives ``{**row, "index": i}``. Position −1−i, which :class:`PointwiseSampler`
    hands out as padding, gives row i with index −1.

    Args:
        rows: a map-style data set. Wrap a Subset or ConcatDataset as a whole.
        fields: names of the entries of rows that are tuples or tensors, such as ``("x", "y")``.
        groups: (N,), the number of each row's group, from 0: see :class:`PointwiseDataModule`.
    """

    def __init__(
        self,
        rows: Rows,
        fields: Sequence[str] | None = None,
        groups: Sequence[int] | Tensor | None = None,
    ) -> None:
        self.rows, self.groups = rows, groups
        self.fields = (fields,) if isinstance(fields, str) else fields

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: int | Drawing) -> dict[str, Any]:
        if isinstance(position, Drawing):
            position = position.start()
        if position >= 0:
            return {**self._named(self.rows[int(position)]), "index": int(position)}
        return {**self._named(self.rows[-1 - position]), "index": PADDING}

    def _named(self, row: Any) -> Mapping[str, Any]:
        if hasattr(row, "_asdict"):
            row = row._asdict()
        if isinstance(row, Mapping):
            return row
        entries = row if isinstance(row, (tuple, list)) else (row,)
        if self.fields is None or len(self.fields) != len(entries):
            names = ", ".join(f'"{name}"' for name in ("x", "y", "z", "…")[: len(entries)])
            raise DataError(
                f"Rows of {type(self.rows).__name__} are {type(row).__name__}s of {len(entries)} "
                f"without names: IndexedDataset(rows, fields=[{names}])."
            )
        return dict(zip(self.fields, entries, strict=True))


class ResumableDataLoader(DataLoader[Any]):
    """A DataLoader over a :class:`PointwiseSampler` that continues in mid-epoch, with workers too.

    Its state: the sampler's seed and epoch, batches handed out, and samples a batch over all ranks.
    ``dataset``, ``batch_size``, ``collate_fn`` and ``num_workers`` are as DataLoader's.
    """

    sampler: PointwiseSampler

    def __init__(
        self,
        dataset: IndexedDataset,
        sampler: PointwiseSampler,
        batch_size: int,
        collate_fn: Callable[[list[dict[str, Any]]], Any],
        num_workers: int = 0,
    ) -> None:
        super().__init__(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            collate_fn=collate_fn,
            num_workers=num_workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=num_workers > 0,
            # Its own generator: starting an epoch must not draw from the global random state.
            generator=torch.Generator().manual_seed(sampler.seed),
        )
        sampler.draws_by_sample = num_workers > 0
        self.position = 0  # Batches handed out in the current epoch.
        self._resume_at: Mapping[str, int] | None = None

    @property
    def _global_batch_size(self) -> int:
        return (self.batch_size or 1) * self.sampler.num_replicas

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator body runs at the first batch, after Lightning has set the sampler's epoch,
        # which is one too far after a stop in mid-epoch by max_steps.
        resumed, self._resume_at = self._resume_at, None
        self.position = resumed["position"] if resumed else 0
        if resumed and self.position:
            if resumed["global_batch_size"] != self._global_batch_size:
                raise DataError(
                    f"This checkpoint stopped after {self.position} batches of an epoch, of "
                    f"{resumed['global_batch_size']} samples over all ranks; now a batch has "
                    f"{self._global_batch_size}. Set the same."
                )
            self.sampler.set_epoch(resumed["epoch"])
        self.sampler.skip = self.position * (self.batch_size or 1)
        for batch in super().__iter__():
            self.position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands; a finished epoch is the start of the next."""
        finished = self.position >= len(self)
        return {
            "seed": self.sampler.seed,
            "epoch": self.sampler.epoch + finished,
            "position": 0 if finished else self.position,
            "global_batch_size": self._global_batch_size,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at ``state`` in the next iteration; at the start of an epoch, in that epoch."""
        self.sampler.seed = state["seed"]
        self._resume_at = state


class PointwiseDataModule(LightningDataModule):
    """Indexed, resumable, rank-aware loaders around a task's data sets.

    A subclass fills ``self.datasets`` in ``setup`` with map-style data sets of dict rows under
    "train", "val", "test" and "predict", and overrides :meth:`collate` where batches are more than
    stacked rows. ``test`` is run on "test" and "train".

    What a data set may say of its N samples, by attributes; none is required:

    - ``groups``, numbers from 0: samples of a group share a multiplier, which follows the mean of
      their violations in a step. Rows without attributes: ``IndexedDataset(rows, groups=…)``.
    - ``strata``, numbers: the kind of each; the training set's are spread evenly over the batches.
    - ``categories``, texts: the kind of each by its name, "" if unknown, for requirements.
    - ``units``, texts: what samples share, as their prompt; without it, the whole row. Samples of
      one unit count once in a certificate, and no unit may stand in two splits.

    Args:
        batch_size: samples per rank in one optimisation step; less than 1 is a ValueError.
        eval_batch_size: samples per rank and evaluation batch; None takes ``batch_size``.
        num_workers: loader processes.
        seed: of the order of training samples, together with ``seed_everything``'s.

    Raises:
        DataError: of a loader: its data set is empty or was not filled.

    >>> data = PointwiseDataModule(batch_size=2)
    >>> data.datasets["train"] = [{"x": 0.5}, {"x": 1.5}, {"x": 2.5}]
    >>> next(iter(data.train_dataloader()))["index"].shape  # each row has its position
    torch.Size([2])
    """

    def __init__(
        self,
        *,
        batch_size: int = 8,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, size in (("batch_size", batch_size), ("eval_batch_size", eval_batch_size)):
            if size is not None and not (isinstance(size, Integral) and size >= 1):
                raise ValueError(f"{name}={size!r}: give a whole number, at least 1 sample.")
        self.batch_size = batch_size
        self.eval_batch_size = batch_size if eval_batch_size is None else eval_batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.datasets: dict[str, Rows] = {}

    def collate(self, rows: list[dict[str, Any]]) -> Any:
        """A batch with ``batch["index"]``, (B,), from rows that have it; here torch's default."""
        return torch.utils.data.default_collate(rows)

    def describe(self, index: int, dataset: str = "train") -> dict[str, Any]:
        """Sample ``index`` for people to look at, by field: texts, numbers, short vectors, images.

        Here the row; override it where a row holds tokens instead of texts. An override that takes
        the index alone is asked for training samples. "record" is where a sample is from, such as
        its file and line; an image is (H, W), (1, H, W) or (3, H, W).
        """
        row: dict[str, Any] = self.datasets[dataset][index]
        return row

    def not_trained_on(self) -> list[str]:
        """What of the training data is not trained on, and why: one plain sentence each.

        The end of a fit says them. Known once ``setup`` has run; [] where all is trained on.
        """
        return []

    def shared_option(self, name: str, own: Any) -> Any:
        """An option that module and data must agree on, else DataError; None takes the module's."""
        module = getattr(self.trainer, "lightning_module", None)
        theirs = getattr(module, name, None)
        if own is not None and hasattr(module, name) and own != theirs:
            raise DataError(
                f"{name}: {type(module).__name__} has {theirs!r}, {type(self).__name__} {own!r}. "
                "Give it to the module alone."
            )
        return theirs if own is None else own

    def train_dataloader(self) -> ResumableDataLoader:
        return self._loader("train", training=True)

    def val_dataloader(self) -> ResumableDataLoader | list[Any]:
        validates = self.trainer is not None and self.trainer.state.fn == TrainerFn.VALIDATING
        if "val" in self.datasets or validates:
            return self._loader("val")
        # Lightning would warn; that nothing is held out is meant.
        warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")
        return []

    def test_dataloader(self) -> dict[str, ResumableDataLoader]:
        names = [name for name in ("test", "train") if name in self.datasets] or ["test"]
        return {name: self._loader(name) for name in names}

    def predict_dataloader(self) -> DataLoader[Any]:
        return self._loader("predict")

    def _require_rows(self, name: str) -> None:
        """Refuses a data set that is not there, is empty, or has no positions."""
        start = f"{type(self).__name__}: the data set {name!r}"
        problem = _describe_rows(self.datasets[name]) if name in self.datasets else ""
        if problem:
            raise DataError(f"{start} {problem}. It is self.datasets[{name!r}], of setup().")
        if name not in self.datasets:
            raise DataError(
                f"{start} is not among {[*self.datasets]}. Fill self.datasets[{name!r}] in setup() "
                "with rows that have positions."
            )

    def _loader(self, name: str, training: bool = False) -> Any:
        self._require_rows(name)
        dataset, trainer = IndexedDataset(self.datasets[name]), self.trainer
        size = self.batch_size if training else self.eval_batch_size
        if name == "predict" or getattr(trainer, "overfit_batches", False):
            # Lightning puts samplers of its own into these, which only a plain loader lets it do.
            return DataLoader(
                dataset,
                batch_size=size,  # Named: Lightning repeats the arguments with its own added.
                collate_fn=self.collate,
                num_workers=self.num_workers,
            )
        sampler = PointwiseSampler(
            dataset,
            num_replicas=trainer.world_size if trainer else 1,
            rank=trainer.global_rank if trainer else 0,
            shuffle=training,
            seed=self.seed + int(os.environ.get("PL_GLOBAL_SEED", 0)),
            strata=getattr(self.datasets[name], "strata", None),
        )
        return ResumableDataLoader(dataset, sampler, size, self.collate, self.num_workers)


def _describe_rows(rows: Any) -> str:
    """What is wrong with rows that no loader can be made of; "" for nothing."""
    if not has_positions(rows):
        kind = type(rows).__name__
        return f"is a {kind}, whose rows have no positions: give a list, or rows with len() and [i]"
    return "" if len(rows) else "is empty: give it at least one row"


def dataset_of(loader: Any) -> Any:
    """The data set behind a loader; None where there is none with positions."""
    dataset: Any = getattr(loader, "dataset", None)
    return dataset if has_positions(dataset) else None


def has_positions(rows: Any) -> bool:
    """Whether it is a map-style data set with a length; a stream may have both and no rows."""
    map_style = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
    return map_style and not isinstance(rows, IterableDataset)


def fingerprint(rows: Rows) -> str:
    """A digest that tells data sets, and orders of one data set, apart; draws nothing.

    The data set's own text ``fingerprint``, else a digest of its length and the content of rows:
    of all up to 1,024, else of 64 spread evenly. If rows differ when read again, the length alone.
    """
    rows = without_index(rows)
    own = getattr(rows, "fingerprint", None)
    return own if isinstance(own, str) else fingerprint_of_content(rows)


def without_index(rows: Rows) -> Rows:
    """The data set in an :class:`IndexedDataset`."""
    while isinstance(rows, IndexedDataset):
        rows = rows.rows
    return rows


def categories_of(rows: Rows) -> list[str] | None:
    """The attribute ``categories`` of each sample, (N,), also through what wraps a data set."""
    return _texts_of(rows, "categories")


def groups_of(rows: Rows) -> Tensor | None:
    """The attribute ``groups`` of each sample, (N,) int64, if the data set has it."""
    own = _entries_of(rows, "groups")
    whose = f"groups of {type(without_index(rows)).__name__}"
    return None if own is None else group_numbers(own, len(rows), whose)


def units_of(rows: Rows) -> list[str] | None:
    """The attribute ``units``, if the data set has it."""
    return _texts_of(rows, "units")


def _texts_of(rows: Any, name: str) -> list[str] | None:
    own = _entries_of(rows, name)
    return None if own is None else ["" if text is None else str(text) for text in own]


def _entries_of(rows: Any, name: str) -> Any:
    """An attribute of each sample, (N,), also through what wraps a data set; None without one."""
    own = getattr(rows, name, None)
    if own is not None:
        if len(own) != len(rows):
            raise DataError(
                f"{type(rows).__name__}.{name} has {len(own):,} entries for {len(rows):,} samples: "
                "give a text or None for each; of groups a number."
            )
        return own
    if isinstance(rows, IndexedDataset):
        return _entries_of(rows.rows, name)
    if isinstance(rows, Subset):
        whole = _entries_of(rows.dataset, name)
        return None if whole is None else [whole[position] for position in rows.indices]
    if isinstance(rows, ConcatDataset):
        parts = [_entries_of(part, name) for part in rows.datasets]
        known = [part for part in parts if part is not None]
        return [entry for part in known for entry in part] if len(known) == len(parts) else None
    return None
