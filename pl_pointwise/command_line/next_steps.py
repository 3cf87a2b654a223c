"""What a run leaves behind, and the command that goes on with it."""

from __future__ import annotations

import shlex
from pathlib import Path

from ..errors import TrainingError
from ..module import PointwiseModule


def config_in(folder: Path) -> Path | None:
    """The last configuration that was written into a folder, if it has one."""
    paths = [*folder.glob("config.yaml"), *folder.glob("config-[0-9]*.yaml")]
    # config-10 is behind config-9.
    return max(paths, key=lambda path: (len(path.name), path.name), default=None)


def config_of(checkpoint: str | Path) -> Path | None:
    """The last configuration in the folder of the run that wrote a checkpoint, if it has one."""
    # Its own, or checkpoints/ in it.
    for folder in Path(checkpoint).absolute().parents[:2]:
        config = config_in(folder)
        if config is not None:
            return config
    return None


def config_option(checkpoint: str | Path) -> str:
    """The option that names the configuration of a checkpoint."""
    config = config_of(checkpoint)
    return f"--config {short_path(config) if config else 'CONFIG, the config.yaml that fit wrote'}"


def exports(kind: type) -> bool:
    """Whether a class of modules says what its export is."""
    return getattr(kind, "export", PointwiseModule.export) is not PointwiseModule.export


def command_for(name: str, checkpoint: str, config: Path | None) -> str:
    """The command that goes on with a checkpoint."""
    words = ["pl-pointwise", name]
    if config is not None:
        words += ["--config", short_path(config)]
    return shlex.join([*words, "--ckpt_path", short_path(checkpoint)])


def short_path(path: str | Path) -> str:
    """Relative to the current folder if it is below it."""
    path = Path(path).absolute()
    return str(
        path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    )


def require_class(path: str, named: str, kind: type) -> None:
    """Refuses a checkpoint whose class, if it names one, is neither ``kind`` nor a parent."""
    of = named.rpartition(".")[2]
    if of and of not in [parent.__name__ for parent in kind.__mro__]:
        raise TrainingError(
            f"--ckpt_path {path} is of a {of}, and the configuration asks for a {kind.__name__}. "
            f"Give {config_option(path)}."
        )
