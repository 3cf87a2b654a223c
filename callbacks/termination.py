"""Saves and ends the run when the machine is about to be taken away.

Writes ``checkpoints/terminated-DIGEST.ckpt`` below the trainer's ``default_root_dir``; a fit of the
same run that starts with this callback and no ``ckpt_path`` continues from it, or from a newer
``last.ckpt``, and removes it when it ends as planned.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import signal
import threading
import warnings
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from pl_pointwise.data import PointwiseDataModule
from pl_pointwise.errors import TrainingError
from pl_pointwise.plain import plain, plain_arguments

# Of a ckpt_path that nobody set, and of a file that is there only after a SIGTERM.
NO_FILE = r'`?.fit\(ckpt_path=(None\)` was called without|"last"\) is set, but there is no last)'
warnings.filterwarnings("ignore", message=NO_FILE)


class SaveOnTermination(OnExceptionCheckpoint):
    """After SIGTERM to any rank, every rank finishes its step, saves, and exits with code 143.

    A validation under way is finished first, so leave more time between SIGTERM and SIGKILL than it
    takes. Where no other callback saves checkpoints, Lightning's ModelCheckpoint is added.

    The file is the run's alone: one with other settings in the same folder neither continues from
    it nor writes over it.

    Args:
        dirpath: the folder of the checkpoint; a relative one is below ``default_root_dir``.
        filename: its name, without digest and ending.

    >>> from lightning.pytorch import Trainer
    >>> from pl_pointwise.callbacks import SaveOnTermination
    >>> callback = SaveOnTermination()
    >>> trainer = Trainer(accelerator="cpu", logger=False, callbacks=[callback])
    """

    def __init__(
        self, dirpath: str = "checkpoints", filename: str = "terminated"
    ) -> None:
        super().__init__(dirpath, filename)
        self._path: str | None = None

    @property
    def ckpt_path(self) -> str:
        if self._path is None:  # Outside a fit, and in one only to try the code.
            raise AttributeError(
                "SaveOnTermination has a path only while a PointwiseModule trains."
            )
        return self._path

    def on_module_attached(self, trainer: Any, pl_module: LightningModule) -> None:
        """Before the trainer looks for a checkpoint to continue from; the module calls it."""
        self._path = None
        # Testing has nothing to continue, and a trial run leaves no files.
        if trainer.state.fn != TrainerFn.FITTING or trainer.fast_dev_run:
            return
        savers = trainer.checkpoint_callbacks
        # Lightning adds its own ModelCheckpoint only where there is none of any kind.
        if all(isinstance(callback, OnExceptionCheckpoint) for callback in savers):
            trainer.callbacks.append(ModelCheckpoint())
        name = f"{self.filename}-{run_digest(trainer, pl_module)}{self.FILE_EXTENSION}"
        self._path = os.path.join(trainer.default_root_dir, self.dirpath, name)

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self._path is None and not trainer.fast_dev_run:
            raise TrainingError(
                f"SaveOnTermination continues runs of a PointwiseModule, and this is a "
                f"{type(pl_module).__name__}. Use Lightning's OnExceptionCheckpoint with it."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._received = False
        # Python takes handlers in the main thread alone.
        if threading.current_thread() is threading.main_thread():
            # Over Lightning's, which puts back at the end what was there before both.
            signal.signal(signal.SIGTERM, self._note)

    def _note(self, *_: Any) -> None:
        self._received = True

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        # Any rank's signal: a rank that stops alone leaves the others waiting.
        if trainer.strategy.reduce_boolean_decision(self._received, all=False):
            if self._path is not None:
                trainer.save_checkpoint(self._path)
            raise SIGTERMException(128 + signal.SIGTERM)

    def on_exception(self, *_: Any, **__: Any) -> None:
        """Nothing is saved after an error: it may have come in mid-step."""

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._path is not None:
            trainer.strategy.remove_checkpoint(self._path)

    def teardown(self, *_: Any, **__: Any) -> None:
        """Lightning's removes the file also after a test, or a search for a learning rate."""


def run_digest(trainer: Any, module: Any) -> str:
    """Twelve characters that tell runs apart: the same for a longer run of the same settings.

    What is said to the Trainer does not count, and other rows are refused with the checkpoint.
    """
    data = getattr(trainer, "datamodule", None)
    kinds: tuple[Any, ...] = type(data).__mro__
    arguments = {}
    for kind in kinds:
        for name in inspect.signature(kind.__init__).parameters:
            # What the data module keeps under the argument's name.
            if hasattr(data, name):
                arguments[name] = getattr(data, name)
    parts = {
        "module": _name(module),
        "settings": plain(dict(module.hparams)),
        "constraints": plain(module.constraints),
        "formulations": plain(module.formulations),
        "data": None if data is None else [_name(data), plain_arguments(arguments)[0]],
        "seed": os.environ.get("PL_GLOBAL_SEED"),
    }
    text = json.dumps(parts, sort_keys=True, default=_name)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _name(value: Any) -> str:
    """The path of a value's class."""
    if type(value) is PointwiseDataModule:
        # Of earlier versions' runs, to go on.
        return "pl_pointwise.data.PointwiseDataModule"
    return f"{type(value).__module__}.{type(value).__qualname__}"
