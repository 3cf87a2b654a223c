"""Files that are there whole or not at all, what they hold as a digest, the folder of a run."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger


def write_whole(path: Path, text: str) -> None:
    """Completely or not at all, whenever the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")  # Every rank may write.
    part.write_text(text, encoding="utf-8")
    part.replace(path)


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
