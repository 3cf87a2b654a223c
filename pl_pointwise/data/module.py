"""The data module that users derive from: indexed, resumable loaders around their data sets."""

from __future__ import annotations

import os
import warnings
from numbers import Integral
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from ..errors import DataError
from .indexed import IndexedDataset, Rows, has_positions
from .loaders import ResumableDataLoader
from .sampler import PointwiseSampler
from .whole_batches import WholeBatches


class PointwiseDataModule(LightningDataModule):
    """Indexed, resumable, rank-aware loaders around a task's data sets.

    A subclass fills ``self.datasets`` in ``setup`` with map-style data sets of dict rows under
    "train", "val", "test" and "predict", and overrides :meth:`collate` where batches are more than
    stacked rows. ``test`` is run on "test" and "train".

    What a data set may say of its N samples, by attributes; none is required:

    - ``groups``, numbers from 0: bounds are on the mean of each group, in training and, of a data
      set's own groups, in evaluation. Rows without attributes: ``IndexedDataset(rows, groups=…)``.
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
        for name, size in (
            ("batch_size", batch_size),
            ("eval_batch_size", eval_batch_size),
        ):
            if size is not None and not (isinstance(size, Integral) and size >= 1):
                raise ValueError(
                    f"{name}={size!r}: give a whole number, at least 1 sample."
                )
        self.batch_size = batch_size
        self.eval_batch_size = (
            batch_size if eval_batch_size is None else eval_batch_size
        )
        self.num_workers = num_workers
        self.seed = seed
        self.datasets: dict[str, Rows] = {}

    def collate(self, rows: list[dict[str, Any]]) -> Any:
        """A batch with ``batch["index"]``, (B,), from rows that have it; here torch's default.

        Raises:
            DataError: rows that do not stack, as lists of different lengths.
        """
        try:
            return torch.utils.data.default_collate(rows)
        except (RuntimeError, TypeError, KeyError) as error:
            problem = _what_does_not_stack(rows)
            if problem is None:
                raise
            raise DataError(
                f"{type(self).__name__}: {problem}. Rows that do not stack need a collate of your "
                "own: collate(self, rows) of the data module returns the batch, padded, with "
                '"index": torch.tensor([row["index"] for row in rows]).'
            ) from error

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

    def shared_option(self, name: str, of_data: Any) -> Any:
        """An option that module and data must agree on, else DataError; None takes the module's."""
        module = getattr(self.trainer, "lightning_module", None)
        of_module = getattr(module, name, None)
        if of_data is not None and hasattr(module, name) and of_data != of_module:
            raise DataError(
                f"{name}: {type(module).__name__} has {of_module!r}, {type(self).__name__} "
                f"{of_data!r}. Give it to the module alone."
            )
        return of_module if of_data is None else of_data

    def train_dataloader(self) -> ResumableDataLoader:
        return self._loader("train", training=True)

    def val_dataloader(self) -> ResumableDataLoader | list[Any]:
        validates = (
            self.trainer is not None and self.trainer.state.fn == TrainerFn.VALIDATING
        )
        # `validate` without validation data is a mistake, which _loader() names; a fit goes
        # without.
        if "val" in self.datasets or validates:
            return self._loader("val")
        # Lightning would warn; that nothing is held out is meant.
        warnings.filterwarnings(
            "ignore", message="Total length of `list` across ranks is zero"
        )
        return []

    def test_dataloader(self) -> dict[str, ResumableDataLoader]:
        names = [name for name in ("test", "train") if name in self.datasets] or [
            "test"
        ]
        return {name: self._loader(name) for name in names}

    def predict_dataloader(self) -> DataLoader[Any]:
        return self._loader("predict")

    def _require_rows(self, name: str) -> None:
        """Refuses a data set that is not there, is empty, or has no positions."""
        start = f"{type(self).__name__}: the data set {name!r}"
        problem = _describe_rows(self.datasets[name]) if name in self.datasets else ""
        if problem:
            raise DataError(
                f"{start} {problem}. It is self.datasets[{name!r}], of setup()."
            )
        if name not in self.datasets:
            raise DataError(
                f"{start} is not among {[*self.datasets]}. Fill self.datasets[{name!r}] in setup() "
                "with rows that have positions."
            )

    def _loader(self, name: str, training: bool = False) -> Any:
        self._require_rows(name)
        dataset = IndexedDataset(self.datasets[name])
        trainer = self.trainer
        size = self.batch_size if training else self.eval_batch_size
        collate = WholeBatches(self.collate, f"{type(self).__name__}.collate()")
        if name == "predict" or getattr(trainer, "overfit_batches", False):
            # Lightning puts samplers of its own into these, which only a plain loader lets it do.
            return DataLoader(
                dataset,
                # Named: Lightning repeats the arguments with its own added.
                batch_size=size,
                collate_fn=collate,
                num_workers=self.num_workers,
            )
        sampler = PointwiseSampler(
            dataset,
            num_replicas=trainer.world_size if trainer else 1,
            rank=trainer.global_rank if trainer else 0,
            shuffle=training,
            # What seed_everything() leaves for other processes.
            seed=self.seed + int(os.environ.get("PL_GLOBAL_SEED", 0)),
            strata=getattr(self.datasets[name], "strata", None),
        )
        return ResumableDataLoader(
            dataset,
            sampler,
            batch_size=size,
            collate_fn=collate,
            num_workers=self.num_workers,
        )


def _what_does_not_stack(rows: list[dict[str, Any]]) -> str | None:
    """The field of which torch makes no batch, and of which rows; None where it is no field."""
    for name in rows[0]:
        values = []
        for row in rows:
            if name not in row:
                return f'row {row["index"]} has no field "{name}", as row {rows[0]["index"]} has'
            values.append(row[name])
        try:
            torch.utils.data.default_collate(values)
        except (RuntimeError, TypeError) as error:
            numbers = ", ".join(str(row["index"]) for row in rows[:4])
            more = ", …" if len(rows) > 4 else ""
            reason = str(error).partition("\n")[0].rstrip(".")
            return f'field "{name}" of rows {numbers}{more} does not stack: {reason}'
    return None


def _describe_rows(rows: Any) -> str:
    """What is wrong with rows that no loader can be made of; "" for nothing."""
    if not has_positions(rows):
        kind = type(rows).__name__
        return f"is a {kind}, whose rows have no positions: give a list, or rows with len() and [i]"
    return "" if len(rows) else "is empty: give it at least one row"
