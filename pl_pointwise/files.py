"""Files that are there whole or not at all, and the folder of a run."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

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


def free_path(folder: Path, name: str, ending: str = "") -> Path:
    """The first of NAME, NAME-1, … in a folder that is not there."""
    paths = (folder / f"{name}{f'-{n}' if n else ''}{ending}" for n in count())
    return next(path for path in paths if not path.exists())


def run_root(trainer: Trainer) -> Path:
    """The logger's folder of this run; without a logger the root folder. To be called on all ranks.

    W&B and MLflow have one folder for all runs; this run's, with its checkpoints, is NAME/VERSION.
    """
    place, logger = Path(trainer.log_dir or trainer.default_root_dir), trainer.logger
    if logger is None or isinstance(logger, (TensorBoardLogger, CSVLogger)):
        return place
    name, version = logger.name, logger.version
    if name is not None and version is not None:
        place /= (
            f"{name}/{version if isinstance(version, str) else f'version_{version}'}"
        )
    return Path(trainer.strategy.broadcast(str(place)))
