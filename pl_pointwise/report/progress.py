"""A progress bar of the whole run: its steps, the time left, the requirements of all samples."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.trainer.states import TrainerFn

from ..errors import TrainingError
from ..task import Task, history_of


class RunProgressBar(TQDMProgressBar):
    """Counts the steps of the run, not of an epoch, so that the time left is the run's.

    Beside it the objective and how many requirements are violated, of all training samples at their
    last visit, not of the last batch. The command line takes it by itself.

    Args:
        refresh_rate: steps between two updates; 0 shows nothing.

    .. versionadded:: 0.3.0

    >>> from lightning.pytorch import Trainer
    >>> from pl_pointwise.callbacks import RunProgressBar
    >>> callback = RunProgressBar(refresh_rate=10)
    >>> trainer = Trainer(accelerator="cpu", logger=False, callbacks=[callback])
    >>> trainer.progress_bar_callback is callback
    True
    """

    def __init__(self, refresh_rate: int = 1) -> None:
        super().__init__(refresh_rate)

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        bar = self.train_progress_bar
        bar.total = _steps_of_run(trainer)
        bar.initial = 0
        bar.set_description(f"Epoch {trainer.current_epoch}")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any
    ) -> None:
        bar = self.train_progress_bar
        step = trainer.global_step
        last = bar.total is not None and step >= bar.total
        if self.is_enabled and (last or step % self.refresh_rate == 0):
            bar.n = step
            bar.set_postfix(self.get_metrics(trainer, pl_module))

    def init_validation_tqdm(self) -> Tqdm:
        """Within a fit no bar of its own: a line that comes and goes hides the run's."""
        within_fit = self.trainer.state.fn == TrainerFn.FITTING
        return Tqdm(disable=True) if within_fit else super().init_validation_tqdm()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self.train_progress_bar.set_description(
                f"Epoch {trainer.current_epoch}, validation"
            )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self.train_progress_bar.set_description(f"Epoch {trainer.current_epoch}")

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Objective and violated requirements as counts; what else is logged for a bar as it is."""
        shown = super().get_metrics(trainer, pl_module)
        # The number of the run's folder, which its end prints.
        shown.pop("v_num", None)
        if "violated" in shown and isinstance(pl_module, Task):
            totals = history_of(pl_module).totals()
            shown["violated"] = f"{totals['violated']:,.0f} of {totals['of']:,.0f}"
        return shown


def _steps_of_run(trainer: Trainer) -> int | None:
    """None where the run has no end, or is no task's."""
    with suppress(TrainingError):
        if isinstance(trainer.lightning_module, Task):
            return trainer.lightning_module.number_of_steps()
    return None
