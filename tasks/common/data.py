"""The base of the data modules whose records come from files or the hub.

A task says where records come from, by data set, and how they are read and tokenised.

Which of them are trained on, which select and which certify: no group stands on two sides. A record
has ``where``, its place, ``prompt``, ``unit``, which all prompts that are alike share, and
``category``. What is held out depends on the records and a seed alone. The parts are drawn one
after the other, "val" before "test", so that "val" is the same with and without a "test".
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, ClassVar

from lightning.pytorch.utilities import rank_zero_warn

from pl_pointwise.data import SPLITS, PointwiseDataModule, ResumableDataLoader
from pl_pointwise.errors import DataError, one_of

from .records import digest, hub_split, records_of, rows_of, without_padding

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
        ignore: names of fields that are not read and may be left unread, at any depth.
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
    tells_of_shared_rows: ClassVar[bool] = True
    """Prompts that stand in two splits are named where records are read: see warn_of_shared()."""
    trained: ClassVar[tuple[str, ...]] = ("train",)
    """What is read to train on, by the names of files."""
    fraction_option: ClassVar[str] = "data.{}_fraction"
    """The option that says which part is held out as a split."""

    def __init__(
        self,
        source: str,
        files: Mapping[str, str | Sequence[str] | None],
        shares: Mapping[str, float],
        invalid: str | None,
        *,
        ignore: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(**options)
        # A text is a sequence too: its letters would be the names.
        if isinstance(ignore, str):
            raise DataError(f"ignore={ignore!r}: give a list of names, [{ignore}].")
        self.ignore = list(ignore)
        one_of("source", source, self.sources, DataError)
        one_of("invalid", invalid, ("error", "skip", None), DataError)
        self.files: dict[str, list[str]] = {}
        for name, paths in files.items():
            self.files[name] = [paths] if isinstance(paths, str) else list(paths or [])
        with_files = {name for name, paths in self.files.items() if paths}
        # Files to predict for go with any source.
        if source != "files" and not with_files <= set(self.beside):
            raise DataError(f"source={source}: it takes no files. Set source to files.")
        if source == "files" and not with_files:
            raise DataError(f"source=files: it needs {self._options(['train'])}.")
        self.source = source
        self.shares = shares
        self.skip_invalid = invalid == "skip" or (invalid is None and source == "hub")
        self._records: dict[str, list[Any]] = {}
        self._taken: Any = None
        self._not_trained: dict[str, str] = {}  # Sentences, by what they are about.

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
        read = {name: self.read(name) for name in SPLITS}
        return self.held_out(
            {name: records for name, records in read.items() if records}
        )

    def read(self, name: str) -> list[Any]:
        """The records of a data set, of its files or the hub; none where its source has none."""
        records = list[Any]()
        parse = self.reader(name)
        for path in self.files.get(name, ()):
            rows, count = counted(rows_of(path))
            of_file = records_of(rows, path, parse, self.skips(name), self.ignore)
            # What is not trained on is told at the end of a fit; of held-out records nobody misses
            # one.
            if name in self.trained:
                self.note_left_out(
                    path, count() - len(of_file), count(), f"records of {path}"
                )
            records += of_file
        if not records and self.source == "hub":
            return self._read_hub(name, parse)
        return records

    def _read_hub(self, name: str, parse: Parse) -> list[Any]:
        """The records of a data set on the hub; none where it has none."""
        place = self.on_hub(name)
        # When2Call's multiple choice, say, where pairs come from another data set.
        if place is None:
            return []
        path, configuration, split = place
        source = f"{path}, {split}"
        numbered = enumerate(hub_split(path, configuration, split), start=1)
        rows = (
            (f"{source}, record {number}", without_padding(row))
            for number, row in numbered
        )
        return records_of(rows, source, parse, self.skip_invalid, self.ignore)

    # For these ------------------------------------------------------------------------------------

    def held_out(
        self,
        read: Mapping[str, list[Any]],
        files: Mapping[str, Sequence[str]] | None = None,
    ) -> dict[str, list[Any]]:
        """All splits: those that were read, and shares of the training prompts of each category.

        Warns of prompts that stand in two of them; ``files`` are for these messages.
        """
        all_splits = dict(read)
        paths = self.files if files is None else files
        named = {split: ", ".join(paths.get(split, ())) for split in SPLITS}
        train = read.get("train")
        if train:
            shares = {
                split: share
                for split, share in self.shares.items()
                if split not in read
            }
            kinds = [record.category for record in train]
            groups = prompt_groups(train)
            all_splits |= split_by_group(
                train, groups, shares, self.seed, "prompt", kinds
            )
            self.note_held_out(all_splits, named["train"], shares)
        splits = {split: all_splits[split] for split in SPLITS if split in all_splits}
        sources = {}
        for split, records in splits.items():
            sources[split] = named[split]
            if not named[split]:
                part = files_of(records) or named["train"]
                sources[split] = f"the {split} part of {part}"
        warn_of_shared(splits, sources)
        return splits

    def not_trained_on(self) -> list[str]:
        """What is held out by a fraction, left out as it cannot be used, or beyond a limit."""
        return [*self._not_trained.values()]

    def note_held_out(
        self,
        records: Mapping[str, Sequence[Any]],
        source: str,
        shares: Mapping[str, float],
    ) -> None:
        """Notes what a fraction holds out of the training records."""
        for split, share in shares.items():
            key = f"{split} of {source}"
            held = len(records.get(split, []))
            self._not_trained.pop(key, None)
            if held and share > 0:
                option = self.fraction_option.format(split)
                # Of several files perhaps not all: what is learnt is never held out.
                names = files_of(records[split]) if source else ""
                of = records_in_words(held)
                of += f" of {names}" if names else ""
                self._not_trained[key] = (
                    f"{of} {'is' if held == 1 else 'are'} held out as {split} ({option} {share:g}):"
                    " set it to 0 to train on all."
                )

    def note_left_out(
        self,
        key: str,
        count: int,
        whole: int,
        what: str,
        why: str = "they cannot be used",
    ) -> None:
        """Notes what is not among the training samples for another reason; 0 for nothing."""
        self._not_trained.pop(key, None)
        if count:
            self._not_trained[key] = (
                f"{count:,} of {whole:,} {what} were left out: {why}."
            )

    def skips(self, name: str) -> bool | None:
        """Whether bad records of a data set are left out; None: there is no choice."""
        return None if name == "predict" else self.skip_invalid

    # Lightning's hooks ----------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Fill the hub's caches, once a node."""
        self._take_model()
        stage = self.trainer.state.fn if self.trainer else None
        # Files are read by each process itself; what is predicted for is a file.
        if self.source == "hub" and stage != "predict":
            for name in self.needs.get(stage or "fit", ()):
                self.task_records(name)

    def setup(self, stage: str | None = None) -> None:
        """Read, split and tokenise what ``stage`` needs and is not there yet."""
        self._take_model()
        for needing in self.needs if stage is None else [stage]:
            for name in self.needs[needing]:
                self._add(name)
        if stage is None:
            return
        # Fitting works without validation data; testing needs any one of its data sets.
        needed = self.needs[stage][: None if stage == "test" else 1]
        if self.datasets.keys().isdisjoint(needed):
            held_out = stage in ("validate", "test")
            shares = ", or val_fraction or test_fraction above 0" if held_out else ""
            raise DataError(
                f"There are no data to {stage} with source={self.source}. "
                f"Set {self._options(needed)}{shares}."
            )

    def test_dataloader(self) -> dict[str, ResumableDataLoader]:
        """One by data set that there is."""
        return {
            name: self._loader(name)
            for name in self.needs["test"]
            if name in self.datasets
        }

    def task_records(self, name: str) -> list[Any]:
        """The records of a data set, read once."""
        if name not in self._records:
            if name in SPLITS:  # All at once, as one may be a part of another.
                splits = self.read_splits()
                for split in SPLITS:
                    self._records[split] = splits.get(split, [])
            else:
                self._records[name] = self.read(name)
        return self._records[name]

    def _options(self, names: Sequence[str]) -> str:
        """The options for the files of these data sets, of whatever kind."""
        keys = [key for key in self.files if key.rpartition("_")[2] in names]
        return " or ".join(
            f"{key}_file".replace("_train_file", "_file") for key in keys
        )

    def _add(self, name: str) -> None:
        """Put the data set ``name`` into ``datasets``, if its source has it."""
        if name in self.datasets:
            return
        records = self.task_records(name)
        # Without test data of its own "test" is "val" under another name, encoded once.
        if name == "test" and not records:
            self._add("val")
            if "val" in self.datasets:
                self.datasets["test"] = self.datasets["val"]
        elif records:
            self.datasets[name] = self.encoded(name, records)
            self._note_unencoded(name, records)

    def _note_unencoded(self, name: str, records: Sequence[Any]) -> None:
        """Of the training records those that became no sample."""
        if name == "train":
            whole = len(records)
            missing = whole - len(self.datasets[name])
            noted = self._not_trained_in_encoding()
            why = "they do not fit, or cannot be rendered; a warning above names the first"
            self.note_left_out(
                "encoding", missing - noted, whole, "training records", why
            )

    def _not_trained_in_encoding(self) -> int:
        """How many records a subclass left out in ``encoded``, and noted itself."""
        return 0

    def _take_model(self) -> None:
        """Encodes for the model it is used with now; data sets of another model are dropped."""
        known = self._taken
        self._taken = self.take_model(known)
        # Tokens of another model's tokenizer mean other words.
        if known not in (None, self._taken):
            self.datasets = {}
            self._records = {}
            self._not_trained = {}


def counted(rows: Iterable[Any]) -> tuple[Iterator[Any], Callable[[], int]]:
    """The rows again, and what tells how many have been taken."""
    taken = 0

    def counting() -> Iterator[Any]:
        nonlocal taken
        for row in rows:
            taken += 1
            yield row

    return counting(), lambda: taken


def files_of(records: Iterable[Any]) -> str:
    """The files, or data sets, that these records are from, in the order of their first."""
    names = [record.where.rpartition(", ")[0] or record.where for record in records]
    return ", ".join(dict.fromkeys(names))


def records_in_words(number: int) -> str:
    """Returns "1 record", "5 records"."""
    return f"{number:,} record{'' if number == 1 else 's'}"


# Splits -----------------------------------------------------------------------------------------


def check_fractions(val: float, test: float) -> None:
    """Raises :class:`DataError`: a fraction out of its range, or nothing left to train on."""
    if val < 0 or test < 0 or val + test >= 1:
        raise DataError(
            f"val_fraction={val}, test_fraction={test}: give numbers from 0 to below 1 whose sum "
            "leaves something to train on."
        )


def hold_out(
    groups: Sequence[str],
    shares: Sequence[float],
    seed: int = 0,
    categories: Sequence[str] | None = None,
) -> list[int]:
    """The part of each record, (N,): 0 for training, j for the j-th held-out part.

    Groups are taken in an order drawn by ``seed``, over which each of the ``categories`` is evenly
    spread: each group that does not push the part above its share of the records; the smallest
    alone where none fits. A group of each category stays in training.
    """
    sizes = Counter(groups)
    kind = dict(zip(groups, categories or [""] * len(groups), strict=True))
    part_of = dict[str, int]()
    left = Counter(kind.values())  # Groups of a category that are in training.
    place = dict[str, float]()
    seen = Counter[str]()
    for group in sorted(sizes, key=lambda group: digest(seed, group)):
        # Evenly between 0 and 1.
        place[group] = (seen[kind[group]] + 0.5) / left[kind[group]]
        seen[kind[group]] += 1
    order = sorted(place, key=place.__getitem__)
    for part, share in enumerate(shares, start=1):
        size = 0
        for group in order:
            fits = size + sizes[group] <= share * len(groups)
            # The last group of a category stays, as else nothing teaches what it asks.
            if fits and group not in part_of and left[kind[group]] > 1:
                part_of[group] = part
                size += sizes[group]
                left[kind[group]] -= 1
        others = [
            group for group in order if group not in part_of and left[kind[group]] > 1
        ]
        # A small file may have no group as small as the share: one is held out all the same.
        if share > 0 and not size and others:
            smallest = min(others, key=lambda group: sizes[group])
            part_of[smallest] = part
            left[kind[smallest]] -= 1
    return [part_of.get(group, 0) for group in groups]


def split_by_group(
    records: Sequence[Any],
    groups: Sequence[str],
    shares: Mapping[str, float],
    seed: int,
    group_name: str,
    categories: Sequence[str] | None = None,
) -> dict[str, list[Any]]:
    """ "train" and the parts of a share above 0 by name, no group on two sides; see hold_out()."""
    names = [name for name, share in shares.items() if share > 0]
    parts = hold_out(groups, [shares[name] for name in names], seed, categories)
    for part, name in enumerate(names, start=1):
        if part in parts:
            continue
        text = (
            f"{records[0].where}: no kind of record has two of different {group_name}"
        )
        if name == "test":  # Of which certificates are.
            raise DataError(
                f"{text}, so none can be test. Set test_fraction to 0, or a file."
            )
        rank_zero_warn(f"{text}, so none is held out for {name}.")
    splits: dict[str, list[Any]] = {}
    for part, name in enumerate(["train", *names]):
        if part in parts:
            splits[name] = []
    for record, part in zip(records, parts, strict=True):
        splits[["train", *names][part]].append(record)
    return splits


def prompt_groups(records: Sequence[Any]) -> list[str]:
    """For each record the first prompt of its unit; where no two are alike, its own."""
    first: dict[str, str] = {}
    return [first.setdefault(record.unit, record.prompt) for record in records]


def side_of_held_out(
    records: Sequence[Any], shares: Mapping[str, float], seed: int
) -> list[str]:
    """For each held-out record "val" or "test", in proportion to the shares, prompts whole."""
    val = shares["val"]
    test = shares["test"]
    if not val or not test:
        return ["test" if test else "val"] * len(records)
    # 0.15 / (0.05 + 0.15) is a little less than 0.75.
    share = round(test / (val + test), 9)
    categories = [record.category for record in records]
    parts = hold_out(prompt_groups(records), [share], seed, categories)
    return ["test" if part else "val" for part in parts]


def warn_of_shared(
    splits: Mapping[str, Sequence[Any]], sources: Mapping[str, str]
) -> None:
    """Says of each two splits how many records of the later have a prompt of the earlier."""
    units = {}
    for split, records in splits.items():
        units[split] = [record.unit for record in records]
    for first, second in combinations(units, 2):
        known = set(units[first])
        shared = sum(unit in known for unit in units[second])
        if shared:
            rank_zero_warn(
                f"{sources[second]}: {shared:,} of {len(units[second]):,} prompts are in "
                f"{sources[first]} too, so results on it flatter. Take them out of one."
            )
