"""Pictures and histograms in the run's loggers: TensorBoard and W&B; others have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from torch import Tensor


def log_picture(trainer: Trainer, key: str, path: Path) -> None:
    """Shows a PNG file under ``key`` at the trainer's step; to be called on rank 0."""
    for logger in trainer.loggers:
        experiment: Any = getattr(logger, "experiment", None)
        if isinstance(logger, TensorBoardLogger):
            import matplotlib.image

            pixels = matplotlib.image.imread(path)[..., :3]
            experiment.add_image(key, pixels, trainer.global_step, dataformats="HWC")
        elif isinstance(logger, WandbLogger):
            logger.log_image(key, [str(path)], step=trainer.global_step)


def log_histogram(trainer: Trainer, key: str, values: Tensor) -> None:
    """Shows the distribution of values (n,), finite; to be called on rank 0."""
    numbers = values.numpy()
    if not len(numbers):
        return
    for logger in trainer.loggers:
        experiment: Any = getattr(logger, "experiment", None)
        if isinstance(logger, TensorBoardLogger):
            experiment.add_histogram(key, numbers, trainer.global_step)
        elif isinstance(logger, WandbLogger):
            import wandb

            shown: Any = {key: wandb.Histogram(numbers)}
            logger.log_metrics(shown, trainer.global_step)
