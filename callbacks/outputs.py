"""Where callbacks write: a folder that is this run's alone, TensorBoard and W&B."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from torch import Tensor

from pl_pointwise.files import free_path, run_root


class RunFolder:
    """A folder below the root folder of the run that this run alone writes to.

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
            name = name or free_path(root, self.folder).name
            (root / name).mkdir(parents=True, exist_ok=self.restored is not None)
        self.name, self.restored = str(trainer.strategy.broadcast(name)), None
        self.path = root / self.name


def log_histogram(trainer: Trainer, key: str, values: Tensor) -> None:
    """Shows the distribution of values (n,), n > 0, finite; on rank 0 alone."""
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
