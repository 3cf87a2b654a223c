"""Records from files: messages name file, line, field and remedy; nothing a file says is run."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow.parquet
from lightning.pytorch.utilities import rank_zero_warn

from pl_pointwise.errors import DataError

R = TypeVar("R")

CHUNK = 256
"""Rows read at a time."""

CHOICE = "(invalid: skip leaves such records out.)"
"""What a message ends in where leaving records out is an option."""


def check_source(source: str, labelled: object, predicted: object, needed: str) -> None:
    """Raises :class:`DataError`: files with another source, or ``source=files`` without one."""
    if source != "files" and labelled:
        raise DataError(f"source={source}: it takes no files. Set source to files.")
    if source == "files" and not (labelled or predicted):
        raise DataError(f"source=files: it needs {needed}.")


def rows_of(path: str) -> Iterator[tuple[str, Any]]:
    """(where, raw row) of a Parquet, CSV or JSON file, by its ending, or of JSON lines, any other.

    JSON lines are bytes still, empty ones are passed over; all values of a CSV file are texts.
    """
    ending = Path(path).suffix.lower()
    try:
        whole = Path(path).read_bytes() if ending == ".json" else b""
        if whole.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            yield from numbered(_decoded(whole, path), path)
        elif ending == ".parquet":
            batches = pyarrow.parquet.ParquetFile(path).iter_batches(CHUNK)
            yield from numbered((row for batch in batches for row in batch.to_pylist()), path)
        elif ending == ".csv":
            with open(path, newline="", encoding="utf-8-sig") as file:
                yield from numbered(csv.DictReader(file), path)
        else:
            with open(path, "rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield f"{path}, line {number}", line
    except DataError:
        raise
    except (OSError, ValueError, csv.Error, pyarrow.ArrowException) as error:
        raise DataError(
            f"{path}: cannot be read ({error}). Check the path, who may read it, and that the file "
            "is what its ending says, text in UTF-8."
        ) from error


def hub_split(path: str, config: str | None, split: str, otherwise: str = "files") -> Any:
    """A split of a data set on the hub, or of a folder of the same layout."""
    import datasets

    try:
        return datasets.load_dataset(path, config, split=split)
    except Exception as error:  # of network, hub, cache or files: they share no base
        which = f"{config}, {split}" if config else split
        raise DataError(
            f"{path} ({which}) cannot be loaded: {error}. Check name and network, or set source to "
            f"{otherwise}."
        ) from error


def numbered(rows: Iterable[Any], source: str) -> Iterator[tuple[str, Any]]:
    """(where, row) of rows that are dicts already."""
    return ((f"{source}, record {number}", row) for number, row in enumerate(rows, start=1))


def _decoded(raw: Any, where: str) -> Any:
    """A row from the bytes of a JSON line; any other is one already."""
    try:
        return json.loads(raw.decode("utf-8-sig")) if isinstance(raw, bytes) else raw
    except ValueError as error:
        remedy = "Give one complete JSON object a line, in UTF-8"
        raise DataError(f"{where}: not a readable record ({error}). {remedy}.") from error


def records_of(
    rows: Iterable[tuple[str, Any]],
    source: str,
    parse: Callable[[Any, str], R],
    skip_invalid: bool | None = None,
) -> list[R]:
    """The records that ``parse`` makes of (where, raw row) pairs; DataError if it makes none."""
    records, skipped = [], []
    for where, raw in rows:
        try:
            records.append(parse(_decoded(raw, where), where))
        except DataError as error:
            skipped.append(refused(error, skip_invalid))
    report_skipped(source, skipped, len(records))
    if not records:
        raise DataError(f"{source}: no usable record. Give at least one.")
    return records


def refused(error: DataError, skip_invalid: bool | None) -> str:
    """The message of a record to leave out; raises it where that is not wanted.

    skip_invalid: None is False where the user has no choice.
    """
    if skip_invalid:
        return str(error)
    raise error if skip_invalid is None else DataError(f"{error} {CHOICE}")


def report_skipped(source: str, problems: Sequence[str], kept: int) -> None:
    """Says once how many records were left out, and why the first was."""
    if problems:
        rank_zero_warn(
            f"{source}: left out {len(problems):,} of {kept + len(problems):,} records that cannot "
            f"be used; the first: {problems[0]}"
        )


def json_object(row: Any, where: str) -> dict[str, Any]:
    """The row, if it is a JSON object."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: the record is {kind(row)}. Give one JSON object.")
    return row


def field(row: dict[str, Any], name: str, where: str, prefix: str = "") -> Any:
    """``row[name]``; ``prefix`` names the row within its record, for the message."""
    if name not in row:
        found = ", ".join(map(shown, list(row)[:12])) or "nothing"
        raise DataError(f'{where}: field "{prefix}{name}" is missing (found: {found}). Add it.')
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


def shown(value: Any) -> str:
    """``value`` for a message, at most some sixty characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}… ({len(text):,} characters)"


def kind(value: Any) -> str:
    """The type of a value, in JSON's words."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    names |= {int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), f"of type {type(value).__name__}")


def digest(*parts: Any) -> str:
    """A hash of JSON values, the same in every process."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def folded(value: Any) -> Any:
    """A JSON value without what makes no other unit of it: case and spaces of its texts.

    >>> folded({"role": "user", "content": " What is  it? "})
    {'role': 'user', 'content': 'what is it?'}
    """
    if isinstance(value, str):
        return " ".join(value.casefold().split())
    if isinstance(value, dict):
        return {key: folded(entry) for key, entry in value.items()}
    return [folded(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def largest(values: Sequence[float], count: int | None) -> list[int]:
    """Positions of the ``count`` largest values (None: all) in order, of equal ones the earlier."""
    return sorted(sorted(range(len(values)), key=lambda position: -values[position])[:count])
