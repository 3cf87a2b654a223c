"""Checkpoints that are there whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile, is_zipfile

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins.io import TorchCheckpointIO
from torch.serialization import get_crc32_options

from .errors import TrainingError

PART = ".part"
"""Ending of a checkpoint that is being written."""

LIGHTNING_VERSION = "pytorch-lightning_version"
"""An entry of every checkpoint."""


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes beside the checkpoint and renames, so that a file of its name is always whole.

    Lightning's own writes into the system's temporary folder and moves: where that is another
    file system the move is a copy over the last checkpoint, and a kill in it leaves neither; and
    each kill leaves a file behind. Remote paths are left to Lightning.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """
        Raises:
            TrainingError: it cannot be written, for lack of space say; what was there stays.
        """
        system, local = url_to_fs(str(path))
        if not isinstance(system, LocalFileSystem) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(local)
        part = target.with_name(target.name + PART)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
            _flush_folder(target.parent)
        except (OSError, RuntimeError) as error:  # torch.save wraps those of the file.
            with suppress(OSError):
                part.unlink()
            raise TrainingError(
                f"The checkpoint {target} could not be written: {error}. Earlier ones are as they "
                "were: make room, and resume from the last."
            ) from error

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads tensors and plain values only, from remote paths too, unless told otherwise.

        A local file's check sums are compared first, which torch does not do: a flipped bit would
        be a weight or a multiplier like any other.

        Raises:
            TrainingError: it is not whole, or holds anything else; none of that was run.
        """
        try:
            _verify(str(path))
            found = super().load_checkpoint(
                path, map_location, weights_only=True if weights_only is None else weights_only
            )
        except FileNotFoundError:
            raise
        except Exception as error:  # What reading a damaged archive or pickle raises has no base.
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise TrainingError(
                f"The checkpoint {path} cannot be read: it is cut off or damaged, or holds more "
                f"than tensors and plain values, of which nothing was run ({reason}). Resume from "
                "another one."
            ) from error
        if not isinstance(found, dict) or not {"state_dict", LIGHTNING_VERSION} <= found.keys():
            raise TrainingError(
                f"{path} is no checkpoint of Lightning: it lacks the weights or the version that "
                "one has. Give ckpt_path a file that a run has saved."
            )
        return found


def _verify(path: str) -> None:
    """Raises if an entry of a local archive differs from its check sum, where it was given one."""
    system, local = url_to_fs(path)
    if isinstance(system, LocalFileSystem) and get_crc32_options() and is_zipfile(local):
        with ZipFile(local) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise BadZipFile(f"check sum of {damaged}")


def _flush_folder(folder: Path) -> None:
    """Makes a renaming in ``folder`` outlast a loss of power, where folders can be opened."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
