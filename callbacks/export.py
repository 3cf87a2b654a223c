"""Writes the trained model as a folder that other libraries load, with its model card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_info

from pl_pointwise.export.folder import check_export_folder, replaced_folder
from pl_pointwise.extras import needs
from pl_pointwise.task import notes_of

from .feasible_checkpoint import FeasibleCheckpoint

with needs("language", "ModelExport"):
    import huggingface_hub  # noqa: F401  # Its cards, for which there is time before the fit.


class ModelExport(Callback):
    """Calls the module's ``export(folder)`` after a fit, on rank 0.

    With :class:`~.feasible_checkpoint.FeasibleCheckpoint`, of the checkpoint that it chose, else of
    the last weights, with their last validation on the model card. Log and card say which.

    Args:
        folder: where; a relative one is below the trainer's ``default_root_dir``. An earlier export
            there stays until the new one is complete; other files are refused before training.
        license: of the exported model, by the hub's name for it, such as "apache-2.0", on the card.
        language: of the data, such as ["en"], on the card.
        datasets: trained on, by their names on the hub, on the card.

    >>> from lightning.pytorch import Trainer
    >>> from pl_pointwise.callbacks import ModelExport
    >>> callback = ModelExport("exported", license="apache-2.0", language=["en"])
    >>> trainer = Trainer(accelerator="cpu", logger=False, callbacks=[callback])
    """

    def __init__(
        self,
        folder: str = "export",
        license: str | None = None,
        language: Sequence[str] = (),
        datasets: Sequence[str] = (),
    ) -> None:
        self.folder = Path(folder)
        self.facts = {
            "license": license,
            "language": [*language],
            "datasets": [*datasets],
        }

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            check_export_folder(Path(trainer.default_root_dir) / self.folder)

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        module = pl_module
        folder = Path(trainer.default_root_dir, self.folder)
        chosen = _chosen_checkpoint(trainer)
        if chosen:
            module = type(module).load_from_checkpoint(
                chosen, map_location="cpu", weights_only=True
            )
            notes_of(module).checkpoint = Path(chosen).name
        notes_of(module).facts = self.facts
        with replaced_folder(folder) as whole:
            module.export(whole)
        path = notes_of(module).checkpoint
        of = f"the checkpoint {path}" if path else "the last step"
        rank_zero_info(f"Model exported to {folder}, with the weights of {of}")


def _chosen_checkpoint(trainer: Trainer) -> str:
    """The checkpoint of the first :class:`FeasibleCheckpoint`; "" without one."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, FeasibleCheckpoint):
            return str(callback.best_model_path)
    return ""
