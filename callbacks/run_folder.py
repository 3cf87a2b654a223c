"""Where a callback writes, so that two runs never write to one place."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Trainer


def run_root(trainer: Trainer) -> Path:
    """The logger's folder of this run, which has a version; without a logger the root folder.

    To be called on all ranks, which agree on it here.
    """
    root = trainer.log_dir if trainer.loggers else None
    return Path(root or trainer.default_root_dir)


class RunFolder:
    """A folder below :func:`run_root` that this run alone writes to.

    A new run takes the first name that is free, "hardest", "hardest-1" and so on; a resumed one
    goes on with the name of its checkpoint.

    Args:
        folder: the name, or a path; an absolute one is numbered likewise.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.path: Path | None = None
        self._restored: str | None = None

    def claim(self, trainer: Trainer) -> Path:
        """This run's folder, made; to be called on all ranks when training starts."""
        root, name = run_root(trainer), self._restored
        self._restored = None
        if trainer.is_global_zero:
            if name is not None:
                (root / name).mkdir(parents=True, exist_ok=True)
            number = 0
            while name is None:
                wanted = f"{self.folder}-{number}" if number else self.folder
                try:
                    (root / wanted).mkdir(parents=True)
                    name = wanted
                except FileExistsError:
                    number += 1
        self.path = root / str(trainer.strategy.broadcast(name))
        return self.path

    def state(self) -> str | None:
        """The name to go on with; None before there is one."""
        return None if self.path is None else str(Path(self.folder).with_name(self.path.name))

    def restore(self, name: str | None) -> None:
        self._restored = name
