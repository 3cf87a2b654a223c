"""What certification samples were measured for before: a split certifies one choice.

A use is a JSON file in ``certification/`` of the comparison's output and in a folder of the user's.
A comparison without a requirement leaves one too: its tables show "test".
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pl_pointwise.files import write_whole
from pl_pointwise.requirements import RequirementError

log = logging.getLogger(__name__)

FOLDER, ENVIRONMENT = "pl-pointwise/certification", "PL_POINTWISE_USES"
"""The user's folder, and the environment variable that names another."""

SHOWN: dict[str, Any] = {"requirements": []}
"""The use by a comparison without a requirement."""


def users_folder() -> Path:
    return Path(os.environ.get(ENVIRONMENT) or Path.home() / ".local/share" / FOLDER)


def remember_use(
    use: Mapping[str, Any], units: Iterable[str], by: Path, output: Path | None = None
) -> None:
    """Records, on rank 0, that ``by`` used units; in ``output`` and the user's folder."""
    known = sorted(set(units))
    if not known:
        return
    name = hashlib.sha256(json.dumps([use, known], sort_keys=True).encode()).hexdigest()[:16]
    text = json.dumps({"use": use, "by": str(by.absolute()), "units": known})
    if output is not None:
        write_whole(output / "certification" / f"{name}.json", text)
    try:
        write_whole(users_folder() / f"{name}.json", text)
    except OSError as error:
        log.warning("Not on record for comparisons in other folders: %s", error)


def check_unused(use: Mapping[str, Any], units: Iterable[str], output: Path) -> None:
    """Refuses units that another choice has used; the same choice gives the same answer."""
    now = set(units)
    folders = (output / "certification", users_folder())
    paths = [path for folder in folders for path in sorted(folder.glob("*.json"))]
    records = {path: json.loads(path.read_text()) for path in paths}
    if any(each["use"] == use and set(each["units"]) == now for each in records.values()):
        return
    for path, record in records.items():
        if both := now.intersection(record["units"]):
            what, how = ", ".join(record["use"]["requirements"]), "shown before"
            if what:
                models = len(record["use"]["runs"])
                how = f"used for another choice before: requirements {what} among {models} models"
            raise RequirementError(
                f"{len(both):,} of {len(now):,} certification units were {how} in {record['by']}, "
                "so they would certify nothing. Certify on new ones (another test file, and train "
                f"again). If nothing here was chosen by what they showed, delete {path}."
            )
