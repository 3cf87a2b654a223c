"""Where a callback writes, so that two runs never write to one place."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger


def run_root(trainer: Trainer) -> Path:
    """The logger's folder of this run, which has a version; without a logger the root folder.

    Beside the checkpoints of ModelCheckpoint: W&B and MLflow have one folder for all their runs,
    and below it this run's is NAME/VERSION. To be called on all ranks, which agree on it here.
    """
    if not trainer.loggers:
        return Path(trainer.default_root_dir)
    logger = trainer.loggers[0]
    if isinstance(logger, (TensorBoardLogger, CSVLogger)):
        return Path(trainer.log_dir or trainer.default_root_dir)
    place = Path(logger.save_dir or trainer.default_root_dir)
    if logger.name is not None and logger.version is not None:
        version = logger.version
        place /= Path(
            str(logger.name), version if isinstance(version, str) else f"version_{version}"
        )
    return Path(trainer.strategy.broadcast(str(place)))


class RunFolder:
    """A folder below :func:`run_root` that this run alone writes to.

    A new run takes the first name that is free, "hardest", "hardest-1" and so on; a resumed one
    goes on with the name of its checkpoint.

    Args:
        folder: the name, or a path; an absolute one is numbered likewise.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.path: Path | None = None
        self._restored: str | None = None

    def claim(self, trainer: Trainer) -> Path:
        """This run's folder, made; to be called on all ranks when training starts."""
        root, name = run_root(trainer), self._restored
        self._restored = None
        if trainer.is_global_zero:
            if name is not None:
                (root / name).mkdir(parents=True, exist_ok=True)
            number = 0
            while name is None:
                wanted = f"{self.folder}-{number}" if number else self.folder
                try:
                    (root / wanted).mkdir(parents=True)
                    name = wanted
                except FileExistsError:
                    number += 1
        self.path = root / str(trainer.strategy.broadcast(name))
        return self.path

    def state(self) -> str | None:
        """The name to go on with; None before there is one."""
        return None if self.path is None else str(Path(self.folder).with_name(self.path.name))

    def restore(self, name: str | None) -> None:
        self._restored = name
