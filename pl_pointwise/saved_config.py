"""The configuration beside a run's log, also where the logger has no folder."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback


class SaveConfig(SaveConfigCallback):
    """As Lightning's, which ends the run where the logger has no folder: MLflow with a database.

    There the configuration goes into ``default_root_dir``.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.save_to_log_dir = trainer.log_dir is not None
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called on rank 0."""
        if not self.save_to_log_dir:
            folder = Path(trainer.default_root_dir)
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / self.config_filename
            self.parser.save(self.config, path, skip_none=False, overwrite=True)
