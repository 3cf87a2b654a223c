"""Checkpoints: there whole or not at all, of plain values, with the multipliers checked."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any
from zipfile import BadZipFile, ZipFile, is_zipfile

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins.io import TorchCheckpointIO
from torch.serialization import get_crc32_options

from ..errors import TrainingError


def constructor_frame(module: Any) -> FrameType | None:
    """The frame of the outermost ``__init__`` that is making ``module``: its class's own."""
    outermost = None
    frame = inspect.currentframe()
    while frame is not None:
        names = frame.f_code.co_varnames
        is_constructor = frame.f_code.co_name == "__init__" and bool(names)
        if is_constructor and frame.f_locals.get(names[0]) is module:
            outermost = frame
        frame = frame.f_back
    return outermost


# The module's entry -----------------------------------------------------------------------------

STATE_KEY = "pl_pointwise"
"""The checkpoint entry: multipliers, thresholds, fingerprint, open window and random states."""

VERSION = 2
"""The version of what the entry holds."""


def state_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The module's entry of a checkpoint; refused if there is none, or one of another version."""
    state = checkpoint.get(STATE_KEY)
    if state is None:
        raise TrainingError(
            f"This checkpoint was not written by a PointwiseModule: it has no {STATE_KEY!r} "
            "entry, so no multipliers. Load its weights into the model instead."
        )
    if not isinstance(state, dict) or state.get("version") != VERSION:
        raise damaged(f"version {VERSION}")
    return state


def damaged(what: str) -> TrainingError:
    """The error of an entry that cannot be used."""
    return TrainingError(
        f"This checkpoint's {STATE_KEY!r} entry cannot be used ({what}): it is damaged, or of "
        "another version of pl-pointwise. Resume from another one, or load its weights only."
    )


def hyperparameters(path: str | Path) -> dict[str, Any]:
    """The module's arguments in a checkpoint, by name, and its class as ``_class_path``."""
    if Path(path).suffix in (".yaml", ".yml"):
        raise TrainingError(
            f"--ckpt_path {path} is a configuration, which --config takes. A checkpoint ends in "
            ".ckpt."
        )
    checkpoint = WholeCheckpointIO().load_checkpoint(path, map_location="cpu")
    stored = dict(checkpoint.get("hyper_parameters") or {})
    stored.pop("_instantiator", None)
    return stored


def differences(before: Any, now: Any, name: str = "") -> dict[str, tuple[Any, Any]]:
    """Values of nested mappings that are in both and differ, (before, now) by dotted name.

    >>> differences({"a": 1, "b": {"c": 2, "d": 3}}, {"a": 1, "b": {"c": 4}, "e": 5})
    {'b.c': (2, 4)}
    """
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        changed: dict[str, tuple[Any, Any]] = {}
        for key in before:
            if key in now:
                inner = f"{name}.{key}" if name else str(key)
                changed |= differences(before[key], now[key], inner)
        return changed
    # One class has several: pl_pointwise.Pointwise and longer.
    if name.endswith("class_path"):
        same = str(before).rpartition(".")[2] == str(now).rpartition(".")[2]
    elif isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor):
        same = torch.equal(before, now)
    else:
        same = bool(before == now)
    return {} if same else {name: (before, now)}


# Files -------------------------------------------------------------------------------------------

PART = ".part"
"""Ending of a checkpoint that is being written."""

LIGHTNING_VERSION = "pytorch-lightning_version"
"""An entry of every checkpoint."""


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes to another name and renames, so that a file of this name is always complete.

    Lightning's own may copy over the last one, and a kill leaves neither. Remote paths are its.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Writes whole, or raises TrainingError and leaves what was there."""
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
        except (OSError, RuntimeError) as error:  # torch.save wraps those of the file.
            with suppress(OSError):
                part.unlink()
            raise TrainingError(
                f"The checkpoint {target} could not be written: {error}. Earlier ones are whole."
            ) from error

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads tensors and plain values only, and compares check sums, unless asked otherwise."""
        try:
            _verify(str(path))
            checkpoint = super().load_checkpoint(
                path,
                map_location,
                weights_only=True if weights_only is None else weights_only,
            )
        except FileNotFoundError:
            raise
        except Exception as error:
            # What reading a damaged archive or pickle raises has no base.
            # The first sentence: torch's next ones advise to run what the file holds.
            reason = str(error).strip().partition("\n")[0].partition(". ")[0]
            raise TrainingError(
                f"The checkpoint {path} cannot be read ({reason or type(error).__name__}): it is "
                "damaged, or holds more than tensors and plain values, of which nothing was run. "
                "Resume from another one."
            ) from error
        entries = {"state_dict", LIGHTNING_VERSION}
        if not isinstance(checkpoint, dict) or not entries <= checkpoint.keys():
            raise TrainingError(
                f"{path} is no checkpoint of Lightning: give ckpt_path one."
            )
        return checkpoint


def _verify(path: str) -> None:
    """Raises if an entry of a local archive differs from its check sum, where it was given one."""
    system, local = url_to_fs(path)
    if (
        isinstance(system, LocalFileSystem)
        and get_crc32_options()
        and is_zipfile(local)
    ):
        with ZipFile(local) as archive:
            # torch stores without compression; a size that says otherwise ends testzip early. Of
            # what is marked a folder torch reads nothing: the tensor is what its memory held.
            for entry in archive.infolist():
                if entry.file_size != entry.compress_size or entry.external_attr:
                    raise BadZipFile(f"check sum of {entry.filename}")
            damaged = archive.testzip()
        if damaged is not None:
            raise BadZipFile(f"check sum of {damaged}")
