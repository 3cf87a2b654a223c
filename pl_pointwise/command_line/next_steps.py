"""What a command leaves: the configuration of its run, and the command that takes the run up."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import SaveConfigCallback

from ..files import run_root, write_whole
from ..module import PointwiseModule

CONFIG = "config.yaml"
"""What a command writes into the folder of its run; ``fit`` config-1.yaml, … where there is one."""
NAME = re.compile(r"config(?:-(\d+))?\.yaml$")


class SaveConfig(SaveConfigCallback):
    """Saves the configuration in the run's own folder, and writes over no file.

    Attributes:
        path: of the file, on the first rank.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._folder = run_root(trainer)  # Asks all ranks.
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        text = self.parser.dump(self.config, skip_none=False)
        names = (f"config-{number}.yaml" if number else CONFIG for number in count())
        paths = (self._folder / name for name in names)
        free = next(p for p in paths if not p.exists() or p.read_bytes() == text.encode())
        if stage == "fit" or free.name == CONFIG:
            write_whole(free, text)
            self.path = free


def config_of(checkpoint: str | Path) -> Path | None:
    """The last configuration in the folder of the run that wrote a checkpoint, if it has one."""
    for folder in Path(checkpoint).absolute().parents[:2]:
        found = [(int(n[1] or 0), p) for p in folder.glob("config*") if (n := NAME.match(p.name))]
        if found:
            return max(found)[1]
    return None


def config_option(checkpoint: str | Path) -> str:
    """The option that names the configuration of a checkpoint."""
    config = config_of(checkpoint)
    return f"--config {short_path(config) if config else 'CONFIG, the config.yaml that fit wrote'}"


def after_fit(trainer: Any, module: LightningModule) -> None:
    """Prints how the constraints ended, where the run is, and the command that takes it up."""
    folder = run_root(trainer)  # Asks all ranks.
    if not trainer.is_global_zero or trainer.fast_dev_run:
        return
    if isinstance(module, PointwiseModule):
        print("\n".join(module._stepper.last_words.lines))
    # Of several callbacks the first that compares checkpoints.
    savers = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
    savers.sort(key=lambda one: one.monitor is None)
    paths = [path for one in savers if (path := one.best_model_path or one.last_model_path)]
    written = f"Written to {short_path(folder)}"
    if not paths:
        print(f"{written}, without a checkpoint: no ModelCheckpoint saved one.")
        return
    print(f"{written}: log, configuration and checkpoint. Next:\n")
    saved = (one.path for one in trainer.callbacks if isinstance(one, SaveConfig))
    print(f"  {_command('test', next(saved, config_of(paths[0])), paths[0])}")


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
