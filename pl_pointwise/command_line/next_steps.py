"""What a command leaves: the configuration of its run, and the command that takes the run up."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities.model_helpers import is_overridden

from ..files import free_path, run_root, write_whole
from ..module import PointwiseModule


class SaveConfig(SaveConfigCallback):
    """Saves the configuration in the run's own folder: config.yaml, and ``fit`` over no file."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._folder = run_root(trainer)  # Asks all ranks.
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" or config_in(self._folder) is None:
            path = free_path(self._folder, "config", ".yaml")
            write_whole(path, self.parser.dump(self.config, skip_none=False))


def config_in(folder: Path) -> Path | None:
    """The last configuration that was written into a folder, if it has one."""
    found = [*folder.glob("config.yaml"), *folder.glob("config-[0-9]*.yaml")]
    return max(found, key=lambda path: (len(path.name), path.name), default=None)


def config_of(checkpoint: str | Path) -> Path | None:
    """The last configuration in the folder of the run that wrote a checkpoint, if it has one."""
    folders = Path(checkpoint).absolute().parents[:2]
    return next(filter(None, map(config_in, folders)), None)


def config_option(checkpoint: str | Path) -> str:
    """The option that names the configuration of a checkpoint."""
    config = config_of(checkpoint)
    return f"--config {short_path(config) if config else 'CONFIG, the config.yaml that fit wrote'}"


def after_fit(trainer: Any, module: LightningModule, data: Any) -> None:
    """Prints how the constraints ended, where the run is, and the command that takes it up."""
    folder = run_root(trainer)  # Asks all ranks.
    if not trainer.is_global_zero or trainer.fast_dev_run:
        return
    if isinstance(module, PointwiseModule):
        print("\n".join(module._stepper.watch.lines))
    # Of several callbacks the first that compares checkpoints.
    savers = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
    savers.sort(key=lambda one: one.monitor is None)
    paths = [path for one in savers if (path := one.best_model_path or one.last_model_path)]
    written = f"Written to {short_path(folder)}"
    if not paths:
        print(f"{written}, without a checkpoint: no ModelCheckpoint saved one.")
        return
    print(f"{written}: log, configuration and checkpoint. Next:\n")
    if any(is_overridden("test_dataloader", each) for each in (data, module) if each is not None):
        print(f"  {_command('test', config_in(folder), paths[0])}")
    elif exports(type(module)):
        print(f"  {export_command(paths[0])}")
    else:
        print(f"  define test_dataloader() or export() to go on with {short_path(paths[0])}")


def metrics_table(metrics: Mapping[str, Any]) -> str:
    """Returns a line per metric, a column per evaluated data set."""
    stages, names = (
        [*dict.fromkeys(name.partition("/")[part] for name in metrics)] for part in (0, 2)
    )
    width = max(map(len, names), default=0)
    lines = [" " * width + "".join(f"{stage:>14}" for stage in stages)]
    for name in names:
        found = [metrics.get(f"{stage}/{name}") for stage in stages]
        cells = ["" if value is None else f"{float(value):.4g}" for value in found]
        lines.append(f"{name:<{width}}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join(lines)


def exports(kind: type) -> bool:
    """Whether a class of modules says what its export is."""
    return getattr(kind, "export", PointwiseModule.export) is not PointwiseModule.export


def export_command(checkpoint: str) -> str:
    """The command that exports a checkpoint."""
    return _command("export", config_of(checkpoint), checkpoint)


def _command(name: str, config: Path | None, checkpoint: str) -> str:
    words = ["pl-pointwise", name]
    words += [] if config is None else ["--config", short_path(config)]
    return shlex.join([*words, "--ckpt_path", short_path(checkpoint)])


def short_path(path: str | Path) -> str:
    """Relative to the current folder if it is below it."""
    path = Path(path).absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
