"""Where callbacks write: a folder that is this run's alone."""

from __future__ import annotations

from lightning.pytorch import Trainer

from pl_pointwise.files import free_path, run_root


class RunFolder:
    """A folder below the root folder of the run that this run alone writes to.

    A new run takes the first free name, "hardest", "hardest-1", …; a resumed one ``restored``.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.name: str | None = None
        self.restored: str | None = None

    def claim(self, trainer: Trainer) -> None:
        """Makes the folder at ``path``; to be called on all ranks when training starts."""
        root, name = run_root(trainer), self.restored
        if trainer.is_global_zero:
            name = name or free_path(root, self.folder).name
            (root / name).mkdir(parents=True, exist_ok=self.restored is not None)
        self.name, self.restored = str(trainer.strategy.broadcast(name)), None
        self.path = root / self.name
