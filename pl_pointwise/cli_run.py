"""Around a run of the command line: where classes come from, what it leaves, what comes next."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities.model_helpers import is_overridden

from .checkpoint_options import differences, hyperparameters
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


class SaveConfig(SaveConfigCallback):
    """Also where the logger has no folder, as MLflow's with a database: in ``default_root_dir``."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.save_to_log_dir = trainer.log_dir is not None
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not self.save_to_log_dir:
            folder = Path(trainer.default_root_dir)
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / self.config_filename
            self.parser.save(self.config, path, skip_none=False, overwrite=True)


def refuse_other_settings(path: str, kind: type, arguments: Mapping[str, Any]) -> None:
    """Refuses a checkpoint of another class than ``kind``, or of other arguments of it."""
    stored = hyperparameters(path)
    require_class(path, stored.pop("_class_path", ""), kind)
    if changed := differences(stored, arguments):
        shown = [f"--model.{name} {old!r}, now {new!r}" for name, (old, new) in changed.items()]
        raise TrainingError(
            f"--ckpt_path {path} was trained with {', '.join(shown)}. Give {_config_for(path)}, or "
            "--accept_differences to go on with the settings of now."
        )


def require_class(path: str, named: str, kind: type) -> None:
    """Refuses a checkpoint whose class, if it names one, is neither ``kind`` nor a parent."""
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
    # Of several callbacks the first that compares checkpoints.
    savers = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
    savers.sort(key=lambda each: each.monitor is None)
    paths = [path for each in savers if (path := each.best_model_path or each.last_model_path)]
    if not paths:
        print(f"Written to {folder}, without a checkpoint: no ModelCheckpoint saved one.")
        return
    print(f"Written to {folder}: log, configuration and checkpoint. Next:\n")
    data = [each for each in (cli.datamodule, cli.model) if each is not None]
    if any(is_overridden("test_dataloader", each) for each in data):
        print(f"  {_command('test', Path(folder) / CONFIG, paths[0])}")
    elif exports(type(cli.model)):
        print(f"  {export_command(cli.model, paths[0])}")
    else:
        print(f"  define test_dataloader() or export() to go on with {short_path(paths[0])}")


def tell_after_test(cli: Any) -> None:
    """Prints the command that exports what was tested."""
    checkpoint = cli.config[cli.subcommand].get("ckpt_path")
    if cli.trainer.is_global_zero and checkpoint and exports(type(cli.model)):
        print(f"\nNext:\n\n  {export_command(cli.model, checkpoint)}")


def export_command(module: LightningModule, checkpoint: str) -> str:
    """The command that exports a checkpoint; it names the configuration if the class is own."""
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
