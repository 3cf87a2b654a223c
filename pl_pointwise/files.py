"""Files that are there whole or not at all, what they hold as a digest, the folder of a run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from stat import S_ISREG

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger


def write_whole(path: Path, text: str) -> None:
    """Completely or not at all, whenever the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")  # Every rank may write.
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)  # Of a disk that is full.


def digest_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def run_root(trainer: Trainer) -> Path:
    """The logger's folder of this run; without a logger the root folder. To be called on all ranks.

    W&B and MLflow have one folder for all runs; this run's, with its checkpoints, is NAME/VERSION.
    """
    place, logger = Path(trainer.log_dir or trainer.default_root_dir), trainer.logger
    if logger is None or isinstance(logger, (TensorBoardLogger, CSVLogger)):
        return place
    name, version = logger.name, logger.version
    if name is not None and version is not None:
        place /= f"{name}/{version if isinstance(version, str) else f'version_{version}'}"
    return Path(trainer.strategy.broadcast(str(place)))


def digest_now(path: str | Path) -> str | None:
    """The same; None where there is no file. A file is read again only once it was written."""
    try:
        found = os.stat(os.path.expanduser(path))
    except (OSError, ValueError):
        return None
    if not S_ISREG(found.st_mode):
        return None
    return _of_version(os.path.expanduser(path), found.st_mtime_ns, found.st_size)


@cache
def _of_version(path: str, written: int, size: int) -> str:
    return digest_of(Path(path))


def changed_files(folder: Path, digests: Mapping[str, str]) -> str:
    """Which files of a folder are not those of the digests, as a sentence; "" if all are."""
    changed = [
        name
        for name, digest in digests.items()
        if {"..", "/"} & {*Path(name).parts} or digest_now(folder / name) != digest
    ]
    if not changed:
        return ""
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"the files are not those that were certified: {changed[0]} differs{more}"
