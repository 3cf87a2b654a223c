"""What certification samples were measured for before: a split certifies one choice.

A use is a JSON file in ``certification/`` of the comparison's output and in a folder of the user's:
the requirements, the digests of configurations, data and weights, and the units. A comparison
without a requirement leaves one too, as its tables show "test", and so does ``check``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from pl_pointwise.files import write_whole

from .requirement import RequirementError
from .samples import Units, known_among

log = logging.getLogger(__name__)

NOT_ON_OLD_RECORDS = ("code", "base")
"""What earlier versions did not record: then it is not compared."""

SHOWN: dict[str, Any] = {"requirements": []}
"""The use by a comparison without a requirement."""


def users_folder() -> Path:
    """Where this user's uses are on record, of all comparisons."""
    usual = Path.home() / ".local/share/pl-pointwise/certification"
    return Path(os.environ.get("PL_POINTWISE_USES") or usual)


@contextmanager
def alone_with_the_record() -> Iterator[None]:
    """One process of this user at a time, so that of two comparisons at once one is refused."""
    folder = users_folder()
    lock = FileLock(folder / ".lock", timeout=600)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError:  # No leave to write: then it is said that nothing is on record.
        yield
        return
    try:
        yield
    finally:
        lock.release()


def remember_use(
    use: Mapping[str, Any], units: Units, by: Path, output: Path | None = None
) -> None:
    """Records, on rank 0, that ``by`` used units; in ``output`` and the user's folder."""
    if not units:
        return
    name = id_of(use, units)
    contents = set[str]()
    for of_unit in units.values():
        contents.update(of_unit)
    record = {
        "use": use,
        "by": str(by.absolute()),
        "units": sorted(units),
        "contents": sorted(contents),
    }
    text = json.dumps(record)
    if output is not None:
        write_whole(output / "certification" / f"{name}.json", text)
    try:
        write_whole(users_folder() / f"{name}.json", text)
    except OSError as error:
        log.warning("Not on record for comparisons in other folders: %s", error)


def id_of(use: Mapping[str, Any], units: Iterable[str]) -> str:
    """The name of a use: the same use of the same units has the same."""
    text = json.dumps([use, sorted(set(units))], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def uses_of(units: Units, output: Path | None = None) -> dict[Path, dict[str, Any]]:
    """The uses on record of any of the units, by their files; ``output``: of a comparison."""
    folders = [users_folder()]
    if output is not None:
        folders.insert(0, output / "certification")
    records = dict[Path, dict[str, Any]]()
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            record = _read_record(path)
            if known_among(units, record["marks"]):
                records[path] = record
    return records


def _read_record(path: Path) -> dict[str, Any]:
    """A use with its ``marks``, by which units are known to be among its own."""
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        # What an error would say, read now: a record that lacks it is damaged.
        _ = record["by"], ", ".join(record["use"]["requirements"])
        record["marks"] = {*record["units"], *record.get("contents", [])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequirementError(
            f"{path}: this record of used samples cannot be read ({type(error).__name__}). "
            "Restore it; or delete it, if what it recorded is no certification split any more."
        ) from error
    return record


def check_unused(use: Mapping[str, Any], units: Units, output: Path) -> None:
    """Refuses units that another choice has used; the same choice gives the same answer.

    use: before training without the digests of weights, which are then not compared.
    """
    differences = dict[Path, list[str]]()
    records = uses_of(units, output)
    for path, record in records.items():
        differences[path] = _differences(record["use"], use)
        if not differences[path] and {*record["units"]} == {*units}:
            return
    for path, record in records.items():  # Of the first, if there is any.
        how = _how_used(record["use"], differences[path])
        known = len(known_among(units, record["marks"]))
        raise RequirementError(
            f"{known:,} of {len(units):,} certification units were {how} in {record['by']}, so "
            "they would certify nothing. Certify on new ones (another test file, and train "
            f"again). If nothing here was chosen by what they showed, delete {path}."
        )


def _differences(earlier: Mapping[str, Any], use: Mapping[str, Any]) -> list[str]:
    """In what two uses differ, as far as both say it."""
    names = []
    for name, value in use.items():
        is_recorded = name in earlier or name not in NOT_ON_OLD_RECORDS
        if is_recorded and earlier.get(name) != value:
            names.append(name)
    return names


def _how_used(use: Mapping[str, Any], differences: Sequence[str]) -> str:
    """What a use was, in words."""
    requirements = ", ".join(use["requirements"])
    if not requirements:
        return "shown before"
    models = len(use.get("runs", [""]))
    how = f"used for another choice before: requirements {requirements} among {models} models"
    # The same comparison, but of other weights or data: said, as the options do not show it.
    of_weights = ("weights", *NOT_ON_OLD_RECORDS)
    if all(name in of_weights or name.endswith(" data") for name in differences):
        how += f", with other {' and '.join(differences)},"
    return how
