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
from collections.abc import Iterable, Iterator, Mapping
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
    known, name = sorted(units), id_of(use, units)
    if not known:
        return
    contents = sorted({content for each in units.values() for content in each})
    record = {"use": use, "by": str(by.absolute()), "units": known, "contents": contents}
    text = json.dumps(record)
    if output is not None:
        write_whole(output / "certification" / f"{name}.json", text)
    try:
        write_whole(users_folder() / f"{name}.json", text)
    except OSError as error:
        log.warning("Not on record for comparisons in other folders: %s", error)


def id_of(use: Mapping[str, Any], units: Iterable[str]) -> str:
    text = json.dumps([use, sorted(set(units))], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def uses_of(units: Units, output: Path | None = None) -> dict[Path, dict[str, Any]]:
    """The uses on record of any of the units, by their files; ``output``: of a comparison."""
    found = dict[Path, dict[str, Any]]()
    folders = [users_folder()] if output is None else [output / "certification", users_folder()]
    for path in [path for folder in folders for path in sorted(folder.glob("*.json"))]:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            record["by"], ", ".join(record["use"]["requirements"])
            record["marks"] = {*record["units"], *record.get("contents", [])}
            if known_among(units, record["marks"]):
                found[path] = record
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RequirementError(
                f"{path}: this record of used samples cannot be read ({type(error).__name__}). "
                "Restore it; or delete it, if what it recorded is no certification split any more."
            ) from error
    return found


def check_unused(use: Mapping[str, Any], units: Units, output: Path) -> None:
    """Refuses units that another choice has used; the same choice gives the same answer.

    use: before training without the digests of weights, which are then not compared.
    """
    others = dict[Path, list[str]]()
    records = uses_of(units, output)
    for path, record in records.items():
        was = record["use"]
        compared = [name for name in use if name in was or name not in NOT_ON_OLD_RECORDS]
        others[path] = [name for name in compared if was.get(name) != use[name]]
        if not others[path] and {*record["units"]} == {*units}:
            return
    for path, record in records.items():
        what, how = ", ".join(record["use"]["requirements"]), "shown before"
        if what:
            models = len(record["use"].get("runs", [""]))
            how = f"used for another choice before: requirements {what} among {models} models"
            shown = ("weights", *NOT_ON_OLD_RECORDS)
            if all(name in shown or name.endswith(" data") for name in others[path]):
                how += f", with other {' and '.join(others[path])},"
        raise RequirementError(
            f"{len(known_among(units, record['marks'])):,} of {len(units):,} certification units "
            "were "
            f"{how} in {record['by']}, so they would certify nothing. Certify on new ones (another "
            "test file, and train again). If nothing here was chosen by what they showed, delete "
            f"{path}."
        )
