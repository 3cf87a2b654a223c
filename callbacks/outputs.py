"""Where callbacks write: a folder that is this run's alone, TensorBoard and W&B."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from torch import Tensor


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


class RunFolder:
    """A folder below :func:`run_root` that this run alone writes to.

    A new run takes the first free name, "hardest", "hardest-1", …; a resumed one ``restored``.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.name: str | None = None
        self.restored: str | None = None

    def claim(self, trainer: Trainer) -> None:
        """Makes the folder at ``path``; to be called on all ranks when training starts."""
        root, name = run_root(trainer), self.restored
        if trainer.is_global_zero:
            if name is None:
                names = (f"{self.folder}-{number}" if number else self.folder for number in count())
                name = next(each for each in names if not (root / each).exists())
            (root / name).mkdir(parents=True, exist_ok=self.restored is not None)
        self.name, self.restored = str(trainer.strategy.broadcast(name)), None
        self.path = root / self.name


def log_picture(trainer: Trainer, key: str, path: Path) -> None:
    """Shows a PNG file at the trainer's step; like the next two to be called on rank 0."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            import matplotlib.image

            pixels = matplotlib.image.imread(path)[..., :3]
            logger.experiment.add_image(key, pixels, trainer.global_step, dataformats="HWC")
        elif isinstance(logger, WandbLogger):
            logger.log_image(key, [str(path)], step=trainer.global_step)


def log_histogram(trainer: Trainer, key: str, values: Tensor) -> None:
    """Shows the distribution of values (n,), n > 0, finite."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_histogram(key, values.numpy(), trainer.global_step)
        elif isinstance(logger, WandbLogger):
            import wandb

            shown: Any = {key: wandb.Histogram(values.numpy())}
            logger.log_metrics(shown, trainer.global_step)


def log_text(trainer: Trainer, key: str, text: str) -> None:
    """Shows a text, in TensorBoard alone."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(key, text, trainer.global_step)
