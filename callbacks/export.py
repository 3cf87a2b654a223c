"""Writes the trained model as a folder that other libraries load, when the fit ends."""

from __future__ import annotations

import logging
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from pl_pointwise.module import PointwiseModule

log = logging.getLogger(__name__)


class ModelExport(Callback):
    """Calls the module's ``export(folder)`` after the fit, on rank 0.

    Args:
        folder: where; a relative one is below the trainer's ``default_root_dir``.
    """

    def __init__(self, folder: str = "export") -> None:
        self.folder = Path(folder)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and isinstance(pl_module, PointwiseModule):
            folder = pl_module.export(Path(trainer.default_root_dir) / self.folder)
            log.info("Model exported to %s", folder)
