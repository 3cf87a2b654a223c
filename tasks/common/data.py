"""The base of the data modules whose records come from files or the hub.

A task says where records come from, by data set, and how they are read and tokenised.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from pl_pointwise.data import SPLITS, PointwiseDataModule, ResumableDataLoader
from pl_pointwise.errors import DataError, one_of

from .records import hub_split, numbered, records_of, rows_of
from .splits import prompt_groups, split_by_group, warn_of_shared

Needs = Mapping[str, tuple[str, ...]]
"""Data sets by stage; the first it cannot do without, of `test` any."""
Parse = Callable[[Any, str], Any]
"""Makes a record of a row and its place."""


class RecordsDataModule(PointwiseDataModule):
    """Records from files, the hub or elsewhere, read once, and tokenised once for a model.

    Args:
        source: one of :attr:`sources`.
        files: by data set a path, several, or None.
        shares: of the training records to hold out as "val" and "test", where there is no file.
        invalid: "error" or "skip" records that cannot be used; None skips those of the hub alone.
            Records to predict for are never skipped.
        options: of `PointwiseDataModule`.
    """

    needs: ClassVar[Needs] = {
        "fit": ("train", "val"),
        "validate": ("val",),
        "test": ("test", "train"),
        "predict": ("predict",),
    }
    """Where no records are held out as "test", it is "val" under another name."""
    sources: ClassVar[tuple[str, ...]] = ("hub", "files")
    beside: ClassVar[tuple[str, ...]] = ("predict",)
    """Data sets whose files are of use with any source."""

    def __init__(
        self,
        source: str,
        files: Mapping[str, str | Sequence[str] | None],
        shares: Mapping[str, float],
        invalid: str | None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        one_of("source", source, self.sources, DataError)
        one_of("invalid", invalid, ("error", "skip", None), DataError)
        self.files = {
            name: [given] if isinstance(given, str) else list(given or [])
            for name, given in files.items()
        }
        given = [name for name, paths in self.files.items() if paths]
        if source != "files" and not set(given) <= set(self.beside):
            raise DataError(f"source={source}: it takes no files. Set source to files.")
        if source == "files" and not given:
            raise DataError(f"source=files: it needs {self._options(['train'])}.")
        self.source, self.shares = source, shares
        self.skip_invalid = invalid == "skip" or (invalid is None and source == "hub")
        self._records: dict[str, list[Any]] = {}
        self._taken: Any = None

    # A task's own ---------------------------------------------------------------------------------

    @abstractmethod
    def reader(self, name: str) -> Parse:
        """What reads the rows of a data set."""

    def on_hub(self, name: str) -> tuple[str, str | None, str] | None:
        """Path, configuration and split of a data set on the hub; None where it has none."""
        return None

    @abstractmethod
    def encoded(self, name: str, records: Sequence[Any]) -> Any:
        """The data set of records, as token ids."""

    @abstractmethod
    def take_model(self, known: Any) -> Any:
        """What tokens depend on, model and settings; loads the tokenizer where it is not known."""

    def read_splits(self) -> dict[str, list[Any]]:
        """The records of "train", "val" and "test", as far as there are any."""
        return self.held_out({name: found for name in SPLITS if (found := self.read(name))})

    def read(self, name: str) -> list[Any]:
        """The records of a data set, of its files or the hub; none where its source has none."""
        found, parse = list[Any](), self.reader(name)
        for path in self.files.get(name, ()):
            found += records_of(rows_of(path), path, parse, self.skips(name))
        if not found and self.source == "hub" and (place := self.on_hub(name)):
            source = f"{place[0]}, {place[2]}"
            rows = numbered(hub_split(*place), source)
            return records_of(rows, source, parse, self.skip_invalid)
        return found

    # For these ------------------------------------------------------------------------------------

    def held_out(
        self, read: Mapping[str, list[Any]], files: Mapping[str, Sequence[str]] | None = None
    ) -> dict[str, list[Any]]:
        """All splits: those that were read, and shares of the training prompts of each category.

        Warns of prompts that stand in two of them; ``files`` are for these messages.
        """
        found, paths = dict(read), self.files if files is None else files
        if train := read.get("train"):
            shares = {split: share for split, share in self.shares.items() if split not in read}
            kinds = [record.category for record in train]
            groups = prompt_groups(train)
            found |= split_by_group(train, groups, shares, self.seed, "prompt", kinds)
        found = {split: found[split] for split in SPLITS if split in found}
        named = {split: ", ".join(paths.get(split, ())) for split in SPLITS}
        sources = {
            split: named[split] or f"the {split} part of {named['train']}" for split in found
        }
        warn_of_shared(found, sources)
        return found

    def skips(self, name: str) -> bool | None:
        """Whether bad records of a data set are left out; None: there is no choice."""
        return None if name == "predict" else self.skip_invalid

    # Lightning's hooks ----------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Fill the hub's caches, once a node."""
        self._take_model()
        stage = self.trainer.state.fn if self.trainer else None
        if self.source == "hub" and stage != "predict":
            for name in self.needs.get(stage or "fit", ()):
                self.task_records(name)

    def setup(self, stage: str | None = None) -> None:
        """Read, split and tokenise what ``stage`` needs and is not there yet."""
        self._take_model()
        for each in self.needs if stage is None else [stage]:
            for name in self.needs[each]:
                self._add(name)
        if stage is None:
            return
        needed = self.needs[stage][: None if stage == "test" else 1]
        if self.datasets.keys().isdisjoint(needed):
            shares = ", or val_fraction or test_fraction above 0" * (stage in ("validate", "test"))
            raise DataError(
                f"There are no data to {stage} with source={self.source}. "
                f"Set {self._options(needed)}{shares}."
            )

    def test_dataloader(self) -> dict[str, ResumableDataLoader]:
        """One by data set that there is."""
        return {name: self._loader(name) for name in self.needs["test"] if name in self.datasets}

    def task_records(self, name: str) -> list[Any]:
        """The records of a data set, read once."""
        if name not in self._records:
            splits = name in SPLITS
            found = self.read_splits() if splits else {name: self.read(name)}
            self._records |= {each: found.get(each, []) for each in (SPLITS if splits else (name,))}
        return self._records[name]

    def _options(self, names: Sequence[str]) -> str:
        """The options for the files of these data sets, of whatever kind."""
        keys = [key for key in self.files if key.rpartition("_")[2] in names]
        return " or ".join(f"{key}_file".replace("_train_file", "_file") for key in keys)

    def _add(self, name: str) -> None:
        """Put the data set ``name`` into ``datasets``, if its source has it."""
        if name in self.datasets:
            return
        records = self.task_records(name)
        if name == "test" and not records:
            self._add("val")
            if "val" in self.datasets:
                self.datasets["test"] = self.datasets["val"]
        elif records:
            self.datasets[name] = self.encoded(name, records)

    def _take_model(self) -> None:
        """Encodes for the model it is used with now; data sets of another model are dropped."""
        known, self._taken = self._taken, self.take_model(self._taken)
        if known not in (None, self._taken):
            self.datasets, self._records = {}, {}
