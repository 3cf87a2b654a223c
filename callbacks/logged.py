"""Pictures and histograms in the run's loggers: TensorBoard, W&B and MLflow; others have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from torch import Tensor

from pl_pointwise.extras import needs


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
        elif isinstance(logger, MLFlowLogger):
            experiment.log_artifact(logger.run_id, str(path), key)


def log_histogram(trainer: Trainer, key: str, values: Tensor) -> None:
    """Shows the distribution of values (n,), finite; to be called on rank 0.

    In MLflow, which has no histograms, as a picture.
    """
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
        elif isinstance(logger, MLFlowLogger):
            with needs("compare", "A histogram in MLflow"):
                from matplotlib.figure import Figure
            figure = Figure(figsize=(4.8, 3.2), layout="constrained")
            panel = figure.subplots()
            panel.hist(numbers, bins=64)
            panel.set_xlabel(key)
            panel.set_ylabel(f"count of {len(numbers):,}")
            name = f"{key}/epoch_{trainer.current_epoch:04d}.png"
            experiment.log_figure(logger.run_id, figure, name)
