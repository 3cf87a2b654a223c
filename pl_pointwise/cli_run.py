"""Around a run of the command line: where classes come from, what it leaves, what comes next."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.model_helpers import is_overridden

from .checkpoints import differences, hyperparameters
from .errors import TrainingError
from .module import PointwiseModule

CONFIG = "config.yaml"
"""What LightningCLI writes into the folder of a run."""


def find_classes_of_the_folder() -> None:
    """Makes the files of the current folder importable, as ``python -m`` does.

    Behind everything else, so that none stands in for a library of its name. Not where Python was
    told to leave the folder out (``-P``, PYTHONSAFEPATH).
    """
    folder = os.getcwd()
    if not getattr(sys.flags, "safe_path", False) and not {"", folder}.intersection(sys.path):
        sys.path.append(folder)


def default_logger(trainer: Any) -> dict[str, Any]:
    """The arguments of a trainer whose configuration names no logger: a log that is a CSV file.

    Lightning's depends on what is installed, and TensorBoard's is no file to look into.
    """
    if trainer.logger is not None or trainer.fast_dev_run or trainer.barebones:
        return {}
    return {"logger": CSVLogger(trainer.default_root_dir or os.getcwd())}


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


def refuse_other_settings(path: str, kind: type, arguments: Mapping[str, Any]) -> None:
    """
    kind, arguments: of the module that a command line asks for.

    Raises:
        TrainingError: the checkpoint is of another class, or was trained with other arguments.
    """
    stored = hyperparameters(path)
    require_class(path, stored.pop("_class_path", ""), kind)
    if changed := differences(stored, arguments):
        shown = [f"--model.{name} {old!r}, now {new!r}" for name, (old, new) in changed.items()]
        raise TrainingError(
            f"--ckpt_path {path} was trained with {', '.join(shown)}. Give {_config_for(path)}, or "
            "--accept_differences to go on with the settings of now."
        )


def require_class(path: str, named: str, kind: type) -> None:
    """
    named: the class that the checkpoint names; "" where it names none.

    Raises:
        TrainingError: it is neither ``kind`` nor a parent of it.
    """
    of = named.rpartition(".")[2]
    if of and of not in [parent.__name__ for parent in kind.__mro__]:
        raise TrainingError(
            f"--ckpt_path {path} is of a {of}, and the configuration asks for a {kind.__name__}. "
            f"Give {_config_for(path)}."
        )


def _config_for(path: str) -> str:
    config = config_of(path)
    return f"--config {short_path(config)}" if config else "the configuration it was trained with"


# What comes next ----------------------------------------------------------------------------------


def kept_checkpoint(trainer: Trainer) -> str:
    """The path of the checkpoint that a fit keeps as its best, or "" where it kept none.

    Of several callbacks the first that compares checkpoints.
    """
    callbacks = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
    callbacks.sort(key=lambda each: each.monitor is None)
    paths = (each.best_model_path or each.last_model_path for each in callbacks)
    return next((path for path in paths if path), "")


def config_of(checkpoint: str | Path) -> Path | None:
    """The configuration of the run that wrote a checkpoint, where it lies as runs leave it."""
    folders = Path(checkpoint).absolute().parents[:2]
    return next((folder / CONFIG for folder in folders if (folder / CONFIG).is_file()), None)


def exports(kind: type) -> bool:
    """Whether a class of modules says what its export is."""
    return getattr(kind, "export", PointwiseModule.export) is not PointwiseModule.export


def tell_after_fit(cli: Any) -> None:
    """Prints where the run is, and the command that takes it up."""
    trainer = cli.trainer
    folder = short_path(trainer.log_dir or trainer.default_root_dir)  # Asks all ranks for it.
    if not trainer.is_global_zero or trainer.fast_dev_run:
        return
    checkpoint = kept_checkpoint(trainer)
    if not checkpoint:
        why = f"no ModelCheckpoint saved one in {trainer.global_step} steps"
        if not trainer.checkpoint_callbacks:
            why = "trainer.enable_checkpointing is false"
        print(f"Written to {folder}, without a checkpoint: {why}.")
        return
    print(f"Written to {folder}: log, configuration and checkpoint.{_older(trainer)} Next:\n")
    if has_test_data(cli):
        print(f"  {_command('test', Path(folder) / CONFIG, checkpoint)}")
    elif exports(type(cli.model)):
        print(f"  {export_command(cli.model, checkpoint)}")
    else:
        print(f"  define test_dataloader() or export() to go on with {short_path(checkpoint)}")


def has_test_data(cli: Any) -> bool:
    return any(
        each is not None and is_overridden("test_dataloader", each)
        for each in (cli.datamodule, cli.model)
    )


def _older(trainer: Trainer) -> str:
    """Says so where no checkpoint is of the last step, and none was chosen by a metric."""
    saving = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
    steps = [each._last_global_step_saved for each in saving]
    if any(each.monitor for each in saving) or max(steps) == trainer.global_step:
        return ""
    return (
        f" The newest checkpoint is of step {max(steps)} of {trainer.global_step}: a "
        "ModelCheckpoint without every_n_train_steps saves the end too."
    )


def tell_after_test(cli: Any) -> None:
    """Prints the command that exports what was tested."""
    checkpoint = cli.config[cli.subcommand].get("ckpt_path")
    if cli.trainer.is_global_zero and checkpoint and exports(type(cli.model)):
        print(f"\nNext:\n\n  {export_command(cli.model, checkpoint)}")


def tell_after_predict(cli: Any) -> None:
    """Says so where nobody has written what was predicted."""
    trainer = cli.trainer
    writers = [each for each in trainer.callbacks if isinstance(each, BasePredictionWriter)]
    if trainer.is_global_zero and not writers:
        print("Nothing was written: give --trainer.callbacks+ PredictionWriter.")


def export_command(module: LightningModule, checkpoint: str) -> str:
    """The command that exports a checkpoint; it names the configuration if the class is one's own.

    See export.py for why.
    """
    ships = type(module).__module__.partition(".")[0] == __name__.partition(".")[0]
    return _command("export", None if ships else config_of(checkpoint), checkpoint)


def _command(name: str, config: Path | None, checkpoint: str) -> str:
    words = ["pl-pointwise", name]
    words += [] if config is None else ["--config", short_path(config)]
    return shlex.join([*words, "--ckpt_path", short_path(checkpoint)])


def short_path(path: str | Path) -> str:
    """Relative to the current folder if it is below it."""
    path = Path(path).absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
