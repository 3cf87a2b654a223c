"""Records from files: messages name file, line, field and remedy; nothing a file says is run."""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import io
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

import pyarrow.ipc
import pyarrow.parquet
from lightning.pytorch.utilities import rank_zero_warn

from pl_pointwise.data.fingerprints import normalised
from pl_pointwise.errors import DataError

R = TypeVar("R")

CHUNK = 256
"""Rows read at a time."""

_BEYOND = "cells beyond the header"


class Row(dict[str, Any]):
    """A JSON object that knows which of its fields were read, by ``row[name]`` or ``row.get``."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As of any dict."""
        self.read.add(name)
        return super().get(name, default)

    def unread(self) -> dict[str, Any]:
        """What holds something and was not read, also of the objects that were read in part."""
        unread = {}
        for name, value in self.items():
            # Blank cells and empty lists of a table say nothing that could be missed.
            if name not in self.read and value not in (None, "", [], {}):
                unread[name] = value
            several = isinstance(value, list)
            for place, entry in enumerate(value if several else [value]):
                if name in self.read and isinstance(entry, Row) and entry.read:
                    prefix = f"{name}[{place}]" if several else name
                    unread |= {
                        f"{prefix}.{key}": inner
                        for key, inner in entry.unread().items()
                    }
        return unread


def _json(file: Any) -> Iterable[Any]:
    """Of a list, of {"data": a list}, of one object, or of JSON lines."""
    whole = file.read()
    try:
        rows = from_json(whole)
    except RepeatedKeyError:
        raise
    except ValueError:
        # JSON lines in a file of this ending, if no list begins it.
        # Of a list it is broken JSON; of anything else each line is said to be one record.
        if whole.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            raise
        return io.BytesIO(whole)
    # Some files wrap their list in one object, as {"data": […]}.
    if isinstance(rows, dict):
        _check_layout(rows)
        rows = rows.get("data", rows)
    return rows if isinstance(rows, list) else [rows]


def _check_layout(whole: Mapping[str, Any]) -> None:
    """Refuses an object that is no record, but holds records in another way than under "data"."""
    values = [*whole.values()]
    by_column = bool(values) and all(
        isinstance(column, dict) and column.keys() == values[0].keys()
        for column in values
    )
    if (by_column and "0" in values[0]) or {"columns", "data"} <= whole.keys():
        raise ValueError(
            "it has columns, as pandas writes them; write it by to_json(…, orient='records')"
        )
    # {"train": […], "test": […]}: which of them is meant cannot be told.
    lists = [name for name, value in whole.items() if _is_rows(value)]
    if len(lists) == len(values) and "data" not in whole and lists:
        names = ", ".join(map(shown, lists))
        raise ValueError(
            f"it is one object with lists of records in {names}; give a file for each"
        )


def _is_rows(value: Any) -> bool:
    """Whether it is a list of objects that are no turns of one conversation."""
    rows = value if isinstance(value, list) else []
    return bool(rows) and all(
        isinstance(r, dict) and "role" not in r and "from" not in r for r in rows
    )


def _csv(file: Any, delimiter: str = ",") -> Iterable[Any]:
    """A blank cell is null."""
    csv.field_size_limit(2**31 - 1)  # of the process: a long conversation is one cell
    text = codecs.iterdecode(file, "utf-8-sig")
    rows = csv.DictReader(text, delimiter=delimiter, restkey=_BEYOND, strict=True)
    _check_separator(list(rows.fieldnames or []), delimiter)
    names = rows.fieldnames or []
    # DictReader keeps the last of two columns in silence.
    if len(set(names)) < len(names):
        raise ValueError(f"two columns of one name in the header {shown(names)}")
    return map(_without_blanks, rows)


def _without_blanks(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: cell or None for name, cell in row.items()}


def _check_separator(names: list[str], delimiter: str) -> None:
    """Refuses a header that is one column only because another sign stands between its names."""
    if names and names[0].startswith("sep="):
        raise ValueError(
            'its first line is "sep=…", which Excel alone reads; take it out'
        )
    # Several names were told apart, so the separator is right.
    if len(names) != 1:
        return
    other = next(
        (sign for sign in ";\t,|" if sign != delimiter and sign in names[0]), None
    )
    if other is not None:
        wanted = "a comma" if delimiter == "," else "a tab"
        raise ValueError(
            f"the header is one column, {shown(names[0])}: between its names stands {other!r}, and "
            f"a file of this ending has {wanted}; save it so"
        )


def _arrow(file: Any) -> Iterable[Any]:
    """Of a stream, as ``datasets`` saves them, or of a file."""
    try:
        return _of_batches(pyarrow.ipc.open_stream(file))
    except pyarrow.ArrowInvalid:
        return _of_batches([pyarrow.ipc.open_file(file).read_all()])


def _of_batches(batches: Iterable[Any]) -> Iterable[Any]:
    for batch in batches:
        yield from map(without_padding, batch.to_pylist())


READERS: Mapping[str, Callable[[Any], Iterable[Any]]] = {
    ".jsonl": iter,
    ".json": _json,
    ".csv": _csv,
    ".tsv": lambda file: _csv(file, "\t"),
    ".parquet": lambda file: _of_batches(
        pyarrow.parquet.ParquetFile(file).iter_batches(CHUNK)
    ),
    ".arrow": _arrow,
}
"""By the ending of a file: what its rows are. JSON lines are bytes still."""


def rows_of(path: str) -> Iterator[tuple[str, Any]]:
    """(where, raw row) of a file of one of :data:`READERS`, by its ending before ``.gz``.

    Empty JSON lines are passed over; all values of a CSV file are texts or null.
    """
    name = path.lower()
    ending = next(
        (known for known in READERS if name.removesuffix(".gz").endswith(known)), None
    )
    place = path
    try:
        # open() says only that it is a folder.
        if os.path.isdir(path):
            raise ValueError(_of_folder(path))
        with gzip.open(path) if name.endswith(".gz") else open(path, "rb") as file:
            if ending is None:
                raise ValueError(
                    f"it ends in none of {', '.join(READERS)}, or these and .gz"
                )
            for number, row in enumerate(READERS[ending](file), start=1):
                unit = "line" if isinstance(row, bytes) else "record"
                # Editors leave an empty line at the end; no record is one.
                if unit == "record" or row.strip():
                    yield f"{path}, {unit} {number}", row
                place = f"{path}, after {unit} {number}"
    except (
        OSError,
        EOFError,
        zlib.error,
        ValueError,
        csv.Error,
        pyarrow.ArrowException,
    ) as error:
        raise DataError(
            f"{place}: cannot be read ({error}). Check the path, who may read it, and that the "
            "file is what its ending says, text in UTF-8."
        ) from error


def _of_folder(path: str) -> str:
    """What is wrong with a folder in a file's place, and which files of ``save_to_disk`` it has."""
    names = sorted(
        file for file in os.listdir(path) if file.endswith((".arrow", ".parquet"))
    )
    some = (
        f": name its files, {', '.join(names[:3])}{', …' * (len(names) > 3)}"
        if names
        else ""
    )
    return f"it is a folder{some}"


def hub_split(path: str, config: str | None, split: str) -> Any:
    """A split of a data set on the hub, or of a folder of the same layout."""
    import datasets

    try:
        return datasets.load_dataset(path, config, split=split)
    except Exception as error:  # of network, hub, cache or files: they share no base
        which = f"{config}, {split}" if config else split
        raise DataError(
            f"{path} ({which}) cannot be loaded: {error}. Check name and network, or take another "
            "source."
        ) from error


def without_padding(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without the nulls that Arrow fills the objects of one column with."""
    # In a schema {"default": null} says something, and "arguments" may be null for {}.
    meant = ("default", "const", "arguments")

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                k: filled(v) for k, v in value.items() if v is not None or k in meant
            }
        return [*map(filled, value)] if isinstance(value, list) else value

    return {name: filled(row[name]) for name in row}


class RepeatedKeyError(ValueError):
    """A JSON object has a key twice, of which Python would keep the last in silence."""


def from_json(text: str | bytes) -> Any:
    """What a JSON text holds, or ValueError; of an object with a key twice too."""
    # Editors on Windows put a mark in front, which json takes for text.
    text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("too many lists and objects stand in each other") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = Counter(name for name, _ in pairs)
        twice = next(name for name, count in names.items() if count > 1)
        raise RepeatedKeyError(
            f"an object has {shown(twice)} twice, and one of the two would be lost; take one out"
        )
    return entries


def validate_values(row: Any) -> Any:
    """The row; ValueError of half a character, which no tokenizer takes."""
    text = json.dumps(row, ensure_ascii=False, default=str)
    half = re.search("(.{0,20})[\ud800-\udfff]", text)
    if half:
        raise ValueError(f"half a character stands behind {shown(half[1])}")
    return row


def records_of(
    rows: Iterable[tuple[str, Any]],
    source: str,
    parse: Callable[[Any, str], R],
    skip_invalid: bool | None = None,
    ignore: Sequence[str] = (),
) -> list[R]:
    """The records that ``parse`` makes of (where, raw row) pairs; DataError if it makes none.

    Warns of the fields that it does not read, but for those to ``ignore``, which it does not see.
    """
    records = []
    skipped = []
    unread = Counter[str]()
    for where, raw in rows:
        try:
            row = json_object(without_fields(_read(raw, where), ignore), where)
            # A text with the separator in it, not in quotes, has moved all cells behind it.
            if _BEYOND in row:
                raise DataError(
                    f"{where}: the row has more cells than the header. Put a text with the "
                    "separator in it in quotes."
                )
            records.append(parse(row, where))
            unread.update(
                {re.sub(r"\[\d+]", "[]", name)[:60] or "''" for name in row.unread()}
            )
        except DataError as error:
            skipped.append(refused(error, skip_invalid))
    report_skipped(source, skipped, len(records))
    if unread:
        of = f"{max(unread.values()):,} of {len(records):,} records"
        rank_zero_warn(
            f"{source}: fields {', '.join(sorted(unread))} of {of} are not read."
        )
    return records


def _read(raw: Any, where: str) -> Any:
    """A row as values, of a line of JSON what it holds."""
    try:
        return validate_values(from_json(raw) if isinstance(raw, bytes) else raw)
    except (ValueError, RecursionError) as error:
        remedy = "Give one complete JSON object a line, in UTF-8"
        raise DataError(
            f"{where}: not a readable record ({error}). {remedy}."
        ) from error


def without_fields(row: Any, names: Sequence[str]) -> Any:
    """The row without the fields of these names, its own and those of objects and lists in it."""
    if not names:
        return row
    if isinstance(row, dict):
        kept = {name: value for name, value in row.items() if name not in names}
        return {name: without_fields(value, names) for name, value in kept.items()}
    if isinstance(row, list):
        return [without_fields(entry, names) for entry in row]
    return row


def refused(error: DataError, skip_invalid: bool | None) -> str:
    """The message of a record to leave out; raises it where that is not wanted.

    skip_invalid: None is False where the user has no choice.
    """
    if skip_invalid:
        return str(error)
    # Records to predict for: one left out would move the answers of all behind it.
    if skip_invalid is None:
        raise error
    raise DataError(f"{error} (invalid: skip leaves such records out.)")


def report_skipped(source: str, problems: Sequence[str], kept: int) -> None:
    """Says how many records were left out, and why the first was; DataError if none is kept."""
    if problems:
        rank_zero_warn(
            f"{source}: left out {len(problems):,} of {kept + len(problems):,} records that cannot "
            f"be used; the first: {problems[0]}"
        )
    # With all of them left out a run would train on nothing.
    if not kept:
        raise DataError(f"{source}: no usable record. Give at least one.")


def json_object(row: Any, where: str) -> Row:
    """The row, if it is a JSON object; the objects in it know what was read of them too."""
    if not isinstance(row, dict):
        several = ", or name a file of one list .json" if isinstance(row, list) else ""
        raise DataError(
            f"{where}: the record is {kind(row)}. Give one JSON object{several}."
        )
    return row if isinstance(row, Row) else Row({k: tracked(v) for k, v in row.items()})


def tracked(value: Any) -> Any:
    """An object, or those in a list, as :class:`Row`; any other value unchanged."""
    if isinstance(value, list):
        return [Row(entry) if isinstance(entry, dict) else entry for entry in value]
    return Row(value) if isinstance(value, dict) else value


def field(row: dict[str, Any], name: str, where: str, prefix: str = "") -> Any:
    """``row[name]``; ``prefix`` names the row within its record, for the message."""
    if name not in row:
        names = ", ".join(map(shown, list(row)[:12])) or "nothing"
        # Another spelling of it stands there, which the user takes for it.
        near = nearest(name, map(str, row))
        remedy = f"Rename {shown(near)}" if near else "Add it"
        raise DataError(
            f'{where}: field "{prefix}{name}" is missing (found: {names}). {remedy}.'
        )
    return row[name]


def text_field(value: Any, name: str, where: str) -> str:
    """``value``, if it is a text that is not blank."""
    if not isinstance(value, str):
        raise bad_field(where, name, f"is {kind(value)}", "Give a text")
    if not value.strip():
        raise bad_field(where, name, "is empty", "Fill it in")
    return value


def bad_field(where: str, name: str, problem: str, remedy: str) -> DataError:
    """The error about one field of one record."""
    return DataError(f'{where}: field "{name}" {problem}. {remedy}.')


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that is spelt nearly so; "" where none is."""
    near = get_close_matches(word.strip().lower(), [*known], 1, cutoff=0.7)
    return near[0] if near else ""


def did_you_mean(word: Any, known: Iterable[str]) -> str:
    """A question for the nearest known word, with a blank behind it; "" where none is near.

    >>> did_you_mean("anwser", ["answer", "prompt"])
    'Did you mean "answer"? '
    """
    near = nearest(word, known) if isinstance(word, str) else ""
    return f'Did you mean "{near}"? ' if near else ""


def shown(value: Any) -> str:
    """``value`` for a message, at most some sixty characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}… ({len(text):,} characters)"


def kind(value: Any) -> str:
    """The type of a value, in JSON's words."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    names |= {int: "a number", float: "a number", type(None): "null", Row: "an object"}
    return names.get(type(value), f"of type {type(value).__name__}")


def digest(*parts: Any) -> str:
    """A hash of JSON values, the same in every process."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def folded(value: Any) -> Any:
    """A JSON value without what makes no other unit of it: case, spaces, and whether letters are
    composed (NFC) in its texts.

    >>> folded({"role": "user", "content": " What is  it? "})
    {'role': 'user', 'content': 'what is it?'}
    """
    if isinstance(value, str):
        return " ".join(normalised(normalised(value).casefold()).split())
    if isinstance(value, dict):
        return {key: folded(entry) for key, entry in value.items()}
    return (
        [folded(entry) for entry in value]
        if isinstance(value, (list, tuple))
        else value
    )


def largest(values: Sequence[float], count: int | None) -> list[int]:
    """Positions of the ``count`` largest values (None: all) in order, of equal ones the earlier."""
    return sorted(
        sorted(range(len(values)), key=lambda position: -values[position])[:count]
    )
