"""Writes the trained model as a folder that other libraries load, with its model card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_info

from pl_pointwise.extras import needs
from pl_pointwise.files import check_export_folder, replaced_folder
from pl_pointwise.module import PointwiseModule
from pl_pointwise.task import notes_of

from .feasible_checkpoint import FeasibleCheckpoint

with needs("language", "ModelExport"):
    import huggingface_hub  # noqa: F401  # Its cards, for which there is time before the fit.


class ModelExport(Callback):
    """Calls the module's ``export(folder)`` after a fit, on rank 0.

    With :class:`~.feasible_checkpoint.FeasibleCheckpoint`, of the checkpoint that it chose, else of
    the last weights. The log and the model card say which; the card shows their last validation.

    Args:
        folder: where; a relative one is below the trainer's ``default_root_dir``. An earlier export
            there stays until the new one is complete; other files are refused before training.
        license: of the exported model, by the hub's name for it, such as "apache-2.0", on the card.
        language: of the data, such as ["en"], on the card.
        datasets: trained on, by their names on the hub, on the card.
    """

    def __init__(
        self,
        folder: str = "export",
        license: str | None = None,
        language: Sequence[str] = (),
        datasets: Sequence[str] = (),
    ) -> None:
        self.folder = Path(folder)
        self.facts = {"license": license, "language": [*language], "datasets": [*datasets]}
        self._chosen = ""
        # What the last validation found, and that of the chosen weights.
        self._evaluated, self._of_chosen = dict[str, Any](), dict[str, Any]()

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            check_export_folder(Path(trainer.default_root_dir) / self.folder)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Checkpoint callbacks run after this one: whether these weights are chosen shows later."""
        if not trainer.sanity_checking:
            self._follow_choice(trainer)
            self._evaluated = dict(pl_module.evaluated)

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._follow_choice(trainer)
        if not trainer.is_global_zero:
            return
        module, folder = self._chosen_module(pl_module), Path(trainer.default_root_dir, self.folder)
        notes_of(module).facts = self.facts
        with replaced_folder(folder) as whole:
            module.export(whole)
        path = notes_of(module).checkpoint
        of = f"the checkpoint {path}" if path else "the last step"
        rank_zero_info(f"Model exported to {folder}, with the weights of {of}")

    def _follow_choice(self, trainer: Trainer) -> None:
        """Keeps what the last validation found if its weights have been chosen since."""
        path = chosen_checkpoint(trainer)
        if path != self._chosen:
            self._chosen, self._of_chosen = path, self._evaluated

    def _chosen_module(self, module: PointwiseModule) -> PointwiseModule:
        """The module with the chosen weights; itself where nothing chose."""
        if not self._chosen:
            return module
        kind = type(module)
        chosen = kind.load_from_checkpoint(self._chosen, map_location="cpu", weights_only=True)
        notes_of(chosen).checkpoint = Path(self._chosen).name
        chosen.evaluated.update(self._of_chosen)
        return chosen


def chosen_checkpoint(trainer: Trainer) -> str:
    """The checkpoint that a FeasibleCheckpoint chose so far; "" without one."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, FeasibleCheckpoint):
            return callback.best_model_path
    return ""
