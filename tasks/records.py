"""Records from files, read strictly: every message names file, line, field and remedy.

What the tasks' data modules share. Nothing here runs anything that a file says.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
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


def rows_of(
    path: str, required: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[str, Any]]:
    """(place, raw row) of a Parquet file, by its ending, or of a file of JSON lines, any other.

    Empty lines are passed over. A raw row is what :func:`decode` takes.

    Args:
        path: the file.
        required: columns a Parquet file must have.
        optional: columns read where there are any.

    Raises:
        DataError: no such file, or not a readable one.
    """
    if not Path(path).is_file():
        raise DataError(f"{path}: no such file. Check the path.")
    if path.lower().endswith(".parquet"):
        yield from parquet_rows(path, required, optional)
    else:
        yield from json_lines(path)


def json_lines(path: str) -> Iterator[tuple[str, Any]]:
    """(place, raw row) of every line that is not empty."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield f"{path}, line {number}", line


def parquet_rows(
    path: str, required: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[str, Any]]:
    """(place, raw row) of a Parquet file; see :func:`rows_of`."""
    try:
        file = pyarrow.parquet.ParquetFile(path)
        found = file.schema_arrow.names
        if missing := set(required).difference(found):
            raise DataError(
                f'{path}: column "{min(missing)}" is missing (found: {", ".join(found)}). Add it.'
            )
        names = [name for name in (*required, *optional) if name in found]
        number = 0
        for batch in file.iter_batches(CHUNK, columns=names):
            for scalar in batch.to_struct_array():
                number += 1
                yield f"{path}, record {number}", scalar
    except (pyarrow.ArrowException, OSError) as error:
        problem = f"not a readable Parquet file ({error})"
        raise DataError(f"{path}: {problem}. Write it again.") from error


def decode(raw: Any, where: str) -> Any:
    """A row from a JSON line or an Arrow scalar."""
    try:
        if not isinstance(raw, bytes):
            return raw.as_py()
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError as error:
        position = f"byte {error.start} of the {'line' if isinstance(raw, bytes) else 'text'}"
        raise DataError(f"{where}: not UTF-8 at {position}. Save the file as UTF-8.") from error
    except RecursionError:
        raise DataError(f"{where}: nested too deeply. Give one flat record a line.") from None
    except ValueError as error:
        problem = f"not a readable record ({error})"
        raise DataError(f"{where}: {problem}. Give one complete JSON object a line.") from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        name = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f'field "{name}" stands twice')
    return row


def records_of(
    rows: Iterable[tuple[str, Any]],
    source: str,
    parse: Callable[[Any, str], R],
    skip_invalid: bool | None = None,
) -> list[R]:
    """The records of (place, raw row) pairs.

    Args:
        rows: see :func:`rows_of`; rows that are already dicts also do.
        source: their name, for messages.
        parse: makes a record of a row and the row's place.
        skip_invalid: leave out what is not a record and say how many, instead of stopping there.
            None is False where the user has no choice.

    Raises:
        DataError: a record that cannot be used (file, line, field, remedy), or no record at all.
    """
    records, skipped = [], []
    for where, raw in rows:
        try:
            records.append(parse(raw if isinstance(raw, dict) else decode(raw, where), where))
        except DataError as error:
            if skip_invalid is False:
                raise DataError(f"{error} {CHOICE}") from error.__cause__
            if not skip_invalid:
                raise
            skipped.append(str(error))
    report_skipped(source, skipped, len(records))
    if not records:
        raise DataError(f"{source}: no usable record. Give at least one.")
    return records


def report_skipped(source: str, problems: Sequence[str], kept: int) -> None:
    """Says once how many records were left out, and why the first was."""
    if problems:
        rank_zero_warn(
            f"{source}: left out {len(problems):,} of {kept + len(problems):,} records that cannot "
            f"be used; the first: {problems[0]}"
        )


def field(row: dict[str, Any], name: str, where: str, prefix: str = "") -> Any:
    """``row[name]``; ``prefix`` is the path of the row within its record, for the message."""
    if name not in row:
        found = ", ".join(map(repr, row)) or "nothing"
        raise DataError(f'{where}: field "{prefix}{name}" is missing (found: {found}). Add it.')
    return row[name]


def text_field(value: Any, name: str, where: str) -> str:
    """``value``, if it is a text that is not blank and can be encoded."""
    if not isinstance(value, str):
        raise bad_field(where, name, f"is {kind(value)}", "Give a text")
    if not value.strip():
        raise bad_field(where, name, "is empty", "Fill it in")
    if "\0" in value:
        raise bad_field(where, name, "holds a NUL character", "Take it out")
    try:
        value.encode()
    except UnicodeEncodeError:
        problem = "holds half of a surrogate pair, which is no Unicode text"
        raise bad_field(where, name, problem, "Write the character itself") from None
    return value


def bad_field(where: str, name: str, problem: str, remedy: str) -> DataError:
    """The error about one field of one record."""
    return DataError(f'{where}: field "{name}" {problem}. {remedy}.')


def kind(value: Any) -> str:
    """The type of a value, in JSON's words."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    names |= {int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), f"of type {type(value).__name__}")


def digest(*parts: Any) -> str:
    """A hash of JSON values, the same in every process."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def hold_out(groups: Sequence[str], share: float, seed: int = 0) -> list[bool]:
    """Which records to hold out so that no group stands on both sides.

    Groups are taken in an order drawn by ``seed``, each that does not push the held-out part above
    ``share`` of the records; the smallest alone where none fits. One group cannot be split.

    Args:
        groups: of each record, (N,).
        share: of the records to hold out, 0 for none.
        seed: of the order.
    """
    sizes = Counter(groups)
    held: set[str] = set()
    taken = 0
    order = sorted(sizes, key=lambda group: digest(seed, group))
    for group in order:
        if taken + sizes[group] <= share * len(groups):
            held.add(group)
            taken += sizes[group]
    if not held and share > 0 and len(sizes) > 1:
        held.add(min(order, key=lambda group: sizes[group]))
    return [group in held for group in groups]
