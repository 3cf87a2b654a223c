"""Where a callback writes, so that two runs never write to one place."""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger


def run_root(trainer: Trainer) -> Path:
    """The logger's folder of this run, which has a version; without a logger the root folder.

    Beside the checkpoints of ModelCheckpoint: W&B and MLflow have one folder for all their runs,
    and below it this run's is NAME/VERSION. To be called on all ranks, which agree on it here.
    """
    place, logger = Path(trainer.default_root_dir), trainer.logger
    if isinstance(logger, (TensorBoardLogger, CSVLogger)):
        return Path(trainer.log_dir or place)
    if logger is not None:
        place = Path(logger.save_dir or place)
        if logger.name is not None and logger.version is not None:
            version = logger.version
            place /= str(logger.name)
            place /= version if isinstance(version, str) else f"version_{version}"
    return Path(trainer.strategy.broadcast(str(place)))


class RunFolder:
    """A folder below :func:`run_root` that this run alone writes to.

    A new run takes the first name that is free, "hardest", "hardest-1" and so on; a resumed one
    goes on with the name of its checkpoint, ``state``.

    Args:
        folder: the name, or a path; an absolute one is numbered likewise.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.path: Path | None = None
        self.state: str | None = None
        self._resumed = False

    def claim(self, trainer: Trainer) -> Path:
        """This run's folder, made; to be called on all ranks when training starts."""
        root, name = run_root(trainer), self.state if self._resumed else None
        self._resumed = False
        if trainer.is_global_zero:
            name = name or self._free(root)
            (root / name).mkdir(parents=True, exist_ok=True)
        self.state = trainer.strategy.broadcast(name)
        self.path = root / str(self.state)
        return self.path

    def _free(self, root: Path) -> str:
        """Makes the first folder that is not there; makes, so that no other run takes it too."""
        for number in count():
            name = f"{self.folder}-{number}" if number else self.folder
            with suppress(FileExistsError):
                (root / name).mkdir(parents=True)
                break
        return name

    def restore(self, state: str | None) -> None:
        """Goes on in the folder of a checkpoint when training starts."""
        self.state, self._resumed = state, state is not None
